"""A launch whose batch system and agents are played: what lives, ends and is claimed is up to the test."""

from dataclasses import replace

import pytest

from tests.unit.allocations import PLAN, open_sweep
from ultrabench.errors import ClusterError
from ultrabench.launchers.launcher import origin
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store import events
from ultrabench.store.claim import claim
from ultrabench.store.events import EVENTS, Start
from ultrabench.store.jobs_seen import JobLimits, JobsSeen
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.sweep.running.price import controls

CONTROL = next(run for run in controls(PLAN).values() if run.nodes == 1)
OTHERS = [run for run in PLAN.runs if run.nodes == 1 and run.run_id != CONTROL.run_id][:2]
SPECS = {run.run_id: to_dict(run.spec) for run in PLAN.runs}
NAME = "n1-0000aaaa.0"
JOB = Start(job_id="57_0")


class Played:
    """A batch system of which everything lives until the test says otherwise."""

    rest_s = 0.0

    def __init__(self, play=lambda allocation: None, max_jobs=2):
        """`play` is what agents do at once where a job is submitted."""
        self.play, self.by = play, origin("big")
        self.limits = JobLimits(max_jobs=max_jobs, max_nodes=99, max_array=99)
        self.taken, self.looked, self.cancelled, self.ended = [], [], [], []
        self.ended_jobs, self.running, self.timed = {}, frozenset(), {}
        self.refusals = 0

    def submit(self, made, avoid, say):
        self.taken += made
        for allocation in made:
            self.play(allocation)
        return {a.name: {"job_id": a.name} for a in made}

    def observe(self, known):
        self.looked.append(sorted(known))
        unended = {name for name, held in known.items() if held.ended is None}
        gone = {name: end for name, end in self.ended_jobs.items() if name in unended}
        alive = frozenset(unended - gone.keys())
        jobs = {name: {"job_id": name} for name in alive}
        running = self.running & alive
        return JobsSeen(alive=alive, running=running, ended_jobs=gone, timed=self.timed, jobs=jobs)

    def cancel(self, known, *, queued_only=False):
        self.cancelled.append(sorted(known))
        if len(self.cancelled) <= self.refusals:
            raise ClusterError("scancel: no answer")
        return {}

    def end_frozen(self, name, job):
        self.ended.append(name)


def open_played(path):
    """A sweep of the control of one node and two other runs, which was launched."""
    made = open_sweep(path, replace(PLAN, candidates=(CONTROL, *OTHERS)))
    made.folder.create()
    made.folder.sweep_json.write_text("{}")
    made.journal.write(events.Launched(generation=1, config={}))
    return replace(made, kernel_digest=made.config.kernel.digest())


@pytest.fixture
def sweep(tmp_path):
    return open_played(tmp_path / "quick")


class Agents:
    """The leading agent of an allocation, as far as others can see it."""

    def __init__(self, sweep, name=NAME, job=JOB):
        self.name, self.job, self.claims = name, job, sweep.folder.claims
        self.journal = JournalWriter(sweep.folder.journal, "agent")
        self.me = {"allocation": name, "host": "gpu01", "job": to_dict(job)}

    def start(self):
        assert claim(self.claims, self.name, self.me)
        agent = events.LeadingAgent(host="gpu01", job=self.job, journal=self.journal.path.name)
        self.journal.write(events.AllocationStarted(allocation=self.name, agent=agent))
        return self

    def claim(self, key, told=True):
        assert claim(self.claims, str(key), self.me)
        if told:
            spec = SPECS[key.run_id]
            self.journal.write(events.Claimed(**key._asdict(), allocation=self.name, job=self.job, spec=spec))

    def ok(self, key):
        self.claim(key)
        result = RunResult(status=Status.OK, step_times_s=(0.1,) * 6, duration_s=9.0)
        self.journal.write(events.Result(**key._asdict(), allocation=self.name, result=result))

    def end(self, code=events.EndCode.OTHER, ran=()):
        """Ends after runs that went well."""
        for key in ran:
            self.ok(key)
        told = {
            "reason": "all tasks done",
            "code": code,
            "source": "agent",
            "job": self.job,
            "elapsed_s": 10.0,
        }
        self.journal.write(events.AllocationEnded(allocation=self.name, **told))


def keys(allocation):
    return [t.key for t in allocation.tasks]


def reconciler_of(sweep, launcher, max_gpu_hours=None, say=lambda note: None):
    """A launch of which nothing is shown."""
    sweep.max_gpu_hours = max_gpu_hours
    return Reconciler(sweep, launcher, lambda state, alive: None, say)


def written(sweep, kind):
    return [line.event for line in read_journal(sweep.folder.journal) if type(line.event) is EVENTS[kind]]


def plan(sweep, name=NAME, tasks=(), **more):
    told = {"nodes": 1, "limit_s": 600.0, "tasks": tuple(tasks), **more}
    sweep.journal.write(events.AllocationPlanned(allocation=name, **told))


def statuses(sweep):
    return {key: a.result and a.result.status for key, a in sweep.state().attempts.items()}
