"""Launchers that look after agents, and that meet a disk they cannot use."""

import os
import time

import pytest

from tests.disks import on_a_small_disk
from tests.unit.allocations import CONFIG
from ultrabench.launchers.agent_watchdog import AgentWatchdog, SilenceTimer
from ultrabench.store.events import LeadingAgent
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import AllocationState

NAME = "n1-0000aaaa.0"
RUNNING = frozenset({NAME, "n1-0000aaaa.1"})
LOCAL_S, CLUSTER_S = 3 * CONFIG.launcher.heartbeat_s, 1.5 * CONFIG.launcher.grace_s


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told to, in steps no longer than a launcher's pauses."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(seconds, look):
        found = []
        for _ in range(int(seconds)):
            now[0] += 1.0
            found += [look()]
        return [reason for reason in found if reason]

    return wait


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "journal" / "agent-gpu03-1-0000aaaa.jsonl"
    path.parent.mkdir()
    path.write_text("")
    return path


def folder_of(journal):
    return SweepFolder(journal.parent.parent)


def held(*journals):
    agents = tuple(LeadingAgent(host="gpu03", journal=path.name) for path in journals)
    return AllocationState(name=NAME, agents=agents)


def looks(watchdog, running):
    """A look at this allocation alone, and whether it has to be ended."""

    def look():
        watchdog.observe([running], RUNNING)
        return watchdog.frozen_now(running)

    return look


@pytest.mark.parametrize(("outlives_us", "patience_s"), [(False, LOCAL_S), (True, CLUSTER_S)])
def test_an_agent_that_touches_nothing_is_frozen(journal, clock, outlives_us, patience_s):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, outlives_us)
    assert watchdog.patience_s == patience_s
    look = looks(watchdog, held(journal))
    assert look() is None
    assert clock(patience_s, look) == []
    os.utime(journal, (5, 5))
    assert clock(patience_s, look) == []
    (reason,) = clock(2, look)
    assert reason.startswith("the agent on gpu03 did not move for ")
    assert watchdog.frozen == {NAME: reason}
    # Should ending it have failed, it is found again.
    (again,) = clock(patience_s + 3, look)
    assert again != reason
    assert watchdog.frozen == {NAME: again}


def test_one_that_moves_after_it_was_found_has_all_the_patience_again(journal, clock):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, False)
    look = looks(watchdog, held(journal))
    look()
    assert len(clock(LOCAL_S + 2, look)) == 1
    os.utime(journal, (5, 5))
    assert clock(LOCAL_S, look) == []
    assert len(clock(2, look)) == 1


def test_agents_that_keep_no_journal_are_not_judged(journal, clock):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, False)
    older = AllocationState(name=NAME, agents=(LeadingAgent(host="gpu03"),))
    for running in (older, held()):
        assert clock(3 * LOCAL_S, looks(watchdog, running)) == []
        assert watchdog.silent(NAME), "nor is there a sign that they live"


def test_the_one_of_several_starts_that_moves_counts(journal, clock):
    second = journal.with_name("agent-gpu04-2-0000bbbb.jsonl")
    second.write_text("")
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, False)
    running = held(journal, second)
    for n in range(5):
        os.utime(second, (2e9 + n, 2e9 + n))
        assert clock(LOCAL_S - 1, looks(watchdog, running)) == []
        assert not watchdog.silent(NAME)


def test_agents_are_silent_once_they_have_been_for_longer_than_the_patience(journal, clock):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, True)
    running = held(journal)

    def silent():
        watchdog.observe([running], RUNNING)
        return watchdog.silent(NAME)

    assert not silent()
    assert clock(CLUSTER_S, silent) == []
    assert clock(1, silent) == [True]
    assert not watchdog.silent(NAME, 10.0)
    assert clock(10, silent) == [True] * 10
    assert watchdog.silent(NAME, 10.0)
    os.utime(journal, (5, 5))
    assert not silent()
    assert watchdog.frozen == {}, "who is silent is not judged, but asked for"


def test_who_was_not_looked_at_lately_shows_no_sign_of_life(journal, clock):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, False)
    watchdog.observe([held(journal)], RUNNING)
    assert not watchdog.silent(NAME)
    watchdog.observe([], RUNNING)
    assert watchdog.silent(NAME)
    assert watchdog.frozen_now(held(journal)) is None


def test_allocations_are_watched_apart(journal, clock):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, False)
    second = journal.with_name("agent-gpu04-2-0000bbbb.jsonl")
    second.write_text("")
    one = held(journal)
    two = AllocationState(name="n1-0000aaaa.1", agents=(LeadingAgent(host="gpu04", journal=second.name),))
    for n in range(int(LOCAL_S) + 2):
        os.utime(second, (2e9 + n, 2e9 + n))
        clock(1, lambda: watchdog.observe([one, two], RUNNING))
    assert (watchdog.silent(one.name), watchdog.silent(two.name)) == (True, False)
    assert watchdog.frozen_now(two) is None
    assert "gpu03" in watchdog.frozen_now(one)


def test_a_launcher_that_was_away_does_not_find_everybody_silent(journal, clock):
    """A laptop that slept for a night has looked once in that time."""
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, True)
    watchdog.observe([held(journal)], RUNNING)
    clock(8 * 3600, lambda: None)
    watchdog.observe([held(journal)], RUNNING)
    assert not watchdog.silent(NAME)
    assert watchdog.frozen_now(held(journal)) is None


def test_a_launcher_waits_for_its_disk_and_then_leaves_in_order(tmp_path):
    told = on_a_small_disk(
        tmp_path,
        """
        from dataclasses import replace
        from tests.unit.allocations import open_sweep
        from ultrabench.errors import ClusterError
        from ultrabench.launchers import reconcile
        from ultrabench.launchers.local import LocalLauncher
        from ultrabench.store.events import Cancel, LaunchConfig
        reconcile.DISK_PATIENCE_S, reconcile.DISK_PAUSE_S = 1.0, 0.1
        sweep = open_sweep(disk / "t")
        sweep = replace(sweep, kernel_digest=sweep.config.kernel.digest())
        sweep.folder.create()
        sweep.folder.sweep_json.write_text("{}")
        sweep.journal.write(Cancel(generation=0))
        sweep.journal.write(LaunchConfig(generation=1, config={}))
        fill()
        reconciler = reconcile.Reconciler(sweep, LocalLauncher(sweep.folder), lambda *shown: None, say=print)
        try:
            reconciler.run()
        except ClusterError as error:
            print(error.exit_code, error)
        """,
    )
    note, end = told.splitlines()
    assert note.endswith("No space left on device); trying again, jobs go on")
    assert end.startswith("3 ")
    assert end.endswith("waited 0.0166667 minutes; what runs goes on: mend it, then launch again")


def test_the_silence_of_a_suspended_job_proves_nothing_when_it_runs_again(journal, clock):
    watchdog = AgentWatchdog(folder_of(journal), CONFIG.launcher, False)
    running = held(journal)
    clock(2 * LOCAL_S, lambda: watchdog.observe([running], frozenset()))
    watchdog.observe([running], RUNNING)
    assert watchdog.frozen_now(running) is None
    assert (
        clock(LOCAL_S - 1, lambda: [watchdog.observe([running], RUNNING), watchdog.frozen_now(running)][1])
        == []
    )
    assert len(clock(3, lambda: [watchdog.observe([running], RUNNING), watchdog.frozen_now(running)][1])) == 1


def test_a_claim_without_a_journal_is_given_its_time(journal, clock):
    """Between its claim and its first line an agent may be held up by a slow disk."""
    folder = folder_of(journal)
    folder.claims.mkdir()
    (folder.claims / NAME).write_text("{}")
    watchdog = AgentWatchdog(folder, CONFIG.launcher, False)
    unheard = AllocationState(name=NAME)
    clock(LOCAL_S, lambda: watchdog.observe([unheard], RUNNING))
    assert not watchdog.silent(NAME)
    clock(2, lambda: watchdog.observe([unheard], RUNNING))
    assert watchdog.silent(NAME)


def test_silence_counts_changes_and_not_clocks(tmp_path):
    journal = tmp_path / "journal"
    journal.write_text("")
    silence = SilenceTimer(10.0)
    looks = [silence.observe("a", [journal], now) for now in (0.0, 4.0, 8.0)]
    assert looks == [0.0, 4.0, 8.0]
    os.utime(journal, (0, 0))  # a clock that jumps back is a sign of life, too
    assert silence.observe("a", [journal], 12.0) == 0.0
    # The one who looks was away for an hour: that proves little.
    assert silence.observe("a", [journal], 3612.0) == 10.0
    # It goes on from there, for each name alone; a file that is not there is no sign of life.
    assert silence.observe("a", [journal, tmp_path / "none"], 3614.0) == 12.0
    assert silence.observe("b", [journal], 3614.0) == 0.0
    os.utime(journal, (5, 5))
    assert silence.observe("a", [journal, tmp_path / "none"], 3620.0) == 0.0
    assert silence.observe("b", [journal], 3620.0) == 0.0


def test_silence_of_what_never_had_a_file_counts_too(tmp_path):
    silence = SilenceTimer(10.0)
    gone = [tmp_path / "none"]
    assert [silence.observe("a", gone, now) for now in (0.0, 4.0, 99.0)] == [0.0, 4.0, 14.0]
    gone[0].write_text("")
    assert silence.observe("a", gone, 100.0) == 0.0
