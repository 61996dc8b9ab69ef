"""A launcher whose squeue and sacct are played, answer by answer."""

import pytest

from tests.unit.allocations import with_launcher
from ultrabench.errors import ClusterError
from ultrabench.launchers.launcher import own_origin
from ultrabench.launchers.slurm import launcher as slurm_module
from ultrabench.launchers.slurm.job import SlurmJob, find_job
from ultrabench.launchers.slurm.launcher import SlurmLauncher
from ultrabench.launchers.slurm.query import Answer
from ultrabench.store.allocation import JOB_LOG
from ultrabench.store.events import AllocationEnded, LeadingAgent, Start
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import AllocationState

A, B = "n1-0000aaaa.0", "n1-0000aaaa.1"
JOB_NAME = "ub-quick-n1-0000aaaa"
GRACE_S = 60.0


def rows(*jobs, name=JOB_NAME, **fields):
    """What squeue or sacct lists, from (id, state)."""
    return {job_id: SlurmJob(job_id=job_id, name=name, state=state, **fields) for job_id, state in jobs}


class Slurm:
    """A launcher, its played Slurm and its allocations; time passes only where the test says so."""

    def __init__(self, folder):
        self.now = self.asked_at = 0.0
        self.listed, self.known, self.held = {}, {}, {}
        self.error, self.polled, self.refuses = None, True, False
        self.asked, self.cancelled, self.foreign_job_notes = [], [], {}
        self.launcher = SlurmLauncher(with_launcher(grace_s=GRACE_S), SweepFolder(folder / "quick"))
        self.launcher.query = self

    def monotonic(self):
        return self.now

    def jobs(self, prefix, *, fresh=False):
        if self.error is None and self.polled:
            self.asked_at = self.now
        jobs = {i: job for i, job in self.listed.items() if job.name.startswith(prefix)}
        return Answer(jobs=jobs, age_s=self.now - self.asked_at, error=self.error)

    def accounting(self, jobs):
        self.asked += jobs

        def job_of(job_id, ours):
            return find_job(
                {i: row for i, row in self.known.items() if not ours.difference(row, 0.0)}, job_id
            )

        return {job_id: job for job_id, ours in jobs.items() if (job := job_of(job_id, ours))}

    def cancel(self, job_ids):
        self.cancelled.append(sorted(job_ids))
        if self.refuses:
            raise ClusterError("scancel: no answer")

    def submitted(self, name, job_id="57_0"):
        self.held[name] = AllocationState(name=name, job=job_id and {"job_id": job_id})

    def log(self, name):
        path = self.launcher._folder.allocations / name / JOB_LOG
        path.parent.mkdir(parents=True)
        return path

    def started(self, name=A, job_id="57_0"):
        """An agent of this job has claimed the allocation and said so."""
        self.held[name].agents += (LeadingAgent(host="gpu01", job=Start(job_id=job_id)),)

    def ended(self, name=A, held_s=None):
        start = Start(job_id="57_0")
        end = AllocationEnded(allocation=name, job=start, reason="all done", elapsed_s=1.0, held_s=held_s)
        self.held[name].ends[start] = end

    def observe(self, *jobs, after=0.0):
        """A look, at which squeue lists these jobs if any are given."""
        self.now += after
        self.listed = rows(*jobs) if jobs else self.listed
        return self.launcher.observe(self.held)

    def lives(self, *jobs, after=0.0):
        """A look at which nothing is over."""
        look = self.observe(*jobs, after=after)
        assert (look.alive, look.ended_jobs) == ({A}, {})
        return look

    def ends(self, after):
        """A look at which the allocation is over: its status and why."""
        end = self.observe(after=after).ended_jobs[A]
        return end.status, end.reason


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = Slurm(tmp_path)
    monkeypatch.setattr(slurm_module, "time", fake)
    fake.submitted(A)
    assert fake.launcher.origin == own_origin("slurm")
    return fake
