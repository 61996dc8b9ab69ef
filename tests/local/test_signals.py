"""Launchers that are told to end, and results folders that vanish under them."""

import os
import shlex
import signal

import pytest


def launch_words(bench):
    size = [
        "sweep.nodes=[1]",
        "sweep.gbs=16",
        "sweep.zero_stage=[0]",
        "sweep.mbs=[1,2,4]",
        "sweep.gas=[1,2,4,8]",
    ]
    return ["sweep", "launch", *bench.overrides("fine", *size)]


def underway(bench, monkeypatch, runs=2):
    """A launcher of which so many of its three runs have begun."""
    monkeypatch.setenv("STEP_S", "0.3")
    launcher = bench.start(*launch_words(bench))
    bench.wait_for(lambda: len(bench.executions()) >= runs)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_ended_leaves_its_agents_and_says_how_to_come_back(bench, monkeypatch, number):
    launcher = underway(bench, monkeypatch, runs=1)
    os.kill(launcher.pid, number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith(
        f"ended by {number.name}: no longer followed; what runs here goes on. Follow again: "
    )
    words = shlex.split(
        last.partition("Follow again: ")[2].partition("; end it: ultrabench sweep cancel t")[0]
    )
    assert words[0] == "ultrabench"
    assert bench.leftovers() != []
    monkeypatch.setenv("STEP_S", "0.002")
    bench.run(*words[1:])
    assert bench.journal().count('"event":"adopted"') == 1
    ran = bench.executions()
    assert len(ran) == len(set(ran)) == bench.status()["attempts"]


def test_a_second_ctrl_c_while_things_are_ended_keeps_the_hint(bench, monkeypatch):
    launcher = underway(bench, monkeypatch)
    os.kill(launcher.pid, signal.SIGINT)
    assert any("stopping what runs" in line for line in launcher.stdout)
    os.kill(launcher.pid, signal.SIGINT)
    os.kill(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Traceback" not in output
    assert "go on with: ultrabench sweep launch" in output
    bench.run("sweep", "cancel", "t")


def test_a_results_folder_that_is_renamed_ends_launcher_and_agents_in_order(bench, monkeypatch):
    launcher = underway(bench, monkeypatch)
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
