"""The cluster of simulated nodes itself: what the other tests of this folder stand on."""

import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.slurm.conftest import SETTINGS, Cluster
from tests.slurm.sweeps import FEW
from ultrabench.processes import command_line, own_processes

pytestmark = pytest.mark.slurm
SMALL = ("--nodes=2", "--gpus=0", "--no-accounting", "--slurmd-timeout=20")


@pytest.fixture(scope="module")
def other(slurm):
    """A second cluster beside the session's: no GPUs, no accounting; the last test that uses it takes it down."""
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="ultrabench-slurm-")))
    try:
        cluster.tool("up", *SMALL)
        yield cluster
    finally:
        cluster.tool("down")


def daemon(cluster, name):
    """Pid of a daemon; a slurmd is named after its node."""
    lines = {pid: command_line(pid) for pid in own_processes()}
    ours = {pid: words for pid, words in lines.items() if any(str(cluster.folder) in arg for arg in words)}
    (pid,) = [pid for pid, words in ours.items() if name in words]
    return pid


def mentions(folder):
    """Processes with a folder in their command line or as their place."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text() + " " + os.readlink(process / "cwd")
        except OSError:
            continue
        if str(folder) in words:
            processes.append(f"{process.name} {words}")
    return processes


def test_up_finds_it_running_and_a_step_sees_its_nodes_and_gpus(slurm):
    assert "already runs" in slurm.tool("up", *SETTINGS)
    words = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    lines = slurm.run("srun", "-N4", "--gpus-per-node=8", "sh", "-c", words).splitlines()
    assert sorted(lines) == [f"gpu0{i} 0,1,2,3,4,5,6,7" for i in range(1, 5)]


def test_a_sweep_needs_no_accounting_and_may_run_beside_another_cluster(slurm, other, sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.02")
    monkeypatch.setenv("SLURM_CONF", str(other.folder / "slurm.conf"))
    other.run("sacct", code=1)
    sweeps.run(*sweeps.launch("fine", *FEW[1:], "sweep.nodes=2"))
    sweeps.assert_each_ran_once(runs=4)
    other.wait_for(other.clean)
    assert len(slurm.nodes()) == 8


def test_up_mends_and_replaces(other):
    for name in ("munged", "gpu02"):
        os.kill(daemon(other, name), signal.SIGKILL)
    assert "munged, gpu02" in other.tool("up", *SMALL)
    other.wait_for(other.clean)
    assert "already" not in other.tool("up", *SMALL, "--max-array-size=7")
    assert "MaxArraySize            = 7" in other.run("scontrol", "show", "config")


def test_a_controller_that_starts_again_knows_its_jobs(other):
    job = other.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 600").strip()
    state = other.folder / "state/job_state"
    before = state.stat().st_mtime_ns if state.exists() else 0
    other.wait_for(lambda: state.exists() and state.stat().st_mtime_ns > before)
    pid = daemon(other, "slurmctld")
    other.tool("restart-slurmctld")
    assert daemon(other, "slurmctld") != pid
    assert other.jobs() == [job]
    other.run("scancel", job)


def test_down_leaves_nothing(slurm, other):
    folder = other.folder
    port = int(other.run("scontrol", "show", "config").split("SlurmctldPort")[1].split()[1])
    job = f"cd {folder}; exec sleep 600"
    other.run("sbatch", "-N2", "-o", "/dev/null", "--wrap", f"trap '' TERM; srun sh -c '{job}' & {job}")
    client = subprocess.Popen(["env", f"SLURM_CONF={folder}/slurm.conf", "srun", "sleep", "600"])
    other.wait_for(lambda: sum(" sleep\0" in line for line in mentions(folder)) == 3)
    other.wait_for(lambda: len(other.jobs()) == 2)
    other.tool("down")
    other.wait_for(lambda: client.poll() is not None)
    assert mentions(folder) == []
    assert not folder.exists()
    assert not [path for path in Path("/run").rglob("*.sock*") if str(path.resolve()).startswith(str(folder))]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert "nothing" in other.tool("down")
    assert len(slurm.nodes()) == 8


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for verb in ("up", "down"):
        assert "is not empty" in Cluster(tmp_path).tool(verb, code=2)
    assert "no cluster" in Cluster(Path("/tmp/ultrabench-nowhere")).tool("env", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
