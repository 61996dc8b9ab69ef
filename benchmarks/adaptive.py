"""Ten runs calibrate a profile, which predicts the rest of a sweep, and the adaptive search finds its best layout.

`python benchmarks/adaptive.py [OVERRIDE]...` runs 60 layouts of mini on two processes of this machine, about 15 minutes
on two idle cores. The sweep runs exhaustively; ten of its runs, drawn at random, calibrate a profile, and it is
scored on the others. Then the same sweep runs with the adaptive strategy and this profile.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from timing import ultrabench

from ultrabench.result import Status

SWEEP = [
    "sweep=quick", "model=mini", "sweep.nodes=[1]", "sweep.seq_len=128", "sweep.gbs=16", "sweep.mbs=[1,2,4,8,16]",
    "sweep.gas=null", "sweep.pp_schedule=[1f1b,afab]", "sweep.recompute=[none,full]",
]  # fmt: skip
RUNS, SEED, TIMES = 10, 7, 5
ERROR, RANK, REGRET, SHARE = 0.15, 0.9, 0.05, 1 / 3
"""Bars: median error of the step time, rank correlation in a cell, regret, and share of the GPU time."""
Row = dict[str, Any]


def call(folder: Path, *words: str) -> str:
    """The stdout of a command in `folder`; what it prints beside goes to stderr."""
    return subprocess.run(
        ultrabench(*words), cwd=folder, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def launched(folder: Path, name: str, *words: str) -> list[Row]:
    """The attempts of a sweep that is launched and followed to its end."""
    overrides = {arg.partition("=")[0]: arg for arg in (*SWEEP, *sys.argv[1:], f"name={name}", *words)}
    call(folder, "sweep", "launch", *overrides.values(), "--yes")
    call(folder, "collect", name, "-o", f"{name}.parquet")
    return [row for row in pq.read_table(folder / f"{name}.parquet").to_pylist() if row["gpu_hours"]]


def scores(folder: Path, rows: str, *profile: str) -> tuple[float, float]:
    """Median error and rank correlation of the step times of a file."""
    step_time = json.loads(call(folder, "predict", "validate", rows, *profile, "--json"))["all"]["step_time"]
    return step_time["median_error"], step_time["spearman_in_cell"]


def best_of(rows: list[Row]) -> Row:
    return min((row for row in rows if row["status"] == Status.OK), key=lambda row: row["step_time_s"])


def alone(folder: Path, name: str, row: Row) -> float:
    """The step time in seconds of a layout in a sweep of its own."""
    axes = [f"sweep.{axis}=[{row[axis]}]" for axis in ("tp", "pp", "zero_stage", "mbs", "gas", "recompute")]
    schedule = f"sweep.pp_schedule=[{row['pp_schedule'] if row['pp'] > 1 else 'auto'}]"
    return float(best_of(launched(folder, name, *axes, schedule))["step_time_s"])


def repeated(folder: Path, chosen: Row, best: Row) -> tuple[float, bool]:
    """How much slower `chosen` is than `best` by medians of TIMES runs of each in turn,
    and whether the runs overlap.
    """
    turns = [[alone(folder, f"{name}{n}", row) for name, row in (("found", chosen), ("best", best))]
             for n in range(TIMES)]  # fmt: skip
    ours, theirs = map(sorted, zip(*turns, strict=True))
    return median(ours) / median(theirs) - 1, ours[1] <= theirs[-2]


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="ultrabench-adaptive-"))
    all_rows = launched(folder, "every", "sweep.strategy=exhaustive")
    timed = [row for row in all_rows if row["status"] == Status.OK]
    table = pq.read_table(folder / "every.parquet")
    chosen = {row["run_id"] for row in random.Random(SEED).sample(timed, RUNS)}
    is_chosen = pa.array([run_id in chosen for run_id in table["run_id"].to_pylist()])
    pq.write_table(table.filter(is_chosen), folder / "ten.parquet")
    pq.write_table(table.filter(pc.invert(is_chosen)), folder / "rest.parquet")
    call(folder, "predict", "calibrate", "ten.parquet", "-o", "ultrabench/profiles/mine.yaml")
    before, after = scores(folder, "rest.parquet"), scores(folder, "rest.parquet", "--profile", "mine")
    # Whole steps, as the sweep has measured with which it is compared.
    few = launched(folder, "few", "sweep.strategy=adaptive", "measure.partial_steps=off", "profile=mine")
    best, pick = best_of(all_rows), best_of(few)
    measured = next(row for row in timed if row["run_id"] == pick["run_id"])
    regret = measured["step_time_s"] / best["step_time_s"] - 1
    overlap = False
    if regret > REGRET:  # the machine may have been slower at the time of the one than at that of the other
        regret, overlap = repeated(folder, pick, best)
    hours, all_hours = (sum(row["gpu_hours"] for row in rows) for rows in (few, all_rows))
    ten_hours = sum(row["gpu_hours"] for row in all_rows if row["run_id"] in chosen)
    verdicts = [
        ("median error of the other step times", f"{100 * after[0]:.1f} %", f"{100 * ERROR:.0f} %", after[0] <= ERROR),
        ("their rank correlation", f"{after[1]:.3f}", f"{RANK}", after[1] >= RANK),
        ("adaptive: slower than the best", f"{100 * regret:.1f} %", f"{100 * REGRET:.0f} %",
            regret <= REGRET or overlap),
        (f"its share of the GPU time ({len(few)} runs)", f"{100 * hours / all_hours:.1f} %", f"{100 * SHARE:.0f} %",
            hours <= SHARE * all_hours),
    ]  # fmt: skip
    for name, value, bar, good in verdicts:
        print(f"{name:40}{value:>10}  bar {bar:>6}  {'ok' if good else 'MISSED'}")
    print(
        f"with the {RUNS} of {len(timed)} runs that calibrate: {100 * (hours + ten_hours) / all_hours:.1f} %"
    )
    print(f"before they do: median error {100 * before[0]:.1f} %, rank correlation {before[1]:.3f}")
    print(f"best of adaptive and of all: {measured['step_time_s']:.4f} and {best['step_time_s']:.4f} s")
    print(f"results in {folder}", file=sys.stderr)
    sys.exit(not all(good for *_, good in verdicts))


if __name__ == "__main__":
    main()
