import os
import pwd
import sys

import pytest

from ultrabench.agent import gpus
from ultrabench.agent.gpus import foreign_processes, visible_gpus

GPUS = """\
0, GPU-aa00, 00000000:1B:00.0
1, GPU-aa11, 00000000:43:00.0
2, GPU-bb22, 00000001:C3:00.0
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a nvidia-smi on PATH that answers a query with a file's content."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(apps="", devices=GPUS, before=""):
        (tmp_path / "devices").write_text(devices)
        (tmp_path / "apps").write_text(apps)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\n{before}\n[ \"$2\" = --format=csv,noheader,nounits ] || exit 2\n"
            f"case $1 in\n--query-gpu=index,uuid,pci.bus_id) cat '{tmp_path}/devices';;\n"
            f"--query-compute-apps=pid,process_name,gpu_uuid,used_memory) cat '{tmp_path}/apps';;\n"
            "*) exit 2;;\nesac\n"
        )  # fmt: skip
        program.chmod(0o755)

    return install


def nobody(pid):
    return False


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        (" 1 ", ["1"]),
        ("GPU-bb22,GPU-aa00", ["2", "0"]),
        ("GPU-bb,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,7,1", ["0"]),
        ("GPU-aa", []),
        ("MIG-aa00", []),
    ],
)
def test_visible_gpus_are_those_cuda_would_take(nvidia_smi, monkeypatch, visible, expected):
    nvidia_smi()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.number for gpu in visible_gpus()] == expected


def test_every_process_that_is_not_ours_is_named(nvidia_smi):
    me, user = os.getpid(), pwd.getpwuid(os.getuid()).pw_name
    nvidia_smi(
        f"{me}, /usr/bin/python, GPU-bb22, 1024\n"
        "4242, ours, GPU-aa00, 7\n"
        "99999999, /opt/a, b/train, GPU-aa11, [N/A]\n"
        "[N/A], hidden, GPU-aa11, 5\n"
        "\n"
    )
    assert foreign_processes(lambda pid: pid == 4242) == [
        f"process {me} (python, user {user}) on GPU 2 with 1024 MiB",
        "process 99999999 (train, unknown user) on GPU 1",
    ]


@pytest.mark.parametrize("visible", ["1,0", "GPU-aa11,GPU-aa00"])
def test_only_the_gpus_we_see_count(nvidia_smi, monkeypatch, visible):
    nvidia_smi("11, a, GPU-aa11, 1\n22, b, GPU-bb22, 2\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (found,) = foreign_processes(nobody)
    assert found.endswith("on GPU 1 with 1 MiB")


def test_no_processes_no_complaint(nvidia_smi):
    nvidia_smi()
    assert foreign_processes(nobody) == []


@pytest.mark.parametrize("before", ["exit 9", "echo 'NVIDIA-SMI has failed'; exit 0"])
def test_a_failing_nvidia_smi_knows_nothing(nvidia_smi, before):
    nvidia_smi("11, a, GPU-aa11, 1\n", before=before)
    assert foreign_processes(nobody) == []
    assert visible_gpus() == []


def test_a_hanging_nvidia_smi_is_given_up(nvidia_smi, monkeypatch):
    nvidia_smi(before=f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.2)
    assert visible_gpus() == []


def test_without_nvidia_smi_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []
    assert foreign_processes(nobody) == []
