"""Steps of few micro-batches stand for whole steps: how exact that is on CPUs, and what it saves on paper.

`nice -n -15 python benchmarks/partial_steps.py ROWS.jsonl` measures 60 layouts of three cells with 32 to 128
micro-batches a step, about an hour on two cores. A start is one set of forked ranks, each bound to a core, with whole
steps on both sides of blocks of turns of parts (whole, g1, g2, g2, g1, ..., whole, ...), so that a machine that slows
down changes both. Micro-batches are as short as they can be, so that a block takes seconds: the speed of a VM's core
changes as fast. After the first block g2 is 3 * g1, as it becomes in runs whose interval misses its target. ROWS.jsonl
gets a line for each start; the same command continues after an interruption. `--starts 2` starts each layout once more,
after all others, where other VMs slow the cores down. `--quick` measures two layouts of each cell.

`--paper` takes the errors of these rows and computes GPU hours of searches; see partial_replay.py.
"""

import argparse
import faulthandler
import gc
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, mean, median, quantiles, stdev
from typing import Any

import torch
import torch.distributed as dist

from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.mesh import build_mesh, join_process_group
from ultrabench.kernel.rank.clock import run_timed
from ultrabench.kernel.rank.environment import use_device
from ultrabench.kernel.requests import SINGLE_THREAD_ENV
from ultrabench.kernel.step import TrainStep
from ultrabench.partial_step import (
    Departure,
    PartTimes,
    Slice,
    extrapolation_error_rel,
    mean_turn,
    part_times,
    pooled,
    step_s,
    turns_ci95_rel,
    variance_between,
    whole_step_ci95_rel,
)
from ultrabench.run import RunSpec
from ultrabench.standing import NEAR_BEST
from ultrabench.step_time import MIN_SAMPLES, ci95_rel
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import MAX_CONTENDERS
from ultrabench.sweep.running.outliers import SAME_START_TOLERANCE

CELLS = ("tiny", "tiny-gqa", "tiny-moe")
"""The models; each has one cell, of two ranks."""
GRID = (
    "sweep=quick", "sweep.nodes=[1]", "sweep.seq_len=32", "sweep.gbs=256",
    "sweep.gas=[32,64,128]", "sweep.mbs=[1,2,4,8]",
    "sweep.pp_schedule=[1f1b,interleaved,zbv]", "measure.partial_steps=auto",
)  # fmt: skip
LAYOUTS, QUICK_LAYOUTS = 20, 2
"""Layouts of each cell."""
BLOCK_SHARE = 2.0
"""Micro-batches of the parts of a block, `whole, g1, g2, g2, g1, ..., whole`, in those of a whole step: a straight line
through parts is less certain than as long a whole step."""
TARGET = 0.01
"""Half-width of the interval by the turns at which no more blocks are measured, as in `measure=default`."""
MEASURED_S, STARTS = 50.0, 1
"""Seconds after which no further block of a start begins, and starts of each layout; `--seconds` and `--starts` give
others."""
TIMEOUT_S = 400.0
"""Longest seconds of one layout; its ranks are then ended, and it is left out."""
NORMAL_ERRORS = 100
"""Number of errors of --error-sd, at equal steps of probability."""
MEDIAN_ERROR, P90_ERROR, COVERAGE, STEP_SHARE = 0.02, 0.06, 0.90, 0.15
"""Bars: median and 90 % quantile of the error, the share of intervals that hold the whole step, and step hours
before confirmation in those of whole steps."""
CONFIRM_STEPS, RUN_STEPS = 8, 33
"""Steps of a start with whole steps and then parts, and of a start with whole steps alone, as a plan prices them."""
Row = dict[str, Any]


def layouts_of(model: str, count: int) -> list[Candidate]:
    """Layouts of a cell that `auto` measures by parts, in turn of each schedule and ZeRO stage."""
    plan = make_plan(load_config([*GRID, f"model={model}"]))
    runs_by_kind = defaultdict[Any, list[Candidate]](list)
    for run in sorted((run for run in plan.runs if run.slice), key=_draw):
        runs_by_kind[run.spec.linearity_kind].append(run)
    places = [(place, kind) for kind, runs in runs_by_kind.items() for place in range(len(runs))]
    return [runs_by_kind[kind][place] for place, kind in sorted(places)[:count]]


def _draw(run: Candidate) -> bytes:
    return hashlib.sha256(run.run_id.encode()).digest()


def measure_rank(
    spec: RunSpec, slice_: Slice, store_path: str, seconds: float, rank: int
) -> list[tuple[str, int, float, float]]:
    """Runs in a rank: the steps in their order, each with its kind, size, seconds and CPU seconds."""
    faulthandler.enable()  # a crash of native code leaves its stacks
    torch.set_num_threads(1)
    # A rank that moves to another core loses its caches, and two on one core wait for each other.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    device, num_ranks = use_device("cpu", rank), spec.layout.world_size
    join_process_group(device, dist.FileStore(store_path, num_ranks), rank, num_ranks)
    trainer = TrainStep(spec, device, build_mesh(spec.layout, "cpu"))
    num_steps, steps = 0, list[tuple[str, int, float, float]]()

    def step(kind: str, size: int) -> None:
        nonlocal num_steps
        num_steps += 1
        trainer.set_gas(size)
        batch = trainer.batch(num_steps)
        dist.barrier()
        cpu_start_s = time.process_time()
        seconds, _ = run_timed(device, lambda: float(trainer.update(trainer.accumulate(*batch))))
        steps.append((kind, size, seconds, time.process_time() - cpu_start_s))

    # A pipeline prepares something for each micro-batch of its first step.
    for size in (*slice_.all_sizes, slice_.g1, *([spec.layout.gas] if spec.layout.pp > 1 else [])):
        step("warmup", size)
    gc.collect()
    gc.freeze()
    gc.disable()
    start_s, needs_more, num_turns = time.monotonic(), torch.ones(1), 0
    step("whole", spec.layout.gas)
    while needs_more:
        block_turns = max(MIN_SAMPLES, round(BLOCK_SHARE * spec.layout.gas / sum(slice_.sizes)))
        for turn in range(num_turns, num_turns + block_turns):
            for size in slice_.order(turn):
                step(f"turn {turn}", size)
        num_turns += block_turns
        step("whole", spec.layout.gas)
        parts = parts_of(steps, spec.layout.gas)
        interval = turns_ci95_rel(parts.slice, parts.turns, parts.gas)
        is_wide = interval is None or interval > TARGET
        needs_more.fill_(float(is_wide and time.monotonic() - start_s < seconds))
        dist.broadcast(needs_more, src=0)
        if slice_.wider:
            slice_ = replace(slice_, g2=slice_.wider, third=None, wider=None)
    dist.destroy_process_group()
    return steps


def parts_of(steps: Iterable[tuple[str, int, float, float]], gas: int) -> PartTimes:
    """The turns of the last slice among the steps of a rank, by wall clock."""
    parts = ((int(kind.split()[1]), size, s) for kind, size, s, _ in steps if kind.startswith("turn"))
    times = part_times(parts, gas)
    assert times is not None
    return times


def measure(run: Candidate, known_departure: Departure | None, seconds: float) -> Row:
    """The row of a layout; it has a third size only while layouts of its kind leave the departure uncertain."""
    assert run.slice
    slice_, spec = run.slice.with_departure(known_departure, TARGET), run.spec
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ultrabench-parts-") as folder:
        ranks = range(spec.layout.world_size)
        functions = {
            str(r): partial(measure_rank, spec, slice_, f"{folder}/store", seconds, r) for r in ranks
        }
        steps_by_rank = list(run_forked(functions, TIMEOUT_S).values())
    # A step ends when its slowest rank does.
    steps = [
        {
            "kind": same[0][0],
            "gas": same[0][1],
            "s": max(s[2] for s in same),
            "cpu_s": sum(s[3] for s in same),
        }
        for same in zip(*steps_by_rank, strict=True)
    ]
    return {
        "run_id": run.run_id, "model": spec.shape.name, "layout": spec.layout.label(), "gas": spec.layout.gas,
        "kind": [*spec.linearity_kind], "g1": slice_.g1, "g2": slice_.g2, "third": slice_.third,
        "load": os.getloadavg()[0], "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": time.monotonic() - start_s, "steps": steps,
    }  # fmt: skip


def parts_of_row(row: Row, clock: str) -> PartTimes:
    """The turns of the last slice of a row, by wall clock (`s`) or CPU time (`cpu_s`)."""
    return parts_of(((step["kind"], step["gas"], step[clock], 0.0) for step in row["steps"]), row["gas"])


def joined(rows: Iterable[Row]) -> list[Row]:
    """A row for each layout, with the steps of all its starts."""
    starts_by_id = defaultdict[str, list[Row]](list)
    for row in rows:
        starts_by_id[row["run_id"]].append(row)
    return [{**starts[0], "steps": _joined_steps(starts)} for starts in starts_by_id.values()]


def _joined_steps(starts: Sequence[Row]) -> list[Row]:
    """The steps of the starts of a layout, whose turns are numbered on from one to the next."""
    steps, num_turns = list[Row](), 0
    for start in starts:
        turns = [int(step["kind"].split()[1]) for step in start["steps"] if step["kind"].startswith("turn")]
        for step in start["steps"]:
            is_turn = step["kind"].startswith("turn")
            kind = f"turn {num_turns + int(step['kind'].split()[1])}" if is_turn else step["kind"]
            steps.append({**step, "kind": kind})
        num_turns += max(turns) + 1
    return steps


def departures(rows: Sequence[Row], clock: str = "s") -> dict[tuple[Any, ...], Departure | None]:
    """Kind of layout -> the departure that its layouts with a third size have measured."""
    values = defaultdict[tuple[Any, ...], list[Departure | None]](list)
    for row in rows:
        values[tuple(row["kind"])].append(parts_of_row(row, clock).departure)
    return {kind: pooled(of_kind) for kind, of_kind in values.items()}


def judge(row: Row, departure_by_kind: dict[tuple[Any, ...], Departure | None], clock: str = "s") -> Row:
    """The error of a layout's parts, their interval, and their seconds beside those of as many whole steps."""
    slice_, gas, turns, _ = parts = parts_of_row(row, clock)
    line_departure = departure_by_kind.get(tuple(row["kind"]))
    whole_s = whole_steps_beside(row, slice_, clock)
    whole_error = stdev(whole_s) / math.sqrt(len(whole_s)) / mean(whole_s) if len(whole_s) > 1 else math.nan
    by_turn_s, own_interval = parts.whole_step_times_s, turns_ci95_rel(slice_, turns, gas)
    later_share = 1 - mean_turn(turns, slice_.pair)[slice_.g2] / median(by_turn_s)
    g1, g2 = (median(turn[size] for turn in turns) for size in (slice_.g1, slice_.g2))
    pair_s = g1 + g2
    return {
        "model": row["model"], "kind": row["kind"], "gas": gas, "layout": row["layout"], "load": row["load"],
        "error": median(by_turn_s) / mean(whole_s) - 1,
        "error_of_medians": step_s(slice_, {slice_.g1: g1, slice_.g2: g2}, gas) / mean(whole_s) - 1,
        "interval": whole_step_ci95_rel(slice_, turns, gas, line_departure),
        "own_interval": own_interval,
        "departure": Departure(
            value=(mean(whole_s) / median(by_turn_s) - 1) / later_share,
            error=math.hypot(whole_error, (own_interval or math.nan) / 2) / later_share,
        ),
        "line_error": extrapolation_error_rel(slice_, turns, gas, line_departure),
        "whole_s": mean(whole_s), "whole_spread": max(whole_s) / min(whole_s) - 1, "turn_s": pair_s,
        "whole_error": whole_error,
    }  # fmt: skip


def whole_steps_beside(row: Row, slice_: Slice, clock: str) -> list[float]:
    """For each block of turns of this slice the mean of the whole steps before and after it, which have seen the same
    states of the machine."""
    steps = [step for step in row["steps"] if step["kind"] != "warmup"]
    whole_places = [place for place, step in enumerate(steps) if step["kind"] == "whole"]
    return [
        (steps[before][clock] + steps[after][clock]) / 2
        for before, after in pairwise(whole_places)
        if sorted({step["gas"] for step in steps[before + 1 : after]})[:2] == [slice_.g1, slice_.g2]
    ]


def quantile_90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def share_of(verdicts: Iterable[bool]) -> float:
    """The fraction of them that are true; not a number where there are none."""
    values = list(verdicts)
    return mean(values) if values else math.nan


def summary(rows: Sequence[Row], clock: str = "s") -> Row:
    """The numbers that the bars are about, of rows by wall clock or CPU time."""
    departure_by_kind = departures(rows, clock)
    judged = [judge(row, departure_by_kind, clock) for row in rows]
    errors = [abs(row["error"]) for row in judged]
    with_interval = [row for row in judged if row["interval"] is not None]
    whole_s, turn_s = (sum(row[name] for row in judged) for name in ("whole_s", "turn_s"))
    # In one of their two further starts, contenders measure eight whole steps, where others count 33 steps each.
    confirm_s = sum(
        row["whole_s"] * CONFIRM_STEPS / RUN_STEPS + 2 * row["turn_s"] for row in contenders(judged)
    )
    return {
        "layouts": len(judged),
        "median_error": median(errors),
        "p90_error": quantile_90(errors),
        "median_signed_error": median(row["error"] for row in judged),
        "median_error_of_medians": median(abs(row["error_of_medians"]) for row in judged),
        "coverage": share_of(abs(row["error"]) <= row["interval"] for row in with_interval),
        "coverage_without_line_error": share_of(abs(r["error"]) <= r["own_interval"] for r in with_interval),
        "median_interval": median([row["interval"] for row in with_interval] or [math.nan]),
        "intervals": len(with_interval),
        "whole_spread": median(row["whole_spread"] for row in judged),
        "whole_error": median(row["whole_error"] for row in judged),
        "departure_spread": departure_spread([row["departure"] for row in judged]),
        "step_share": turn_s / whole_s,
        "step_share_confirmed": (turn_s + confirm_s) / whole_s,
        "load": [min(row["load"] for row in judged), max(row["load"] for row in judged)],
    }


def starts_with_both(starts: Sequence[Row], clock: str = "s") -> list[tuple[float, float]]:
    """For each start with enough steps the time of its first whole steps over that by the parts after them, as a
    logarithm, and the half-width of its interval; so a run is measured in full."""
    departure_by_kind, ratios = departures(starts, clock), list[tuple[float, float]]()
    for start in starts:
        steps = [step for step in start["steps"] if step["kind"] != "warmup"]
        whole_places = [place for place, step in enumerate(steps) if step["kind"] == "whole"]
        if len(whole_places) <= MIN_SAMPLES:
            continue
        whole_s = [steps[place][clock] for place in whole_places[:MIN_SAMPLES]]
        parts = parts_of_row({**start, "steps": steps[whole_places[MIN_SAMPLES - 1] :]}, clock)
        part_s, whole_ci = median(parts.whole_step_times_s), ci95_rel(whole_s)
        line_departure = departure_by_kind.get(tuple(start["kind"]))
        part_ci = whole_step_ci95_rel(parts.slice, parts.turns, parts.gas, line_departure)
        if part_ci is not None and whole_ci is not None:
            ratios.append((math.log(median(whole_s) / part_s), math.hypot(whole_ci, part_ci)))
    return ratios


def show_starts_with_both(starts: Sequence[Row]) -> None:
    """Prints how many starts contradict themselves by chance, with and without the tolerance of shared cores."""
    for clock, name in (("s", "wall clock"), ("cpu_s", "CPU time")):
        ratios = starts_with_both(starts, clock)
        shares = [
            share_of(abs(log_ratio) > math.log1p(interval + tolerance) for log_ratio, interval in ratios)
            for tolerance in (0.0, SAME_START_TOLERANCE)
        ]
        fact = f"whole steps and parts of one start differ beyond their intervals, by {name}: {shares[0]:.1%}"
        print(f"{fact} of {len(ratios)} starts, {shares[1]:.1%} by {SAME_START_TOLERANCE:.0%} more")


def departure_spread(departures_by_whole_steps: Sequence[Departure]) -> float:
    """The standard deviation, beyond noise, of what whole steps of layouts say about the straight line."""
    certain = [departure for departure in departures_by_whole_steps if not math.isnan(departure.error)]
    return math.sqrt(variance_between(certain)) if len(certain) > 1 else math.nan


def contenders(judged: Sequence[Row]) -> Iterator[Row]:
    """The layouts of each cell that whole steps confirm."""
    rows_by_model = defaultdict[str, list[Row]](list)
    for row in judged:
        rows_by_model[row["model"]].append(row)
    for rows in rows_by_model.values():
        by_parts = sorted(rows, key=lambda row: row["whole_s"] * (1 + row["error"]))
        best_s = by_parts[0]["whole_s"] * (1 + by_parts[0]["error"])
        near = [row for row in by_parts if row["whole_s"] * (1 + row["error"]) <= NEAR_BEST * best_s]
        yield from near[:MAX_CONTENDERS]


def measure_all(path: Path, count: int, seconds: float, starts: int, say: Callable[[str], None]) -> None:
    """Measures the starts that the file has no row of; one that fails is said and left out."""
    rows = read(path)
    num_done = Counter(row["run_id"] for row in rows)
    layouts = [run for model in CELLS for run in layouts_of(model, count)]
    # Cells take turns, so that an interrupted benchmark has rows of all.
    layouts = [run for place in range(count) for run in layouts[place::count]]
    todo = [run for start in range(starts) for run in layouts if num_done[run.run_id] <= start]
    for number, run in enumerate(todo, 1):
        known = departures(joined(rows)).get(run.spec.linearity_kind)
        try:
            row = measure(run, known, seconds)
        except ChildError as error:
            say(f"{run.spec.shape.name} {run.spec.label()}: {error}")
            continue
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        judged = judge(joined(r for r in rows if r["run_id"] == run.run_id)[0], departures(joined(rows)))
        values_text = f"error {judged['error']:+.1%}, interval {judged['interval'] or float('nan'):.1%}"
        say(f"{number}/{len(todo)} {row['model']} {row['layout']}: {values_text}, {row['seconds']:.0f} s")


def read(path: Path) -> list[Row]:
    """The rows of the file; a line that an interruption has cut is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def show(rows: Sequence[Row]) -> bool:
    """Prints the numbers beside the bars; returns whether all are met."""
    by_wall, by_cpu = summary(rows), summary(rows, "cpu_s")
    verdicts = [
        ("median error of T(gas)", "median_error", MEDIAN_ERROR, by_wall["median_error"] <= MEDIAN_ERROR),
        ("90 % quantile", "p90_error", P90_ERROR, by_wall["p90_error"] <= P90_ERROR),
        ("intervals that hold the whole step", "coverage", COVERAGE, by_wall["coverage"] >= COVERAGE),
        ("step hours of parts", "step_share", STEP_SHARE, by_wall["step_share"] <= STEP_SHARE),
    ]
    low_load, high_load = by_wall["load"]
    counts_text = f"{by_wall['layouts']} layouts, {by_wall['intervals']} with an interval"
    print(f"{counts_text}, load {low_load:.1f} to {high_load:.1f}")
    for name, key, bar, is_met in verdicts:
        verdict = "ok" if is_met else "MISSED"
        print(f"{name:38}{by_wall[key]:>8.1%}  by CPU time {by_cpu[key]:>7.1%}  bar {bar:>5.0%}  {verdict}")
    for name, key in (
        ("the same with confirmation", "step_share_confirmed"),
        ("median of signed errors", "median_signed_error"),
        ("error from medians of all steps", "median_error_of_medians"),
        ("half-width of the interval", "median_interval"),
        ("coverage without the line's error", "coverage_without_line_error"),
        ("slowest / fastest whole step of a layout - 1", "whole_spread"),
        ("standard error of the mean of whole steps", "whole_error"),
        ("departures by whole steps beyond noise", "departure_spread"),
    ):
        print(f"{name:46}{by_wall[key]:>8.1%}  by CPU time {by_cpu[key]:>7.1%}")
    return all(is_met for *_, is_met in verdicts)


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "rows", type=Path, help="file of the rows, a JSON line each; what it has is not measured again"
    )
    cli.add_argument("--quick", action="store_true", help=f"{QUICK_LAYOUTS} layouts of each cell")
    cli.add_argument(
        "--seconds", type=float, default=MEASURED_S, help="seconds of each start (default: %(default)s)"
    )
    cli.add_argument(
        "--starts", type=int, default=STARTS, help="starts of each layout (default: %(default)s)"
    )
    cli.add_argument("--report", action="store_true", help="measure nothing")
    cli.add_argument("--paper", action="store_true", help="GPU hours of searches with the errors of the rows")
    cli.add_argument(
        "--cpu-time", action="store_true", help="with --paper: the errors by CPU time, not by wall clock"
    )
    cli.add_argument(
        "--error-sd",
        type=float,
        metavar="SD",
        help="with --paper: normal errors of this size, not those of the rows",
    )
    cli.add_argument(
        "--playbook", type=Path, help="with --paper: table of the playbook, from `ultrabench import`"
    )
    cli.add_argument(
        "--bloom", type=Path, help="with --paper: CSV file of published layouts with those of BLOOM"
    )
    args = cli.parse_args()
    for path in filter(None, (args.playbook, args.bloom)):
        if not path.is_file():
            cli.error(f"{path} is not a file; give a table with the rows of others")
    if not SINGLE_THREAD_ENV.items() <= os.environ.items():  # libraries have started threads at import
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SINGLE_THREAD_ENV)
    if not (args.report or args.paper):
        say = partial(print, file=sys.stderr, flush=True)
        measure_all(args.rows, QUICK_LAYOUTS if args.quick else LAYOUTS, args.seconds, args.starts, say)
    rows = joined(read(args.rows))
    if not rows:
        print(f"{args.rows} has no rows; run without --report and --paper first", file=sys.stderr)
        return 2
    if not args.paper:
        show_starts_with_both(read(args.rows))
        return int(not show(rows))
    from partial_replay import print_paper  # it imports pyarrow, whose threads forked ranks must not have

    clock = "cpu_s" if args.cpu_time else "s"
    errors = [judge(row, departures(rows, clock), clock)["error"] for row in rows]
    if args.error_sd is not None:
        probabilities = ((n + 0.5) / NORMAL_ERRORS for n in range(NORMAL_ERRORS))
        errors = [args.error_sd * NormalDist().inv_cdf(probability) for probability in probabilities]
    print_paper(errors, args.playbook, args.bloom)
    return 0


if __name__ == "__main__":
    sys.exit(main())
