"""benchmarks/gpu_check.py: what it would run on GPUs, what it keeps, how it stops, and one real line on processes."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Finding, Line, Machine, RefusedError, TimeSpentError
from benchmarks.gpu_rows import VARIANTS, Variant, fitting, gemm_shares, write_rows
from ultrabench.cli.kernel.check import check_spec
from ultrabench.kernel_config import KernelConfig

ROOT = Path(__file__).parents[3]
FACTS = {"gpu_name": "NVIDIA H100 80GB HBM3", "gpus": 8, "torch_version": "2.13.0"}
OUT = Path("out.json")


def machine(ranks=8, device="cuda", hardware="h100x8", results="results", end_s=math.inf):
    return Machine(device, ranks, FACTS, hardware, Path(results), end_s)


def names(step, host):
    return [line.name for line in gpu_check.lines_of(step, host, OUT)]


@pytest.mark.parametrize("words", [words for checks in gpu_check.CHECKS.values() for words in checks])
def test_every_check_is_one_that_the_cli_takes(words):
    spec = check_spec(words.split(), {"device": "cuda", "precision": "bf16", "compile": False, "dump": None})
    assert words in gpu_check.CHECKS[spec.layout.world_size]


def test_a_check_takes_every_word_of_a_routing():
    options = {"device": "cpu", "precision": "fp64", "compile": False, "dump": None}
    assert check_spec(["model=tiny-moe", "dp=2", "routing=skew=1.5"], options).routing == "skew=1.5"


def test_steps_that_need_more_gpus_have_no_lines():
    steps = [step for step in gpu_check.LOOK if names(step, machine(ranks=1))]
    assert steps == ["machine", "check", "compile", "memory", "rows"]
    fused = ["dp=1 attention=cudnn bf16", "dp=1 attention=flash bf16"]
    on_one = [*(f"dp=1 gas=2 {precision}" for precision in ("fp32", "bf16", "fp8")), *fused]
    assert names("check", machine(ranks=1)) == on_one
    for device, precision in (("cpu", "fp64"), ("cuda", "bf16")):
        last = [f"cp=2 gas=2 {precision}", f"cp=2 attention=flash {precision}"]
        assert names("check", machine(ranks=2, device=device))[-2:] == last


def test_the_rows_of_one_gpu_are_all_that_are_asked_for():
    """Three sizes, two precisions, eager and compiled, two lengths; three of them are traced, and these come early."""
    assert names("rows", machine(ranks=1)) == names("rows", machine(ranks=2, device="cpu"))
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) == 3 * 2 * 2 * 2
    traced = [variant.name for variant in VARIANTS[:6] if variant.is_traced]
    assert traced == ["1B bf16 compiled 4k", "8B bf16 compiled 4k", "8B fp8 compiled 4k"]
    assert sum(variant.is_traced for variant in VARIANTS) == 3


def test_fp8_is_checked_before_the_rows_that_matter_most_and_these_before_all_else():
    lines = [*gpu_check.lines_in_order(machine(ranks=1), OUT)]
    rows = [f"rows: {size} {precision} compiled 4k" for precision in ("bf16", "fp8") for size in ("1B", "8B")]
    checks = ["check: dp=1 gas=2 fp8", "compile: dp=1 gas=2 recompute=selective fp8 --compile"]
    assert lines[:7] == ["machine: doctor hardware=h100x8", *checks, *rows]
    assert sorted(lines) == sorted(
        {f"{step}: {n}" for step in gpu_check.LOOK for n in names(step, machine(ranks=1))}
    )


def test_a_sweep_that_ended_is_measured_anew_and_another_kernel_has_its_own(tmp_path):
    local = machine(results=tmp_path)
    (tmp_path / local.sweep_name("row")).mkdir()
    assert (tmp_path / local.sweep_name("row")).exists()  # interrupted
    (tmp_path / local.sweep_name("row") / "runs.parquet").touch()
    (tmp_path / "row-01234567-1").mkdir()
    (tmp_path / "row-01234567-1" / "runs.parquet").touch()
    assert local.sweep_name("row") == f"row-{KernelConfig(name='embedded').digest()[:8]}-2"


def test_the_layout_of_a_row_fits_and_one_with_more_does_not(tmp_path):
    """An H100 has run eight layers of 8B with 2 sequences eager; 1B with 8 fits compiled only, in 65 GB."""
    compiled, eager = (Variant("8B", "fp8", compiled, "4k") for compiled in (True, False))
    _, layout = fitting(machine(results=tmp_path), Variant("1B", "bf16", True, "4k"))
    assert (layout.mbs, layout.recompute) == (4, "none")
    path, layout = fitting(machine(results=tmp_path), eager)
    assert fitting(machine(results=tmp_path), compiled) == (path, layout)
    assert (path.parent.name, layout.mbs, layout.recompute) == ("8B-8-layers", 2, "none")


def lines_of(calls, **results):
    """Lines that note their calls; a result is whether a line passes, or the error that it raises."""

    def line(name, result):
        def attempt():
            calls.append(name)
            if isinstance(result, Exception):
                raise result
            return Finding(result, f"{name} ran")

        return Line(name, attempt, 60.0, may_be_refused=name == "fp8")

    return {name: line(name, result) for name, result in results.items()}


def test_what_passed_is_kept_and_what_failed_comes_last(tmp_path):
    calls, out = [], tmp_path / "out.json"
    gpu_check.run_lines(lines_of(calls, a=True, b=False), [], machine(), out)
    results = gpu_check.run_lines(lines_of(calls, a=True, b=False, c=True), [], machine(), out)
    assert calls == ["a", "b", "c", "b"]
    assert {name: result["status"] for name, result in results.items()} == {
        "a": "pass",
        "b": "fail",
        "c": "pass",
    }
    gpu_check.run_lines(lines_of(calls, a=True, b=True), ["a"], machine(), out)
    assert calls[4:] == ["a"]
    gpu_check.run_lines(lines_of(calls, a=True), [], machine(ranks=2), out)  # another machine
    assert calls[5:] == ["a"]


def test_no_line_begins_for_which_the_time_is_too_short(tmp_path):
    calls, out = [], tmp_path / "out.json"
    lines = lines_of(calls, long=True, short=True, interrupted=TimeSpentError("no time"))
    lines["long"] = lines["long"]._replace(estimate_s=200.0)
    results = gpu_check.run_lines(lines, [], machine(end_s=time.monotonic() + 100), out)
    assert calls == ["short", "interrupted"]
    assert [*results] == [*json.loads(out.read_text())["lines"]] == ["short"]


def test_a_refusal_is_an_answer_only_where_it_may_be_one(tmp_path):
    lines = lines_of(
        [], fp8=RefusedError("no fp8"), check=RefusedError("no GPU"), broken=ValueError("a fault")
    )
    results = gpu_check.run_lines(lines, [], machine(), tmp_path / "out.json")
    assert [result["status"] for result in results.values()] == ["refused", "fail", "fail"]
    assert [result["found"] for result in results.values()] == ["no fp8", "no GPU", "ValueError: a fault"]


def test_commands_are_refused_in_one_line_and_interrupted_in_time():
    with pytest.raises(RefusedError, match=r"^kernel\.precision='fp9'; must be "):
        machine().run("sweep", "plan", "kernel.precision=fp9")
    with pytest.raises(TimeSpentError):
        machine(end_s=time.monotonic() + 0.2).run("sweep", "plan", "sweep=playbook", "--json")


def test_the_share_of_the_gemm_rate_is_also_known_at_one_clock():
    row = {
        "model_flops_per_s_per_gpu": 3e14, "gemm_flops_per_s": 6e14, "gemm_sm_clock_hz": 1.2e9,
        "sm_clock_hz": 1.5e9,
    }  # fmt: skip
    assert gemm_shares(row) == {"bf16_gemm_share": 0.5, "bf16_gemm_share_at_clock": 0.4}
    assert gemm_shares(row | {"gemm_sm_clock_hz": None}) == {"bf16_gemm_share": 0.5}


def test_rows_are_a_table_of_results_with_their_settings(tmp_path):
    row = {
        "run_id": "ab", "step_times_s": [5.5, 5.0], "min_s": 10.0, "started_at": "2026-11-26T12:00:00+00:00",
    }  # fmt: skip
    write_rows([row], path := tmp_path / "rows.parquet")
    (stored,) = pq.read_table(path).to_pylist()
    stored["started_at"] = stored["started_at"].isoformat()
    assert {name: value for name, value in stored.items() if value is not None} == row


def run(*words):
    return subprocess.run((sys.executable, *words), cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parity
def test_a_line_on_processes_of_this_machine(tmp_path):
    out = tmp_path / "out.json"
    process = run("benchmarks/gpu_check.py", "--cpu", "--only", "check: dp=1 gas=2 fp64", "--out", out)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = json.loads(out.read_text())["lines"]
    assert {key: line["status"] for key, line in lines.items()} == {"check: dp=1 gas=2 fp64": "pass"}
    assert "of 1e-10" in process.stdout


@pytest.mark.parity
@pytest.mark.campaign
def test_ranks_that_share_a_device_train_as_one_process_does():
    layout = "dp=2 tp=2 zero_stage=3"
    process = run(
        "benchmarks/one_gpu.py", *["--device", "cpu", "--precision", "fp64", "--processes", "1"], layout
    )
    assert (process.returncode, process.stdout.count("| pass |")) == (0, 1), process.stdout + process.stderr
