"""Journals that are lost, a budget that is used up and a cancel that Slurm refuses: no run and no job too many."""

import json
import shutil
import subprocess

import pytest

from tests.slurm.sweeps import FEW, slurm_says

pytestmark = pytest.mark.slurm

ONE = ("sweep.nodes=[1]", "sweep.gbs=8", "sweep.zero_stage=[0]", "sweep.mbs=[1]", "sweep.gas=[4]",
       "launcher.heartbeat_s=1")  # fmt: skip
"""A single run on one node."""


def planned(sweeps):
    return sweeps.journal().count('"event":"allocation_planned"')


def claims(sweeps):
    """Claims of attempts, not of allocations."""
    return [p for p in sorted((sweeps.folder / "results/t/claims").glob("*.*.*")) if p.name[0] != "."]


def test_lost_journals_with_claims_that_stayed_cost_an_attempt_each(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    launcher = sweeps.start(*sweeps.launch("fine", *FEW))
    sweeps.wait_for(lambda: len(sweeps.executions()) >= 2)
    launcher.kill()
    launcher.communicate()
    shutil.rmtree(sweeps.folder / "results/t/journal")
    (sweeps.folder / "results/t/journal").mkdir()
    before = len(claims(sweeps))
    monkeypatch.setenv("STEP_S", "0.002")
    output = sweeps.run(*sweeps.launch("fine", *FEW), timeout=280)
    rows = sweeps.judge(runs=10, allowed=frozenset({"lost"}))
    assert 2 <= sum(row["status"] == "lost" for row in rows) <= before + 8, output
    assert planned(sweeps) < 20


def test_a_budget_bounds_what_is_held_with_its_setup_and_a_larger_one_goes_on(sweeps):
    words = sweeps.launch("fine", *FEW, "launcher.pack=1")
    plan = json.loads(sweeps.run("sweep", "plan", *words[2:-2], "--json"))
    # Enough for a job of one node, and not for one of two; nodes are held longer than predicted, so that the second
    # job is over it, however fast this machine is.
    budget = f"{0.12 * plan['predicted_gpu_hours']:.3g}"
    stopped = sweeps.done(*words[:-1], budget, "launcher.setup=['sleep 15']")
    assert stopped.returncode == 1, stopped.stderr
    assert f"over the {budget} that may be used" in stopped.stderr
    assert 0 < len(sweeps.rows()) < 10
    held = [line.split("|") for line in _sacct(sweeps)]
    hours = sum(int(seconds) * int(nodes) * 2 / 3600 for seconds, nodes in held)
    told = sweeps.status()["gpu_hours"]
    assert told["useful"] + told["wasted"] == pytest.approx(hours, rel=0.1, abs=0.003 * sweeps.slowness)
    # The canary of each size is submitted at its predicted price; its true one is known only then.
    assert hours < float(budget) + 0.06 * sweeps.slowness, held
    sweeps.run(*words)
    sweeps.judge(runs=10)


def _sacct(sweeps):
    """Seconds|nodes of each job of the sweep, once the accounting knows the end of all of them."""
    names = {p.name.rpartition(".")[0] for p in sweeps.folder.glob("results/t/allocations/*")}

    def rows():
        text = slurm_says(
            "sacct", "--parsable2", "--noheader", "--allocations", "--format=JobName,ElapsedRaw,NNodes,End",
            "--starttime=now-1hour",
        )  # fmt: skip
        found = [line.split("|") for line in text.splitlines()]
        return [row for row in found if row[0].removeprefix("ub-t-") in names]

    sweeps.wait_for(lambda: rows() and all(row[3] != "Unknown" for row in rows()))
    return [f"{row[1]}|{row[2]}" for row in rows()]


def test_cancel_is_tried_again_until_slurm_takes_it(sweeps, slurm, monkeypatch):
    monkeypatch.setenv("STEP_S", "2")
    launcher = sweeps.start(*sweeps.launch("fine", *ONE))
    sweeps.wait_for(sweeps.executions)
    sweeps.fake("scancel", '[ $N -gt 3 ] && exec $REAL "$@"; echo "scancel: error: Unable to contact slurm controller" >&2; exit 1')  # fmt: skip
    told = sweeps.done("sweep", "cancel", "t")
    assert told.returncode == 0, told.stderr
    assert "tries again until it is done" in told.stderr
    subprocess.run(["scancel", "--name", "nothing"], check=False)
    output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 1, output
    assert "stopped: cancelled" in output
    assert sweeps.job_ids() == []
