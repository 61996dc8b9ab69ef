"""Chooses the runs of a cell that are measured more than once: its control layout and its contenders."""

from collections.abc import Iterable, Sequence
from statistics import median

from ultrabench.result import RunResult
from ultrabench.store.state import SweepState
from ultrabench.sweep.plan import Candidate, CellKey, Plan
from ultrabench.sweep.running.outliers import control_times, may_win

SAFE_SHARE = 0.7
"""Largest predicted share of a rank's memory for a control run, which must not run out of memory."""
WITHIN = 1.05
"""A contender's step time is at most this many times the best step time of its cell."""
MOST = 4
"""Largest number of contenders of one cell."""


def controls(plan: Plan) -> dict[CellKey, Candidate]:
    """CellKey -> its control run: the fastest by prediction of those that surely fit, else the smallest."""
    return {cell: min(runs, key=_rank) for cell, runs in plan.cells.items()}


def _rank(run: Candidate) -> tuple[float, float, str]:
    """Sort key of a control run, smaller is better; the run_id settles ties, so that all launches agree."""
    share, time_s = run.prediction.memory_share, run.prediction.step_time_s
    return (0.0, time_s, run.run_id) if share <= SAFE_SHARE else (share, 0.0, run.run_id)


def next_repeat(run_id: str, known: Iterable[tuple[str, int, int]], repeats: int) -> int:
    """The number of a new repeat of a control run, larger than those of the plan and all known ones."""
    return max([repeats - 1, *(repeat for other, repeat, _ in known if other == run_id)]) + 1


def contenders(runs: Iterable[Candidate], state: SweepState) -> frozenset[str]:
    """The run_ids of the runs within 5 % of the best of their cell, at most four for each cell.

    Where every run of a cell was measured beside a control layout, step times are divided by those of the
    control, because allocations may differ by more than 5 %.
    """
    controls, tried = control_times(state), state.by_run()
    cells: dict[CellKey, list[tuple[str, float, float | None]]] = {}
    for run in runs:
        timed = [(a, t) for a in tried.get(run.run_id, ()) if (t := step_time_s(a.result)) is not None]
        if timed:
            ratios = [t / c for a, t in timed if (c := controls.get(a.allocation or ""))]
            times = (median(t for _, t in timed), median(ratios) if ratios else None)
            cells.setdefault(run.cell, []).append((run.run_id, *times))
    return frozenset(run_id for times in cells.values() for run_id in _near_best(times))


def _near_best(times: Sequence[tuple[str, float, float | None]]) -> list[str]:
    ratios = sorted((ratio, run_id) for run_id, _, ratio in times if ratio is not None)
    known = ratios if len(ratios) == len(times) else sorted((time_s, run_id) for run_id, time_s, _ in times)
    return [run_id for time_s, run_id in known if time_s <= WITHIN * known[0][0]][:MOST]


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
