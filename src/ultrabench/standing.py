"""The standing of every run in its cell: which one is the best, which are as good, and which cannot win.

This is the only rule for "best". The agent that ends slow runs, the launcher that repeats the best ones, status,
rankings and figures call it with the repeats that they know, and the page has a copy of it in JavaScript.

Rule. A repeat competes if it is ok, was not stopped as slower than the best, and is not in doubt; where all of a
cell are in doubt, these compete. If all that compete were measured beside one control layout, in one environment,
their ratios to the control are compared, since allocations differ; else their rates. A run counts with the median
of its repeats. The larger value wins, and of equal ones the smaller run_id. A run is as good as the best if their
95 % intervals overlap.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from ultrabench.result import NOT_TRIED, SLOWER, Status, outcome_order

NEAR = 1.05
"""A run is near the best of its cell if the best is at most this many times as fast."""


class Repeat(NamedTuple):
    """One repeat of a run as it competes in its cell: the attempt that counts for it."""

    run_id: str
    cell: Hashable
    environment: str | None = None
    """Names the environment; None where it is unknown, or the only one."""
    allocation: Hashable = None
    control: str | None = None
    """run_id of the control layout of its allocation."""
    status: str | None = None
    """None while it waits or runs."""
    stopped: str | None = None
    doubt: str | None = None
    """Why its measurement is in doubt; None if it is not."""
    rate: float | None = None
    """What is compared, where larger is better, such as tokens per second per GPU."""
    control_ratio: float | None = None
    """Step time of the control layout of its allocation over its own."""
    ci95_rel: float | None = None
    """Half the 95 % interval of the rate, relative to it; None counts as 0."""

    @property
    def measured(self) -> bool:
        """Whether it has a rate and may win, unless it is in doubt."""
        return self.rate is not None and self.status == Status.OK and self.stopped != SLOWER

    @property
    def may_win(self) -> bool:
        """Whether it may win against any other repeat."""
        return self.measured and self.doubt is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The place of a run in its cell, in one environment."""

    run_id: str
    cell: Hashable
    environment: str | None
    place: int
    """1 for the first run of the cell."""
    outcome: str | None
    """The status that the run counts with: ok, else oom, else another; None while it waits or runs."""
    repeat: int
    """Index of the repeat that stands for the run: the nearest to the median of those that compete."""
    rate: float | None = None
    """Median rate of the repeats that compete, or the rate of the one that stands for the run."""
    control_ratio: float | None = None
    """The same of the ratio to the control."""
    interval: tuple[float, float] | None = None
    """95 % interval of what is compared; None for a run that does not compete."""
    doubts: str | None = None
    """Why the measurement is in doubt; None if it is not."""
    by_control: bool = False
    """Whether ratios to the control are compared in this cell."""
    best: bool = False
    as_good: bool = False
    """Whether the run is as good as the best one."""

    @property
    def value(self) -> float | None:
        """What is compared: the ratio to the control, or the rate."""
        return self.control_ratio if self.by_control else self.rate


def standings(
    repeats: Iterable[Repeat], *, include_suspects: bool = False, by_control: bool = True
) -> dict[Hashable, list[Standing]]:
    """Cell -> the standings of its runs, the best first; the cells are in the order of the repeats.

    The best run and those that are as good come first, then the other ok runs by their value, also those that were
    stopped as slower, then suspects, runs that failed or ran out of memory, runs that wait or run, and skipped ones.

    Args:
        include_suspects: whether repeats in doubt compete with all others.
        by_control: whether ratios to the control may be compared.
    """
    cells: dict[Hashable, list[tuple[int, Repeat]]] = defaultdict(list)
    for index, repeat in enumerate(repeats):
        cells[repeat.cell].append((index, repeat))
    return {cell: _ranked(of_cell, include_suspects, by_control) for cell, of_cell in cells.items()}


def near_best(of_cell: Sequence[Standing], most: int) -> list[Standing]:
    """The best run of a cell and those near it, at most `most`; empty where no run has won."""
    values = [(s, s.value) for s in of_cell if s.interval is not None]
    ordered = sorted(
        ((s, v) for s, v in values if v is not None), key=lambda pair: (-pair[1], pair[0].run_id)
    )
    return [s for s, value in ordered if value * NEAR >= ordered[0][1]][:most]


def _ranked(
    of_cell: Sequence[tuple[int, Repeat]], include_suspects: bool, by_control: bool
) -> list[Standing]:
    measured = [(i, r) for i, r in of_cell if r.measured]
    competing = [(i, r) for i, r in measured if include_suspects or r.doubt is None] or measured
    by_control = by_control and _one_control([r for _, r in competing])
    winners = _winners(competing, by_control)
    named = {(s.run_id, s.environment) for s in winners}
    others: dict[tuple[str, str | None], tuple[int, Repeat]] = {}
    for index, repeat in of_cell:
        name = repeat.run_id, repeat.environment
        if name not in named and (name not in others or _outcome(repeat) >= _outcome(others[name][1])):
            others[name] = index, repeat
    rest = [
        Standing(
            run_id=r.run_id, cell=r.cell, environment=r.environment, place=0, outcome=r.status, repeat=i, rate=r.rate,
            control_ratio=r.control_ratio, doubts=r.doubt, by_control=by_control,
        )
        for i, r in others.values()
    ]  # fmt: skip
    ordered = sorted((*winners, *rest), key=_order)
    return [replace(standing, place=place) for place, standing in enumerate(ordered, 1)]


def _one_control(competing: Sequence[Repeat]) -> bool:
    """Whether all were measured beside one control layout, in one environment."""
    controls, environments = {r.control for r in competing}, {r.environment for r in competing} - {None}
    same = len(controls) == 1 and len(environments) <= 1
    return same and all(r.control_ratio is not None for r in competing)


def _winners(competing: Sequence[tuple[int, Repeat]], by_control: bool) -> list[Standing]:
    """The standings of the runs that compete, the best first, without their place."""
    control_ci = {
        r.allocation: r.ci95_rel or 0.0 for _, r in competing if by_control and r.run_id == r.control
    }
    by_run: dict[tuple[str, str | None], list[tuple[int, Repeat]]] = defaultdict(list)
    for index, repeat in competing:
        by_run[repeat.run_id, repeat.environment].append((index, repeat))
    found = [_competitor(of_run, by_control, control_ci) for of_run in by_run.values()]
    found.sort(key=lambda standing: (-(standing.value or 0.0), standing.run_id))
    low = found[0].interval[0] if found and found[0].interval else math.inf
    good = [s.interval is not None and s.interval[1] >= low for s in found]
    return [replace(s, best=n == 0, as_good=n > 0 and good[n]) for n, s in enumerate(found)]


def _competitor(
    of_run: Sequence[tuple[int, Repeat]], by_control: bool, control_ci: Mapping[Hashable, float]
) -> Standing:
    """The standing of a run from those of its repeats that compete."""
    values = [(r.control_ratio if by_control else r.rate) or 0.0 for _, r in of_run]
    cis = [math.hypot(r.ci95_rel or 0.0, control_ci.get(r.allocation, 0.0)) for _, r in of_run]
    reach = [abs(value) * ci for value, ci in zip(values, cis, strict=True)]
    middle = median(values)
    nearest = min(range(len(values)), key=lambda n: (abs(values[n] - middle), values[n]))
    index, repeat = of_run[nearest]
    rates = [r.rate for _, r in of_run if r.rate is not None]
    ratios = [r.control_ratio for _, r in of_run if r.control_ratio is not None]
    return Standing(
        run_id=repeat.run_id,
        cell=repeat.cell,
        environment=repeat.environment,
        place=0,
        outcome=repeat.status,
        repeat=index,
        rate=median(rates),
        control_ratio=median(ratios) if ratios else None,
        interval=(
            min(value - width for value, width in zip(values, reach, strict=True)),
            max(value + width for value, width in zip(values, reach, strict=True)),
        ),
        doubts=repeat.doubt,
        by_control=by_control,
    )


def _outcome(repeat: Repeat) -> tuple[tuple[int, str], bool]:
    """A sort key by which the last one of the repeats of a run stands for it."""
    return outcome_order(repeat.status), repeat.doubt is None


def tier(status: str | None) -> float:
    """The place of a status among those of a cell: ok, failed or out of memory, waiting or running, skipped, rejected."""
    if status in NOT_TRIED:
        return 2.0 + NOT_TRIED.index(status)
    return 0.0 if status == Status.OK else 1.0


def _order(standing: Standing) -> tuple[float, float, str]:
    first, suspect = standing.best or standing.as_good, standing.outcome == Status.OK and standing.doubts
    place = -1.0 if first else 0.5 if suspect else tier(standing.outcome)
    return place, math.inf if standing.value is None else -standing.value, standing.run_id


def same_environments(
    seen: Iterable[tuple[Hashable, str, str]],
) -> tuple[dict[str, str], dict[Hashable, list[str]]]:
    """env_id -> the env_id that stands for it, and the drivers of environments that count as one.

    Environments are one if they differ in the driver, and in nothing else that is known.

    Args:
        seen: all that is known of the environment of a repeat but the driver, its env_id, and the driver.
    """
    drivers_by_rest: dict[Hashable, dict[str, str]] = defaultdict(dict)
    same: dict[str, str] = {}
    for rest, env_id, driver in seen:
        same[env_id] = env_id
        drivers_by_rest[rest][env_id] = driver
    merged: dict[Hashable, list[str]] = {}
    for rest, driver_of in drivers_by_rest.items():
        if len({*driver_of.values()}) == len(driver_of) > 1:
            first = min(same[env_id] for env_id in driver_of)
            old = {same[env_id] for env_id in driver_of}
            same = {env_id: first if other in old else other for env_id, other in same.items()}
            merged[rest] = sorted(driver_of.values())
    return same, merged
