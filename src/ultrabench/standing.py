"""The standing of every run in its cell: which one is the best, which are as good, and which cannot win.

This is the only rule for "best". The agent that ends slow runs, the launcher that repeats the best ones, status,
rankings and figures call it with the repeats that they know, and the page has a copy of it in JavaScript.

Rule. A repeat competes if it is ok, was not stopped as slower than the best, and is not suspect;
where all of a cell are suspect, these compete. If all that compete were measured beside one control layout,
in one environment, their ratios to the control are compared, since allocations differ; else their rates. A run counts,
and is shown, with the median of the repeats that compete, which lies between two of an even number.
The larger value wins, and of equal ones the smaller run_id. A run is as good as the best if their 95 %
intervals overlap. A run that was only screened, by parts of steps or by few whole steps, is neither the best nor as
good, and repeats that screened a run do not count beside those that measured it in full. Only the interval holds them,
since they show what starts differ in: few whole steps as they are, and parts if one start has measured both, with the
ratio of whole steps to parts in it. A run that was only screened and whose start in full has failed stands as that
start ended, such as oom, and none of its repeats competes.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from ultrabench.result import FAILURES, NOT_TRIED, OUTER_FAILURES, SLOWER, Status, outcome_order, tier
from ultrabench.step_time import START_SD

NEAR_BEST = 1.05
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
    suspect: str | None = None
    """Why its measurement is suspect; None if it is not."""
    rate: float | None = None
    """What is compared, where larger is better, such as tokens per second per GPU."""
    control_ratio: float | None = None
    """Step time of the control layout of its allocation, measured beside it, over its own."""
    ci95_rel: float | None = None
    """Half the 95 % interval of the step time, relative to it; None counts as 0."""
    ci_reached: bool | None = None
    """Whether this interval met the target of the measurement."""
    control_ci95_rel: float | None = None
    """Half the 95 % interval of the step time of the control layout beside it, relative to that; None in tables of
    earlier versions: that of the control runs of its allocation."""
    partial: bool = False
    """Whether parts of steps alone were measured."""
    screened: bool = False
    """Whether it chooses contenders, but does not say which one is the best: by parts alone, or by few whole steps."""
    parts_ci95_rel: float | None = None
    """Half the 95 % interval of the step time by the turns of parts alone, relative to it; None where it is unknown."""
    parts_ratio: float | None = None
    """Step time by parts over that by whole steps, both measured in this start; None where not both were."""

    @property
    def measured(self) -> bool:
        """Whether it has a rate and may win, unless it is suspect."""
        return self.rate is not None and self.status == Status.OK and self.stopped != SLOWER


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a run in its cell, in one environment."""

    run_id: str
    cell: Hashable
    environment: str | None
    place: int
    """1 for the first run of the cell."""
    outcome: str | None
    """The status of the run: ok, else oom, else that of its latest repeat; None while it waits or runs. Of a run that
    failed in full, that of the start which was to measure it in full."""
    repeat: int
    """Index of the repeat that stands for the run: the nearest to the median of those that compete."""
    rate: float | None = None
    """The median of the rates of the repeats that compete; that of this repeat if none does."""
    control_ratio: float | None = None
    """The median of the ratios of these repeats to their controls, of those whose ratio is known."""
    value: float | None = None
    """What is compared: the ratio to the control, or the rate."""
    control: str | None = None
    """run_id of this control layout."""
    interval: tuple[float, float] | None = None
    """95 % interval of what is compared; None for a run that does not compete."""
    rate_interval: tuple[float, float] | None = None
    """95 % interval of the rate; None for a run that does not compete."""
    ci_reached: bool | None = None
    """Whether the intervals of all these repeats met the target of the measurement; None where this is unknown."""
    suspect: str | None = None
    """Why the measurement is suspect; None if it is not."""
    screened: bool = False
    """Whether it was only screened, so that it is neither the best nor as good."""
    by_control: bool = False
    """Whether ratios to the control are compared in this cell."""
    best: bool = False
    as_good: bool = False
    """Whether the run is as good as the best one."""
    competing: tuple[int, ...] = ()
    """Indices of its repeats that compete, whose median counts."""
    num_repeats: int = 0
    """Number of its repeats that have ended."""
    num_repeats_failed: int = 0
    """Number of these that were not ok."""

    @property
    def num_competing(self) -> int:
        """Number of its repeats that compete."""
        return len(self.competing)

    @property
    def ci95_rel(self) -> float | None:
        """Half the 95 % interval of the rate, relative to it: that of the step time of a single
        repeat; None if unknown.
        """
        if self.rate_interval is None or not self.rate or not all(self.rate_interval):
            return None
        low, high = self.rate_interval
        to_low, to_high = (
            (self.rate / low, self.rate / high) if self.rate > 0 else (low / self.rate, high / self.rate)
        )
        return max(to_low - 1, 1 - to_high) or None

    @property
    def may_win(self) -> bool:
        """Whether the run may win against any other one."""
        return self.interval is not None and self.suspect is None


def standings(
    repeats: Iterable[Repeat],
    *,
    indices: Iterable[int] | None = None,
    include_suspects: bool = False,
    by_control: bool = True,
) -> dict[Hashable, list[Standing]]:
    """Cell -> the standings of its runs, the best first; the cells are in the order of the repeats.

    The best run and those that are as good come first, then the other ok runs by their value, also suspects and those
    that were stopped as slower, then runs that failed or ran out of memory, runs that wait or run, and skipped ones.

    Args:
        indices: the index of each repeat, if they are not counted from 0.
        include_suspects: whether suspect repeats compete with all others.
        by_control: whether ratios to the control may be compared.
    """
    repeats_by_cell: dict[Hashable, list[_IndexedRepeat]] = defaultdict(list)
    for index, repeat in enumerate(repeats) if indices is None else zip(indices, repeats, strict=True):
        repeats_by_cell[repeat.cell].append((index, repeat))
    return {cell: _rank(repeats, include_suspects, by_control) for cell, repeats in repeats_by_cell.items()}


def near_best(standings_of_cell: Sequence[Standing], max_runs: int) -> list[Standing]:
    """The best run of a cell and those near it, at most `max_runs`; empty where no run has won.

    A run is near the best if that is at most NEAR_BEST times as fast. If one of them was only screened, it is also near
    within half the joint interval of both, about one standard error: a rough number must not decide what is measured
    in full.
    """
    competing = sorted((s for s in standings_of_cell if s.interval is not None), key=_value_key)
    if not competing:
        return []
    best = competing[0]
    return [standing for standing in competing if _is_near(standing, best)][:max_runs]


ROUGH_SHARE = 0.5
"""A run that was only screened is near the best within this part of the joint interval. With all of it, searches by
parts whose errors are those of busy cores confirm a third more and miss as much."""


def _is_near(standing: Standing, best: Standing) -> bool:
    if (standing.value or 0.0) >= (best.value or 0.0) / NEAR_BEST:
        return True
    return (standing.screened or best.screened) and _gap(standing, best) <= ROUGH_SHARE


def failed_in_full(ends: Iterable[tuple[str | None, bool]]) -> bool:
    """Whether a run was only screened, and a start that was to measure it in full has failed.

    A start that was lost, cancelled or taken from the run does not count: the next launch tries it again anyway.

    Args:
        ends: how each repeat of the run ended, and whether it only screened the run.
    """
    all_ends = [*ends]
    screens = [is_screened for status, is_screened in all_ends if status == Status.OK]
    is_only_screened = bool(screens) and all(screens)
    return is_only_screened and any(map(_is_failure_in_full, all_ends))


_OWN_FAILURES = FAILURES - OUTER_FAILURES


def _is_failure_in_full(end: tuple[str | None, bool]) -> bool:
    status, is_screened = end
    return not is_screened and status in _OWN_FAILURES


def open_contenders(contenders: Sequence[Standing]) -> list[Standing]:
    """Those of the contenders of a cell that may still be the best one, or as good, and need more measurements.

    A contender needs no more if it was measured in full and is slower than the best one by more than the joint
    interval of both. Steps do not show what starts differ in, so that the half-width of a run with n starts
    is at least 2 START_SD / sqrt(n), and that of a single start holds both.
    """
    full = [s for s in contenders if s.may_win and not s.screened and s.value]
    best = min(full, key=_value_key, default=None)
    if best is None:
        return [*contenders]
    return [standing for standing in contenders if standing.screened or _gap(standing, best) <= 1]


def _gap(standing: Standing, best: Standing) -> float:
    """The difference of a run from the best one, in half-widths of the joint interval of both; 0 if it is unknown."""
    if not standing.value or not best.value:
        return 0.0
    return abs(math.log(best.value / standing.value)) / math.hypot(_half_width(best), _half_width(standing))


def _half_width(standing: Standing) -> float:
    """Half the 95 % interval of what is compared, relative to it, with what its starts may differ in."""
    (low, high), value = standing.interval or (0.0, 0.0), standing.value or 1.0
    shown, between_starts = abs(high - low) / abs(2 * value), 2 * START_SD / math.sqrt(standing.num_competing)
    return math.hypot(shown, between_starts) if standing.num_competing == 1 else max(shown, between_starts)


_IndexedRepeat = tuple[int, Repeat]
"""The index of a repeat among all of them, and the repeat."""


def _rank(repeats: Sequence[_IndexedRepeat], include_suspects: bool, by_control: bool) -> list[Standing]:
    """The standings of the runs of one cell, the best first."""
    all_by_run = _group_by_run(repeats)
    failed_runs = {
        run for run, pairs in all_by_run.items() if failed_in_full((r.status, r.screened) for _, r in pairs)
    }
    measured_pairs = [
        (index, repeat)
        for index, repeat in repeats
        if repeat.measured and (repeat.run_id, repeat.environment) not in failed_runs
    ]
    sure_pairs = [pair for pair in measured_pairs if include_suspects or pair[1].suspect is None]
    competing = sure_pairs or measured_pairs
    by_control = by_control and _have_one_control([repeat for _, repeat in competing])
    control_cis = _control_cis(repeat for _, repeat in competing) if by_control else {}
    pairs_by_run = _group_by_run(competing)
    whole_by_parts = {run: _whole_by_parts(pairs) for run, pairs in pairs_by_run.items()}
    competing_by_run = {run: _full_ones(pairs) for run, pairs in pairs_by_run.items()}
    other_starts_by_run = {
        run: _other_starts(pairs, whole_by_parts, by_control) for run, pairs in pairs_by_run.items()
    }
    drafts = [
        _standing(
            repeats_of_run,
            competing_by_run.get(run, ()),
            other_starts_by_run.get(run, ()),
            by_control,
            control_cis,
            run in failed_runs,
        )
        for run, repeats_of_run in all_by_run.items()
    ]
    full_drafts = [s for s in drafts if s.interval is not None and not s.screened]
    best = min(full_drafts, key=_value_key, default=None)
    best_low = best.interval[0] if best and best.interval else math.inf  # lower end of its interval
    as_good_ids = {id(s) for s in full_drafts if s is not best and s.interval and s.interval[1] >= best_low}
    flagged_standings = [(s, s is best, id(s) in as_good_ids) for s in drafts]
    flagged_standings.sort(key=lambda entry: _place_key(entry[0], entry[1] or entry[2]))
    return [
        msgspec.structs.replace(standing, place=place, best=is_best, as_good=is_as_good)
        for place, (standing, is_best, is_as_good) in enumerate(flagged_standings, 1)
    ]


class _Ratio(NamedTuple):
    """How much longer whole steps of a run take than its parts say."""

    value: float
    ci95_rel: float
    """Half the 95 % interval of it, relative to it."""


def _whole_by_parts(repeats: Sequence[_IndexedRepeat]) -> _Ratio | None:
    """The ratio of whole steps to parts of a run, the median of its starts that have measured both.

    It is 1 for a run that was measured by whole steps alone, and None where no start has measured both.
    """
    if not any(r.partial or r.parts_ratio for _, r in repeats):
        return _Ratio(1.0, 0.0)
    both = [r for _, r in repeats if not r.partial and r.parts_ratio and r.parts_ci95_rel is not None]
    if not both:
        return None
    cis = [math.hypot(r.ci95_rel or 0.0, r.parts_ci95_rel or 0.0) for r in both]
    return _Ratio(median(1 / (r.parts_ratio or 1.0) for r in both), median(cis))


def _full_ones(repeats: Sequence[_IndexedRepeat]) -> list[_IndexedRepeat]:
    """The repeats of a run that measured it in full; all if none did."""
    return [pair for pair in repeats if not pair[1].screened] or [*repeats]


def _other_starts(
    repeats: Sequence[_IndexedRepeat],
    whole_by_parts: Mapping[tuple[str, str | None], _Ratio | None],
    by_control: bool,
) -> list[Repeat]:
    """The repeats that screened a run which was measured in full, as if whole steps had been measured in their starts.

    Args:
        whole_by_parts: run_id and environment of each run -> the ratio of its whole steps to its parts.
        by_control: whether ratios to the control layout are compared, whose parts differ from its whole steps, too.
    """
    screened, first = [repeat for _, repeat in repeats if repeat.screened], repeats[0][1]
    if len(screened) == len(repeats):
        return []
    by_parts = [repeat for repeat in screened if repeat.partial]
    by_few_steps = [repeat for repeat in screened if not repeat.partial]
    ratio, control_ratio = whole_by_parts[first.run_id, first.environment], None
    if by_control and first.control:
        control_ratio = whole_by_parts.get((first.control, first.environment))
        ratio = ratio if control_ratio else None
    as_whole = (_as_whole(repeat, ratio, control_ratio) for repeat in by_parts)
    return [*by_few_steps, *filter(None, as_whole)]


def _as_whole(repeat: Repeat, ratio: _Ratio | None, control_ratio: _Ratio | None) -> Repeat | None:
    """A repeat that was measured by parts as if by whole steps; None where no start has measured both."""
    if ratio is None or repeat.parts_ci95_rel is None or not repeat.rate:
        return None
    rate = repeat.rate / ratio.value if repeat.rate > 0 else repeat.rate * ratio.value
    value, ci = repeat.control_ratio, math.hypot(repeat.parts_ci95_rel, ratio.ci95_rel)
    if value is not None and control_ratio:
        value *= control_ratio.value / ratio.value
        ci = math.hypot(ci, control_ratio.ci95_rel)
    return repeat._replace(rate=rate, control_ratio=value, ci95_rel=ci, partial=False)


def _control_cis(competing: Iterable[Repeat]) -> dict[Hashable, float]:
    """Allocation -> half the 95 % interval of the step time of its control runs, relative to it;
    the median of several.
    """
    cis_by_allocation = defaultdict[Hashable, list[float]](list)
    for repeat in competing:
        if repeat.run_id == repeat.control:
            cis_by_allocation[repeat.allocation].append(repeat.ci95_rel or 0.0)
    return {allocation: median(cis) for allocation, cis in cis_by_allocation.items()}


def _control_ci(repeat: Repeat, control_cis: Mapping[Hashable, float]) -> float:
    """Half the 95 % interval of the step time of the control layout beside a repeat, relative to it."""
    if repeat.control_ci95_rel is not None:
        return repeat.control_ci95_rel
    return control_cis.get(repeat.allocation, 0.0)


def _group_by_run(repeats: Iterable[_IndexedRepeat]) -> dict[tuple[str, str | None], list[_IndexedRepeat]]:
    """run_id and environment of a run -> its repeats."""
    repeats_by_run = defaultdict[tuple[str, str | None], list[_IndexedRepeat]](list)
    for index, repeat in repeats:
        repeats_by_run[repeat.run_id, repeat.environment].append((index, repeat))
    return repeats_by_run


def _have_one_control(competing: Sequence[Repeat]) -> bool:
    """Whether all were measured beside one control layout, in one environment."""
    controls, environments = {r.control for r in competing}, {r.environment for r in competing} - {None}
    is_comparable = len(controls) == 1 and len(environments) <= 1
    return is_comparable and all(r.control_ratio is not None for r in competing)


def _standing(
    repeats: Sequence[_IndexedRepeat],
    competing: Sequence[_IndexedRepeat],
    other_starts: Sequence[Repeat],
    by_control: bool,
    control_cis: Mapping[Hashable, float],
    is_failed: bool,
) -> Standing:
    """The standing of a run from its repeats and those of them that compete, without its place.

    Args:
        other_starts: what `_other_starts` returns, which only the intervals hold.
        control_cis: allocation -> half the 95 % interval of the step time of its control, relative to it.
        is_failed: whether its start in full has failed.
    """
    interval = rate_interval = None
    if competing:
        values = [(repeat.control_ratio if by_control else repeat.rate) or 0.0 for _, repeat in competing]
        median_value = median(values)
        nearest_index = min(range(len(values)), key=lambda n: (abs(values[n] - median_value), values[n]))
        index, representative = competing[nearest_index]
        starts = [*(repeat for _, repeat in competing), *other_starts]
        interval = rate_interval = _interval([(r.rate or 0.0, r.ci95_rel or 0.0) for r in starts])
        if by_control:
            cis = (math.hypot(r.ci95_rel or 0.0, _control_ci(r, control_cis)) for r in starts)
            interval = _interval([(r.control_ratio or 0.0, ci) for r, ci in zip(starts, cis, strict=True)])
    else:
        ended = (
            [p for p in repeats if _is_failure_in_full((p[1].status, p[1].screened))]
            if is_failed
            else repeats
        )
        index, representative = max(ended, key=lambda pair: (*_outcome_key(pair[1]), pair[0]))
    shown_repeats = [repeat for _, repeat in competing] or [representative]
    rate = _median_of_known(repeat.rate for repeat in shown_repeats)
    control_ratio = _median_of_known(repeat.control_ratio for repeat in shown_repeats)
    reached = {repeat.ci_reached for repeat in shown_repeats}
    ended_statuses = [repeat.status for _, repeat in repeats if repeat.status not in NOT_TRIED]
    return Standing(
        run_id=representative.run_id,
        cell=representative.cell,
        environment=representative.environment,
        place=0,
        outcome=representative.status,
        repeat=index,
        rate=rate,
        control_ratio=control_ratio,
        value=control_ratio if by_control else rate,
        control=representative.control,
        interval=interval,
        rate_interval=rate_interval,
        ci_reached=False if False in reached else True if reached == {True} else None,
        suspect=representative.suspect,
        screened=representative.screened,
        by_control=by_control,
        competing=tuple([index for index, _ in competing]),
        num_repeats=len(ended_statuses),
        num_repeats_failed=sum([status != Status.OK for status in ended_statuses]),
    )


def _median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None if there is none."""
    known_values = [value for value in values if value is not None]
    return median(known_values) if known_values else None


def _interval(values_and_cis: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The smallest interval that holds the intervals of all repeats.

    Args:
        values_and_cis: the value of each repeat, which is a rate, or a time or cost with a minus, and half the 95 %
            interval of its step time, relative to it.
    """
    lows = [value * (1 + ci) if value < 0 else value / (1 + ci) for value, ci in values_and_cis]
    highs = [
        value * (1 - ci) if value < 0 else value / (1 - ci) if ci < 1 else math.inf
        for value, ci in values_and_cis
    ]
    return min(lows), max(highs)


def _outcome_key(repeat: Repeat) -> tuple[tuple[int, bool], bool]:
    """A sort key of the repeats of a run; the one with the largest key stands for the run where none competes."""
    return outcome_order(repeat.status), repeat.suspect is None


def _value_key(standing: Standing) -> tuple[float, str]:
    """A sort key by which the larger value comes first, and of equal ones the smaller run_id."""
    return math.inf if standing.value is None else -standing.value, standing.run_id


def _place_key(standing: Standing, is_as_good: bool) -> tuple[int, float, str]:
    """A sort key of the runs of a cell; the best and those that are as good come first.

    Args:
        is_as_good: whether the run is the best one or as good.
    """
    return -1 if is_as_good else tier(standing.outcome), *_value_key(standing)


def merge_environments(
    environments: Iterable[tuple[Hashable, str, str]],
) -> tuple[dict[str, str], dict[Hashable, list[str]]]:
    """env_id -> the env_id that stands for it, and the drivers of environments that count as one.

    Two environments count as one if they differ in the driver, and in nothing else that is known.

    Args:
        environments: for each repeat all that is known of its environment except the driver, its env_id,
            and the driver.
    """
    drivers_by_facts: dict[Hashable, dict[str, str]] = defaultdict(dict)
    representative_by_id: dict[str, str] = {}
    for facts, env_id, driver in environments:
        representative_by_id[env_id] = env_id
        drivers_by_facts[facts][env_id] = driver
    merged_drivers: dict[Hashable, list[str]] = {}
    for facts, driver_by_id in drivers_by_facts.items():
        if len({*driver_by_id.values()}) == len(driver_by_id) > 1:
            first_id = min(representative_by_id[env_id] for env_id in driver_by_id)
            merged_ids = {representative_by_id[env_id] for env_id in driver_by_id}
            representative_by_id = {
                env_id: first_id if representative in merged_ids else representative
                for env_id, representative in representative_by_id.items()
            }
            merged_drivers[facts] = sorted(driver_by_id.values())
    return representative_by_id, merged_drivers


def environments_of(
    repeats: Sequence[tuple[Hashable, Hashable, str | None, str | None]],
    representative_by_id: Mapping[str, str],
) -> list[str | None]:
    """For each repeat the env_id that stands for its environment; None where that is unknown.

    A repeat that is not ok may have ended before it reported its environment. It has that of the ok repeats of its run
    if they have one, else that of its sweep if this has one.

    Args:
        repeats: sweep, run_id, status and env_id of each.
        representative_by_id: what `merge_environments` returns for the ok repeats.
    """
    ids_by_run = defaultdict[Hashable, set[str]](set)
    for sweep, run_id, status, env_id in repeats:
        if status == Status.OK and env_id:
            ids_by_run[sweep, run_id].add(representative_by_id[env_id])
            ids_by_run[sweep, None].add(representative_by_id[env_id])

    def environment(sweep: Hashable, run_id: Hashable, status: str | None, env_id: str | None) -> str | None:
        if status == Status.OK and env_id:
            return representative_by_id[env_id]
        candidates = ids_by_run.get((sweep, run_id)) or ids_by_run.get((sweep, None), set())
        return next(iter(candidates)) if len(candidates) == 1 else representative_by_id.get(env_id or "")

    return [environment(*repeat) for repeat in repeats]
