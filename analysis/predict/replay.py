"""Replays a finished sweep as if it were live, to measure what a strategy of search costs and what it misses."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ultrabench.analysis.predict.cases import Case
from ultrabench.analysis.predict.nanotron import of_version
from ultrabench.layout import Layout, dominates
from ultrabench.result import Status
from ultrabench.standing import NEAR_BEST
from ultrabench.sweep.grid import broken_rules
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.predict import LIKELY_OOM, Prediction
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.search import TriedRuns, propose
from ultrabench.sweep.running.attempts import MAX_CONTENDERS

START_S = 60.0
"""Seconds from the start of a run to its first step."""
STEPS, FAILED_STEPS, CONFIRM_STEPS = 5, 1, 10
"""Steps of a run, of a failed run, and of the two repeats of a contender in one process."""
RACE_RATIO, RACED_STEPS = 1.3, 2
"""A run this many times slower than the best of its cell so far is stopped after this many steps."""
TOP_RUNS = 5
"""Runs with the lowest predicted step time that the strategy predicted makes."""
RANDOM_SHARE = 0.1
"""Share of the hours of a cell that the strategy random uses."""


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

    def cost(self, best_s: float = math.inf) -> float:
        """GPU seconds of the run, when the best step time before it was `best_s`."""
        if self.step_time_s is None:
            return self._gpu_s(FAILED_STEPS * self.prediction.step_time_s)
        num_steps = RACED_STEPS if self.step_time_s > RACE_RATIO * best_s else STEPS
        return self._gpu_s(num_steps * self.step_time_s)

    def confirmation(self) -> float:
        """GPU seconds of the repeats of a contender."""
        return self._gpu_s(CONFIRM_STEPS * (self.step_time_s or 0.0))

    def _gpu_s(self, steps_s: float) -> float:
        return (START_S + steps_s) * self.layout.world_size


@dataclass(slots=True)
class Replay:
    """The runs that a strategy has made so far in one cell."""

    runs: Sequence[ReplayedRun]
    """All runs of the cell."""
    max_p_oom: float
    """P(OOM) above which the strategy adaptive makes no run."""
    runs_made: list[ReplayedRun] = field(default_factory=list)
    gpu_s: float = 0.0

    @property
    def best_s(self) -> float:
        """The best step time found so far in seconds."""
        return min((run.step_time_s for run in self.runs_made if run.step_time_s), default=math.inf)

    @property
    def total_gpu_s(self) -> float:
        """GPU seconds of all runs of the cell, none of them stopped early."""
        return sum(run.cost() for run in self.runs)

    def make(self, runs: Sequence[ReplayedRun]) -> None:
        """Makes these runs at the same time."""
        best_s = self.best_s
        self.gpu_s += sum(run.cost(best_s) for run in runs)
        self.runs_made += runs

    def tried(self) -> TriedRuns:
        """What the search knows of the cell."""
        times_s = {run.run_id: run.step_time_s for run in self.runs_made if run.step_time_s}
        oom_ids = {run.run_id for run in self.runs_made if run.oom}
        failed_ids = {run.run_id for run in self.runs_made} - oom_ids - times_s.keys()
        return TriedRuns(times_s=times_s, oom_ids=oom_ids, failed_ids=failed_ids, max_p_oom=self.max_p_oom)

    def possible(self, run: ReplayedRun) -> bool:
        """Whether no run that ran out of memory shows that this one would, too."""
        return not any(other.oom and dominates(other.layout, run.layout) for other in self.runs_made)

    def confirm(self) -> None:
        """Repeats the contenders."""
        contenders = [r for r in self.runs_made if r.step_time_s and r.step_time_s <= NEAR_BEST * self.best_s]
        contenders.sort(key=lambda r: r.step_time_s or 0.0)
        self.gpu_s += sum(r.confirmation() for r in contenders[:MAX_CONTENDERS])


def _adaptive(cell: Replay, batch: int) -> None:
    while proposed := propose(cell.runs, cell.tried(), batch):
        cell.make(proposed)


def _in_order(
    cell: Replay, batch: int, key: Callable[[ReplayedRun], Any], is_enough: Callable[[Replay], bool]
) -> None:
    remaining = sorted(cell.runs, key=key)
    while remaining and not is_enough(cell):
        next_runs = [run for run in remaining if cell.possible(run)][:batch]
        cell.make(next_runs)
        remaining = [run for run in remaining if run not in next_runs and cell.possible(run)]


ReplayedCell = tuple[str, int]
"""Model and number of nodes."""

_IN_ORDER: dict[str, tuple[Callable[[ReplayedRun], Any], Callable[[Replay], bool]]] = {
    "exhaustive": (lambda run: (run.prediction.p_oom > LIKELY_OOM, run.cost()), lambda cell: False),
    "random": (lambda run: hashlib.sha256(run.run_id.encode()).digest(), lambda cell: cell.gpu_s >= RANDOM_SHARE * cell.total_gpu_s),
    "predicted": (lambda run: (run.prediction.p_oom > LIKELY_OOM, run.prediction.step_time_s), lambda cell: len(cell.tried().times_s) >= TOP_RUNS),
}  # fmt: skip
"""Strategy that makes runs in a fixed order -> the sort key of a run, and when enough is measured."""
STRATEGIES = ("adaptive", *_IN_ORDER)


def cells_of(cases: Sequence[Case], profile: Profile) -> dict[ReplayedCell, list[ReplayedRun]]:
    """The runs of each cell in which any layout works.

    Suspect runs and layouts that a structural rule rejects are left out. Of several measurements of a run the
    last one counts.
    """
    cells: dict[ReplayedCell, dict[str, ReplayedRun]] = {}
    for case in cases:
        spec = case.run.spec
        if not case.run.suspect and not any(broken_rules(spec.layout, spec.shape)):
            cells.setdefault((spec.shape.name, spec.nodes), {})[spec.run_id] = _run(case, profile)
    return {
        cell: list(runs.values())
        for cell, runs in sorted(cells.items())
        if any(run.step_time_s for run in runs.values())
    }


def _run(case: Case, profile: Profile) -> ReplayedRun:
    spec, limit_bytes = case.run.spec, case.hardware.mem_bytes
    constants = of_version(memory_constants(profile.framework, profile.memory), case.run)
    stages = predict_memory(spec, constants)
    peak_bytes = max(stage.peak_bytes for stage in stages)
    time_s, low_s, high_s = case.interval_s(profile)
    prediction = Prediction(
        step_time_s=time_s,
        step_time_low_s=low_s,
        step_time_high_s=high_s,
        p_oom=p_oom(stages, limit_bytes, constants),
        limited_by="compute",
        peak_mem_bytes=int(peak_bytes),
        memory_share=peak_bytes / limit_bytes,
        duration_s=START_S + STEPS * time_s,
    )
    return ReplayedRun(
        run_id=spec.run_id,
        layout=spec.layout,
        prediction=prediction,
        step_time_s=case.run.step_time_s if case.run.status == Status.OK else None,
        oom=case.run.status == Status.OOM,
    )


def replay(
    cells: Mapping[ReplayedCell, Sequence[ReplayedRun]], strategy: str, batch: int, max_p_oom: float
) -> dict[str, Any]:
    """The document of `ultrabench predict replay --json`.

    Hours are shares of those of all runs. A regret of 0.02 means that the best layout found is 2 % slower than the
    best of its cell; it is None where the strategy found none.
    """
    replays, rows = list[Replay](), list[dict[str, Any]]()
    for (model, nodes), runs in cells.items():
        cell = Replay(runs, max_p_oom)
        if strategy == "adaptive":
            _adaptive(cell, batch)
        else:
            _in_order(cell, batch, *_IN_ORDER[strategy])
        cell.confirm()
        replays.append(cell)
        best_s = min(run.step_time_s for run in runs if run.step_time_s)
        regret = cell.best_s / best_s - 1 if cell.best_s < math.inf else None
        cell_counts = {"model": model, "nodes": nodes, "layouts": len(runs), "runs": len(cell.runs_made)}
        rows.append({**cell_counts, "gpu_hours_share": cell.gpu_s / cell.total_gpu_s, "regret": regret})
    share = sum(cell.gpu_s for cell in replays) / sum(cell.total_gpu_s for cell in replays)
    totals = {"gpu_hours_share": share, "runs": sum(row["runs"] for row in rows)}
    return {"strategy": strategy, "batch": batch, **totals, "cells": rows}
