"""What doctor makes of a node's report, and the cluster configurations it writes."""

import time
from dataclasses import replace

import pytest
import yaml

from ultrabench.errors import ConfigError
from ultrabench.launchers.doctor.checkup_folder import CheckupFolder, checkup_folder
from ultrabench.launchers.doctor.checkup_job import Seen, checkup_script
from ultrabench.launchers.doctor.cluster_file import write_cluster_file
from ultrabench.launchers.doctor.node_checks import (
    check_clock,
    check_devices,
    check_folder,
    check_python,
    check_room,
    check_torch,
)
from ultrabench.launchers.slurm.limits import Limits
from ultrabench.launchers.slurm.site import Site
from ultrabench.sweep.config import load_config

H100 = load_config(["hardware=h100x8"]).hardware
CPU = load_config([]).hardware
TORCH = {
    "gpus": 8, "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.13.0", "cuda_version": "12.8",
    "nccl_version": "2.27", "driver_version": "570.1",
}  # fmt: skip
REPORT = {
    "host": "gpu01", "job_id": "7_0", "token": "t", "won_own_claim": True, "won_taken_claim": False,
    "python": "/envs/ub/bin/python", "python_version": "3.11.7", "ultrabench_version": "0.1.0",
    "ultrabench_path": "/envs/ub/ultrabench", "kernel_digest": "aa", "kernel_error": None, "git_commit": "c0ffee",
    "utc_offset": "+0000", "gpus": 8, "foreign": [], "cores": 112, "numa_nodes": 2, "temp_folder": "/tmp",
    "temp_free_bytes": 2**40, "torch": TORCH, "torch_error": None, "began_s": 1000.0, "ended_s": 1004.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "claim_seen", "status"),
    [
        ({}, True, "pass"),
        ({"token": None}, True, "fail"),
        ({"token": "of another file system"}, True, "fail"),
        ({"won_taken_claim": True}, True, "fail"),
        ({"won_own_claim": False}, True, "fail"),
        ({}, False, "fail"),
    ],
)
def test_the_results_folder_has_to_be_one(change, claim_seen, status):
    check = check_folder(REPORT | change, "t", claim_seen, "/shared/results")
    assert check.status == status
    assert "/shared/results" in check.told or "claims" in check.told


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "pass"),
        ({"kernel_digest": "bb"}, "fail"),
        ({"kernel_digest": None, "kernel_error": "ConfigError: unknown field"}, "fail"),
        ({"ultrabench_version": "0.0.9"}, "warn"),
        ({"git_commit": None}, "warn"),
    ],
)
def test_the_same_ultrabench(change, status):
    check = check_python(REPORT | change, "aa", "c0ffee")
    assert check.status == status
    assert status == "pass" or "launcher.python=" in str(check.remedy)


@pytest.mark.parametrize(
    ("hardware", "change", "torch", "status", "remedy"),
    [
        (H100, {}, {}, "pass", ""),
        (CPU, {"gpus": 0}, {"gpus": 0}, "pass", ""),
        (H100, {"gpus": 0}, {"gpus": 0, "cuda_version": None}, "fail", "launcher.partition="),
        (H100, {}, {"gpus": 0, "cuda_version": None}, "fail", "without CUDA"),
        (H100, {}, {"gpus": 0}, "fail", "fits the driver"),
        (H100, {"gpus": 4}, {"gpus": 4}, "fail", "hardware.gpus_per_node=4"),
        (H100, {}, {"gpu_name": "NVIDIA A100-SXM4-80GB"}, "fail", "NVIDIA H100 80GB HBM3"),
        (H100, {"foreign": ["process 9 (python, user bob) on GPU 2"]}, {}, "warn", "launcher.exclusive=true"),
        (replace(H100, gpus_per_node=2), {}, {}, "warn", "hardware.gpus_per_node=8"),
    ],
)
def test_the_gpus_of_the_node(hardware, change, torch, status, remedy):
    check = check_devices(REPORT | change | {"torch": TORCH | torch}, hardware, "GPUs")
    assert check.status == status
    assert remedy in (check.remedy or "")


def test_a_node_without_torch():
    report = REPORT | {"torch": None, "torch_error": "ModuleNotFoundError: No module named 'torch'"}
    embedded = check_torch(report, load_config([]), "torch")
    assert (embedded.status, "launcher.setup=" in str(embedded.remedy)) == ("fail", True)
    own = ["kernel=command", "kernel.command=[python,train.py]", "launcher.preflight=false"]
    assert check_torch(report, load_config(own), "torch").status == "warn"
    assert check_devices(report, H100, "GPUs").status == "fail"


def test_room():
    assert check_room(REPORT, H100, "room").status == "pass"
    assert "launcher.cpus=" in str(check_room(REPORT | {"cores": 1}, H100, "room").remedy)
    assert check_room(REPORT | {"cores": 1}, CPU, "room").status == "pass"
    assert "TMPDIR" in str(check_room(REPORT | {"temp_free_bytes": 2**20}, CPU, "room").remedy)


@pytest.mark.parametrize(
    ("off_s", "status", "told"),
    [
        (0.0, "pass", "within the 6.0 s"),
        (0.9, "pass", "within"),
        (2.5, "warn", "at least 1.5 s ahead of"),
        (-2.5, "warn", "at least 1.5 s behind"),
        (40.0, "fail", "ahead of"),
        (-3600.0, "fail", "3599.0 s behind"),
    ],
)
def test_clocks(off_s, status, told):
    # Here the job began after 999 and its report was there before 1005; it ran from 1000 to 1004.
    report = REPORT | {"began_s": 1000.0 + off_s, "ended_s": 1004.0 + off_s}
    check = check_clock(Seen(report=report, earliest_s=999.0, latest_s=1005.0), None, "+0000")
    assert check.status == status
    assert told in check.told


def test_another_time_zone_matters_to_a_window_only():
    seen = Seen(report=REPORT, earliest_s=999.0, latest_s=1005.0)
    assert check_clock(seen, None, "+0100").status == "pass"
    assert check_clock(seen, "19:00-07:00", "+0100").status == "warn"


def test_the_job_is_asked_for_as_jobs_of_a_sweep_are(tmp_path):
    config = load_config([
        "launcher=slurm", "hardware=h100x8", "launcher.partition=hopper", "launcher.account=a", "launcher.mem=9G",
        "launcher.setup=['module load cuda']", "launcher.python=[apptainer,exec,my image.sif,python]",
        "launcher.srun=['--mpi=none']", "+launcher.sbatch.mail-type=FAIL", "+launcher.sbatch.hold=''",
    ])  # fmt: skip
    script = checkup_script(CheckupFolder(tmp_path), config)
    text = script.text
    for line in ("--partition=hopper", "--account=a", "--mem=9G", "--nodes=1", "--gpus-per-node=8", "--exclusive",
                 "--mail-type=FAIL", "--hold", "--time=10"):  # fmt: skip
        assert f"\n#SBATCH {line}\n" in text, text
    assert "\nmodule load cuda\n" in text
    assert "--mpi=none apptainer exec 'my image.sif' python -P -m ultrabench.agent.checkup" in text
    assert "sweep pause" not in text


def test_the_folder_of_a_checkup_goes_with_all_that_was_made_for_it(tmp_path):
    config = replace(load_config([]), results_dir=str(tmp_path / "a" / "results"))
    with checkup_folder(config) as (folder, check):
        assert check.status == "pass"
        assert folder.report() is None
        (folder.path / "report.json").write_text("{}")
        assert folder.report() == {}
        assert not folder.node_claim_seen()
    assert list(tmp_path.iterdir()) == []
    with checkup_folder(config) as (folder, _):
        folder.keep = True
    assert (folder.path / "request.json").is_file()


LIMITS = Limits(
    name="hopper", total_nodes=8, up_nodes=7, gres="gpu:h100:8(S:0-1)", cluster="alps", max_array_size=101,
    kinds=("8 nodes of 16 CPUs, 2000 MB, gpu:h100:8",), mem_mb_per_node=2000, state="UP",
)  # fmt: skip
SMALL = Limits(name="big.mem", gres="gpu:8")


def site(default="research", enforce="associations"):
    """A Slurm that knows one account of ours."""
    answers = {"config": f"AccountingStorageEnforce = {enforce}\n", "user": f"{default}\n",
               "assoc": "research|||||||normal,short|short\n"}  # fmt: skip
    return Site(lambda *words: next(text for word, text in answers.items() if word in words))


def written(folder, limits=LIMITS, site=site(), **choice):  # noqa: B008
    path = write_cluster_file(
        folder, "mine", site, limits, replace(load_config([]).launcher, **choice), force=True
    )
    return path.read_text()


def test_a_cluster_file(tmp_path):
    text = written(tmp_path)
    assert yaml.safe_load(text) == {"name": "mine", "partition": "hopper", "gres": "gpu:h100:8"}
    first = text.splitlines()
    assert first[0] == "# Partition hopper of alps: 8 nodes of 16 CPUs, 2000 MB, gpu:h100:8"
    assert time.strftime("%Y-%m-%d") in first[1]
    assert first[2] == "# nodes: 8, 7 up; of one job: any number; time limit: none; state: UP"
    assert "# account: research  # the default is research; yours are research" in first
    assert "# qos: short  # account research has normal, short" in first
    assert yaml.safe_load(written(tmp_path, SMALL)) == {"name": "mine", "partition": "big.mem"}


def test_a_cluster_file_names_what_is_asked_for_or_needed(tmp_path):
    asked = {"account": "a", "qos": "q", "gres": "gpu:4"}
    assert yaml.safe_load(written(tmp_path, **asked)) == {"name": "mine", "partition": "hopper", **asked}
    nameless = written(tmp_path, site=site("gone"))
    assert yaml.safe_load(nameless)["account"] == "research"
    assert "account" not in yaml.safe_load(written(tmp_path, site=site("gone", "none")))


@pytest.mark.parametrize("name", ["a/b", "local", "", "-x", "a b", "../x"])
def test_names_that_cannot_be(tmp_path, name):
    with pytest.raises(ConfigError, match="--name"):
        write_cluster_file(tmp_path, name, site(), LIMITS, load_config([]).launcher, force=False)


@pytest.mark.parametrize(("limits", "partition"), [(LIMITS, "hopper"), (SMALL, "big.mem")])
def test_a_written_configuration_can_be_composed(tmp_path, monkeypatch, limits, partition):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ultrabench" / "cluster"
    written(folder, limits)
    config = load_config(["cluster=mine", "launcher=slurm"])
    assert (config.cluster, config.launcher.partition) == ("mine", partition)
    with pytest.raises(ConfigError, match=r"mine\.yaml exists"):
        write_cluster_file(folder, "mine", site(), limits, config.launcher, force=False)
