"""Replays measured runs as if they were made now, to measure what a search strategy costs and what it misses.

`python benchmarks/replay.py FILE.parquet... --strategy NAME` reads finished sweeps and tables that `ultrabench import`
made. For each cell it prints the rank correlation of the predictions, the regret of the layout predicted fastest, and
the runs, GPU hours and regret of a strategy. `--json` prints them as a document, and `-o FILE.png` draws them.

A cell has the runs of one source and program that train the same model on the same accelerators, with batches within
BATCH_TOLERANCE of each other. They are ranked by tokens per second: step times are those of the smallest batch.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from replay_figure import figure

from ultrabench.allowed import Count
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.results.cases import Case, open_cases_by_profile
from ultrabench.analysis.results.nanotron_version import with_version
from ultrabench.analysis.studies.predictions.validate import MIN_RANKED
from ultrabench.cli.tables import print_json, say, show, table, warn
from ultrabench.errors import ConfigError, UltrabenchError, require_known
from ultrabench.layout import Layout, dominates
from ultrabench.record import value_from
from ultrabench.result import Status
from ultrabench.standing import NEAR_BEST
from ultrabench.store.folder import write_whole
from ultrabench.sweep.candidate import options_of
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.grid import broken_rules
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.predict import LIKELY_OOM, Prediction
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.search import TriedRuns, propose
from ultrabench.sweep.running.attempts import MAX_CONTENDERS

STARTUP_S = 60.0
"""Seconds from the start of a run to its first step."""
RUN_STEPS, FAILED_STEPS, CONFIRM_STEPS = 5, 1, 10
"""Number of steps of a run, of a failed run, and of the two repeats of a contender in one process."""
RACE_STEP_TIME_RATIO, RACED_STEPS = 1.3, 2
"""Ratio of step times above which a run is stopped as slower than the best of its cell so far,
and after how many steps."""
TOP_RUNS = 5
"""Number of runs with a step time after which the strategy predicted ends."""
RANDOM_SHARE = 0.1
"""Fraction of the GPU hours of a cell after which the strategy random ends."""
BATCH_TOLERANCE = 0.02
"""Largest share by which batches of one cell exceed the smallest one."""
LARGE_CELL = 8
"""Number of layouts from which a cell counts as large."""
NEAR, SMALL_CELL_NEAR = 0.02, 0.05
"""Regret up to which the best layout of a large and of a smaller cell counts as found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRun:
    """A measured run and its prediction, which uses the bandwidths that its job measured."""

    run_id: str
    layout: Layout
    prediction: Prediction
    step_time_s: float | None
    """Seconds for the smallest batch of the cell; None where the run failed."""
    oom: bool
    """Whether it failed for lack of memory."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What the step time depends on beside the layout."""
    search_cost: float = 1.0
    """What a measurement costs beside one of whole steps."""

    def with_batch(self, gbs: int) -> "ReplayedRun":
        """The run as if it had another batch and computed as many tokens per second."""
        scale = gbs / self.layout.gbs
        times = ("step_time_s", "step_time_low_s", "step_time_high_s")
        scaled_times = {name: scale * getattr(self.prediction, name) for name in times}
        step_time_s = self.step_time_s and scale * self.step_time_s
        return replace(self, prediction=replace(self.prediction, **scaled_times), step_time_s=step_time_s)

    def cost_gpu_s(self, best_s: float = math.inf) -> float:
        """GPU seconds of the run, when the best step time before it was `best_s` seconds."""
        if self.step_time_s is None:
            return self._gpu_s(FAILED_STEPS * self.prediction.step_time_s)
        num_steps = RACED_STEPS if self.step_time_s > RACE_STEP_TIME_RATIO * best_s else RUN_STEPS
        return self._gpu_s(num_steps * self.step_time_s)

    def confirm_gpu_s(self) -> float:
        """GPU seconds of the repeats of a contender."""
        return self._gpu_s(CONFIRM_STEPS * (self.step_time_s or 0.0))

    def _gpu_s(self, steps_time_s: float) -> float:
        return (STARTUP_S + steps_time_s) * self.layout.world_size


@dataclass(slots=True)
class Replay:
    """The runs that a strategy has made so far in one cell."""

    runs: Sequence[ReplayedRun]
    """All runs of the cell."""
    max_p_oom: float
    """P(OOM) above which the strategy adaptive makes no run."""
    runs_made: list[ReplayedRun] = field(default_factory=list)
    gpu_s: float = 0.0
    """GPU seconds of the runs made so far."""

    @property
    def best_s(self) -> float:
        """The best step time found so far in seconds."""
        return min((run.step_time_s for run in self.runs_made if run.step_time_s), default=math.inf)

    @property
    def total_gpu_s(self) -> float:
        """GPU seconds of all runs of the cell, none of them stopped early."""
        return sum(run.cost_gpu_s() for run in self.runs)

    def make(self, runs: Sequence[ReplayedRun]) -> None:
        """Adds these runs, made at the same time, and what they cost."""
        best_s = self.best_s
        self.gpu_s += sum(run.cost_gpu_s(best_s) for run in runs)
        self.runs_made += runs

    def tried(self) -> TriedRuns:
        """The results so far, as the search takes them."""
        times_s = {run.run_id: run.step_time_s for run in self.runs_made if run.step_time_s}
        oom_ids = {run.run_id for run in self.runs_made if run.oom}
        failed_ids = {run.run_id for run in self.runs_made} - oom_ids - times_s.keys()
        return TriedRuns(times_s=times_s, oom_ids=oom_ids, failed_ids=failed_ids, max_p_oom=self.max_p_oom)

    def may_fit(self, run: ReplayedRun) -> bool:
        """Whether the run may fit into memory: no smaller run, made before, ran out of it."""
        return not any(other.oom and dominates(other.layout, run.layout) for other in self.runs_made)

    def confirm(self) -> None:
        """Adds the cost of repeating the fastest runs."""
        timed_runs = (run for run in self.runs_made if run.step_time_s)
        contenders = [run for run in timed_runs if (run.step_time_s or 0.0) <= NEAR_BEST * self.best_s]
        contenders.sort(key=lambda run: run.step_time_s or 0.0)
        self.gpu_s += sum(run.confirm_gpu_s() for run in contenders[:MAX_CONTENDERS])


def _run_adaptively(replay: Replay, num_parallel: int) -> None:
    while proposed_runs := propose(replay.runs, replay.tried(), num_parallel):
        replay.make(proposed_runs)


def _run_in_order(
    replay: Replay, num_parallel: int, key: Callable[[ReplayedRun], Any], is_enough: Callable[[Replay], bool]
) -> None:
    remaining_runs = sorted(replay.runs, key=key)
    while remaining_runs and not is_enough(replay):
        next_runs = [run for run in remaining_runs if replay.may_fit(run)][:num_parallel]
        replay.make(next_runs)
        remaining_runs = [run for run in remaining_runs if run not in next_runs and replay.may_fit(run)]


class ReplayedCell(NamedTuple):
    """What the runs of a cell have in common."""

    source: str
    """Where they were published; empty for runs of a sweep."""
    program: str
    model: str
    gpu: str
    """The accelerator, with a lower power limit where it has one."""
    gpus: int
    seq_len: int
    gbs: int
    """The smallest batch."""


_FIXED_ORDERS: dict[str, tuple[Callable[[ReplayedRun], Any], Callable[[Replay], bool]]] = {
    "exhaustive": (lambda run: (run.prediction.p_oom > LIKELY_OOM, run.cost_gpu_s()), lambda cell: False),
    "random": (lambda run: hashlib.sha256(run.run_id.encode()).digest(),
        lambda cell: cell.gpu_s >= RANDOM_SHARE * cell.total_gpu_s),
    "predicted": (lambda run: (run.prediction.p_oom > LIKELY_OOM, run.prediction.step_time_s),
        lambda cell: len(cell.tried().times_s) >= TOP_RUNS),
}  # fmt: skip
"""Strategy that makes runs in a fixed order -> the sort key of a run, and when enough is measured."""
STRATEGIES = ("adaptive", *_FIXED_ORDERS)


def cells_of(cases: Sequence[Case], profile: Profile) -> dict[ReplayedCell, list[ReplayedRun]]:
    """The runs of each cell in which any layout works.

    Suspect runs and layouts that a structural rule rejects are left out. Of several measurements of a run the
    last one counts.
    """
    cells: dict[ReplayedCell, dict[str, ReplayedRun]] = {}
    cell = None
    for next_cell, case in sorted(((_cell_of(case), case) for case in cases), key=lambda pair: pair[0]):
        spec = case.run.spec
        if case.run.suspect or any(broken_rules(spec.layout, spec.shape)):
            continue
        is_same = cell is not None and next_cell[:-1] == cell[:-1]
        if cell is None or not is_same or next_cell.gbs > (1 + BATCH_TOLERANCE) * cell.gbs:
            cell = next_cell
        run = _replayed_run(case, profile).with_batch(cell.gbs)
        cells.setdefault(cell, {})[spec.run_id] = run
    return {
        cell: list(run_by_id.values())
        for cell, run_by_id in cells.items()
        if any(run.step_time_s for run in run_by_id.values())
    }


def _cell_of(case: Case) -> ReplayedCell:
    spec, gpu = case.run.spec, case.hardware.gpu_at_limit
    program, num_gpus, source = spec.kernel.name, spec.layout.world_size, case.run.source or ""
    workload = spec.workload
    return ReplayedCell(source, program, spec.shape.name, gpu, num_gpus, workload.seq_len, workload.gbs)


def _replayed_run(case: Case, profile: Profile) -> ReplayedRun:
    spec, limit_bytes = case.run.spec, case.hardware.mem_bytes
    constants = with_version(memory_constants(profile.framework, profile.memory), case.run)
    stages = predict_memory(profile.as_divided(spec), constants)
    peak_bytes = max(stage.peak_bytes for stage in stages)
    time_s, low_s, high_s = case.interval_s(profile)
    prediction = Prediction(
        step_time_s=time_s, step_time_low_s=low_s, step_time_high_s=high_s,
        p_oom=p_oom(stages, limit_bytes, constants), limited_by="compute", peak_mem_bytes=int(peak_bytes),
        memory_share=peak_bytes / limit_bytes, duration_s=STARTUP_S + RUN_STEPS * time_s,
    )  # fmt: skip
    return ReplayedRun(
        run_id=spec.run_id,
        layout=spec.layout,
        prediction=prediction,
        step_time_s=case.run.step_time_s if case.run.status == Status.OK else None,
        oom=case.run.status == Status.OOM,
        options=options_of(spec),
    )


def replay(
    cells: Mapping[ReplayedCell, Sequence[ReplayedRun]], strategy: str, num_parallel: int, max_p_oom: float
) -> dict[str, Any]:
    """The document that --json prints.

    `num_parallel` runs are made at a time. Hours are fractions of those of all runs. A regret of 0.02 means that the
    best layout found is 2 % slower than the best of its cell; it is None if the strategy found none.
    """
    replays, cell_rows = list[Replay](), list[dict[str, Any]]()
    for cell, runs in cells.items():
        replay = Replay(runs, max_p_oom)
        if strategy == "adaptive":
            _run_adaptively(replay, num_parallel)
        else:
            _run_in_order(replay, num_parallel, *_FIXED_ORDERS[strategy])
        replay.confirm()
        replays.append(replay)
        best_s = min(run.step_time_s for run in runs if run.step_time_s)
        regret = replay.best_s / best_s - 1 if replay.best_s < math.inf else None
        counts = {"layouts": len(runs), "runs": len(replay.runs_made)}
        shares = {"gpu_hours_share": replay.gpu_s / replay.total_gpu_s, "regret": regret}
        cell_rows.append({**cell._asdict(), **counts, **shares, **prediction_metrics(runs)})
    gpu_hours_share = sum(replay.gpu_s for replay in replays) / sum(replay.total_gpu_s for replay in replays)
    totals = {"gpu_hours_share": gpu_hours_share, "runs": sum(row["runs"] for row in cell_rows)}
    groups = {"large_cells": _is_large, "small_cells": lambda replay: not _is_large(replay)}
    totals |= {name: _group_totals(list(filter(is_in, replays))) for name, is_in in groups.items()}
    totals["predictions"] = {
        name: _mean(row[name] for row in cell_rows)
        for name in ("rank_correlation", "first_regret", "best_in_first")
    }
    return {"strategy": strategy, "batch": num_parallel, **totals, "cells": cell_rows}


def prediction_metrics(runs: Sequence[ReplayedRun]) -> dict[str, float | bool | None]:
    """How well the predictions order the runs of a cell; None in a cell with fewer than MIN_RANKED step times.

    `rank_correlation` is Spearman's, `first_regret` how much slower the layout predicted fastest is than the best one,
    and `best_in_first` says whether the best one is among the TOP_RUNS predicted fastest.
    """
    pairs = sorted((run.prediction.step_time_s, run.step_time_s) for run in runs if run.step_time_s)
    if len(pairs) < MIN_RANKED:
        return dict.fromkeys(("rank_correlation", "first_regret", "best_in_first"))
    predicted, measured = (pd.Series(times_s) for times_s in zip(*pairs, strict=True))
    rank_correlation = float(predicted.rank().corr(measured.rank()))
    return {
        "rank_correlation": None if math.isnan(rank_correlation) else rank_correlation,
        "first_regret": float(measured[0] / measured.min() - 1),
        "best_in_first": bool(measured[:TOP_RUNS].min() == measured.min()),
    }


def _is_large(replay: Replay) -> bool:
    return len(replay.runs) >= LARGE_CELL


def _group_totals(replays: Sequence[Replay]) -> dict[str, Any]:
    """What cells of one size took together, in fractions of what all their runs take, and in how many of them the
    strategy ended near the best layout.
    """
    near_best = [replay for replay in replays if _best_is_found(replay)]
    total_runs, total_gpu_s = sum(len(r.runs) for r in replays), sum(r.total_gpu_s for r in replays)
    return {
        "cells": len(replays),
        "layouts": total_runs,
        "near_best": len(near_best),
        "runs_share": sum(len(r.runs_made) for r in replays) / total_runs if replays else None,
        "gpu_hours_share": sum(r.gpu_s for r in replays) / total_gpu_s if replays else None,
    }


def _best_is_found(replay: Replay) -> bool:
    best_s = min(run.step_time_s for run in replay.runs if run.step_time_s)
    return replay.best_s <= (1 + (NEAR if _is_large(replay) else SMALL_CELL_NEAR)) * best_s


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def show_replay(arguments: argparse.Namespace) -> None:
    """Prints what a strategy costs in each cell of measured runs, and what it misses.

    Raises:
        ConfigError: there is no such strategy, or no layout has an ok run.
    """
    require_known("strategy", STRATEGIES, arguments.strategy)
    max_parallel_runs = value_from(Count, arguments.batch, "--batch")
    cells, sources_text = dict[ReplayedCell, list[ReplayedRun]](), ", ".join(arguments.sources)
    for source in arguments.sources:
        for cases, profile in open_cases_by_profile(
            source, arguments.profile, arguments.results_dir, say, warn
        ):
            cells |= cells_of(cases, profile)
    cells = {cell: runs for cell, runs in cells.items() if len(runs) >= arguments.min_layouts}
    if not cells:
        raise ConfigError(f"no layout of {sources_text} has an ok run", "replay a finished sweep")
    document = replay(cells, arguments.strategy, max_parallel_runs, load_config().max_p_oom)
    if arguments.output is not None:
        write_whole(arguments.output, render(lambda: figure(document, sources_text), arguments.output))
    if arguments.json:
        print_json(document)
        return
    rows = [
        (c["program"], c["model"], f"{c['gpus']} {c['gpu']}", c["seq_len"], c["gbs"], c["layouts"],
         _text(c["rank_correlation"], ".2f"), _text(c["first_regret"], ".1%"), c["runs"],
         f"{c['gpu_hours_share']:.1%}", _text(c["regret"], ".1%", "none found"))
        for c in document["cells"]
    ]  # fmt: skip
    title = f"strategy {arguments.strategy}, batch {max_parallel_runs}"
    heads = ("program", "model", "GPUs", ">seq_len", ">gbs", ">layouts", ">Spearman", ">first", ">runs")
    show(table(title, *heads, ">GPU hours", ">regret", rows=rows), "")
    say(*_summary_lines(document))


def _text(value: float | None, form: str, missing_text: str = "-") -> str:
    return missing_text if value is None else format(value, form)


def _summary_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The sums over all cells, over those with LARGE_CELL or more layouts, and over the others."""
    predictions = document["predictions"]
    ranked = [row for row in document["cells"] if row["first_regret"] is not None]
    if ranked:
        yield (
            f"predictions in {len(ranked)} cells of {MIN_RANKED} or more step times: mean Spearman "
            f"{_text(predictions['rank_correlation'], '.2f')}, the first is {predictions['first_regret']:.1%} slower "
            f"than the best, the best is among the first {TOP_RUNS} in {predictions['best_in_first']:.0%}"
        )
    for name, size_text, near in (
        ("large_cells", f"{LARGE_CELL} or more", NEAR),
        ("small_cells", f"fewer than {LARGE_CELL}", SMALL_CELL_NEAR),
    ):
        totals = document[name]
        if totals["cells"]:
            yield (
                f"cells of {size_text} layouts: {totals['runs_share']:.1%} of {totals['layouts']:,} runs, "
                f"{totals['gpu_hours_share']:.1%} of the GPU hours; within {near:.0%} of the best in "
                f"{totals['near_best']} of {totals['cells']}"
            )
    yield f"{document['runs']:,} runs, {document['gpu_hours_share']:.1%} of the GPU hours of all layouts"


def main() -> int:
    """Reads the arguments and prints the replay; returns the exit code, 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(description="Replay measured runs with a search strategy.")
    source_help = "file of ultrabench collect or import, or name of a sweep"
    parser.add_argument("sources", metavar="FILE.parquet", nargs="+", help=source_help)
    least_help = "leave out cells with fewer layouts (default: 2)"
    parser.add_argument("--min-layouts", metavar="NUMBER", type=int, default=2, help=least_help)
    parser.add_argument("--strategy", metavar="NAME", default="adaptive", help=", ".join(STRATEGIES))
    parser.add_argument("--batch", metavar="NUMBER", type=float, default=1, help="number of concurrent runs")
    parser.add_argument("--profile", metavar="NAME", help="default: the profile of the program of the runs")
    parser.add_argument("-o", "--output", type=Path, help="draw a .png, .svg or .pdf figure")
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="folder of the sweeps")
    try:
        show_replay(parser.parse_args())
    except UltrabenchError as error:
        say(f"replay: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
