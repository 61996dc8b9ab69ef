"""What a sweep must not do on a cluster: mix versions, disturb others, take more than it was given."""

import os
import shutil
import signal
import subprocess

import pytest

from tests.local.conftest import PROGRAM
from tests.slurm.sweeps import FEW, FEWER
from tests.unit.agent.test_gpus import DRIVER

pytestmark = pytest.mark.slurm


def refused(sweeps, *words, code):
    """What a launch says that must not come about."""
    process = sweeps.here(*words)
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    return process.stderr.strip().splitlines()[-1]


def test_a_program_that_changes_under_its_sweep_is_noticed(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.1")
    program = sweeps.folder / "mine.py"
    shutil.copy(PROGRAM, program)
    words = [w.replace(str(PROGRAM), str(program)) for w in sweeps.launch("fine", *FEW)]
    launcher = sweeps.start(*words)
    sweeps.wait_for(lambda: len(sweeps.executions()) >= 2)
    program.write_text(program.read_text() + "# another version\n")
    assert "the training program changed during the sweep" in sweeps.end(launcher, 1, seconds=60)
    assert len(sweeps.executions()) < 10
    assert "--reuse any counts them" in refused(sweeps, *words, code=2)
    sweeps.run(*words, "--reuse", "same")
    rows = [r for r in sweeps.rows() if r["status"] == "ok"]
    digests = {r["kernel_digest"] for r in rows}
    assert len(digests) == 2
    last_launch = sweeps.state().launched
    new = [r for r in rows if r["kernel_digest"] == last_launch.kernel_digest]
    assert len({r["run_id"] for r in new}) == 10, "each run has a result of the new version"


def test_a_foreign_process_on_a_gpu_is_left_alone_and_its_node_avoided(sweeps):
    """The driver is a library of ours, which reads a file for each node."""
    folder, name = sweeps.folder, "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, DRIVER], check=True)
    for node in range(1, 9):
        pid = os.getpid() if node == 1 else 0
        lines = [
            f"GPU-{gpu} 00000000:1{gpu}:00.0 {gpu * 2**31} {2**36} 1980 0 {gpu * pid} 0 0" for gpu in (0, 1)
        ]
        (folder / f"gpu{node:02d}").write_text("\n".join(lines) + "\n")
    setup = f"export LD_LIBRARY_PATH={folder} FAKE_GPUS={folder}/$SLURMD_NODENAME"
    options = ("hardware=h100x8", "hardware.gpus_per_node=2", "launcher.preflight=false", "sweep.nodes=1",
            f"launcher.setup=['{setup}']")  # fmt: skip
    sweeps.run(*sweeps.launch("fine", *FEW[1:], *options))
    rows = sweeps.assert_each_ran_once(runs=6, allowed=frozenset({"node_fail"}))
    refusals = [r for r in rows if r["status"] == "node_fail"]
    assert len(refusals) == 1, "the node was avoided from the first refusal on"
    assert refusals[0]["suspect_hosts"] == ["gpu01"]
    assert f"gpu01: other processes use the GPUs: process {os.getpid()} (python" in refusals[0]["reason"]
    assert "on GPU 1 with 2048 MiB" in refusals[0]["reason"]
    assert all(r["hostnames"] != ["gpu01"] for r in rows if r["status"] == "ok")


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("launcher.max_nodes=null sweep.nodes=[4]", 2, "set launcher.max_nodes=4"),
        ("sweep.nodes=[16]", 2, "set launcher.max_nodes=16"),
        ("sweep.nodes=[16] launcher.max_nodes=16", 2, "partition hopper has 8 nodes"),
        ("launcher.partition=hoper", 2, "hopper"),
        ("launcher.partition=debug launcher.time_minutes=60", 2, "allows 30"),
        ("launcher.partition=debug sweep.nodes=[4]", 2, "at most 2 per job"),
        ("+launcher.sbatch.constraint=nowhere", 2, "Invalid feature specification"),
    ],
)
def test_what_the_site_does_not_give_is_said_before_anything_is_submitted(sweeps, override, code, message):
    assert message in refused(sweeps, *sweeps.launch("fine", *FEW, *override.split()), code=code)
    assert (sweeps.folder / "results").exists() == ("sbatch" in override), "only sbatch knows of constraints"


@pytest.fixture
def partition(slurm):
    """Sets the state of the partition; it is up again after the test."""

    def set_state(state):
        slurm.run("scontrol", "update", "partitionname=hopper", f"state={state}")

    yield set_state
    set_state("UP")


def test_a_launch_waits_for_a_partition_that_takes_no_jobs(sweeps, partition):
    partition("INACTIVE")
    launcher = sweeps.start(*sweeps.launch("fine", *FEWER))
    line = next(line for line in launcher.stdout if line.startswith("waiting to submit jobs"))
    assert "partition hopper is INACTIVE (sbatch did not accept a job of 1 node: " in line
    assert "Required partition not available (inactive or drain)" in line
    sweeps.wait_for(lambda: sweeps.count("submitting") > 3)
    status = sweeps.run("sweep", "status", "t")
    assert (
        "The launcher waits to submit jobs: the latest was not submitted: partition hopper is INACTIVE"
        in status
    )
    sweeps.wait_for(lambda: not [*(sweeps.folder / "results/t/allocations").iterdir()])
    partition("UP")
    assert "jobs are submitted again" in sweeps.end(launcher)
    sweeps.assert_each_ran_once(runs=3)


def test_a_sweep_survives_a_partition_that_is_drained_for_a_while(sweeps, partition, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.05")
    launcher = sweeps.start(
        *sweeps.launch("fine", *FEW[1:], "sweep.nodes=1", "launcher.pack=1", "launcher.max_jobs=2")
    )
    sweeps.wait_for(lambda: sweeps.executions())
    partition("DRAIN")
    sweeps.wait_for(lambda: '"code":"refused"' in sweeps.journal())
    partition("UP")
    assert "waiting to submit jobs: partition hopper is DRAIN" in sweeps.end(launcher)
    sweeps.assert_each_ran_once(runs=6)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [("pause", 1, "resume with"), ("cancel", 1, "cancelled"), (None, 130, "To follow again")],
)
def test_a_launch_that_waits_can_be_stopped(sweeps, partition, command, code, words):
    partition("DRAIN")
    launcher = sweeps.start(*sweeps.launch("fine", *FEW))
    sweeps.wait_for(lambda: '"code":"refused"' in sweeps.journal())
    if command:
        sweeps.run("sweep", command, "t")
    else:
        launcher.send_signal(signal.SIGINT)
    assert words in sweeps.end(launcher, code, seconds=30)
    assert not sweeps.job_ids()


def test_a_launch_gives_up_with_the_words_of_slurm(sweeps, partition):
    partition("DRAIN")
    line = refused(sweeps, *sweeps.launch("fine", *FEW, "launcher.refused_minutes=0.05"), code=2)
    assert (
        "Required partition not available (inactive or drain); waited 0.05 minutes; launch again when it takes jobs"
        in line
    )


def test_a_limit_of_accounting_passes_unless_it_is_one_of_each_job(sweeps, slurm):
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    fail = f'echo "sbatch: error: %s" >&2; echo "sbatch: error: Batch job submission failed: {policy}" >&2; exit 1'
    sweeps.fake("sbatch", f'case $N in [1-4]) {fail % "AssocGrpSubmitJobsLimit"};; *) exec $REAL "$@";; esac')
    output = sweeps.end(sweeps.start(*sweeps.launch("fine", *FEWER)))
    assert "the account, QOS or user has as many queued and running jobs as allowed (sbatch did not" in output
    sweeps.assert_each_ran_once(runs=3)
    sweeps.fake("sbatch", fail % "QOSMaxNodePerJobLimit")
    line = refused(sweeps, *sweeps.launch("fine", *FEWER, "name=u"), code=2)
    assert policy in line
    assert "lower launcher.max_nodes=" in line
