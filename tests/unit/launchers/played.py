"""A launch whose batch system and agents are played: what lives, ends and is claimed is up to the test."""

from dataclasses import replace

import pytest

from tests import sweep_folder
from tests.unit.allocations import PLAN, open_sweep
from ultrabench.errors import ClusterError
from ultrabench.launchers.launcher import own_origin
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.record import to_dict
from ultrabench.store import events
from ultrabench.store.claim import claim
from ultrabench.store.events import Start
from ultrabench.store.jobs_seen import JobLimits, JobsSeen
from ultrabench.store.journal import JournalWriter
from ultrabench.sweep.running.price import controls

CONTROL = next(run for run in controls(PLAN).values() if run.nodes == 1)
OTHERS = [run for run in PLAN.runs if run.nodes == 1 and run.run_id != CONTROL.run_id][:2]
SPECS = {run.run_id: run.spec for run in PLAN.runs}
NAME = "n1-0000aaaa.0"
JOB = Start(job_id="57_0")


class Played:
    """A batch system of which everything lives until the test says otherwise."""

    look_pause_s = 0.0

    def __init__(self, play=lambda allocation: None, max_jobs=2):
        """`play` is what agents do at once where a job is submitted."""
        self.play, self.origin = play, own_origin("big")
        self.limits = JobLimits(max_jobs=max_jobs, max_nodes=99, max_array=99)
        self.taken, self.looked, self.cancelled, self.ended = [], [], [], []
        self.ended_jobs, self.running, self.timed = {}, frozenset(), {}
        self.refusals = 0

    def submit(self, allocations, avoid, say):
        self.taken += allocations
        for allocation in allocations:
            self.play(allocation)
        return {a.name: {"job_id": a.name} for a in allocations}

    def observe(self, allocations):
        self.looked.append(sorted(allocations))
        unended = {name for name, allocation in allocations.items() if allocation.ended is None}
        ends = {name: end for name, end in self.ended_jobs.items() if name in unended}
        alive = frozenset(unended - ends.keys())
        jobs = {name: {"job_id": name} for name in alive}
        running = self.running & alive
        return JobsSeen(alive=alive, running=running, ended_jobs=ends, timed=self.timed, jobs=jobs)

    def cancel(self, allocations, *, queued_only=False):
        self.cancelled.append(sorted(allocations))
        if len(self.cancelled) <= self.refusals:
            raise ClusterError("scancel: no answer")
        return {}

    def end_frozen_job(self, name, job):
        self.ended.append(name)


def open_played(path):
    """A sweep of the control of one node and two other runs, which was launched."""
    return open_launched(path, replace(PLAN, candidates=(CONTROL, *OTHERS)))


def open_launched(path, plan):
    """The sweep of a plan, which was launched."""
    sweep = open_sweep(path, plan)
    sweep.folder.create()
    sweep.folder.sweep_json.write_text("{}")
    sweep.journal.write(events.Launched(generation=1, config={}))
    return replace(sweep, kernel_digest=sweep.config.kernel.digest())


@pytest.fixture
def sweep(tmp_path):
    return open_played(tmp_path / "quick")


class Agents:
    """The leading agent of an allocation, as far as others can see it."""

    def __init__(self, sweep, name=NAME, job=JOB, specs=SPECS):
        self.specs = specs
        self.name, self.job, self.claims = name, job, sweep.folder.claims
        self.journal = JournalWriter(sweep.folder.journal, "agent")
        self.me = {"allocation": name, "host": "gpu01", "job": to_dict(job)}

    def start(self):
        assert claim(self.claims, self.name, self.me)
        agent = events.LeadingAgent(host="gpu01", job=self.job, journal=self.journal.path.name)
        self.journal.write(events.AllocationStarted(allocation=self.name, agent=agent))
        return self

    def claim(self, key, journaled=True):
        assert claim(self.claims, str(key), self.me)
        if journaled:
            self.journal.write(sweep_folder.claimed(self.specs[key.run_id], key, self.name, job=self.job))

    def ok(self, key):
        self.claim(key)
        result = sweep_folder.ended(duration_s=9.0)
        self.journal.write(sweep_folder.finished(self.specs[key.run_id], key, result, allocation=self.name))

    def end(self, code=events.EndCode.OTHER, ran=()):
        """Ends after runs that went well."""
        for key in ran:
            self.ok(key)
        end = {"reason": "all tasks done", "code": code, "source": "agent", "elapsed_s": 10.0}
        self.journal.write(events.AllocationEnded(allocation=self.name, job=self.job, **end))


def keys(allocation):
    return [t.key for t in allocation.tasks]


def reconciler_of(sweep, launcher, max_gpu_hours=None, say=lambda note: None):
    """A launch of which nothing is shown."""
    sweep.max_gpu_hours = max_gpu_hours
    return Reconciler(sweep, launcher, lambda state, alive: None, say)


def plan(sweep, name=NAME, tasks=(), **changes):
    planned = {"nodes": 1, "limit_s": 600.0, "tasks": tuple(tasks), **changes}
    sweep.journal.write(events.AllocationPlanned(allocation=name, **planned))


def statuses(sweep):
    return {key: a.result and a.result.status for key, a in sweep.state().attempts.items()}
