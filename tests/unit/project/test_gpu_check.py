"""benchmarks/gpu_check.py: what it would run on GPUs, what it keeps, and one real line on processes."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks import gpu_check
from tests.configs import refused
from ultrabench.cli.kernel.check import check_spec
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

ROOT = Path(__file__).parents[3]
FACTS = {"gpu_name": "NVIDIA H100 80GB HBM3", "gpus": 8, "torch_version": "2.13.0"}


def machine(ranks=8, device="cuda", hardware="h100x8"):
    return gpu_check.Machine(
        device=device, ranks=ranks, facts=FACTS, hardware=hardware, results=Path("results")
    )


def names(step, at):
    return [name for name, _ in gpu_check.lines_of(step, at)]


def test_every_check_is_a_command_that_the_cli_takes(monkeypatch):
    asked, seen = [], set()
    monkeypatch.setattr(gpu_check, "run_ultrabench", lambda *words: asked.append(words) or {"error": "x"})
    lines = [
        line for step in ("check", "schedules", "compile") for line in gpu_check.lines_of(step, machine())
    ]
    assert {attempt() for _, attempt in lines} == {(False, "x")}
    for words in asked:
        assert words[:2] == ("kernel", "check")
        assert words[-1] == "--json"
        given = {name: words[words.index(f"--{name}") + 1] for name in ("device", "precision")}
        options = {**given, "compile": "--compile" in words, "dump": None}
        spec = check_spec([word for word in words if "=" in word], options)
        seen |= {(spec.device, spec.layout.world_size, given["precision"])}
    assert seen == {("cuda", n, kind) for n in (1, 2, 4, 8) for kind in ("fp32", "bf16")}
    assert len(asked) == len(lines) > 30


def test_sweeps_have_the_published_layouts_and_pass_where_they_are_as_good(monkeypatch):
    planned, cost = {}, Mock(peak_bytes=1000)
    row = {
        "run_id": "x", "tokens_per_s_per_gpu": 5200.0, "mfu": 0.3, "peak_flops_per_s": 989e12, "suspect": None,
        "status": "ok", "reason": "no room", "peak_mem_allocated_bytes": 1019,
    }  # fmt: skip

    def sweep(self, name, *overrides):
        config = load_config([*overrides, f"hardware={self.hardware}", f"name={name}", "sweep.nodes=[1]"])
        planned[name] = make_plan(config).runs
        return [row, row | {"mfu": None}], {"x": planned[name][0].spec}

    monkeypatch.setattr(gpu_check.Machine, "sweep", sweep)
    monkeypatch.setattr(gpu_check, "dry_run", lambda spec: [cost])
    lines = [
        line for step in ("speed 8B", "speed 1B", "memory") for line in gpu_check.lines_of(step, machine())
    ]
    (passed, eager), (compiled, _), (small, _), (fits, memory) = (attempt() for _, attempt in lines)
    assert (passed, compiled, small, fits) == (True, False, False, True)
    assert eager.startswith("5,200 tokens/s/GPU, MFU 30.0%; published 5,762, 33.2% (torchtitan")
    assert memory.endswith("(+1.9%)")
    runs = {name: {run.layout.label() for run in found} for name, found in planned.items()}
    assert runs.pop("gpu-check-memory") > {"dp8 tp1 pp1 z3 mbs1 gas2"}
    both = {f"dp8 tp1 pp1 z3 {batch} recompute-selective" for batch in ("mbs1 gas2", "mbs2 gas1")}
    one = {"dp8 tp1 pp1 z0 mbs2 gas16"}
    assert runs == {"gpu-check-8B-eager": both, "gpu-check-8B-compiled": both, "gpu-check-1B": one}
    cost.peak_bytes = 990
    assert not lines[-1][1]()[0]
    row["status"] = "oom"
    assert lines[-1][1]() == (False, "x oom: no room; x oom: no room")


@pytest.mark.parametrize(
    ("facts", "told"),
    [({"gpus": 0, "cuda_version": None}, "torch 2.13.0 is built without CUDA; nothing was measured or"),
     ({"gpus": 0, "cuda_version": "12.8", "driver_version": None}, "no NVIDIA driver is loaded; nothing"),
     ({"gpus": 0, "cuda_version": "12.8", "driver_version": "570"}, "gives this process no GPU"),
     ({"gpus": 1, "gpu_name": "Toaster"}, "names 'Toaster' in reported_as; nothing was measured or")],
)  # fmt: skip
def test_a_machine_that_cannot_be_checked_is_told_in_one_line(monkeypatch, tmp_path, facts, told):
    monkeypatch.setattr(gpu_check, "run_module", lambda *_, **__: json.dumps(FACTS | facts))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out.json")])
    with refused(told):
        gpu_check.main()
    assert not list(tmp_path.iterdir())


def test_links_slower_than_expected_fail(monkeypatch):
    rates = [{"operation": o, "scope": "all", "busbw_bytes_per_s": 3e11} for o in ("allreduce", "sendrecv")]
    monkeypatch.setattr(gpu_check.Machine, "sweep", lambda *_: ([{"bandwidths": rates}], {}))
    ((_, links),) = gpu_check.lines_of("links", machine())
    assert links() == (True, "GB/s: allreduce 300, sendrecv 300; at least 270")
    rates[1]["busbw_bytes_per_s"] = 2e11
    assert not links()[0]


def test_steps_that_need_more_gpus_have_no_lines():
    assert [step for step in gpu_check.LOOK if names(step, machine(ranks=1))] == ["machine", "check"]
    on_one = ["dp=1 gas=2 fp32", "dp=1 gas=2 bf16", "dp=1 attention=cudnn bf16", "dp=1 attention=flash bf16"]
    assert names("check", machine(ranks=1)) == on_one
    for device, precision in (("cpu", "fp64"), ("cuda", "bf16")):
        last = [f"cp=2 gas=2 {precision}", f"cp=2 attention=flash {precision}"]
        assert names("check", machine(ranks=2, device=device))[-2:] == last


def test_what_passed_is_kept_until_it_is_asked_for_again(monkeypatch, tmp_path):
    tried, out = [], tmp_path / "out.json"

    def lines_of(step, at):
        yield "good", lambda: tried.append(f"{step}: good") or (True, "told")
        yield "bad", lambda: tried.append(f"{step}: bad") or (False, "told")

    def again(*only, ranks=8):
        tried.clear()
        lines = gpu_check.run_lines([*only], machine(ranks=ranks), out)
        assert {key: line["status"] for key, line in lines.items()} == every
        return tried

    monkeypatch.setattr(gpu_check, "lines_of", lines_of)
    monkeypatch.setattr(gpu_check, "LOOK", {"check": "x", "links": "y"})
    every = {"check: good": "pass", "check: bad": "fail", "links: good": "pass", "links: bad": "fail"}
    assert again() == [*every]
    assert again() == ["check: bad", "links: bad"]
    assert again("links") == ["links: good", "links: bad"]
    assert again("check: good") == ["check: good"]
    assert json.loads(out.read_text())["environment"] == FACTS
    assert again(ranks=2) == [*every], "another machine"


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
    layouts = ("dp=2 tp=2 zero_stage=3", "pp=2 gas=2", "cp=2")
    done = run(
        "benchmarks/one_gpu.py", *["--device", "cpu", "--precision", "fp64", "--processes", "1"], *layouts
    )
    assert (done.returncode, done.stdout.count("| pass |")) == (0, len(layouts)), done.stdout + done.stderr
