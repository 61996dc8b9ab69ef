"""Journals that are lost, a budget that is used up and a cancel: no run and no job too many."""

import json
import shutil

import pytest

from tests.slurm.sweeps import FEW, slurm_says
from ultrabench.launchers.slurm.script import job_name
from ultrabench.store.folder import SweepFolder
from ultrabench.store.sweep_json import read_sweep_json

pytestmark = pytest.mark.slurm


def test_lost_journals_with_claims_that_stayed_cost_an_attempt_each(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    launcher = sweeps.start(*sweeps.launch("fine", *FEW))
    sweeps.wait_for(lambda: len(sweeps.executions()) >= 2)
    launcher.kill()
    launcher.communicate()
    shutil.rmtree(sweeps.folder / "results/t/journal")
    (sweeps.folder / "results/t/journal").mkdir()
    # Claims of attempts, not of allocations.
    before = len([p for p in sweeps.folder.glob("results/t/claims/*.*.*") if p.name[0] != "."])
    monkeypatch.setenv("STEP_S", "0.002")
    output = sweeps.run(*sweeps.launch("fine", *FEW), seconds=280)
    rows = sweeps.assert_each_ran_once(runs=10, allowed=frozenset({"lost"}))
    assert 2 <= sum(row["status"] == "lost" for row in rows) <= before + 8, output
    assert sweeps.count("allocation_planned") < 20


def test_a_budget_bounds_what_is_held_with_its_setup_and_a_larger_one_goes_on(sweeps):
    words = sweeps.launch("fine", *FEW, "launcher.pack=1")
    plan = json.loads(sweeps.run("sweep", "plan", *words[2:-2], "--json"))
    # Enough for a job of one node, and not for one of two; nodes are held longer than predicted, so that the second
    # job is over it, however fast this machine is.
    budget = f"{0.12 * plan['predicted_gpu_hours']:.3g}"
    stopped = sweeps.done(*words[:-1], budget, "launcher.setup=['sleep 15']")
    assert stopped.returncode == 1, stopped.stderr
    assert f"over the budget of {budget}" in stopped.stderr
    assert 0 < len(sweeps.rows()) < 10
    hours = held_hours(sweeps)
    usage = sweeps.status()["gpu_hours"]
    assert usage["useful"] + usage["wasted"] == pytest.approx(hours, rel=0.1, abs=0.003 * sweeps.slowness)
    # The canary of each size is submitted at its predicted price; its true one is known only then.
    assert hours < float(budget) + 0.06 * sweeps.slowness
    sweeps.run(*words)
    sweeps.assert_each_ran_once(runs=10)


def held_hours(sweeps):
    """The GPU hours of the sweep's jobs, once the accounting knows the end of all of them."""
    sweep_id = read_sweep_json(SweepFolder(sweeps.folder / "results/t")).id
    arrays = {name.rpartition(".")[0] for name in sweeps.allocations()}
    names = ",".join(job_name("t", sweep_id, array) for array in arrays)
    words = ["sacct", "-X", "-n", "-P", "--starttime=now-1hour", "--format=ElapsedRaw,NNodes,End"]

    def rows():
        return [line.split("|") for line in slurm_says(*words, f"--name={names}").splitlines()]

    sweeps.wait_for(lambda: rows() and all(end != "Unknown" for _, _, end in rows()))
    return sum(int(seconds) * int(nodes) * 2 / 3600 for seconds, nodes, _ in rows())


def test_a_cancelled_sweep_ends_its_jobs_and_its_launcher(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "2")
    launcher = sweeps.start(*sweeps.launch("fine", *FEW, "launcher.heartbeat_s=1"))
    sweeps.wait_for(sweeps.executions)
    sweeps.run("sweep", "cancel", "t")
    assert "stopped: cancelled" in sweeps.end(launcher, 1, seconds=90)
    assert sweeps.job_ids() == []
    sweeps.run("sweep", "rm", "t", "--yes")
    assert not (sweeps.folder / "results" / "t").exists()
