"""Groups of similar layouts of a cell: to measure one of them teaches what measurements of the others would.

A layout belongs to the group of a better one, the best of the group, if its options are the same, its predicted speed
is within SIMILAR_SPEED of that of the best, and the same part limits both. Its degrees are those of the best, or trade
one pair of them: one is doubled as often as another one is halved, each time from a layout of the group. So dp32, dp16
cp2 and dp8 cp4 are one group if all three are nearly as fast, but dp32 and dp8 tp2 cp2 are not. Micro-batch, ZeRO
stage, recomputation and other axes may differ.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import ne
from types import MappingProxyType
from typing import Any

from ultrabench.errors import counted
from ultrabench.layout import degrees_of
from ultrabench.sweep.candidate import Candidate

SIMILAR_SPEED = 0.03
"""Largest difference of the speeds of similar layouts, relative to the best of their group."""

Group = tuple[Candidate, ...]
"""Similar runs, the best first."""


def groups_of(
    runs: Sequence[Candidate], rate_by_run: Mapping[str, float | None] = MappingProxyType({})
) -> Iterator[Group]:
    """The groups of the runs of a cell, in the order of their best runs.

    Args:
        runs: the runs of one cell, the best first.
        rate_by_run: run_id -> measured tokens/s/GPU. Two measured runs are compared by these, others by predictions.
    """
    while runs:
        best, *others = runs
        similar_runs = [run for run in _nearly_as_fast(others, best, rate_by_run) if _is_similar(run, best)]
        degrees = _traded_degrees(degrees_of(best.layout), {degrees_of(r.layout) for r in similar_runs})
        group = (best, *(run for run in similar_runs if degrees_of(run.layout) in degrees))
        yield group
        grouped_ids = {run.run_id for run in group}
        runs = [run for run in others if run.run_id not in grouped_ids]


def shown_runs(groups: Sequence[Group], *, with_similar: bool) -> Iterator[tuple[Candidate, dict[str, int]]]:
    """The runs that stand for groups, or all of their runs, each with the keys of its row that describe its group."""
    for number, group in enumerate(groups, 1):
        group_keys = {"group": number, "similar": len(group) - 1}
        yield from ((run, group_keys) for run in (group if with_similar else group[:1]))


def group_column(*, with_similar: bool) -> str:
    """The key of a row that a table shows of its group: its number, or the number of similar layouts
    that are not shown.
    """
    return "group" if with_similar else "similar"


def group_lines(rows: Sequence[Mapping[str, Any]], *, with_similar: bool) -> Iterator[str]:
    """A line about the groups of a table of these rows, if a layout is similar to another one."""
    limits = f"{100 * SIMILAR_SPEED:g} % of the speed of the best of their group and limited by the same part"
    num_similar = sum(row["similar"] for row in rows)
    if num_similar and with_similar:
        yield f"similar layouts have the same group: they are within {limits}"
    elif num_similar:
        are_left_out = "is left out: it is" if num_similar == 1 else "are left out: they are"
        yield f"{counted(num_similar, 'similar layout')} {are_left_out} within {limits}; --all shows them"


def _nearly_as_fast(
    runs: Iterable[Candidate], best: Candidate, rate_by_run: Mapping[str, float | None]
) -> Iterator[Candidate]:
    """The runs whose speed differs from that of the best one by at most SIMILAR_SPEED."""
    best_step_s, best_rate = best.prediction.step_time_s, rate_by_run.get(best.run_id)
    for run in runs:
        relative_speed = best_step_s / run.prediction.step_time_s
        if best_rate and (rate := rate_by_run.get(run.run_id)):
            relative_speed = rate / best_rate
        if abs(relative_speed - 1) <= SIMILAR_SPEED:
            yield run


def _is_similar(run: Candidate, best: Candidate) -> bool:
    """Whether a run that is nearly as fast as the best one of a group belongs to it if its degrees do."""
    has_same_limit = run.prediction.limited_by == best.prediction.limited_by
    return run.spec.kernel.is_predictable and has_same_limit and run.spec.variant == best.spec.variant


def _traded_degrees(best: tuple[int, ...], others: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """The degrees of a group: those of its best layout, and others that trade one pair of them,
    doubling by doubling.
    """
    candidates = [degrees for degrees in others if sum(map(ne, best, degrees)) <= 2]
    connected, reached = {best}, [best]
    for degrees in reached:  # grows while it is walked
        neighbours = [o for o in candidates if o not in connected and _is_one_doubling(degrees, o)]
        connected.update(neighbours)
        reached += neighbours
    return connected


def _is_one_doubling(degrees: Sequence[int], others: Sequence[int]) -> bool:
    """Whether one degree is doubled, another one halved, and all others are equal."""
    factors = (other / degree for degree, other in zip(degrees, others, strict=True) if other != degree)
    return sorted(factors) == [0.5, 2]
