"""The first hour with GPUs: does the kernel train correctly on them, and as fast as others do?

    python benchmarks/gpu_check.py                 # everything, in order; the same command continues it
    python benchmarks/gpu_check.py --only memory   # one step again, or one line: --only "compile: tp=2"
    python benchmarks/gpu_check.py --cpu           # what processes of a machine without GPUs can show

docs/first-gpu-hour.md explains each step and what to look at when it fails. Every line is a command of ultrabench;
the results go to a table and to a JSON file, which keeps the lines that passed with the same program and machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.text import Text

from ultrabench import checkout
from ultrabench.cli.tables import duration, say, show, style_of, table
from ultrabench.errors import ConfigError, UltrabenchError, require_known
from ultrabench.hardware import GIB
from ultrabench.kernel.requests import CheckSpec, RankCost, dry_run
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.processes import run_module, thread_variables
from ultrabench.record import from_dict, to_dict
from ultrabench.run import RunSpec
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.files import files, read_yaml, usable
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan_table import read_rows, runs_of

PRECISIONS = {"cuda": ("fp32", "bf16"), "cpu": ("fp64",)}
CHECKS = {
    1: ("dp=1 gas=2", "dp=1 attention=cudnn", "dp=1 attention=flash"),
    2: ("dp=2 gas=2", "dp=2 zero_stage=1 gas=2", "dp=2 zero_stage=3 gas=2", "tp=2 gas=2", "cp=2 gas=2",
        "cp=2 attention=flash"),
    4: ("pp=4 gas=4 model=tiny-gqa", "dp=2 tp=2 zero_stage=2 gas=2", "dp=4 dp_shard=2 zero_stage=3 gas=2"),
    8: ("dp=2 tp=2 pp=2 zero_stage=1 gas=4", "dp=2 tp=2 cp=2 zero_stage=3 gas=2", "dp=8 zero_stage=3"),
}  # fmt: skip
"""Number of ranks -> layouts; tiny-gqa has tied embeddings, of which middle stages of a pipeline hold none."""
SCHEDULES = ("1f1b", "afab", "interleaved", "zbv")
COMPILED = ("dp=2 zero_stage=3 gas=2", "tp=2", "pp=2 gas=2", "cp=2")
MEMORY_RUNS = (
    "model=1B", "measure=quick", "sweep.seq_len=4096", "sweep.gas=null", "sweep.tp=[1,2]", "sweep.pp=[1,2]",
    "sweep.zero_stage=[0,3]", "sweep.mbs=[1]", "sweep.cp=[1]", "kernel.compile=false",
)  # fmt: skip
SPEED = ("measure=default", "measure.confirm=1")
SPEED_8B = (
    *SPEED, "model=llama3-8b", "sweep.seq_len=8192", "sweep.gbs=16", "sweep.gas=null", "sweep.mbs=[1,2]", "sweep.tp=[1]",
    "sweep.pp=[1]", "sweep.cp=[1]", "sweep.zero_stage=[3]", "sweep.recompute=[selective]",
)  # fmt: skip
LINK_SHARE = 0.6
"""Least bus bandwidth at the largest size, as a share of the rate of a GPU's links in the file of the hardware."""
MEMORY_OFF = {"cuda": 0.02, "cpu": 0.04}
"""Largest difference of a measured peak from the dry run's; on CPUs gloo holds buffers a little longer."""
SPEED_SHARE = 0.9
TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
H100_FLOPS_PER_S = 989e12
"""Peak rate of the GPUs on which the published speeds were measured; other GPUs are compared by MFU."""
TORCHTITAN_8B = {"false": 5762.0, "true": 6667.0}
"""kernel.compile -> tokens/s/GPU of Llama 3.1 8B on 8 H100 (96 GB, 500 W), FSDP, seq_len 8192, batch 16, selective."""
LOOK = {
    "machine": "the remedy in: ultrabench doctor launcher=local",
    "check": "which attention fails, with cp or without; fp32 passes and bf16 fails: a kernel for 16 bits",
    "schedules": "the same layout with 1f1b: if that passes, the schedule; with pp=1, the pipeline",
    "compile": "the same line without --compile, then TORCH_LOGS=graph_breaks,recompiles",
    "links": "nvidia-smi topo -m and nvlink -s, then NCCL_DEBUG=INFO: P2P or NVLS off, a GPU on PCIe",
    "memory": "the same run with trace=true: its memory by kind beside the dry run's",
    "speed 8B": "sm_clock_hz and throttled in runs.parquet, then trace=true: exposed communication, longest kernels",
    "speed 1B": "as for speed 8B; with 1B the host counts more: idle time in the profile",
}
"""Step -> what to look at first when one of its lines fails; the steps in their order."""


@dataclass(frozen=True)
class Machine:
    """What the lines need to know of this machine."""

    device: str
    ranks: int
    facts: dict[str, Any]
    hardware: str
    results: Path

    @property
    def identity(self) -> list[Any]:
        """What has to be the same for a line that passed to count again."""
        names = ("gpu_name", "torch_version", "nccl_version", "driver_version")
        return [self.device, self.ranks, KernelConfig(name="embedded").digest(), *map(self.facts.get, names)]

    def sweep(self, name: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, RunSpec]]:
        """Launches a sweep on this machine; returns its rows, and the spec of each run by its id."""
        where = [f"name={name}", f"results_dir={self.results}", "sweep.nodes=[1]", "launcher=local"]
        here = [f"hardware={self.hardware}", f"hardware.gpus_per_node={self.ranks}"]
        run_ultrabench("sweep", "launch", "--yes", "--reuse", "same", *where, *overrides, *here)
        run_ultrabench("collect", name, "--results-dir", str(self.results))
        folder = SweepFolder(self.results / name)
        state = fold(read_journal(folder.journal, say))
        runs = runs_of(read_sweep_json(folder), read_rows(folder.plan), state)
        rows = pq.read_table(folder.path / "runs.parquet").to_pylist()
        return [row for row in rows if row["is_final"]], {run.run_id: run.spec for run in runs}


Line = tuple[str, Callable[[], tuple[bool, str]]]
"""What is tried, and a function that tries it: whether it passed, and what was found."""


def run_ultrabench(*words: str) -> Any:
    """Runs a command of ultrabench, whose progress goes to stderr; returns its JSON, or its text."""
    command = [sys.executable, "-P", "-m", "ultrabench", *words]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out) if words[-1] == "--json" and out else out


def machine_lines(at: Machine) -> Iterator[Line]:
    """Whether ultrabench can use this machine."""

    def doctor() -> tuple[bool, str]:
        words = ("launcher=local", f"hardware={at.hardware}", f"hardware.gpus_per_node={at.ranks}")
        nothing = [{"name": "doctor", "status": "fail", "told": ""}]
        checks = run_ultrabench("doctor", *words, "--json") or nothing
        bad = [f"{c['name']}: {c['told']}" for c in checks if c["status"] == "fail"]
        return not bad, "; ".join(bad) or f"{len(checks)} checks"

    yield f"doctor hardware={at.hardware}", doctor


def differences(result: dict[str, Any]) -> str:
    """What a check found: each difference beside the largest that is allowed."""
    return ", ".join(f"{k} {float(result[f'{k}_diff'] or 'inf'):.2g} of {result[f'{k}_allowed']:.2g}"
                     for k in ("loss", "grad", "param"))  # fmt: skip


def check_line(at: Machine, layout: str, precision: str, *more: str) -> Line:
    """A layout compared with one process."""
    options = ["--device", at.device, "--precision", precision, *more]

    def compare() -> tuple[bool, str]:
        result = run_ultrabench("kernel", "check", *layout.split(), *options, "--json")
        if not result or result["error"]:
            return False, (result or {}).get("error") or "refused, see above"
        lost = len(result["missing_gradients"])
        missing = f"{lost} gradients missing, " if lost else ""
        graphs = f", {result['graphs']} graphs" if "--compile" in more else ""
        return result["passed"], f"{missing}{differences(result)}{graphs}"

    return " ".join([layout, precision, *more]), compare


def check_lines(at: Machine, layouts: Iterator[str] | list[str], *more: str) -> Iterator[Line]:
    """Layouts in all precisions; the fused attention of GPUs, which a ring needs, computes in 16 bits only."""
    for layout in layouts:
        fused = at.device == "cuda" and ("cp=" in layout or "attention=" in layout)
        for precision in ("bf16",) if fused else PRECISIONS[at.device]:
            if not (at.device == "cpu" and "cudnn" in layout):
                yield check_line(at, layout, precision, *more)


def links(at: Machine) -> tuple[bool, str]:
    """Every operation over all ranks, at the largest size."""
    rows, _ = at.sweep("gpu-check-links", "sweep=comm")
    if not rows or not rows[0]["bandwidths"]:
        return False, rows[0]["reason"] if rows else "no result"
    everywhere = (row for row in rows[0]["bandwidths"] if row["scope"] == "all")
    largest = {row["operation"]: row["busbw_bytes_per_s"] for row in everywhere}
    needed = LINK_SHARE * load_config([f"hardware={at.hardware}"]).hardware.link_bytes_per_s
    told = ", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in largest.items())
    slow = at.device == "cuda" and min(largest.values()) < needed
    return not slow, f"GB/s: {told}" + (f"; at least {needed / 1e9:.3g}" if at.device == "cuda" else "")


def memory(at: Machine) -> tuple[bool, str]:
    """The measured peaks of several layouts beside those of dry runs."""
    failed = []
    if at.device == "cpu":
        spec = CheckSpec(layout=Layout(dp=2, zero_stage=3, gas=2), precision="bf16").run
        peaks = [(spec, max(live_peaks(spec)))]
    else:
        rows, specs = at.sweep("gpu-check-memory", *MEMORY_RUNS, f"sweep.gbs={2 * at.ranks}")
        ran = [(specs[row["run_id"]], row) for row in rows if row["run_id"] in specs]
        failed = [f"{r['run_id']} {r['status']}: {r['reason']}" for _, r in ran if r["status"] != "ok"]
        peaks = [(spec, r["peak_mem_allocated_bytes"]) for spec, r in ran if r["status"] == "ok"]
    dry = [(spec, peak, max(cost.peak_bytes for cost in dry_run(spec))) for spec, peak in peaks]
    if not dry or failed:
        return False, "; ".join(failed) or "no run has ended"
    spec, peak, expected = max(dry, key=lambda one: abs(one[1] / one[2] - 1))
    told = f"{peak / GIB:.4g} GiB, dry run {expected / GIB:.4g} GiB ({peak / expected - 1:+.1%})"
    passed = abs(peak / expected - 1) <= MEMORY_OFF[at.device]
    return passed, f"farthest of {len(dry)}: {spec.layout.label()} {told}"


def live_peaks(spec: RunSpec) -> list[int]:
    """The largest live bytes of each rank in a real step over gloo."""
    command, env = [sys.executable, str(Path(__file__).with_name("live_peak.py"))], thread_variables(1)
    done = subprocess.run(
        command, input=json.dumps(to_dict(spec)), text=True, stdout=subprocess.PIPE, env={**os.environ, **env}
    )
    return [from_dict(RankCost, cost).peak_bytes for cost in json.loads(done.stdout)]


def speed(at: Machine, name: str, published: float, source: str, *overrides: str) -> tuple[bool, str]:
    """The MFU of the fastest of some runs beside that of a published speed on H100s."""
    rows, _ = at.sweep(name, *overrides)
    best = max(rows, key=lambda row: row["mfu"] or 0, default={})
    if not best.get("mfu"):
        return False, f"{best.get('status')}: {best.get('reason')}"
    rate, mfu = best["tokens_per_s_per_gpu"], best["mfu"]
    theirs = published * mfu / rate * best["peak_flops_per_s"] / H100_FLOPS_PER_S
    told = f"{rate:,.0f} tokens/s/GPU, MFU {mfu:.1%}; published {published:,.0f}, {theirs:.1%} ({source})"
    told += f"; in doubt: {best['suspect']}" if best["suspect"] else ""
    return mfu >= SPEED_SHARE * theirs, told


def speed_8b(at: Machine) -> Iterator[Line]:
    """Llama 3 8B with fully sharded data parallelism, eager and compiled."""
    for compiled, published in TORCHTITAN_8B.items():
        name = f"gpu-check-8B-{'compiled' if compiled == 'true' else 'eager'}"
        yield name, partial(speed, at, name, published, TORCHTITAN, *SPEED_8B, f"kernel.compile={compiled}")


def speed_1b(at: Machine) -> Iterator[Line]:
    """The run of the Ultra-Scale Playbook on one node."""
    told = read_yaml(files("published")["h100x8"])
    row = next(row for row in told["runs"] if row["nodes"] == 1)
    axes = [f"sweep.{word}=[{row.get(word, 1)}]" for word in ("tp", "pp", "cp", "zero_stage", "mbs", "gas")]
    batch = (f"model={told['model']}", f"sweep.seq_len={told['seq_len']}", f"sweep.gbs={told['gbs']}")
    name, published = "gpu-check-1B", row["tokens_per_s_per_gpu"]
    yield name, partial(speed, at, name, published, told["source"], *SPEED, *batch, *axes)


def lines_of(step: str, at: Machine) -> Iterator[Line]:
    """The lines of one step that this machine can run; none if it has too few GPUs."""
    if step == "machine":
        yield from machine_lines(at)
    elif step == "check":
        yield from check_lines(at, [layout for n, some in CHECKS.items() if n <= at.ranks for layout in some])
    elif at.ranks >= 2 and step == "schedules":
        yield from check_lines(at, [f"pp=2 gas=4 pp_schedule={name}" for name in SCHEDULES])
    elif at.ranks >= 2 and step == "compile":
        yield from check_lines(at, list(COMPILED), "--compile")
    elif at.ranks >= 2 and step == "links":
        yield "all operations", partial(links, at)
    elif at.ranks >= 2 and step == "memory":
        yield "dry run", partial(memory, at)
    elif at.ranks == 8 and at.device == "cuda" and step in ("speed 8B", "speed 1B"):
        yield from {"speed 8B": speed_8b, "speed 1B": speed_1b}[step](at)


def load_lines(path: Path, at: Machine) -> dict[str, dict[str, Any]]:
    """The lines of an earlier call with the same program on the same machine, by `step: line`."""
    document = json.loads(path.read_text()) if path.exists() else {}
    return document.get("lines", {}) if document.get("identity") == at.identity else {}


def run_lines(only: list[str], at: Machine, out: Path) -> dict[str, dict[str, Any]]:
    """Tries the lines whose names begin with a text in `only`; if it is empty, those that have not passed yet.

    The file is written after each line.
    """
    lines = load_lines(out, at)
    for step in LOOK:
        if only and not any(name.partition(":")[0] == step for name in only):
            continue
        for what, attempt in lines_of(step, at):
            key = f"{step}: {what}"
            if not key.startswith(tuple(only)) if only else lines.get(key, {}).get("status") == "pass":
                continue
            say(key)
            start = time.monotonic()
            try:
                passed, told = attempt()
            except UltrabenchError as error:
                passed, told = False, str(error)
            lines[key] = {"status": "pass" if passed else "fail", "found": told,
                          "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
            document = {"schema_version": 1, "time": time.time(), "git_commit": checkout.commit(), "hardware": at.hardware,
                        "identity": at.identity, "environment": at.facts, "lines": lines}  # fmt: skip
            out.write_text(json.dumps(document, indent=1) + "\n")
    return lines


def print_lines(lines: dict[str, dict[str, Any]], at: Machine) -> None:
    """The table of all lines, and what to look at for each step that failed."""
    styles = {"pass": "ok", "fail": "crash"}
    rows = [(key, Text(line["status"], style_of(styles[line["status"]])), duration(line["seconds"]), line["found"])
            for key, line in lines.items()]  # fmt: skip
    show(table(f"{at.ranks} x {at.facts['gpu_name']}", "line", "status", ">time", "found", rows=rows))
    failed = {key.partition(":")[0] for key, line in lines.items() if line["status"] == "fail"}
    show(*(f"{step} failed; look at: {look}" for step, look in LOOK.items() if step in failed))
    left = [step for step in LOOK if not any(key.startswith(f"{step}: ") for key in lines)]
    if left:
        needs = "links, schedules, compile and memory need 2 GPUs, speeds 8 of them"
        show(f"not run: {', '.join(left)} ({needs})")


def require_gpus(facts: dict[str, Any]) -> None:
    """Raises if torch sees no GPU on this machine.

    Raises:
        ConfigError: it tells why, as far as the facts do.
    """
    if facts["gpus"]:
        return
    why = "a driver is loaded, but gives this process no GPU (CUDA_VISIBLE_DEVICES, the job, or another version)"
    if facts["cuda_version"] is None:
        why = f"torch {facts['torch_version']} is built without CUDA"
    elif facts["driver_version"] is None:
        why = "no NVIDIA driver is loaded"
    told = f"torch sees no GPU here: {why}; nothing was measured or written"
    raise ConfigError(f"{told}. Run it on a machine with GPUs, or add --cpu for two processes of this one")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    again = "do a step or `STEP: LINE` again"
    asked.add_argument("--only", action="append", default=[], metavar="STEP", help=again)
    asked.add_argument("--cpu", action="store_true", help="two processes of this machine instead of GPUs")
    of_gpu = "the file in configs/hardware/; default: the one that names this GPU"
    asked.add_argument("--hardware", help=of_gpu)
    asked.add_argument("--results-dir", type=Path, default=Path("results"), help="for the sweeps")
    asked.add_argument("--out", type=Path, help="the JSON file; default: benchmarks/gpu-check-HARDWARE.json")
    words = asked.parse_args()
    require_known("step", LOOK, *(name.partition(":")[0] for name in words.only))
    facts = json.loads(run_module("ultrabench.kernel.rank.environment", timeout_s=300))
    names = {path.stem: values.get("reported_as", []) for path, values in usable("hardware").items()}
    known = "cpu" if words.cpu else next((n for n, gpus in names.items() if facts["gpu_name"] in gpus), None)
    if not words.cpu:
        require_gpus(facts)
    if (hardware := words.hardware or known) is None:
        unknown = f"no file in configs/hardware/ names {facts['gpu_name']!r} in reported_as"
        raise ConfigError(f"{unknown}; nothing was measured or written. Give --hardware NAME")
    ranks, device = (2, "cpu") if words.cpu else (facts["gpus"], "cuda")
    at = Machine(device=device, ranks=ranks, facts=facts, hardware=hardware, results=words.results_dir)
    out = words.out or Path(__file__).parent / f"gpu-check-{hardware}.json"
    lines = run_lines(words.only, at, out)
    print_lines(lines, at)
    say(f"wrote {out}")
    return int(any(line["status"] == "fail" for line in lines.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UltrabenchError as error:
        say(f"gpu-check: {error}")
        sys.exit(error.exit_code)
