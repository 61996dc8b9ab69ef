"""Whose allocations a launcher sees, and what it may think of those that are somebody else's or not listed."""

import os
import socket
import time

import pytest

from tests.unit.launchers.played import Agents, Played, keys, plan, statuses, sweep, written
from ultrabench.launchers import launcher as launcher_module
from ultrabench.launchers.launcher import origin
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.launchers.settle import interrupt
from ultrabench.processes import own_name
from ultrabench.result import Status
from ultrabench.store.claim import GIVEN_UP, owner_of
from ultrabench.store.events import Cancel, Start
from ultrabench.store.jobs_seen import JobEnd, same_place, sees

__all__ = ["sweep"]  # a fixture

HERE = {"user": "ann", "cluster": "", "host": "desk"}
BIG = {"user": "ann", "cluster": "big", "host": "login1"}
THEIRS = "n1-0000bbbb.0"


def test_this_user_on_this_host_is_the_origin(monkeypatch):
    host = socket.gethostname().split(".")[0]
    assert origin("big") == {"user": own_name(), "cluster": "big", "host": host}
    inode = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(launcher_module, "_FIRST_NAMESPACE", inode)
    assert origin() == {"user": own_name(), "cluster": "", "host": host}
    # Of processes in a container those outside, and in others of the same name, see nothing.
    monkeypatch.setattr(launcher_module, "_FIRST_NAMESPACE", inode + 1)
    assert origin()["host"] == f"{host}:{inode}"
    assert origin("big")["host"] == host


@pytest.mark.parametrize(
    ("own", "by", "place", "seen"),
    [
        (BIG, BIG, True, True), (BIG, {**BIG, "host": "login2"}, True, True),
        (BIG, {**BIG, "user": "bob"}, True, False), (BIG, {**BIG, "cluster": "small"}, False, False),
        (BIG, HERE, False, False), (BIG, {**HERE, "host": "login1"}, False, False), (HERE, HERE, True, True),
        (HERE, {**HERE, "host": "desk:4026532"}, False, False),
        (HERE, {**HERE, "host": "desk2"}, False, False), (HERE, {**HERE, "user": "bob"}, True, False),
        (HERE, BIG, False, False), (HERE, {**BIG, "host": "desk"}, False, False), (BIG, {}, True, True),
        (HERE, {}, True, True),
    ],
)  # fmt: skip
def test_who_sees_whose_allocations(own, by, place, seen):
    """Jobs are seen on all hosts of their cluster, processes on theirs; what says nothing is older, and ours."""
    assert same_place(own, by) is place
    assert sees(own, by) is seen


class Watched:
    """A reconciler whose looks a test can take one by one, at times of its own."""

    def __init__(self, sweep, launcher, clock):
        self.sweep, self.launcher, self.clock = sweep, launcher, clock
        self.told, self.alive = [], frozenset()
        self.reconciler = Reconciler(sweep, launcher, self._show, self.told.append)

    def _show(self, state, alive):
        self.alive = alive

    def once(self, after=0.0):
        self.clock[0] += after
        return self.reconciler.once()[1]

    def ended(self, name):
        return self.sweep.state().allocations[name].ended


@pytest.fixture
def watched(sweep, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return Watched(sweep, Played(), clock)


def touch(agents, stamp):
    os.utime(agents.journal.path, (stamp, stamp))


# allocations of others


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("by", [{"user": "somebody else", "cluster": "big", "host": "login1"},
                                {"user": own_name(), "cluster": "small", "host": "login1"},
                                {"user": own_name(), "cluster": "", "host": "a laptop"}])  # fmt: skip
def test_an_allocation_of_others_lives_and_is_left_alone(watched, by, started):
    """squeue shows nothing of it here: neither is it over, nor is it ours to end or to replace."""
    watched.once()
    (mine,) = watched.launcher.taken
    plan(watched.sweep, THEIRS, keys(mine), by=by)
    if started:
        agents = Agents(watched.sweep, THEIRS).start()
    watched.launcher.ended_jobs[THEIRS] = JobEnd(status=Status.LOST, reason="Slurm does not know a job of it")
    local = not (by["cluster"] or started)
    for n in range(2 if local else 50):
        if started:
            touch(agents, 2e9 + n)
        assert watched.once(after=60.0)
        assert watched.alive == {mine.name, THEIRS}
    assert all(THEIRS not in known for known in watched.launcher.looked)
    assert watched.ended(THEIRS) is None
    whose = f"{by['user']} on {by['cluster'] or by['host']}"
    note = f"{THEIRS} is a job of {whose}: it is watched, and neither ended nor replaced. "
    assert sum(told.startswith(note) for told in watched.told) == 1
    assert THEIRS not in [e.allocation for e in written(watched.sweep, "adopted")]
    # What it has claimed no one else may run; what only it was to run is waited for.
    assert len(watched.launcher.taken) == 1
    watched.sweep.journal.write(Cancel(generation=2))
    watched.once()
    interrupt(watched.sweep, watched.launcher)
    assert watched.launcher.cancelled == [[mine.name]] * 2
    assert watched.ended(THEIRS) is None
    assert watched.ended(mine.name) == f"the agents of {mine.name} were ended"
    assert not watched.once(), "there is nothing of ours to wait for"


def test_what_others_finish_is_settled(watched):
    watched.once()
    (mine,) = watched.launcher.taken
    key, *_ = keys(mine)
    plan(watched.sweep, THEIRS, [key], by={"user": "bob", "cluster": "big", "host": "login1"})
    agents = Agents(watched.sweep, THEIRS).start()
    agents.claim(key, told=False)
    agents.end()
    watched.once()
    assert watched.alive == {mine.name}
    assert statuses(watched.sweep) == {key: Status.LOST}


def test_others_whose_agents_are_silent_for_longer_than_their_limit_are_over(watched):
    """Slurm has ended that job by then, whoever it belongs to."""
    watched.once()
    (mine,) = watched.launcher.taken
    key, *_ = keys(mine)
    plan(watched.sweep, THEIRS, [key], by={"user": "bob", "cluster": "small", "host": "login1"})
    agents = Agents(watched.sweep, THEIRS).start()
    agents.claim(key)
    patience_s = watched.reconciler.settler.watchdog.patience_s
    touch(agents, 2e9)
    silent_s = 0.0
    watched.once()
    while silent_s + 10.0 <= 600.0 + patience_s:
        silent_s += 10.0
        watched.once(after=10.0)
        assert THEIRS in watched.alive
    for _ in range(2):  # its claim is looked at first
        watched.once(after=10.0)
    assert watched.alive == {mine.name}
    assert watched.ended(THEIRS) == (
        f"the agents of {THEIRS}, of bob on small, were silent for longer than its time limit"
    )
    assert statuses(watched.sweep) == {key: Status.LOST}


def test_what_others_have_queued_is_taken_over_only_where_a_person_asks(watched):
    by = {"user": "bob", "cluster": "small", "host": "login1"}
    watched.once()
    (mine,) = watched.launcher.taken
    running = "n1-0000bbbb.1"
    plan(watched.sweep, THEIRS, keys(mine)[-1:], by=by)
    plan(watched.sweep, running, by=by)
    runs = Agents(watched.sweep, running, Start(job_id="9_1")).start()
    Agents(watched.sweep, mine.name).start().end()
    watched.once()
    assert watched.alive >= {THEIRS, running}
    watched.reconciler.settler.withdraw([THEIRS, running], "taken over")
    assert owner_of(watched.sweep.folder.claims, THEIRS) == GIVEN_UP
    assert watched.ended(THEIRS) == "taken over"
    assert watched.ended(running) is None, "what runs is waited for"
    watched.once()
    assert watched.alive == {running}
    runs.end()  # until now it was the first of its size
    watched.once()
    again = [key for made in watched.launcher.taken[1:] for key in keys(made)]
    assert keys(mine)[-1] in again, "the same attempt: nobody has claimed it, and now nobody else will"


def test_what_has_started_meanwhile_is_not_taken_over(watched):
    """Its claim is there, its journal cannot be seen yet."""
    plan(watched.sweep, THEIRS, by={"user": "bob", "cluster": "small", "host": "login1"})
    agents = Agents(watched.sweep, THEIRS).start()
    agents.journal.path.rename(agents.journal.path.with_suffix(".late"))
    watched.reconciler.settler.withdraw([THEIRS], "taken over")
    assert watched.ended(THEIRS) is None
    assert owner_of(watched.sweep.folder.claims, THEIRS) == THEIRS


# a job that Slurm does not show


UNKNOWN = JobEnd(status=Status.LOST, reason="Slurm does not know job 57_0")
ENDED = JobEnd(status=Status.NODE_FAIL, reason="Slurm ended job 57_0: NODE_FAIL", held_s=50.0)


@pytest.mark.parametrize("gone", [UNKNOWN, ENDED])
def test_a_job_whose_agents_touch_their_journal_is_not_dead(watched, gone):
    """slurmctld may have lost its state, sacct be behind or squeue ask the wrong cluster."""
    watched.once()
    (made,) = watched.launcher.taken
    agents = Agents(watched.sweep, made.name).start()
    agents.claim(keys(made)[0])
    watched.launcher.ended_jobs[made.name] = gone
    patience_s = watched.reconciler.settler.watchdog.patience_s
    for n in range(100):
        touch(agents, (-1) ** n * n + 1e9)  # whatever clock it is
        assert watched.once(after=0.3 * patience_s)
        assert watched.alive == {made.name}
    assert watched.ended(made.name) is None
    assert statuses(watched.sweep) == {keys(made)[0]: None}
    assert len(watched.launcher.taken) == 1
    note = f"{gone.reason}, but the agents of {made.name} touched their journal lately"
    assert sum(told.startswith(note) for told in watched.told) == 1
    for _ in range(3):
        watched.once(after=0.3 * patience_s)
        assert watched.alive == {made.name}
    watched.once(after=0.3 * patience_s)
    assert watched.ended(made.name) == gone.reason
    assert statuses(watched.sweep)[keys(made)[0]] == gone.status


def test_where_its_processes_were_looked_at_it_is_dead_at_once(watched):
    watched.once()
    (made,) = watched.launcher.taken
    Agents(watched.sweep, made.name).start()
    watched.launcher.ended_jobs[made.name] = JobEnd(status=Status.LOST, reason="vanished", certain=True)
    watched.once()
    assert watched.ended(made.name) == "vanished"


def test_a_silent_job_that_slurm_lists_is_not_dead(watched):
    """It may be suspended, or its file server hangs: Slurm has to say that it is over."""
    watched.once()
    (made,) = watched.launcher.taken
    Agents(watched.sweep, made.name).start()
    for _ in range(50):
        assert watched.once(after=100.0)
        assert watched.alive == {made.name}
    assert (watched.ended(made.name), watched.launcher.ended) == (None, [])


def test_processes_of_another_host_that_never_started_are_given_up_after_their_limit(watched):
    """A container that died at once never comes back under its name; unlike a job it waits in no queue."""
    watched.once()
    (mine,) = watched.launcher.taken
    plan(watched.sweep, THEIRS, keys(mine), by={"user": own_name(), "cluster": "", "host": "a container"})
    for _ in range(50):
        watched.once(after=60.0)
    assert "longer than its time limit" in str(watched.ended(THEIRS))
    assert owner_of(watched.sweep.folder.claims, THEIRS) == GIVEN_UP
