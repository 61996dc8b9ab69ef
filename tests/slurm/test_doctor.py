"""`ultrabench doctor` on a real Slurm."""

import json
import os
import signal
import sys
import time

import pytest

from ultrabench.node_health import CHECKS

pytestmark = pytest.mark.slurm
LITTLE = ("launcher.mem=200M", "launcher.poll_s=1", "launcher.grace_s=2")


def doctor(sweeps, *words, code=0):
    """The checks by name."""
    checks = json.loads(sweeps.run("doctor", *LITTLE, *words, "--json", code=code))
    assert not list(sweeps.folder.glob("*/.doctor-*")) or code
    return {check["name"]: check for check in checks}


def test_all_checks_pass_and_written_clusters_are_used(sweeps):
    checks = doctor(sweeps, "--write", "sweep.nodes=[1]")
    health = {f"{name} on the node" for name in CHECKS}
    assert {c["status"] for name, c in checks.items() if name not in health} == {"pass"}, (
        "the job had what was written"
    )
    assert (len(checks), health - checks.keys()) == (17 + len(health), set())
    assert "ran on gpu0" in checks["job"]["finding"]
    assert [path.name for path in sweeps.folder.iterdir()] == ["ultrabench"], "it leaves nothing else behind"
    script = sweeps.run("sweep", "plan", "cluster=mine", "launcher=slurm", "--show-script").splitlines()
    assert {"#SBATCH --partition=hopper", "#SBATCH --gres=gpu:h100:8"} <= set(script)


@pytest.mark.parametrize(
    ("override", "finding", "remedy"),
    [
        ("launcher.python=/nowhere/python", "/nowhere/python", "launcher.python="),
        ("hardware.gpus_per_node=16", "Requested node configuration is not available", "hardware.gpus_per_node="),
        ("launcher.setup=['exit 9']", "exit code 9:0", "launcher.setup="),
        ("+launcher.sbatch.constraint=nowhere", "Invalid feature specification", "+launcher.sbatch.constraint="),
        # The node has another folder under the name of ours.
        ("launcher.python=[unshare,--mount,sh,-c,'mount -t tmpfs none {folder} && exec {python} \"$@\"',sh]",
         "exit code 73:0", "results_dir="),
    ],
)  # fmt: skip
def test_a_job_that_does_not_work(sweeps, override, finding, remedy):
    override = override.replace("{folder}", str(sweeps.folder)).replace("{python}", sys.executable)
    hardware = "hardware=h100x8" if "hardware" in override else "hardware=cpu"
    checks = doctor(sweeps, hardware, "sweep.nodes=[1]", override, code=1)
    assert checks["job"]["status"] == "fail"
    assert finding in checks["job"]["finding"]
    assert remedy in checks["job"]["remedy"]
    assert list(checks)[-1] == "job", "nothing is said of a node that nobody saw"


@pytest.mark.parametrize("acceptance", [(), ("--deep", "--wait", "0")])
def test_ctrl_c_cancels_the_job(sweeps, slurm, acceptance):
    process = sweeps.start("doctor", *LITTLE, "launcher.setup=['sleep 600']", *acceptance)
    slurm.wait_for(lambda: slurm.jobs())
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    if acceptance:
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)  # who presses twice ends the jobs all the same
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    slurm.wait_for(lambda: not slurm.jobs(), 10)
    if acceptance:
        assert output.splitlines()[-2].startswith("ended the jobs; finished runs are kept in ")
        assert output.splitlines()[-1] == "ultrabench: interrupted"
    else:
        assert list(sweeps.folder.iterdir()) == []
