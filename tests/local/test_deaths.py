"""Launchers and agents are killed at random moments; a witness file tells what really ran."""

import os
import random
import signal
import time
from collections import Counter

import pytest

from tests.local.conftest import Bench
from ultrabench.processes import command_line, own_processes

pytestmark = pytest.mark.local


def agents(bench: Bench) -> list[int]:
    words = {"ultrabench.agent", "submitit.local._local"}
    return [
        pid
        for pid in own_processes()
        if words & set(command_line(pid)) and any(str(bench.folder) in w for w in command_line(pid))
    ]


def judge(bench: Bench, runs: int) -> None:
    """Nothing lost, nothing twice, nothing invented."""
    rows = bench.rows()
    attempts = {f"{r['run_id']} {r['repeat']} {r['attempt']}": r["status"] for r in rows}
    executions = bench.executions()
    assert max(Counter(executions).values()) == 1, "an attempt ran twice"
    assert set(executions) <= set(attempts), "a run that is not recorded"
    unseen = {attempts[a] for a in set(attempts) - set(executions)}
    # An agent killed between its claim and the first line of the program leaves a lost attempt.
    assert unseen <= {"lost"}, unseen
    oks = Counter((r["run_id"], r["repeat"]) for r in rows if r["status"] == "ok")
    assert len(oks) == runs
    assert set(oks.values()) == {1}
    assert {r["status"] for r in rows} <= {"ok", "lost", "node_fail", "cancelled"}


def launch_words(bench: Bench) -> list[str]:
    return [
        "sweep", "launch", *bench.overrides("fine", "sweep.nodes=[1,2]", "sweep.gbs=16"),
        "sweep.zero_stage=[0,1,3]", "sweep.mbs=[1,2,4]", "sweep.gas=[1,2,4,8]",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [1])
def test_killed_launchers_and_agents_lose_nothing_and_repeat_nothing(bench, monkeypatch, seed):
    monkeypatch.setenv("STEP_S", "0.03")
    chance = random.Random(seed)
    words = launch_words(bench)
    for number in range(7):
        launcher = bench.start(*words)
        time.sleep(chance.uniform(1.0, 5.0) * bench.slowness)
        if number % 2 and agents(bench):
            os.kill(chance.choice(agents(bench)), signal.SIGKILL)
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.communicate()
    bench.run(*words)
    judge(bench, runs=18)


def test_a_launcher_killed_at_once_after_submission_adopts_its_agents(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.08")
    words = launch_words(bench)
    launcher = bench.start(*words)
    bench.wait_for(lambda: list(bench.folder.glob("results/t/allocations/*/submitit")))
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    bench.run(*words)
    judge(bench, runs=18)
    assert bench.journal().count('"event":"allocation_planned"') == 2, "the first one was not adopted"
    assert bench.journal().count('"event":"adopted"') == 1


def test_ctrl_c_stops_everything_and_the_same_command_goes_on(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.1")
    words = launch_words(bench)
    launcher = bench.start(*words)
    bench.wait_for(lambda: len(bench.executions()) >= 2)
    os.kill(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 130
    assert "go on with: ultrabench sweep launch" in output
    assert bench.leftovers() == []
    done = sum(r["status"] == "ok" for r in bench.rows())
    assert 1 <= done < 18
    monkeypatch.setenv("STEP_S", "0.002")
    bench.run(*words)
    judge(bench, runs=18)


def test_cancel_ends_a_sweep_from_outside_and_launch_goes_on(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.1")
    words = launch_words(bench)
    launcher = bench.start(*words)
    bench.wait_for(lambda: len(bench.executions()) >= 2)
    bench.run("sweep", "cancel", "t")
    output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 1
    assert "cancelled" in output
    assert bench.leftovers() == []
    monkeypatch.setenv("STEP_S", "0.002")
    bench.run(*words)
    judge(bench, runs=18)


def test_two_launchers_at_once_run_nothing_twice(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.02")
    words = launch_words(bench)
    launchers = [bench.start(*words) for _ in range(2)]
    for launcher in launchers:
        output, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, output
    judge(bench, runs=18)
