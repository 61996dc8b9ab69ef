"""Launchers and agents are killed, ended and interrupted; a witness file tells what really ran."""

import os
import random
import shlex
import signal
import time

import pytest

pytestmark = pytest.mark.local


ENDS = frozenset({"lost", "node_fail", "cancelled"})


def launch_words(bench):
    return [
        "sweep", "launch", *bench.overrides("fine", "sweep.nodes=[1,2]", "sweep.gbs=16"),
        "sweep.zero_stage=[0,1,3]", "sweep.mbs=[1,2,4]", "sweep.gas=[1,2,4,8]",
    ]  # fmt: skip


def underway(bench, words):
    """A launcher that follows what already runs, or has begun a run in an allocation of its own."""
    ran, adopted, planned = len(bench.executions()), adoptions(bench), allocations(bench)
    launcher = bench.start(*words)
    bench.wait_for(
        lambda: adoptions(bench) > adopted or (allocations(bench) > planned and len(bench.executions()) > ran)
    )
    return launcher


def allocations(bench):
    """Number of allocations that launchers have made."""
    return bench.journal().count('"event":"allocation_planned"')


def adoptions(bench):
    return bench.journal().count('"event":"adopted"')


@pytest.mark.parametrize("seed", [1])
def test_killed_launchers_and_agents_lose_nothing_and_repeat_nothing(bench, monkeypatch, seed):
    monkeypatch.setenv("STEP_S", "0.03")
    chance = random.Random(seed)
    words = launch_words(bench)
    for number in range(5):
        launcher = bench.start(*words)
        time.sleep(chance.uniform(1.0, 4.0) * bench.slowness)
        if number % 2 == 0 and bench.agents():
            os.kill(chance.choice(bench.agents()), signal.SIGKILL)
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.communicate()
    bench.run(*words)
    bench.judge(18, ENDS)


def test_every_way_to_end_a_launcher_loses_nothing_and_repeats_nothing(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.25")
    words = launch_words(bench)
    killed = bench.start(*words)
    bench.wait_for(lambda: list(bench.folder.glob("results/t/allocations/*/submitit")))
    killed.kill()
    killed.communicate()

    again = words
    for number in (signal.SIGTERM, signal.SIGHUP):
        launcher = underway(bench, again)
        again = follow_again(launcher, number)
        assert bench.leftovers() != []
    launcher = underway(bench, again)
    assert adoptions(bench) == 3, "each one follows what runs"
    assert allocations(bench) == 1

    bench.wait_for(lambda: '"status":"ok"' in bench.journal())
    os.kill(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 130
    assert "go on with: ultrabench sweep" in output
    assert bench.leftovers() == []
    assert 1 <= sum(r["status"] == "ok" for r in bench.rows()) < 18

    impatient = underway(bench, words)
    os.kill(impatient.pid, signal.SIGINT)
    assert any("stopping what runs" in line for line in impatient.stdout)
    os.kill(impatient.pid, signal.SIGINT)
    os.kill(impatient.pid, signal.SIGINT)
    output, _ = impatient.communicate(timeout=60)
    assert impatient.returncode == 130
    assert "Traceback" not in output
    assert "go on with: ultrabench sweep launch" in output

    cancelled = underway(bench, words)
    bench.run("sweep", "cancel", "t")
    output, _ = cancelled.communicate(timeout=90)
    assert cancelled.returncode == 1
    assert "cancelled" in output
    assert bench.leftovers() == []

    monkeypatch.setenv("STEP_S", "0.002")
    for launcher in [bench.start(*words) for _ in range(2)]:
        output, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, output
    bench.judge(18, ENDS)


def follow_again(launcher, number):
    """Ends a launcher by a signal; gives the words that it says to follow the sweep again."""
    os.kill(launcher.pid, number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith(f"ended by {number.name}: no longer followed; what runs here goes on. ")
    told = last.partition("Follow again: ")[2].partition("; end it: ultrabench sweep cancel t")[0]
    first, *words = shlex.split(told)
    assert first == "ultrabench"
    return words


def test_a_results_folder_that_is_renamed_ends_launcher_and_agents_in_order(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    launcher = underway(bench, launch_words(bench))
    (bench.folder / "results/t").rename(bench.folder / "results/u")
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith(f"ultrabench: the results folder {bench.folder}/results/t is gone: ")
    bench.wait_for(lambda: bench.leftovers() == [], 120)
    logs = [p.read_text() for p in bench.folder.glob("results/u/allocations/*/submitit/*.err")]
    assert logs
    assert not any("Traceback" in log for log in logs)
