"""The local launcher's look at real processes that carry an allocation's folder in their command line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.patience import slowness, wait_until
from ultrabench.launchers import local
from ultrabench.launchers.launcher import own_origin
from ultrabench.launchers.local import LocalLauncher
from ultrabench.result import Status
from ultrabench.store.events import AllocationEnded, LeadingAgent, Start
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import AllocationState

NAME = "n1-0000aaaa.0"
GRACE_S = 0.05


@pytest.fixture
def folder(tmp_path):
    sweep_folder = SweepFolder(tmp_path / "my sweep")
    sweep_folder.create()
    return sweep_folder


@pytest.fixture
def start():
    """Starts a process with these words in its command line."""
    started = []

    def run(*words, before=""):
        code = f"import signal, time; {before}print('up', flush=True); time.sleep(60)"
        started.append(subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"up\n"
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def launcher(folder, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", GRACE_S)
    monkeypatch.setattr(local, "STOP_PATIENCE_S", 0.1 * slowness())
    local_launcher = LocalLauncher(folder)
    assert local_launcher.origin == own_origin() | {"cluster": ""}
    return local_launcher


def states_of(*names, **words):
    return {name: AllocationState(name=name, **words) for name in names}


def gone_within(launcher, allocations, seconds=3.0):
    wait_until(lambda: launcher.observe(allocations).ended_jobs, seconds)
    return launcher.observe(allocations)


def test_an_allocation_lives_while_it_has_a_process(folder, launcher, start):
    launcher.observe(states_of(NAME))
    time.sleep(GRACE_S)
    agent = start("ultrabench.agent", str(folder.allocations / NAME))  # a late one
    for _ in range(3):
        look = launcher.observe(states_of(NAME))
        assert (look.alive, look.queued, look.ended_jobs) == ({NAME}, frozenset(), {})
        assert set(look.jobs) == {NAME}
        time.sleep(GRACE_S)
    agent.kill()
    agent.wait()
    look = launcher.observe(states_of(NAME))
    assert (look.alive, look.ended_jobs) == ({NAME}, {})
    look = gone_within(launcher, states_of(NAME))
    assert look.alive == frozenset()
    assert look.ended_jobs[NAME].status == Status.LOST
    assert look.ended_jobs[NAME].reason == f"the agents of {NAME} disappeared"
    assert look.ended_jobs[NAME].certain, "its processes were looked at"


def test_processes_of_other_allocations_and_programs_do_not_count(folder, launcher, start):
    """Those that start agents do."""
    mine, other = str(folder.allocations / NAME), str(folder.allocations / "n1-0000aaaa.1")
    for words in (
        ("ultrabench.agent", f"{mine}0"), ("ultrabench.agent", f"prefix{mine}"), ("tail", f"{mine}/job.log"),
        (f"ultrabench.agent {mine}",), ("submitit.local._local", f"{other}/submitit"),
    ):  # fmt: skip
        start(*words)
    assert set(launcher.observe(states_of(NAME, "n1-0000aaaa.1")).jobs) == {"n1-0000aaaa.1"}
    assert set(gone_within(launcher, states_of(NAME)).ended_jobs) == {NAME}
    start("ultrabench.launchers.local", mine)
    assert set(launcher.observe(states_of(NAME)).jobs) == {NAME}


def test_a_process_that_outlives_its_allocation_is_killed(folder, launcher, start):
    straggler = start("ultrabench.agent", str(folder.allocations / NAME))
    straggler.send_signal(signal.SIGSTOP)
    end = AllocationEnded(allocation=NAME, reason="all tasks done", source="agent", elapsed_s=1.0)
    look = launcher.observe(states_of(NAME, ends={Start(): end}))
    assert (look.alive, look.ended_jobs, look.jobs) == (frozenset(), {}, {})
    assert straggler.wait() == -signal.SIGKILL


def test_cancelling_asks_first_and_then_kills(folder, launcher, start):
    mine = str(folder.allocations / NAME)
    obedient = start("ultrabench.agent", mine)
    stubborn = start("ultrabench.agent", mine, before="signal.signal(15, signal.SIG_IGN); ")
    other = start("ultrabench.agent", str(folder.allocations / "n1-0000bbbb.0"))
    launcher.cancel(states_of(NAME), queued_only=True)
    assert obedient.poll() is stubborn.poll() is None
    launcher.cancel(states_of(NAME))
    assert (obedient.wait(), stubborn.wait(), other.poll()) == (-15, -9, None)


def test_what_vanished_is_paid_for_until_its_last_sign_of_life(folder, launcher):
    """From the moment its files were written, all by one clock, which may be set back."""
    allocation = folder.allocations / NAME / "allocation.json"
    allocation.parent.mkdir()
    journals = [folder.journal / f"agent-here-{n}-0000aaaa.jsonl" for n in range(2)]
    agents = tuple(LeadingAgent(host="here", journal=journal.name) for journal in journals)
    never = states_of(NAME, agents=(LeadingAgent(host="x"),))
    for seconds, states, held_s in ((50, states_of(NAME, agents=agents), 51.0),
                                    (-100, states_of(NAME, agents=agents), 0.0),
                                    (50, states_of(NAME), 0.0), (50, never, 0.0)):  # fmt: skip
        for path, time_s in zip((allocation, *journals), (1000, 1000 + seconds, 1001 + seconds), strict=True):
            path.write_text("{}")
            os.utime(path, (time_s, time_s))
        assert gone_within(launcher, states).ended_jobs[NAME].held_s == held_s


def test_processes_are_found_by_every_path_of_the_folder(folder, launcher, start, tmp_path):
    """The sweep was launched by a link, or has another name since."""
    for path in (tmp_path / "link", tmp_path / "earlier name"):
        start("ultrabench.agent", str(path / "allocations" / NAME))
        assert set(launcher.observe(states_of(NAME)).jobs) == {NAME}
