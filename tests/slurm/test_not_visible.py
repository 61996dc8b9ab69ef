"""What a launcher cannot see, reads wrongly or gets twice: nothing runs twice, and nothing is submitted for ever."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.chaos.target import processes
from tests.slurm.sweeps import FEW, slurm_says

pytestmark = pytest.mark.slurm

ONE = ("sweep.nodes=[1]", "sweep.gbs=8", "sweep.zero_stage=[0]", "sweep.mbs=[1]", "sweep.gas=[4]",
       "launcher.heartbeat_s=1")  # fmt: skip
"""A single run on one node."""


def planned(sweeps) -> int:
    return sweeps.journal().count('"event":"allocation_planned"')


def claims(sweeps):
    """Claims of attempts, not of allocations."""
    return [p for p in sorted((sweeps.folder / "results/t/claims").glob("*.*.*")) if p.name[0] != "."]


def end_leader(sweeps) -> None:
    """Kills the leading agent of the job that runs, so that it can say nothing."""
    (leader,) = processes(sweeps.folder, "leader")
    os.kill(leader.pid, signal.SIGKILL)


def test_a_claim_that_cannot_be_read_costs_an_attempt_and_not_a_night(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.8")
    launcher = sweeps.start(*sweeps.launch("fine", *ONE))
    sweeps.wait_for(sweeps.executions)
    (claim,) = claims(sweeps)
    content = claim.read_bytes()
    claim.write_bytes(b"")
    end_leader(sweeps)
    monkeypatch.setenv("STEP_S", "0.002")
    sweeps.wait_for(lambda: planned(sweeps) == 2)
    claim.write_bytes(content)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    rows = sweeps.judge(runs=1, allowed=frozenset({"lost"}))
    assert [row["status"] for row in rows] == ["lost", "ok"]
    assert planned(sweeps) == 2


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


def test_who_watches_writes_nothing_and_submits_nothing(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.2")
    words = sweeps.launch("fine", *ONE, "retry.attempts.crash=1")
    sweeps.run(*words, "--detach")
    sweeps.wait_for(sweeps.executions)
    end_leader(sweeps)  # now something is left to do, and nobody follows
    sweeps.wait_for(lambda: not sweeps.job_ids())

    def files():
        return {str(p): p.stat().st_size for p in sorted(sweeps.folder.rglob("*")) if p.is_file()}

    def jobs():
        """Numbers of the jobs that slurmctld remembers; it forgets old ones."""
        return set(slurm_says("squeue", "-h", "-r", "-t", "all", "-o", "%i").split())

    before, submitted = files(), jobs()
    watcher = sweeps.start("sweep", "status", "t", "--watch")
    time.sleep(12 * sweeps.slowness)  # longer than three heartbeats and twice the grace
    assert watcher.poll() is None
    watcher.send_signal(signal.SIGINT)
    output, _ = watcher.communicate(timeout=20)
    assert "ultrabench sweep resume t" in output
    assert files() == before
    assert jobs() <= submitted
    sweeps.run("sweep", "resume", "t")
    rows = sweeps.judge(runs=1, allowed=frozenset({"lost"}))
    assert [row["status"] for row in rows] == ["lost", "ok"]


def test_jobs_of_another_cluster_are_watched_only(sweeps, bare, monkeypatch):
    """`bare` is the second cluster; its Slurm is what SLURM_CONF names now."""
    second = os.environ["SLURM_CONF"]
    monkeypatch.setenv("STEP_S", "1")
    first = sweeps.environ["SLURM_CONF"]
    monkeypatch.setenv("SLURM_CONF", first)
    words = sweeps.launch("fine", *ONE)
    sweeps.run(*words, "--detach")
    sweeps.wait_for(sweeps.executions)
    monkeypatch.setenv("SLURM_CONF", second)
    done = sweeps.done(*words)
    assert "it is watched, and neither ended nor replaced" in done.stderr
    rows = sweeps.judge(runs=1)
    assert [row["status"] for row in rows] == ["ok"]
    assert planned(sweeps) == 1


def test_an_empty_squeue_and_a_sacct_that_is_wrong_kill_nothing(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "1")
    launcher = sweeps.start(*sweeps.launch("fine", *ONE))
    sweeps.wait_for(sweeps.executions)
    launcher.kill()
    launcher.communicate()
    sweeps.fake("squeue", "exit 0")
    sweeps.fake("sacct", '$REAL "$@" | sed "s/|RUNNING|/|COMPLETED|/"')
    output = sweeps.run(*sweeps.launch("fine", *ONE))
    rows = sweeps.judge(runs=1)
    assert [row["status"] for row in rows] == ["ok"], output
    assert planned(sweeps) == 1


def test_a_wrapper_that_submits_everything_twice(sweeps):
    sweeps.fake("sbatch", '$REAL "$@" >/dev/null && exec $REAL "$@"')
    launcher = sweeps.start(*sweeps.launch("fine", *FEW))
    output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, output
    rows = sweeps.judge(runs=10)
    assert {row["status"] for row in rows} == {"ok"}
    assert sweeps.journal().count('"event":"allocation_started"') == planned(sweeps)


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


def _sacct(sweeps) -> list[str]:
    """Seconds|nodes of each job of the sweep, once the accounting knows the end of all of them."""
    names = {p.name.rpartition(".")[0] for p in sweeps.folder.glob("results/t/allocations/*")}

    def rows() -> list[list[str]]:
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
