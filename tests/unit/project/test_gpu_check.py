"""benchmarks/gpu_check.py: what it would run on GPUs, what it keeps, and one real line on processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from ultrabench.cli.kernel.check import check_spec

ROOT = Path(__file__).parents[3]
FACTS = {"gpu_name": "NVIDIA H100 80GB HBM3", "gpus": 8, "torch_version": "2.13.0"}


def machine(ranks=8, device="cuda", hardware="h100x8"):
    return gpu_check.Machine(
        device=device, ranks=ranks, facts=FACTS, hardware=hardware, results=Path("results")
    )


def names(step, at):
    return [name for name, _ in gpu_check.lines_of(step, at)]


@pytest.mark.parametrize("words", [words for checks in gpu_check.CHECKS.values() for words in checks])
def test_every_check_is_one_that_the_cli_takes(words):
    spec = check_spec(words.split(), {"device": "cuda", "precision": "bf16", "compile": False, "dump": None})
    assert words in gpu_check.CHECKS[spec.layout.world_size]


def test_steps_that_need_more_gpus_have_no_lines():
    assert [step for step in gpu_check.LOOK if names(step, machine(ranks=1))] == ["machine", "check"]
    on_one = ["dp=1 gas=2 fp32", "dp=1 gas=2 bf16", "dp=1 attention=cudnn bf16", "dp=1 attention=flash bf16"]
    assert names("check", machine(ranks=1)) == on_one
    for device, precision in (("cpu", "fp64"), ("cuda", "bf16")):
        last = [f"cp=2 gas=2 {precision}", f"cp=2 attention=flash {precision}"]
        assert names("check", machine(ranks=2, device=device))[-2:] == last


def run(*words):
    return subprocess.run((sys.executable, *words), cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parity
def test_a_line_on_processes_of_this_machine(tmp_path):
    out = tmp_path / "out.json"
    done = run("benchmarks/gpu_check.py", "--cpu", "--only", "check: dp=1 gas", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(out.read_text())["lines"]
    assert {key: line["status"] for key, line in lines.items()} == {"check: dp=1 gas=2 fp64": "pass"}
    assert "of 1e-10" in done.stdout


@pytest.mark.parity
def test_ranks_that_share_a_device_train_as_one_process_does():
    layout = "dp=2 tp=2 zero_stage=3"
    done = run(
        "benchmarks/one_gpu.py", *["--device", "cpu", "--precision", "fp64", "--processes", "1"], layout
    )
    assert (done.returncode, done.stdout.count("| pass |")) == (0, 1), done.stdout + done.stderr
