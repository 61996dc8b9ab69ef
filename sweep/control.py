"""The control layout of a cell: measured in every allocation, so that allocations can be compared."""

from collections.abc import Iterable

from ultrabench.sweep.candidate import Candidate, Cell
from ultrabench.sweep.plan import Plan

SAFE_SHARE = 0.7
"""Largest predicted share of the memory of an accelerator; a control run must not fail for lack of memory."""


def controls(plan: Plan) -> dict[Cell, Candidate]:
    """One run for each cell: the fastest by prediction of those that surely fit, else the smallest."""
    chosen: dict[Cell, Candidate] = {}
    for run in plan.runs:
        held = chosen.get(run.cell)
        if held is None or _rank(run) < _rank(held):
            chosen[run.cell] = run
    return chosen


def _rank(run: Candidate) -> tuple[float, float, str]:
    """Smaller is better; the id settles ties, so that every launch chooses the same."""
    share, time_s = run.prediction.memory_share, run.prediction.step_time_s
    return (0.0, time_s, run.run_id) if share <= SAFE_SHARE else (share, 0.0, run.run_id)


def next_repeat(run_id: str, known: Iterable[tuple[str, int, int]], repeats: int) -> int:
    """The number of a further repeat of a control: behind those the plan asks for and all known ones."""
    return max([repeats - 1, *(repeat for other, repeat, _ in known if other == run_id)]) + 1
