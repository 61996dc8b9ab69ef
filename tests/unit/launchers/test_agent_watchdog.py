"""Launchers that look after agents, and that meet a disk they cannot use."""

import os
import time

import pytest

from tests.disks import on_a_small_disk
from tests.unit.allocations import CONFIG, with_launcher
from ultrabench.launchers.allocation_ends import AgentWatchdog
from ultrabench.store.events import LeadingAgent
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import AllocationState

NAME = "n1-0000aaaa.0"
RUNNING = frozenset({NAME, "n1-0000aaaa.1"})
LOCAL_S, GRACE_S = 3 * CONFIG.launcher.heartbeat_s, CONFIG.launcher.grace_s


class Watch:
    """A watchdog of the allocation NAME, at the seconds that a test lets pass, a look in each."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.now, self.running = SweepFolder(folder), 0.0, RUNNING
        self.folder.journal.mkdir()
        self.journal, self.second = (self.folder.journal / f"agent-gpu0{n}-0000.jsonl" for n in (3, 4))
        self.touch(self.journal, 1.0)
        self.touch(self.second, 1.0)
        self.of()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def of(self, *allocations, grace_s=0.0):
        """Watches these allocations; by default one whose agent keeps a journal."""
        self.allocations = allocations or (self.allocation(self.journal),)
        self.dog = AgentWatchdog(self.folder, with_launcher(grace_s=grace_s).launcher)
        return self

    @staticmethod
    def allocation(*journals, name=NAME):
        agents = tuple(LeadingAgent(host=path.name.split("-")[1], journal=path.name) for path in journals)
        return AllocationState(name=name, agents=agents)

    def look(self):
        """Whether the first allocation has to be ended, and why."""
        self.dog.observe(self.allocations, self.running)
        return self.dog.new_freeze(self.allocations[0])

    def wait(self, seconds):
        """Looks each second; why the allocation had to be ended, each time it had to."""
        reasons = []
        for _ in range(int(seconds)):
            self.now += 1.0
            reasons.append(self.look())
        return [reason for reason in reasons if reason]

    def touch(self, path, stamp=5.0):
        path.touch()
        os.utime(path, (stamp, stamp))


@pytest.fixture
def watch(tmp_path, monkeypatch):
    return Watch(tmp_path, monkeypatch)


@pytest.mark.parametrize(("grace_s", "patience_s"), [(0.0, LOCAL_S), (GRACE_S, 1.5 * GRACE_S)])
def test_an_agent_that_touches_nothing_is_frozen(watch, grace_s, patience_s):
    dog = watch.of(grace_s=grace_s).dog
    assert dog.patience_s == patience_s
    assert watch.look() is None
    assert watch.wait(patience_s) == []
    assert not dog.is_silent(NAME)
    watch.touch(watch.journal)
    assert watch.wait(patience_s) == []
    (reason,) = watch.wait(2)
    assert reason.startswith("the agent on gpu03 was frozen for ")
    assert dog.freezes == {NAME: reason}
    assert (dog.is_silent(NAME), dog.is_silent(NAME, 10.0)) == (True, False)
    (second_reason,) = watch.wait(patience_s + 3)  # should ending it have failed, it is found again
    assert dog.freezes == {NAME: second_reason} != {NAME: reason}
    assert dog.is_silent(NAME, 10.0)
    watch.touch(watch.journal, 6.0)
    assert watch.wait(patience_s) == [], "it has all the patience again"
    assert not dog.is_silent(NAME)
    assert len(watch.wait(2)) == 1


@pytest.mark.parametrize("agents", [(), (LeadingAgent(host="gpu03"),)])
def test_agents_that_keep_no_journal_are_not_judged(watch, agents):
    watch.of(AllocationState(name=NAME, agents=agents))
    assert watch.wait(3 * LOCAL_S) == []
    assert watch.dog.is_silent(NAME), "nor is there a sign that they live"


def test_allocations_are_watched_apart_and_of_several_starts_the_one_that_moves_counts(watch):
    other = watch.allocation(watch.journal, watch.second, name="n1-0000aaaa.1")
    watch.of(*watch.allocations, other)
    reasons = []
    for n in range(int(LOCAL_S) + 2):
        watch.touch(watch.second, 2e9 + n)
        reasons += watch.wait(1)
    assert "gpu03" in reasons[0]
    assert (watch.dog.is_silent(NAME), watch.dog.is_silent(other.name)) == (True, False)
    assert watch.dog.new_freeze(other) is None
    watch.dog.observe([], RUNNING)
    assert watch.dog.is_silent(other.name), "who was not looked at lately shows no sign of life"


def test_the_silence_of_a_suspended_job_proves_nothing_when_it_runs_again(watch):
    watch.running = frozenset()
    watch.wait(2 * LOCAL_S)
    watch.running = RUNNING
    assert watch.look() is None
    assert watch.wait(LOCAL_S - 1) == []
    assert len(watch.wait(3)) == 1


def test_a_claim_without_a_journal_is_given_its_time(watch):
    """Between its claim and its first line an agent may be held up by a slow disk."""
    watch.folder.claims.mkdir()
    (watch.folder.claims / NAME).write_text("{}")
    watch.of(AllocationState(name=NAME)).wait(LOCAL_S)
    assert not watch.dog.is_silent(NAME)
    watch.wait(2)
    assert watch.dog.is_silent(NAME)


def test_a_launcher_waits_for_its_disk_and_then_leaves_in_order(tmp_path):
    output = on_a_small_disk(
        tmp_path,
        """
        from tests.unit.launchers.played import Played, open_played, reconciler_of
        from ultrabench.errors import ClusterError
        from ultrabench.launchers import reconcile
        reconcile.DISK_PATIENCE_S, reconcile.DISK_PAUSE_S = 1.0, 0.1
        sweep = open_played(disk / "t")
        fill()
        try:
            reconciler_of(sweep, Played(), say=print).run()
        except ClusterError as error:
            print(error.exit_code, error)
        """,
    )
    note, end = output.splitlines()
    assert note.endswith("No space left on device); retrying, running jobs continue")
    assert end.startswith("3 ")
    assert end.endswith("waited 0.0166667 minutes; jobs continue: fix the folder, then launch again")


def test_silence_counts_from_the_first_look_and_a_long_pause_between_two_only_in_part(watch):
    """Also of what never had a file. A launcher that was away, on a laptop that slept, finds nobody silent."""
    missing = watch.folder.journal / "agent-none-0000.jsonl"
    watch.of(watch.allocation(missing))
    for after, silent_s in ((0.0, 0.0), (4.0, 4.0), (95.0, 4.0 + LOCAL_S / 3)):
        watch.now += after
        watch.look()
        assert watch.dog.silent_s(NAME) == silent_s
    watch.touch(missing)
    watch.look()
    assert watch.dog.silent_s(NAME) == 0.0
