"""Launchers that look after agents, and that meet a disk they cannot use."""

import os
import time

import pytest

from tests.disks import on_a_small_disk
from tests.unit.allocations import CONFIG
from ultrabench.launchers.vigil import Vigil
from ultrabench.state import AllocationState

NAME = "n1-0000aaaa.0"
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
    path = tmp_path / "agent-gpu03-1-0000aaaa.jsonl"
    path.write_text("")
    return path


def held(*journals):
    agents = tuple({"host": "gpu03", "journal": path.name} for path in journals)
    return AllocationState(name=NAME, agents=agents)


@pytest.mark.parametrize(("outlives_us", "patience_s"), [(False, LOCAL_S), (True, CLUSTER_S)])
def test_an_agent_that_touches_nothing_is_frozen(journal, clock, outlives_us, patience_s):
    vigil = Vigil(journal.parent, CONFIG.launcher, outlives_us)
    running = held(journal)
    assert vigil.look(running) is None
    assert clock(patience_s, lambda: vigil.look(running)) == []
    os.utime(journal, (5, 5))
    assert clock(patience_s, lambda: vigil.look(running)) == []
    (reason,) = clock(2, lambda: vigil.look(running))
    assert reason.startswith("the agent on gpu03 did not move for ")
    assert vigil.frozen == {NAME: reason}
    # Should ending it have failed, it is found again.
    assert len(clock(patience_s + 3, lambda: vigil.look(running))) == 1


def test_agents_that_keep_no_journal_are_not_judged(journal, clock):
    vigil = Vigil(journal.parent, CONFIG.launcher, False)
    older = AllocationState(name=NAME, agents=({"host": "gpu03"},))
    for running in (older, held()):
        assert clock(3 * LOCAL_S, lambda running=running: vigil.look(running)) == []


def test_the_one_of_several_starts_that_moves_counts(journal, clock):
    second = journal.with_name("agent-gpu04-2-0000bbbb.jsonl")
    second.write_text("")
    vigil = Vigil(journal.parent, CONFIG.launcher, False)
    running = held(journal, second)
    for n in range(5):
        os.utime(second, (2e9 + n, 2e9 + n))
        assert clock(LOCAL_S - 1, lambda: vigil.look(running)) == []


def test_a_launcher_waits_for_its_disk_and_then_leaves_in_order(tmp_path):
    told = on_a_small_disk(
        tmp_path,
        """
        from dataclasses import replace
        from tests.unit.allocations import open_sweep
        from ultrabench.errors import ClusterError
        from ultrabench.launchers import follow
        from ultrabench.launchers.local import LocalLauncher
        follow.DISK_PATIENCE_S, follow.DISK_PAUSE_S = 1.0, 0.1
        sweep = open_sweep(disk / "t")
        sweep = replace(sweep, kernel_digest=sweep.config.kernel.digest())
        sweep.folder.create()
        sweep.journal.write("cancel", generation=0)
        sweep.journal.write("config", generation=1, config={})
        fill()
        follower = follow.Follower(sweep, LocalLauncher(sweep.folder), lambda *shown: None, say=print)
        try:
            follower.run()
        except ClusterError as error:
            print(error.exit_code, error)
        """,
    )
    note, end = told.splitlines()
    assert note.endswith("No space left on device); trying again, jobs go on")
    assert end.startswith("3 ")
    assert end.endswith("waited 0.0166667 minutes; what runs goes on: mend it, then launch again")
