"""Chooses the runs of a cell that are measured more than once: its control layout and its contenders."""

from collections.abc import Iterable, Sequence
from statistics import median

from ultrabench.result import RunResult
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.outliers import control_times, may_win

SAFE_SHARE = 0.7
"""Largest predicted share of a rank's memory for a control run, which must not run out of memory."""
WITHIN = 1.05
"""A contender's step time is at most this many times the best step time of its cell."""
MOST = 4
"""Largest number of contenders of one cell."""


def controls(plan: Plan) -> dict[CellKey, Candidate]:
    """CellKey -> its control run: the fastest by prediction of those that surely fit, else the smallest."""
    chosen: dict[CellKey, Candidate] = {}
    for run in plan.runs:
        held = chosen.get(run.cell)
        if held is None or _rank(run) < _rank(held):
            chosen[run.cell] = run
    return chosen


def _rank(run: Candidate) -> tuple[float, float, str]:
    """Sort key of a control run, smaller is better; the run_id settles ties, so that all launches agree."""
    share, time_s = run.prediction.memory_share, run.prediction.step_time_s
    return (0.0, time_s, run.run_id) if share <= SAFE_SHARE else (share, 0.0, run.run_id)


def next_repeat(run_id: str, known: Iterable[tuple[str, int, int]], repeats: int) -> int:
    """The number of a new repeat of a control run, larger than those of the plan and all known ones."""
    return max([repeats - 1, *(repeat for other, repeat, _ in known if other == run_id)]) + 1


def contenders(
    runs: Iterable[Candidate], tried: dict[str, list[AttemptState]], state: SweepState
) -> frozenset[str]:
    """The run_ids of the runs within 5 % of the best of their cell, at most four for each cell.

    Where every run of a cell was measured beside a control layout, step times are divided by those of the
    control, because allocations may differ by more than 5 %.
    """
    controls = control_times(state)
    cells: dict[CellKey, list[tuple[str, float, float | None]]] = {}
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
    """Median step time of a result that may win its cell; None for any other result."""
    if result is None or not result.step_times_s or not may_win(result.status, result.stopped, None):
        return None
    return median(result.step_times_s)


def best_step_times_s(state: SweepState, runs: Iterable[Candidate]) -> dict[CellKey, float]:
    """CellKey -> its shortest median step time so far, in seconds."""
    cells = {run.run_id: run.cell for run in runs}
    found: dict[CellKey, float] = {}
    for key, attempt in state.attempts.items():
        time_s, cell = step_time_s(attempt.result), cells.get(key.run_id)
        if time_s is not None and cell is not None:
            found[cell] = min(found.get(cell, time_s), time_s)
    return found
