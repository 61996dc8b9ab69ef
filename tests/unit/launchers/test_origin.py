"""Whose allocations a launcher sees, and what it may think of those that are somebody else's or not listed."""

import os
import socket
import time

import pytest

from tests.sweep_folder import events_of
from tests.unit.launchers.played import Agents, Played, keys, plan, statuses, sweep
from ultrabench.launchers import launcher as launcher_module
from ultrabench.launchers.allocation_ends import interrupt
from ultrabench.launchers.launcher import own_origin
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.processes import own_name
from ultrabench.result import Status
from ultrabench.store.claim import GIVEN_UP, owner_of
from ultrabench.store.events import Cancel, Preflight, Start
from ultrabench.store.jobs_seen import JobEnd, is_same_site, sees

__all__ = ["sweep"]  # a fixture

HERE = {"user": "ann", "cluster": "", "host": "desk"}
BIG = {"user": "ann", "cluster": "big", "host": "login1"}
BOB = {"user": "bob", "cluster": "big", "host": "login1"}
THEIRS = "n1-0000bbbb.0"


def test_this_user_on_this_host_is_the_origin(monkeypatch):
    host = socket.gethostname().split(".")[0]
    assert own_origin("big") == {"user": own_name(), "cluster": "big", "host": host}
    inode = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(launcher_module, "FIRST_PID_NAMESPACE", inode)
    assert own_origin() == {"user": own_name(), "cluster": "", "host": host}
    # Of processes in a container those outside, and in others of the same name, see nothing.
    monkeypatch.setattr(launcher_module, "FIRST_PID_NAMESPACE", inode + 1)
    assert own_origin()["host"] == f"{host}:{inode}"
    assert own_origin("big")["host"] == host


@pytest.mark.parametrize(
    ("origin", "by", "place", "visible"),
    [
        (BIG, {**BIG, "host": "login2"}, True, True), (BIG, {**BIG, "user": "bob"}, True, False),
        (BIG, {**BIG, "cluster": "small"}, False, False), (BIG, {**HERE, "host": "login1"}, False, False),
        (HERE, HERE, True, True), (HERE, {**HERE, "host": "desk2"}, False, False),
        (HERE, {**HERE, "user": "bob"}, True, False), (HERE, {**BIG, "host": "desk"}, False, False),
        (BIG, {}, True, True), (HERE, {}, True, True),
    ],
)  # fmt: skip
def test_who_sees_whose_allocations(origin, by, place, visible):
    """Jobs are seen on all hosts of their cluster, processes on theirs; what says nothing is older, and ours."""
    assert is_same_site(origin, by) is place
    assert sees(origin, by) is visible


class Watched:
    """A reconciler whose looks a test can take one by one, at times of its own; it has submitted `mine`."""

    def __init__(self, sweep, clock):
        self.sweep, self.launcher, self.clock = sweep, Played(), clock
        self.told, self.alive = [], frozenset()
        self.reconciler = Reconciler(sweep, self.launcher, self._show, self.told.append)
        self.patience_s = self.reconciler.recorder.watchdog.patience_s
        self.once()
        (mine,) = self.launcher.taken
        self.mine, self.keys = mine.name, keys(mine)

    def _show(self, state, alive):
        self.alive = alive

    def once(self, after=0.0):
        self.clock[0] += after
        return self.reconciler.run_once()[1]

    def starts(self, name=THEIRS, **job):
        return Agents(self.sweep, name, **job).start()

    def plan(self, *tasks, by=BOB, name=THEIRS):
        """Somebody else plans an allocation."""
        plan(self.sweep, name, tasks, by=by)

    def ended(self, name=THEIRS):
        return self.sweep.state().allocations[name].ended


@pytest.fixture
def watched(sweep, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return Watched(sweep, clock)


def touch(agents, stamp):
    os.utime(agents.journal.path, (stamp, stamp))


# allocations of others


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "by",
    [BOB, BOB | {"user": own_name(), "cluster": "small"}, {**HERE, "user": own_name(), "host": "a laptop"}],
)
def test_an_allocation_of_others_lives_and_is_left_alone(watched, by, started):
    """squeue shows nothing of it here: neither is it over, nor is it ours to end or to replace."""
    watched.plan(*watched.keys, by=by)
    agents = watched.starts() if started else None
    watched.launcher.ended_jobs[THEIRS] = JobEnd(status=Status.LOST, reason="Slurm does not know a job of it")
    local = not (by["cluster"] or started)
    for n in range(2 if local else 50):
        if agents:
            touch(agents, 2e9 + n)
        assert watched.once(after=60.0)
        assert watched.alive == {watched.mine, THEIRS}
    assert all(THEIRS not in looked for looked in watched.launcher.looked)
    whose = f"{by['user']} on {by['cluster'] or by['host']}"
    note = f"{THEIRS} is a job of {whose}: this launcher can neither end nor replace it. "
    assert sum(message.startswith(note) for message in watched.told) == 1
    assert THEIRS not in [e.allocation for e in events_of(watched.sweep.folder, "adopted")]
    # What it has claimed no one else may run; what only it was to run is waited for.
    assert len(watched.launcher.taken) == 1
    watched.sweep.journal.write(Cancel(generation=2))
    watched.once()
    interrupt(watched.sweep, watched.launcher)
    assert watched.launcher.cancelled == [[watched.mine]] * 2
    assert watched.ended() is None
    assert watched.ended(watched.mine) == f"the agents of {watched.mine} were ended"
    assert not watched.once(), "there is nothing of ours to wait for"


def test_others_whose_agents_are_silent_for_longer_than_their_limit_are_over(watched):
    """Slurm has ended that job by then, whoever it belongs to."""
    watched.plan(key := watched.keys[0])
    agents = watched.starts()
    agents.claim(key)
    touch(agents, 2e9)
    watched.once()
    for _ in range(int((600.0 + watched.patience_s) / 10.0)):
        watched.once(after=10.0)
        assert THEIRS in watched.alive
    for _ in range(2):  # its claim is looked at first
        watched.once(after=10.0)
    assert (watched.alive, statuses(watched.sweep)) == ({watched.mine}, {key: Status.LOST})
    reason = f"the agents of {THEIRS}, of bob on big, were silent for longer than its time limit"
    assert watched.ended() == reason


def test_processes_of_another_host_that_never_started_are_given_up_after_their_limit(watched):
    """A container that died at once never comes back under its name; unlike a job it waits in no queue."""
    watched.plan(*watched.keys, by={"user": own_name(), "cluster": "", "host": "a container"})
    for _ in range(50):
        watched.once(after=60.0)
    assert "longer than its time limit" in str(watched.ended())
    assert owner_of(watched.sweep.folder.claims, THEIRS) == GIVEN_UP


def test_what_others_have_queued_is_taken_over_only_where_a_person_asks(watched):
    running, last = "n1-0000bbbb.1", watched.keys[-1]
    watched.plan(last)
    watched.plan(name=running)
    runs = watched.starts(running, job=Start(job_id="9_1"))
    watched.starts(watched.mine).end()
    watched.once()
    assert watched.alive >= {THEIRS, running}
    watched.reconciler.recorder.withdraw([THEIRS, running], "taken over")
    assert owner_of(watched.sweep.folder.claims, THEIRS) == GIVEN_UP
    assert (watched.ended(), watched.ended(running)) == ("taken over", None), "what runs is waited for"
    watched.once()
    assert watched.alive == {running}
    runs.end()  # until now it was the first of its size
    watched.once()
    planned = [key for allocation in watched.launcher.taken[1:] for key in keys(allocation)]
    assert last in planned, "the same attempt: nobody has claimed it, and now nobody else will"


def test_what_has_started_meanwhile_is_not_taken_over(watched):
    """Its claim is there, its journal cannot be seen yet."""
    watched.plan()
    path = watched.starts().journal.path
    path.rename(path.with_suffix(".late"))
    watched.reconciler.recorder.withdraw([THEIRS], "taken over")
    assert watched.ended() is None
    assert owner_of(watched.sweep.folder.claims, THEIRS) == THEIRS


# a job that Slurm does not show


@pytest.mark.parametrize(
    "job_end",
    [JobEnd(status=Status.LOST, reason="Slurm does not know job 57_0"),
     JobEnd(status=Status.NODE_FAIL, reason="Slurm ended job 57_0: NODE_FAIL", held_s=50.0)],
)  # fmt: skip
def test_a_job_whose_agents_touch_their_journal_is_not_dead(watched, job_end):
    """slurmctld may have lost its state, sacct be behind or squeue ask the wrong cluster."""
    agents, key = watched.starts(watched.mine), watched.keys[0]
    agents.claim(key)
    watched.launcher.ended_jobs[watched.mine] = job_end
    for n in range(100):
        touch(agents, (-1) ** n * n + 1e9)  # whatever clock it is
        assert watched.once(after=0.3 * watched.patience_s)
        assert watched.alive == {watched.mine}
    assert (watched.ended(watched.mine), statuses(watched.sweep)) == (None, {key: None})
    assert len(watched.launcher.taken) == 1
    note = f"{job_end.reason}, but the agents of {watched.mine} updated their journal recently"
    assert sum(message.startswith(note) for message in watched.told) == 1
    for _ in range(3):
        watched.once(after=0.3 * watched.patience_s)
        assert watched.alive == {watched.mine}
    watched.once(after=0.3 * watched.patience_s)
    assert (watched.ended(watched.mine), statuses(watched.sweep)[key]) == (job_end.reason, job_end.status)


def test_the_health_of_a_node_is_warned_of_once(watched):
    """Also where later allocations find it again, with another number."""
    agents = watched.starts(watched.mine)

    def preflight(restart, **errors):
        facts = {h: {"warn": {"ECC errors in its life": {"GPU 3": n}}} for h, n in errors.items()}
        nodes = [{"host": host, "health": health} for host, health in facts.items()]
        agents.journal.write(Preflight(allocation=watched.mine, restart=restart, found={"nodes": nodes}))
        before = len(watched.told)
        watched.once()
        watched.once()
        return watched.told[before:]

    limit = (
        "limit: no uncorrected errors in the life of a GPU; remedy: watch the GPU; "
        "have it replaced if new errors appear"
    )
    assert preflight(0, gpu03=2) == [f"warning: gpu03: ECC errors in its life (GPU 3: 2 errors); {limit}"]
    assert preflight(1, gpu03=4, gpu04=1) == [
        f"warning: gpu04: ECC errors in its life (GPU 3: 1 errors); {limit}"
    ]
    assert preflight(2, gpu03=9) == []
