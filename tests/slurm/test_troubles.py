"""What clusters do to a sweep: it ends as planned, every attempt is told, and nothing runs twice."""

import os
import subprocess
import time

import pytest

from tests import patience
from tests.slurm.conftest import SETTINGS
from tests.slurm.sweeps import FEW, SlurmBench, slurm_says

pytestmark = pytest.mark.slurm


def scontrol(*words: str) -> None:
    assert patience.run(["scontrol", *words]).returncode == 0


def running(sweeps: SlurmBench) -> list[tuple[str, str]]:
    """(job id, nodes) of the sweep's running jobs."""
    text = slurm_says("squeue", "-h", "-r", "-t", "R", "-o", "%i %N")
    return [(line.split()[0], line.split()[1]) for line in text.splitlines() if len(line.split()) == 2]


def started(sweeps: SlurmBench, *more: str):
    """A launch in the middle of its first runs."""
    os.environ["STEP_S"] = "0.08"
    launcher = sweeps.start(*sweeps.launch("fine", *FEW, *more))
    sweeps.wait_for(lambda: len(sweeps.executions()) >= 2)
    return launcher


def ended(launcher) -> str:
    output, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, output
    return output


def test_scancel_of_an_allocation(sweeps):
    launcher = started(sweeps)
    subprocess.run(["scancel", running(sweeps)[0][0]], check=True)
    ended(launcher)
    rows = sweeps.judge(runs=10, allowed=frozenset({"cancelled"}))
    assert any(r["status"] == "cancelled" for r in rows)


def test_a_requeued_job_does_not_run_its_runs_again(sweeps):
    launcher = started(sweeps, "launcher.requeue=true")
    scontrol("requeue", running(sweeps)[0][0])
    ended(launcher)
    rows = sweeps.judge(runs=10, allowed=frozenset({"cancelled", "lost"}))
    assert any(r["status"] in ("cancelled", "lost") for r in rows)
    assert '"restart":1' in sweeps.journal()


def test_a_node_set_down(sweeps):
    launcher = started(sweeps)
    node = running(sweeps)[0][1]
    slurm_says("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    time.sleep(3)
    slurm_says("scontrol", "update", f"nodename={node}", "state=resume")
    ended(launcher)
    rows = sweeps.judge(runs=10, allowed=frozenset({"node_fail", "cancelled"}))
    assert any(r["status"] in ("node_fail", "cancelled") for r in rows)


def test_a_node_that_dies(sweeps, slurm):
    launcher = started(sweeps)
    node = next(nodes for _, nodes in running(sweeps) if "[" not in nodes)
    slurm.tool("node-down", node)
    ended(launcher)
    rows = sweeps.judge(runs=10, allowed=frozenset({"node_fail"}))
    assert any(r["status"] == "node_fail" and "NODE_FAIL" in r["reason"] for r in rows)
    slurm.tool("node-up", node)


def test_a_time_limit_in_the_middle_of_a_run(sweeps):
    os.environ["STEP_S"] = "0.1"
    more = ("sweep.nodes=1", "sweep.zero_stage=0", "launcher.allocation_minutes=5", "launcher.time_minutes=1")
    sweeps.run(*sweeps.launch("1:slow_first,2:fine,4:fine", *FEW[1:], *more))
    rows = sweeps.judge(runs=3, allowed=frozenset({"cancelled"}))
    cut = [r["reason"] for r in rows if r["status"] == "cancelled"]
    assert len(cut) == 1, "finished runs stay finished"
    assert "ended" in cut[0]


def test_slurmctld_restarted_in_between(sweeps, slurm):
    launcher = started(sweeps)
    slurm.run("scontrol", "shutdown", "slurmctld")
    time.sleep(4)
    slurm.tool("up", *SETTINGS)
    ended(launcher)
    sweeps.judge(runs=10)


def test_sbatch_fails_three_times(sweeps):
    sweeps.fake(
        "sbatch",
        'if [ $N -le 3 ]; then echo "sbatch: error: Socket timed out" >&2; exit 1; fi\nexec $REAL "$@"',
    )
    sweeps.run(*sweeps.launch("fine", *FEW))
    assert '"event":"adopted"' not in sweeps.journal()
    sweeps.judge(runs=10)


def test_sbatch_refuses_for_good(sweeps):
    launched = sweeps.done(*sweeps.launch("fine", *FEW, "+launcher.sbatch.constraint=nowhere"))
    assert launched.returncode == 3
    assert "Invalid feature specification" in launched.stderr
    assert "Traceback" not in launched.stderr


def test_the_answer_of_sbatch_is_lost(sweeps):
    sweeps.fake("sbatch", 'if [ $N -le 1 ]; then $REAL "$@" >/dev/null; exit 1; fi\nexec $REAL "$@"')
    sweeps.run(*sweeps.launch("fine", *FEW))
    rows = sweeps.judge(runs=10)
    planned = sweeps.journal().count('"event":"allocation_planned"')
    assert planned == sweeps.journal().count('"event":"allocation_started"'), "submitted twice"
    assert len({r["allocation"] for r in rows}) == planned


def test_squeue_hangs(sweeps):
    sweeps.fake("squeue", 'if [ $N -eq 3 ]; then sleep 60; fi\nexec $REAL "$@"')
    os.environ["STEP_S"] = "0.15"
    sweeps.run(*sweeps.launch("fine", *FEW))
    sweeps.judge(runs=10)
    assert "no answer" not in sweeps.journal()


def test_a_pending_job_that_cannot_start_is_told_with_a_remedy(sweeps):
    launcher = sweeps.start(*sweeps.launch("fine", *FEW, "+launcher.sbatch.hold=''"))
    sweeps.wait_for(lambda: sweeps.job_ids())
    assert any("JobHeldUser" in line and "release" in line for line in launcher.stdout)
    while launcher.poll() is None:
        for job in sweeps.job_ids():
            slurm_says("scontrol", "release", job)
        time.sleep(0.5)
    ended(launcher)
    sweeps.judge(runs=10)
