"""The runs that may be the best of their cell: those are measured again in other allocations."""

from collections.abc import Iterable, Sequence
from statistics import median

from ultrabench.result import RunResult
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate, Cell
from ultrabench.sweep.outliers import control_times, may_win

WITHIN = 1.05
"""Of the best step time of the cell."""
MOST = 4


def contenders(
    runs: Iterable[Candidate], tried: dict[str, list[AttemptState]], state: SweepState
) -> frozenset[str]:
    """run_ids of those within 5 % of their cell's best, four a cell at most; one batch has one size.

    Step times are taken relative to the control layout of the same allocation where all runs of a
    cell have one: allocations differ more than that.
    """
    controls = control_times(state)
    cells: dict[Cell, list[tuple[str, float, float | None]]] = {}
    for run in runs:
        timed = [(a, t) for a in tried.get(run.run_id, ()) if (t := step_time_s(a.result)) is not None]
        if timed:
            ratios = [t / c for a, t in timed if (c := controls.get(a.allocation or ""))]
            times = (median(t for _, t in timed), median(ratios) if ratios else None)
            cells.setdefault(run.cell, []).append((run.run_id, *times))
    return frozenset(run_id for times in cells.values() for run_id in _near_best(times))


def _near_best(times: Sequence[tuple[str, float, float | None]]) -> list[str]:
    known = [(t if r is None else r, run_id) for run_id, t, r in times]
    if any(ratio is None for _, _, ratio in times):
        known = [(t, run_id) for run_id, t, _ in times]
    best = min(known)[0]
    return [run_id for time_s, run_id in sorted(known) if time_s <= WITHIN * best][:MOST]


def step_time_s(result: RunResult | None) -> float | None:
    """Median step time of a result that may win; None for any other."""
    if result is None or not result.step_times_s or not may_win(result.status, result.stopped, None):
        return None
    return median(result.step_times_s)


def best_step_times_s(state: SweepState, runs: Iterable[Candidate]) -> dict[Cell, float]:
    """The fastest median step time of each cell so far."""
    cells = {run.run_id: run.cell for run in runs}
    found: dict[Cell, float] = {}
    for key, attempt in state.attempts.items():
        time_s, cell = step_time_s(attempt.result), cells.get(key.run_id)
        if time_s is not None and cell is not None:
            found[cell] = min(found.get(cell, time_s), time_s)
    return found
