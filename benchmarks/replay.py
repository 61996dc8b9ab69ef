"""Replays a finished sweep as if it were running, to measure what a search strategy costs and what it misses.

`python benchmarks/replay.py FILE.parquet --strategy NAME` prints the GPU hours and the regret of a strategy in each
cell, `--json` prints them as a document, and `-o FILE.png` draws them.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_figure import figure

from ultrabench.allowed import Count
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.results.cases import Case, open_cases
from ultrabench.analysis.results.nanotron_version import with_version
from ultrabench.cli.tables import print_json, say, show, table, warn
from ultrabench.errors import ConfigError, UltrabenchError, require_known
from ultrabench.layout import Layout, dominates
from ultrabench.record import value_from
from ultrabench.result import Status
from ultrabench.standing import NEAR_BEST
from ultrabench.store.folder import write_whole
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRun:
    """A measured run and its prediction, which uses the bandwidths that its job measured."""

    run_id: str
    layout: Layout
    prediction: Prediction
    step_time_s: float | None
    """None where the run failed."""
    oom: bool
    """Whether it failed for lack of memory."""

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


ReplayedCell = tuple[str, int]
"""Model and number of nodes."""

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
    for case in cases:
        spec = case.run.spec
        if not case.run.suspect and not any(broken_rules(spec.layout, spec.shape)):
            cells.setdefault((spec.shape.name, spec.nodes), {})[spec.run_id] = _replayed_run(case, profile)
    return {
        cell: list(run_by_id.values())
        for cell, run_by_id in sorted(cells.items())
        if any(run.step_time_s for run in run_by_id.values())
    }


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
    )


def replay(
    cells: Mapping[ReplayedCell, Sequence[ReplayedRun]], strategy: str, num_parallel: int, max_p_oom: float
) -> dict[str, Any]:
    """The document that --json prints.

    `num_parallel` runs are made at a time. Hours are fractions of those of all runs. A regret of 0.02 means that the
    best layout found is 2 % slower than the best of its cell; it is None if the strategy found none.
    """
    replays, cell_rows = list[Replay](), list[dict[str, Any]]()
    for (model, nodes), runs in cells.items():
        replay = Replay(runs, max_p_oom)
        if strategy == "adaptive":
            _run_adaptively(replay, num_parallel)
        else:
            _run_in_order(replay, num_parallel, *_FIXED_ORDERS[strategy])
        replay.confirm()
        replays.append(replay)
        best_s = min(run.step_time_s for run in runs if run.step_time_s)
        regret = replay.best_s / best_s - 1 if replay.best_s < math.inf else None
        counts = {"model": model, "nodes": nodes, "layouts": len(runs), "runs": len(replay.runs_made)}
        cell_rows.append({**counts, "gpu_hours_share": replay.gpu_s / replay.total_gpu_s, "regret": regret})
    gpu_hours_share = sum(replay.gpu_s for replay in replays) / sum(replay.total_gpu_s for replay in replays)
    totals = {"gpu_hours_share": gpu_hours_share, "runs": sum(row["runs"] for row in cell_rows)}
    return {"strategy": strategy, "batch": num_parallel, **totals, "cells": cell_rows}


def show_replay(arguments: argparse.Namespace) -> None:
    """Prints what a strategy costs in each cell of a finished sweep, and what it misses.

    Raises:
        ConfigError: there is no such strategy, or no layout of the sweep has an ok run.
    """
    require_known("strategy", STRATEGIES, arguments.strategy)
    max_parallel_runs = value_from(Count, arguments.batch, "--batch")
    cases, profile = open_cases([arguments.source], arguments.profile, arguments.results_dir, say, warn)
    cells = cells_of(cases, profile)
    if not cells:
        raise ConfigError(f"no layout of {arguments.source} has an ok run; replay a finished sweep")
    document = replay(cells, arguments.strategy, max_parallel_runs, load_config().max_p_oom)
    if arguments.output is not None:
        write_whole(arguments.output, render(lambda: figure(document, arguments.source), arguments.output))
    if arguments.json:
        print_json(document)
        return
    rows = [
        (c["model"], c["nodes"], c["layouts"], c["runs"], f"{c['gpu_hours_share']:.1%}",
         "none found" if c["regret"] is None else f"{c['regret']:.1%}")
        for c in document["cells"]
    ]  # fmt: skip
    title = f"strategy {arguments.strategy}, batch {max_parallel_runs}, profile {profile.name}"
    show(table(title, "model", ">nodes", ">layouts", ">runs", ">GPU hours", ">regret", rows=rows), "")
    num_near_best = sum(c["regret"] is not None and c["regret"] <= 0.02 for c in document["cells"])
    cost_text = (
        f"{document['runs']:,} runs, {document['gpu_hours_share']:.1%} of the GPU hours of all layouts"
    )
    say(f"{cost_text}; within 2 % of the best in {num_near_best} of {len(rows)} cells")


def main() -> int:
    """Reads the arguments and prints the replay; returns the exit code, 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(description="Replay a finished sweep with a search strategy.")
    parser.add_argument(
        "source", metavar="FILE.parquet", help="file of ultrabench collect, or name of a sweep"
    )
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
