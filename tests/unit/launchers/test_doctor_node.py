"""What doctor makes of a node's report, and the cluster configurations it writes."""

import time
from dataclasses import replace
from functools import cache

import pytest
import yaml

import ultrabench
from tests.configs import refused
from tests.unit.launchers.conftest import CONFIG
from ultrabench import checkout
from ultrabench.agent import checkup
from ultrabench.launchers.doctor.checkup import CheckupFolder, CheckupJob, checkup_folder
from ultrabench.launchers.doctor.cluster_file import write_cluster_file
from ultrabench.launchers.doctor.examine import REPORT_CHECKS
from ultrabench.launchers.slurm.script import array_script
from ultrabench.launchers.slurm.site import Limits, Site
from ultrabench.store.claim import claim_content
from ultrabench.sweep.config.load import load_config

load = cache(load_config)
CPU, H100 = (), ("hardware=h100x8",)
TWO, WINDOW = (*H100, "hardware.gpus_per_node=2"), ("launcher.window=19:00-07:00",)
OWN = ("kernel=command", "kernel.command=[a]", "launcher.preflight=false")
TORCH = {
    "gpus": 8, "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.13.0", "cuda_version": "12.8",
    "nccl_version": "2.27", "driver_version": "570.1",
}  # fmt: skip
REPORT = {
    "host": "gpu01", "job_id": "7_0", "won_own_claim": True, "won_taken_claim": False,
    "python": "/envs/ub/bin/python", "python_version": "3.11.7", "ultrabench_version": ultrabench.__version__,
    "ultrabench_path": "/envs/ub/ultrabench", "kernel_digest": load(CPU).kernel.digest(), "kernel_error": None,
    "git_commit": checkout.commit_sha(), "utc_offset": time.strftime("%z"), "gpus": 8, "foreign": [], "cores": 112,
    "numa_nodes": 2, "torch": TORCH, "torch_error": None,
    "began_s": 1000.0, "ended_s": 1004.0,
    "results_dir": "/shared/results", "same_folder": True, "own_claim_seen": True, "earliest_s": 999.0,
    "latest_s": 1005.0,
}  # fmt: skip
"""The job began after 999 s and its report was there before 1005 s by our clock;
it ran from 1000 to 1004 by its own."""


def torch(**change):
    return {"torch": TORCH | change}


def clock(off_s):
    return {"began_s": 1000.0 + off_s, "ended_s": 1004.0 + off_s}


@pytest.mark.parametrize(
    ("check", "words", "change", "status", "text"),
    [
        ("folder", CPU, {}, "pass", "/shared/results, tried from gpu01"),
        ("folder", CPU, {"same_folder": False}, "fail", "results_dir="),
        ("folder", CPU, {"won_taken_claim": True}, "fail", "already claimed here"),
        ("folder", CPU, {"won_own_claim": False}, "fail", "its own claim of a run was lost"),
        ("folder", CPU, {"own_claim_seen": False}, "fail", "its own claim of a run was lost"),
        ("Python", CPU, {}, "pass", "kernel_digest"),
        ("Python", CPU, {"kernel_digest": "bb"}, "fail", "launcher.python="),
        ("Python", CPU, {"kernel_digest": None, "kernel_error": "ConfigError: unknown"}, "fail",
            "ConfigError: unknown"),
        ("Python", CPU, {"ultrabench_version": "0.0.9"}, "warn", "here it is ultrabench"),
        ("Python", CPU, {"git_commit": "c0ffee" * 7}, "warn", "commit c0ffeec0ffee there"),
        ("torch", CPU, {}, "pass", "torch 2.13.0 (CUDA 12.8, NCCL 2.27, driver 570.1) on NVIDIA H100"),
        ("torch", CPU, torch(cuda_version=None, nccl_version=None, driver_version=None), "pass", "(without CUDA) on"),
        ("torch", CPU, {"torch": None, "torch_error": "No module named 'torch'"}, "fail", "launcher.setup="),
        ("torch", OWN, {"torch": None, "torch_error": "No module named 'torch'"}, "warn", "may not need it"),
        ("GPUs", H100, {}, "pass", "they are NVIDIA H100 80GB HBM3"),
        ("GPUs", CPU, {"gpus": 0} | torch(gpus=0), "pass", "needs no GPU"),
        ("GPUs", H100, {"gpus": 0} | torch(gpus=0, cuda_version=None), "fail", "launcher.partition="),
        ("GPUs", H100, torch(gpus=0, cuda_version=None), "fail", "without CUDA"),
        ("GPUs", H100, {"torch": None}, "fail", "without CUDA"),
        ("GPUs", H100, torch(gpus=0), "fail", "matches the driver"),
        ("GPUs", H100, {"gpus": 4} | torch(gpus=4), "fail", "hardware.gpus_per_node=4"),
        ("GPUs", H100, torch(gpu_name="NVIDIA A100-SXM4-80GB"), "fail", "this one expects NVIDIA H100 80GB HBM3"),
        ("GPUs", H100, {"foreign": ["process 9 (python) on GPU 2"]}, "warn", "launcher.exclusive=true"),
        ("GPUs", TWO, {}, "warn", "hardware.gpus_per_node=8"),
        ("GPUs", H100, torch(gpu_mem_bytes=int(79.2 * 2**30)), "pass", "they are NVIDIA H100"),
        ("GPUs", H100, torch(gpu_mem_bytes=64 * 2**30), "warn",
         "torch reports 64 GiB a GPU, hardware=h100x8 has 79.1094 GiB; for predictions with the real memory, set "
         "hardware.mem_bytes=68719476736"),
        ("room", H100, {}, "pass", "112 cores"),
        ("room", H100, {"cores": 1}, "warn", "launcher.cpus="),
        ("room", CPU, {"cores": 1}, "pass", "1 cores"),
        ("/dev/shm", CPU, {"health": {"ok": {"/dev/shm": {"/dev/shm": 12.0}}}}, "pass",
            "12 GiB free; limit: at least 1 GiB"),
        ("scratch", CPU, {"health": {"warn": {"scratch": {"/tmp": 0.5}}}}, "warn",
            "/tmp: 0.5 GiB free; limit: at least 1 GiB"),
        ("row remapping failed", H100, {"health": {"fail": {"row remapping failed": {"GPU 3": 1.0}}}}, "fail",
         "GPU 3; limit: no failure; have the GPU replaced"),
        ("row remapping failed", H100, {}, "unknown", "this node cannot report it"),
        ("clock", CPU, clock(0.9), "pass", "within the 6.0 s"),
        ("clock", CPU, clock(2.5), "warn", "at least 1.5 s ahead of"),
        ("clock", CPU, clock(-2.5), "warn", "at least 1.5 s behind"),
        ("clock", CPU, clock(40.0), "fail", "ahead of"),
        ("clock", CPU, clock(-3600.0), "fail", "3599.0 s behind"),
        ("clock", CPU, {"utc_offset": "+1234"}, "pass", "within"),
        ("clock", WINDOW, {"utc_offset": "+1234"}, "pass", "within"),
    ],
)  # fmt: skip
def test_what_a_node_reported(check, words, change, status, text):
    judge = next(judge for name, judge in REPORT_CHECKS.items() if name.startswith(check))
    result = judge(REPORT | change, load(words))
    assert result.status == status
    assert text in f"{result.finding}; {result.remedy}"


def test_the_job_is_asked_for_as_jobs_of_a_sweep_are(tmp_path):
    words = ("hardware=h100x8", "launcher.partition=hopper", "launcher.setup=['module load cuda']",
             "launcher.python=[apptainer,exec,my image.sif,python]", "+launcher.sbatch.hold=''")  # fmt: skip
    config = replace(load_config(["launcher=slurm", *words]), results_dir=str(tmp_path))
    job = CheckupJob(CheckupFolder(config), print)
    text = array_script([job.allocation], job.launcher._config, module=job.launcher.module)
    options = "--partition=hopper", "--nodes=1", "--gpus-per-node=8", "--exclusive", "--hold", "--time=10"
    assert {f"#SBATCH {option}" for option in options} <= set(text.splitlines())
    assert "\nmodule load cuda\n" in text
    assert " apptainer exec 'my image.sif' python -P -m ultrabench.agent.checkup" in text
    assert "sweep pause" not in text


def test_the_folder_of_a_checkup_goes_with_all_that_was_made_for_it(tmp_path):
    config = replace(load(CPU), results_dir=str(tmp_path / "a" / "results"))
    with checkup_folder(config) as (folder, check):
        assert (check.status, folder.report()) == ("pass", None)
        (folder.path / "report.json").write_text('{"token": "of another file system"}')
        report = folder.report()
        assert (report["same_folder"], report["own_claim_seen"]) == (False, False)
    assert list(tmp_path.iterdir()) == []
    with checkup_folder(config) as (folder, _):
        folder.is_kept = True
    assert (folder.path / "request.json").is_file()


def test_a_checkup_in_a_job_claims_for_that_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(checkup, "_torch_facts", dict)
    (tmp_path / "claims").mkdir()
    report = checkup.examine_node(tmp_path)
    assert (report["job_id"], report["won_own_claim"], report["token"]) == ("7", True, None)
    assert claim_content(tmp_path / "claims", "node")["job"]["job_id"] == "7"


MEMORY = Limits(name="big.mem", gres="gpu:8")
ASKED, H100X8 = {"account": "a", "qos": "q", "gres": "gpu:4"}, {"gres": "gpu:h100:8"}


@pytest.fixture
def hopper(programs):
    """The limits in a partition where accounts are needed."""
    programs.says["config"] = CONFIG
    programs.write()
    return Site().limits("hopper", None, None)


@pytest.mark.parametrize(
    ("limits", "says", "choice", "settings"),
    [
        (None, {}, {}, H100X8),
        (MEMORY, {}, {}, {}),
        (None, {}, ASKED, ASKED),
        (None, {"user": "gone\n"}, {}, H100X8 | {"account": "research"}),
        (None, {"user": "gone\n", "config": ""}, {}, H100X8),
    ],
)
def test_a_cluster_file(alone, programs, hopper, limits, says, choice, settings):
    programs.says |= says
    programs.write()
    limits, choice = limits or hopper, replace(load(CPU).launcher.slurm, **choice)
    path = write_cluster_file(alone / "ultrabench/cluster", "mine", Site(), limits, choice, force=False)
    assert yaml.safe_load(path.read_text()) == {"name": "mine", "partition": limits.name, **settings}
    assert load_config(["cluster=mine", "launcher=slurm"]).launcher.slurm.partition == limits.name


def test_a_cluster_file_tells_what_was_found(tmp_path, hopper):
    path = write_cluster_file(tmp_path, "mine", Site(), hopper, load(CPU).launcher.slurm, force=False)
    lines = path.read_text().splitlines()
    assert lines[0] == "# Partition hopper of alps: 8 nodes of 16 CPUs, 2000 MB, gpu:h100:8(S:0-1)"
    assert time.strftime("%Y-%m-%d") in lines[1]
    assert lines[2] == "# UP, 8 nodes, no time limit; nodes up: 8"
    assert "# account: research  # the default is research; you have research, root" in lines
    assert "# qos: short  # account research has normal, short" in lines


@pytest.mark.parametrize("name", ["a/b", "local", "", "-x", "a b"])
def test_names_that_cannot_be(tmp_path, name):
    with refused("--name"):
        write_cluster_file(tmp_path, name, Site(), MEMORY, load(CPU).launcher.slurm, force=False)
