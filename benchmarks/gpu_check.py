"""The first hour with GPUs: does the kernel train correctly on them, and as fast as others do?

python benchmarks/gpu_check.py                 # everything, in order; the same command continues it
    python benchmarks/gpu_check.py --minutes 9     # as many lines as fit; the same command continues it
    python benchmarks/gpu_check.py --only memory   # one step again, or one line: --only "compile: tp=2"
    python benchmarks/gpu_check.py --cpu           # what processes of a machine without GPUs can show
    python benchmarks/gpu_check.py --nine          # instead, the twelve lines of benchmarks/nine_minutes.py

benchmarks/first-gpu-hour.md explains each step and what to look at when it fails.
Every line is a command of ultrabench; the results go to a table and to a JSON file, which keeps the lines that passed
with the same program and machine.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_facts import hardware_name, require_gpus
from gpu_machine import Finding, Line, Machine, RefusedError, TimeSpentError
from gpu_rows import FIRST as FIRST_ROWS
from gpu_rows import row_lines, write_rows
from rich.text import Text

from ultrabench import checkout
from ultrabench.cli.tables import duration_text, say, show, style_of, table
from ultrabench.errors import UltrabenchError, counted, require_known
from ultrabench.hardware import GIB
from ultrabench.kernel.requests import CheckSpec, dry_run
from ultrabench.layout import Layout
from ultrabench.processes import run_python, thread_variables
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.run import RunSpec
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.load import load_config

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
COMPILED = {
    1: ("dp=1 gas=2 recompute=selective",),
    2: ("dp=2 zero_stage=3 gas=2", "tp=2", "pp=2 gas=2", "cp=2"),
}
MEMORY_RUNS = (
    "model=1B", "measure=quick", "measure.min_s=0", "measure.warmup_s=0", "sweep.seq_len=4096", "sweep.gas=null",
    "sweep.mbs=[1]", "sweep.cp=[1]", "kernel.compile=false",
)  # fmt: skip
MEMORY_LAYOUTS = {
    1: ("sweep.tp=[1]", "sweep.pp=[1]", "sweep.zero_stage=[0]", "sweep.recompute=[none,selective,full]"),
    2: ("sweep.tp=[1,2]", "sweep.pp=[1,2]", "sweep.zero_stage=[0,3]"),
}
"""Number of ranks, 2 also for more -> the layouts of the memory step."""
SPEED = ("measure=default", "measure.confirm=1")
SPEED_8B = (
    *SPEED, "model=llama3-8b", "sweep.seq_len=8192", "sweep.gbs=16", "sweep.gas=null", "sweep.mbs=[1,2]",
    "sweep.tp=[1]",
    "sweep.pp=[1]", "sweep.cp=[1]", "sweep.zero_stage=[3]", "sweep.recompute=[selective]",
)  # fmt: skip
ESTIMATES_S = {
    "machine": 15.0,
    "check": 15.0,
    "compile": 30.0,
    "links": 60.0,
    "memory": 90.0,
    "speed 8B": 400.0,
    "speed 1B": 300.0,
}
"""Step -> expected seconds of one of its lines, from the runs of benchmarks/h100; those of rows are in gpu_rows.py."""
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
    "rows": "the reason; an interval above 1 %: power and clocks, then other programs; not ok: the logs of the run",
}
"""Step -> what to look at first when one of its lines fails; the steps in their order."""
FIRST = (
    "machine: ", "check: dp=1 gas=2 fp8", "compile: dp=1 gas=2 recompute=selective fp8",
    *(f"rows: {variant.name}" for variant in FIRST_ROWS),
)  # fmt: skip
"""Beginnings of the lines that come before all others, because an hour may end early."""


def machine_lines(machine: Machine) -> Iterator[Line]:
    """Whether ultrabench can use this machine."""

    def doctor() -> Finding:
        words = ("launcher=local", f"hardware={machine.hardware}", f"hardware.gpus_per_node={machine.ranks}")
        nothing = [{"name": "doctor", "status": "fail", "finding": ""}]
        checks = machine.run("doctor", *words, "--json") or nothing
        failed = [f"{c['name']}: {c['finding']}" for c in checks if c["status"] == "fail"]
        return Finding(not failed, "; ".join(failed) or f"{len(checks)} checks")

    yield Line(f"doctor hardware={machine.hardware}", doctor, ESTIMATES_S["machine"])


def differences(result: dict[str, Any]) -> str:
    """What a check found: each difference beside the largest that is allowed."""
    return ", ".join(f"{k} {float(result[f'{k}_diff'] or 'inf'):.2g} of {result[f'{k}_allowed']:.2g}"
                     for k in ("loss", "grad", "param"))  # fmt: skip


def check_line(machine: Machine, layout: str, precision: str, *flags: str) -> Line:
    """A layout compared with one process."""
    options = ["--device", machine.device, "--precision", precision, *flags]

    def compare() -> Finding:
        result = machine.run("kernel", "check", *layout.split(), *options, "--json")
        if not result or result["error"]:
            return Finding(False, (result or {}).get("error") or "no result, see above")
        lost = len(result["missing_gradients"])
        missing = f"{lost} gradients missing, " if lost else ""
        graphs = f", {result['graphs']} graphs" if "--compile" in flags else ""
        return Finding(result["passed"], f"{missing}{differences(result)}{graphs}")

    estimate_s = ESTIMATES_S["compile" if flags else "check"]
    return Line(" ".join([layout, precision, *flags]), compare, estimate_s, precision == "fp8")


def check_lines(machine: Machine, layouts: Sequence[str], *flags: str) -> Iterator[Line]:
    """Layouts in all precisions, of one process also in fp8; the fused attention of GPUs,
    which a ring needs, has 16 bits only.
    """
    for layout in layouts:
        fused = machine.device == "cuda" and ("cp=" in layout or "attention=" in layout)
        precisions = (
            ("bf16",) if fused else PRECISIONS[machine.device] + ("fp8",) * layout.startswith("dp=1 gas")
        )
        for precision in precisions:
            if not (machine.device == "cpu" and "cudnn" in layout):
                yield check_line(machine, layout, precision, *flags)


def links(machine: Machine) -> Finding:
    """Every operation over all ranks, at the largest size."""
    rows = machine.sweep("gpu-check-links", "sweep=comm").rows
    if not rows or not rows[0]["bandwidths"]:
        return Finding(False, rows[0]["reason"] if rows else "no result")
    everywhere = (row for row in rows[0]["bandwidths"] if row["scope"] == "all")
    largest = {row["operation"]: row["busbw_bytes_per_s"] for row in everywhere}
    needed = LINK_SHARE * load_config([f"hardware={machine.hardware}"]).hardware.link_bytes_per_s
    rates = ", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in largest.items())
    slow = machine.device == "cuda" and min(largest.values()) < needed
    least = f"; at least {needed / 1e9:.3g}" if machine.device == "cuda" else ""
    return Finding(not slow, f"GB/s: {rates}{least}")


def memory(machine: Machine) -> Finding:
    """The measured peaks of several layouts beside those of dry runs."""
    failed = []
    if machine.device == "cpu":
        spec = CheckSpec(layout=Layout(dp=2, zero_stage=3, gas=2), precision="bf16").run
        peaks = [(spec, max(live_peaks(spec)))]
    else:
        layouts = MEMORY_LAYOUTS[min(machine.ranks, 2)]
        overrides = (*MEMORY_RUNS, *layouts, f"sweep.gbs={2 * machine.ranks}")
        sweep = machine.sweep("gpu-check-memory", *overrides)
        ran = [(sweep.specs[row["run_id"]], row) for row in sweep.rows if row["run_id"] in sweep.specs]
        failed = [f"{r['run_id']} {r['status']}: {r['reason']}" for _, r in ran if r["status"] != Status.OK]
        peaks = [(spec, r["peak_mem_allocated_bytes"]) for spec, r in ran if r["status"] == Status.OK]
    dry = [(spec, peak, max(cost.peak_bytes for cost in dry_run(spec))) for spec, peak in peaks]
    if not dry or failed:
        return Finding(False, "; ".join(failed) or "no run has ended")
    spec, peak, expected = max(dry, key=lambda run: abs(run[1] / run[2] - 1))
    off = peak / expected - 1
    sizes = f"{peak / GIB:.4g} GiB, dry run {expected / GIB:.4g} GiB ({off:+.1%})"
    passed = abs(off) <= MEMORY_OFF[machine.device]
    return Finding(passed, f"farthest of {len(dry)}: {spec.layout.label()} {sizes}")


def live_peaks(spec: RunSpec) -> list[int]:
    """The largest live bytes of each rank in a real step over gloo."""
    command, env = [sys.executable, str(Path(__file__).with_name("live_peak.py"))], thread_variables(1)
    process = subprocess.run(
        command, input=json.dumps(to_dict(spec)), text=True, stdout=subprocess.PIPE, env={**os.environ, **env}
    )
    return [cost["peak_bytes"] for cost in json.loads(process.stdout)]


def speed(machine: Machine, name: str, published: float, source: str, *overrides: str) -> Finding:
    """The MFU of the fastest of some runs beside that of a published speed on H100s."""
    rows = machine.sweep(name, *overrides).rows
    best = max(rows, key=lambda row: row["mfu"] or 0, default={})
    if not best.get("mfu"):
        return Finding(False, f"{best.get('status')}: {best.get('reason')}")
    rate, mfu = best["tokens_per_s_per_gpu"], best["mfu"]
    theirs = published * mfu / rate * best["peak_flops_per_s"] / H100_FLOPS_PER_S
    text = f"{rate:,.0f} tokens/s/GPU, MFU {mfu:.1%}; published {published:,.0f}, {theirs:.1%} ({source})"
    text += f"; in doubt: {best['suspect']}" if best["suspect"] else ""
    return Finding(mfu >= SPEED_SHARE * theirs, text)


def speed_8b(machine: Machine) -> Iterator[Line]:
    """Llama 3 8B with fully sharded data parallelism, eager and compiled."""
    for compiled, published in TORCHTITAN_8B.items():
        name = f"gpu-check-8B-{'compiled' if compiled == 'true' else 'eager'}"
        overrides = (*SPEED_8B, f"kernel.compile={compiled}")
        attempt = partial(speed, machine, name, published, TORCHTITAN, *overrides)
        yield Line(name, attempt, ESTIMATES_S["speed 8B"])


def speed_1b(machine: Machine) -> Iterator[Line]:
    """The run of the Ultra-Scale Playbook on one node."""
    table_of_runs = read_yaml(files("published")["h100x8"])
    row = next(row for row in table_of_runs["runs"] if row["nodes"] == 1)
    axes = [f"sweep.{key}=[{row.get(key, 1)}]" for key in ("tp", "pp", "cp", "zero_stage", "mbs", "gas")]
    batch = [f"sweep.{key}={table_of_runs[key]}" for key in ("seq_len", "gbs")]
    overrides = (*SPEED, f"model={table_of_runs['model']}", *batch, *axes)
    name, published = "gpu-check-1B", row["tokens_per_s_per_gpu"]
    attempt = partial(speed, machine, name, published, table_of_runs["source"], *overrides)
    yield Line(name, attempt, ESTIMATES_S["speed 1B"])


def lines_of(step: str, machine: Machine, out: Path) -> Iterator[Line]:
    """The lines of one step that this machine can run; none if it has too few GPUs."""
    if step == "machine":
        yield from machine_lines(machine)
    elif step == "check":
        yield from check_lines(
            machine, [layout for n, group in CHECKS.items() if n <= machine.ranks for layout in group]
        )
    elif step == "compile":
        compiled = [layout for n, group in COMPILED.items() if n <= machine.ranks for layout in group]
        yield from check_lines(machine, compiled, "--compile")
    elif step == "memory":
        yield Line("dry run", partial(memory, machine), ESTIMATES_S[step])
    elif step == "rows":
        yield from row_lines(machine, out)
    elif machine.ranks >= 2 and step == "schedules":
        yield from check_lines(machine, [f"pp=2 gas=4 pp_schedule={name}" for name in SCHEDULES])
    elif machine.ranks >= 2 and step == "links":
        yield Line("all operations", partial(links, machine), ESTIMATES_S[step])
    elif machine.ranks == 8 and machine.device == "cuda" and step in ("speed 8B", "speed 1B"):
        yield from {"speed 8B": speed_8b, "speed 1B": speed_1b}[step](machine)


def lines_in_order(machine: Machine, out: Path) -> dict[str, Line]:
    """`step: line` -> the line: those of FIRST, then the others step by step."""
    lines = {f"{step}: {line.name}": line for step in LOOK for line in lines_of(step, machine, out)}
    first = [key for start in FIRST for key in lines if key.startswith(start)]
    return {key: lines[key] for key in (*first, *lines)}


def load_results(path: Path, machine: Machine) -> dict[str, dict[str, Any]]:
    """The results of an earlier call with the same program on the same machine, by `step: line`."""
    document = json.loads(path.read_text()) if path.exists() else {}
    return document.get("lines", {}) if document.get("identity") == machine.identity else {}


def due(lines: Mapping[str, Line], results: Mapping[str, dict[str, Any]], only: Sequence[str]) -> list[str]:
    """The lines to try, in order: those whose names begin with a text in `only`, whatever their result.

    If `only` is empty, they are those without a result, then those that have not passed.
    """
    if only:
        return [key for key in lines if key.startswith(tuple(only))]
    not_passed = [key for key in lines if results.get(key, {}).get("status") != "pass"]
    return sorted(not_passed, key=lambda key: key in results)


def run_lines(
    lines: Mapping[str, Line], only: Sequence[str], machine: Machine, out: Path
) -> dict[str, dict[str, Any]]:
    """Tries the lines that are due, and skips those whose estimate exceeds the time left; returns all results.

    The file is written after each line.
    """
    results = load_results(out, machine)
    for key in due(lines, results, only):
        if lines[key].estimate_s > machine.remaining_s:
            continue
        say(key)
        start, row = time.monotonic(), None
        try:
            passed, text, row = lines[key].attempt()
            status = "pass" if passed else "fail"
        except TimeSpentError:
            continue  # shorter lines have no time either
        except RefusedError as error:
            status, text = "refused" if lines[key].may_be_refused else "fail", str(error)
        except Exception as error:  # the other lines of a lent machine are worth more than a traceback
            traceback.print_exc()
            status, text = "fail", f"{type(error).__name__}: {error}"
        results[key] = {"status": status, "found": text, "seconds": round(time.monotonic() - start, 1)}
        results[key] |= {"row": row} if row else {}
        document = {
            "schema_version": 1,
            "time": time.time(),
            "git_commit": checkout.commit_sha(),
            "hardware": machine.hardware,
            "identity": machine.identity,
            "environment": machine.facts,
            "lines": results,
        }
        out.write_text(json.dumps(document, indent=1) + "\n")
    if rows := [result["row"] for result in results.values() if "row" in result]:
        write_rows(rows, out.with_suffix(".parquet"))
    return results


def print_results(results: dict[str, dict[str, Any]], lines: Mapping[str, Line], machine: Machine) -> None:
    """The table of all results, what to look at for each step that failed, and what is left."""
    styles = {"pass": Status.OK, "fail": Status.CRASH, "refused": None}
    rows = [
        (
            key,
            Text(result["status"], style_of(styles[result["status"]])),
            duration_text(result["seconds"]),
            result["found"],
        )
        for key, result in results.items()
    ]
    show(
        table(f"{machine.ranks} x {machine.facts['gpu_name']}", "line", "status", ">time", "found", rows=rows)
    )
    failed = {key.partition(":")[0] for key, result in results.items() if result["status"] == "fail"}
    show(*(f"{step} failed; look at: {look}" for step, look in LOOK.items() if step in failed))
    if rest := [line.estimate_s for key, line in lines.items() if key not in results]:
        show(
            f"left: {counted(len(rest), 'line')}, about {duration_text(sum(rest))}; the same command continues"
        )
    if empty := [step for step in LOOK if not any(key.startswith(f"{step}: ") for key in lines)]:
        show(f"not run: {', '.join(empty)} (links and schedules need 2 GPUs, speeds 8 of them)")


def main() -> int:
    if "--nine" in sys.argv:
        nine_minutes = str(Path(__file__).with_name("nine_minutes.py"))
        words = [word for word in sys.argv[1:] if word != "--nine"]
        os.execv(sys.executable, [sys.executable, nine_minutes, *words])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STEP",
        help="do a step or `STEP: LINE` again; sweeps are measured anew",
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no line that would take longer"
    )
    parser.add_argument("--cpu", action="store_true", help="two processes of this machine instead of GPUs")
    parser.add_argument(
        "--hardware", help="the file in configs/hardware/; default: the one that names this GPU"
    )
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="for the sweeps")
    parser.add_argument("--out", type=Path, help="the JSON file; default: benchmarks/gpu-check-HARDWARE.json")
    arguments = parser.parse_args()
    # In the background SIGINT is ignored, also by commands that are to end in time.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    require_known("step", LOOK, *(name.partition(":")[0] for name in arguments.only))
    facts = json.loads(run_python("-m", "ultrabench.kernel.rank.environment", timeout_s=300))
    if not arguments.cpu:
        require_gpus(facts)
    hardware = arguments.hardware or ("cpu" if arguments.cpu else hardware_name(facts))
    ranks, device = (2, "cpu") if arguments.cpu else (facts["gpus"], "cuda")
    end_s = time.monotonic() + 60 * arguments.minutes
    machine = Machine(device, ranks, facts, hardware, arguments.results_dir, end_s)
    out = arguments.out or Path(__file__).parent / f"gpu-check-{hardware}.json"
    lines = lines_in_order(machine, out)
    results = run_lines(lines, arguments.only, machine, out)
    print_results(results, lines, machine)
    say(f"wrote {out}")
    return int(any(result["status"] == "fail" for result in results.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UltrabenchError as error:
        say(f"gpu-check: {error}")
        sys.exit(error.exit_code)
