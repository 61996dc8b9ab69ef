"""Launchers and agents are killed, ended and interrupted; a witness file tells what really ran."""

import os
import shlex
import signal

import pytest

pytestmark = pytest.mark.local


SIZES = {"nodes": [1, 2], "gbs": 16, "zero_stage": [0, 1, 3], "mbs": [1, 2, 4]}


def underway(bench, words):
    """A launcher that follows what already runs, or has begun a run in an allocation of its own."""
    ran, adopted, planned = len(bench.executions()), bench.count("adopted"), bench.count(PLANNED)
    launcher = bench.start(*words)

    def begins():
        return bench.count(PLANNED) > planned and len(bench.executions()) > ran

    bench.wait_for(lambda: bench.count("adopted") > adopted or begins())
    return launcher


PLANNED = "allocation_planned"


def test_every_way_to_end_a_launcher_loses_nothing_and_repeats_nothing(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.25")
    words = bench.launch("fine", **SIZES)
    killed = bench.start(*words)
    bench.wait_for(lambda: list(bench.folder.glob("results/t/allocations/*/submitit")))
    killed.kill()
    killed.communicate()

    command = words
    for number in (signal.SIGTERM, signal.SIGHUP):
        launcher = underway(bench, command)
        command = follow_again(bench, launcher, number)
        assert bench.leftovers() != []
    launcher = underway(bench, command)
    assert bench.count("adopted") == 3, "each one follows what runs"
    assert bench.count(PLANNED) == 1

    bench.wait_for(lambda: '"status":"ok"' in bench.journal())
    os.kill(launcher.pid, signal.SIGINT)
    assert "To continue: ultrabench sweep" in bench.end(launcher, 130)
    assert bench.leftovers() == []
    assert 1 <= sum(r["status"] == "ok" for r in bench.rows()) < 18

    impatient = underway(bench, words)
    os.kill(impatient.pid, signal.SIGINT)
    assert any("stopping the runs" in line for line in impatient.stdout)
    os.kill(impatient.pid, signal.SIGINT)
    os.kill(impatient.pid, signal.SIGINT)
    output = bench.end(impatient, 130)
    assert "Traceback" not in output
    assert "To continue: ultrabench sweep launch" in output

    cancelled = underway(bench, words)
    bench.run("sweep", "cancel", "t")
    assert "cancelled" in bench.end(cancelled, 1)
    assert bench.leftovers() == []

    monkeypatch.setenv("STEP_S", "0.002")
    for launcher in [bench.start(*words) for _ in range(2)]:
        bench.end(launcher)
    bench.assert_each_ran_once(18, frozenset({"lost", "node_fail", "cancelled"}))


def follow_again(bench, launcher, number):
    """Ends a launcher by a signal; gives the words that it says to follow the sweep again."""
    os.kill(launcher.pid, number)
    output = bench.end(launcher, 128 + number)
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    ended, _, advice = last.partition(" To follow again: ")
    assert ended == f"ended by {number.name}: stopped following the sweep; runs on this machine continue."
    first, *words = shlex.split(advice.partition("; to end them: ultrabench sweep cancel t")[0])
    assert first == "ultrabench"
    return words


def test_a_results_folder_that_is_renamed_ends_launcher_and_agents_in_order(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    launcher = underway(bench, bench.launch("fine", **SIZES))
    (bench.folder / "results/t").rename(bench.folder / "results/u")
    output = bench.end(launcher, 3)
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith(f"ultrabench: the results folder {bench.folder}/results/t is gone: ")
    bench.wait_for(lambda: bench.leftovers() == [], 120)
    logs = [p.read_text() for p in bench.folder.glob("results/u/allocations/*/submitit/*.err")]
    assert logs
    assert not any("Traceback" in log for log in logs)


def test_the_run_of_a_killed_agent_is_tried_again(bench):
    """The agent of the second of two nodes, in each attempt."""
    behaviours = "1:kill_agent,2:fine"
    bench.run(*bench.launch(behaviours, "retry.causes.agent_gone=1", nodes=2, gbs=8, mbs=[1, 2]), code=1)
    rows = bench.rows()
    killed = [row for row in rows if row["mbs"] == 1]
    assert len(killed) == 2
    assert {row["status"] for row in killed} <= {"node_fail", "lost"}
    assert {row["cause"] for row in killed} == {"agent_gone"}
    assert [row["status"] for row in rows if row["mbs"] == 2] == ["ok"]
