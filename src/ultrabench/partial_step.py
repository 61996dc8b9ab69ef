"""The time of a whole step from steps of fewer micro-batches: `Slice` says which, `step_s` extrapolates.

All micro-batches of a step are alike, so that its time is a constant (bubble, reduction of gradients, optimizer) and
a multiple of their number. A run measures steps of two sizes g1 < g2 in turns (g1, g2, g2, g1, ...), in which what
drifts cancels. The mean times of both sizes give the time of the whole step, with the interval of a mean. Each turn
gives a time, too; these are moved together so that their median, which is the step time of any run, is that of the
means. What the turns cannot show is that the time is no straight line: a third size shows it as the departure, which
has an error of its own.

A start that *screens* a run chooses whether the run is measured again, but does not say that it is the best: it
measures parts alone or, where no part stands for the run, few whole steps. The start that confirms a run measures few
whole steps before its parts, or all whole steps.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median, quantiles, stdev
from typing import NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.step_time import MIN_SAMPLES, START_SD, TWO_SIDED, t_quantile, with_error

Turn = Mapping[int, float]
"""Number of micro-batches of a step -> its seconds, for the steps of one turn."""

NUM_BATCHES = 10
"""Smallest number of batches into which turns are divided for the error of their mean, if there are twice as many."""
MAX_DEPARTURES = 3
"""Number of runs of a kind that measure a third size, if fewer leave the departure uncertain."""
DEPARTURE_SD = 0.05
"""Standard deviation of the departures that kinds of runs are expected to have. By whole steps beside parts, those of
layouts on CPUs differed by 0.5 to 3 % beyond their noise (docs/design/prediction.md); GPUs were not measured."""
_NORMAL = NormalDist()
_ONE_SIDED = _NORMAL.inv_cdf(0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How much more time a further micro-batch takes beyond g2 than below it, as a fraction; 0 on a straight line."""

    value: float
    error: float
    """The standard error of the value, for a run of the same kind."""
    num_runs: int = 1
    """Number of runs that have measured it."""

    def is_certain(self, target_ci95_rel: float) -> bool:
        """Whether no further run needs to measure it: it widens no interval by much more than this half-width, or as
        many runs have measured it as may.
        """
        return self.num_runs >= MAX_DEPARTURES or TWO_SIDED * self.error <= target_ci95_rel

    @property
    def expected(self) -> "Departure":
        """The departure that noise leaves probable: where it says little, 0 within DEPARTURE_SD.

        One that is further from 0 than both its noise and DEPARTURE_SD explain stays as it is.
        """
        if abs(self.value) > 2 * math.hypot(DEPARTURE_SD, self.error):
            return self
        weight = DEPARTURE_SD**2 / (DEPARTURE_SD**2 + self.error**2)
        return replace(self, value=weight * self.value, error=math.sqrt(weight) * self.error)


def pooled(departures: Iterable[Departure | None]) -> Departure | None:
    """The departure of a kind of runs from those that its runs have measured; None where none has.

    It is their mean, weighted by the inverse of their variances. Where they differ by more than their errors, the
    variance between runs is added to that of each (DerSimonian and Laird, doi:10.1016/0197-2456(86)90046-2) and to that
    of the result, since the run that it is for may differ as much from their mean.
    """
    measured = [departure for departure in departures if departure is not None]
    if len(measured) <= 1:
        return measured[0] if measured else None
    between_runs = variance_between(measured)
    weights = [1 / (between_runs + _variance(departure)) for departure in measured]
    return Departure(
        value=_mean([departure.value for departure in measured], weights),
        error=math.sqrt(between_runs + 1 / sum(weights)),
        num_runs=sum(departure.num_runs for departure in measured),
    )


def variance_between(departures: Sequence[Departure]) -> float:
    """By how much two or more departures vary beyond their errors, which is 0 where these explain it."""
    values, weights = [d.value for d in departures], [1 / _variance(d) for d in departures]
    mean, total_weight = _mean(values, weights), sum(weights)
    deviations = (weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    excess = sum(deviations) - (len(departures) - 1)
    return max(0.0, excess / (total_weight - sum(weight**2 for weight in weights) / total_weight))


def _variance(departure: Departure) -> float:
    return max(departure.error, 1e-9) ** 2


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The numbers of micro-batches of the short steps that stand for the whole steps of a run."""

    g1: int
    g2: int
    third: int | None = None
    """A third number, larger than g2, with which each turn shows the departure; None where that is known."""
    departure: Departure | None = None
    """The departure of the same schedule and ZeRO stage as other runs have measured it; None where none has."""
    wider: int | None = None
    """The number that replaces g2 where the interval misses its target; None: g2 stays."""
    keeps_memory: bool = True
    """Whether whole steps need as much memory as these, by the formulas of the prediction."""
    two_starts: bool = False
    """Whether the program starts twice, with steps of g1 and then of g2 micro-batches, since all steps of a start have
    the same number."""

    def __post_init__(self) -> None:
        if not 0 < self.g1 < self.g2:
            raise ConfigError(f"a slice of {self.g1} and {self.g2} micro-batches; needs 0 < g1 < g2")

    @property
    def pair(self) -> tuple[int, int]:
        """The numbers of micro-batches of the straight line."""
        return self.g1, self.g2

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of micro-batches of one turn, the smallest first."""
        return self.pair if self.third is None else (*self.pair, self.third)

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """All numbers of micro-batches of which a step may be measured, the smallest first."""
        return tuple(sorted({*self.sizes, *([self.wider] if self.wider else [])}))

    @property
    def text(self) -> str:
        """The slice as results show it, such as `4,8`."""
        return f"{self.g1},{self.g2}"

    def steps_beyond(self, gas: int) -> float:
        """How many times g2 - g1 micro-batches are added to g2 for a step of `gas`: the line adds as many times the
        difference of both times, and their errors."""
        return (gas - self.g2) / (self.g2 - self.g1)

    def with_departure(self, departure: Departure | None, target_ci95_rel: float) -> "Slice":
        """The slice with the departure of other runs; without a third size if that is certain enough."""
        if departure is None:
            return self
        third = None if departure.is_certain(target_ci95_rel) else self.third
        return replace(self, third=third, departure=departure)

    def order(self, turn: int) -> tuple[int, ...]:
        """The sizes in the order of turn number `turn`, counted from 0: every other turn goes backwards."""
        return self.sizes if turn % 2 == 0 else self.sizes[::-1]


PART_FOLDER = "gas"
"""How the folders of logs begin where a program starts twice; the number of micro-batches follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStart:
    """One of the two starts of a program that runs steps of one size."""

    gas: int
    """Micro-batches of its steps: g1 of the slice in the first start, g2 in the second."""
    first_times_s: tuple[float, ...] = ()
    """Seconds of the measured steps of the first start; empty in that start itself."""


def only_screens(slice_: Slice | None, few_steps: bool) -> bool:
    """Whether a start only chooses runs to measure again, by parts alone or by few whole steps alone.

    Args:
        slice_: the parts that are measured; None: whole steps alone are.
        few_steps: whether few whole steps are measured, before the parts if there are any.
    """
    return (slice_ is not None) != few_steps


SCREENED_BY = "by parts of steps or few whole steps"
"""How runs were measured that were only screened, as sentences say it of several."""
IN_PARTS, FEW_STEPS = "in parts", "few steps"
"""Marks of such a run in tables."""


def screening_text(part_sizes: str | None) -> str:
    """What a start measured that only screened its run, such as `parts of 4,8 micro-batches`.

    Args:
        part_sizes: the micro-batches of the parts, as in `Slice.text`; None: few whole steps alone were measured.
    """
    return f"parts of {part_sizes} micro-batches" if part_sizes else "few whole steps"


def step_s(slice_: Slice, turn: Turn, num_microbatches: int) -> float:
    """Seconds of a step of `num_microbatches` by the straight line through the two sizes of a turn.

    `T(n) = T(g2) + (n - g2) (T(g2) - T(g1)) / (g2 - g1)`. A larger step is never the faster one: where noise says so,
    the line is level, so that the result is at least T(g2) for n > g2.
    """
    slope_s = max(0.0, turn[slice_.g2] - turn[slice_.g1]) / (slice_.g2 - slice_.g1)
    return turn[slice_.g2] + (num_microbatches - slice_.g2) * slope_s


ACCIDENT_SPREADS = 10.0
"""A time that lies further than so many interquartile ranges beyond the quartiles is an accident of a step."""
MAX_ACCIDENTS = 0.1
"""Largest share of turns with accidents; what happens more often belongs to the mean."""


def without_accidents(turns: Sequence[Turn], sizes: Iterable[int]) -> Sequence[Turn]:
    """The turns in which the step of none of these sizes had an accident.

    A whole step is the sum of many micro-batches, of which some are slow, so that its time follows the mean; the
    median of steps of few micro-batches is less where their times are skewed. What happens once in a while, such as a
    pause of a second, hardly moves the median of whole steps, but a line through two sizes would multiply it.
    """
    if len(turns) * MAX_ACCIDENTS < 1:
        return turns
    limits = [(size, *_accident_limits_s([turn[size] for turn in turns])) for size in sizes]
    regular_turns = [turn for turn in turns if all(low <= turn[size] <= high for size, low, high in limits)]
    return regular_turns if len(regular_turns) >= (1 - MAX_ACCIDENTS) * len(turns) else turns


def _accident_limits_s(times_s: Sequence[float]) -> tuple[float, float]:
    """The seconds between which the steps of one size lie that had no accident."""
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    margin_s = ACCIDENT_SPREADS * (third - first)
    return first - margin_s, third + margin_s


def mean_turn(turns: Sequence[Turn], sizes: Sequence[int]) -> Turn:
    """For each of these sizes the mean of its seconds in the turns without accidents."""
    regular_turns = without_accidents(turns, sizes)
    return {size: fmean([turn[size] for turn in regular_turns]) for size in sizes}


def whole_step_times_s(slice_: Slice, turns: Sequence[Turn], gas: int) -> list[float]:
    """Seconds of the whole step of `gas` micro-batches by each turn, moved so that their median is that of `mean_turn`,
    which is the time of the run.
    """
    times_s = [step_s(slice_, turn, gas) for turn in turns]
    if len(times_s) < 3:
        return times_s
    factor = step_s(slice_, mean_turn(turns, slice_.pair), gas) / median(times_s)
    return [factor * seconds for seconds in times_s]


def turns_ci95_rel(slice_: Slice, turns: Sequence[Turn], gas: int) -> float | None:
    """Half-width of the 95 % interval of the time of the whole step by these turns, relative to it.

    The time by the line through the mean times of both sizes is the mean of the times by the lines of all turns, which
    have the errors of both sizes and what these have in common. The result is None below MIN_SAMPLES turns. It lacks
    the error of the straight line.
    """
    regular_turns = without_accidents(turns, slice_.pair)
    if len(turns) < MIN_SAMPLES:
        return None
    weight = slice_.steps_beyond(gas)
    times_s = [turn[slice_.g2] + weight * (turn[slice_.g2] - turn[slice_.g1]) for turn in regular_turns]
    return _mean_half_width(times_s) / step_s(slice_, mean_turn(turns, slice_.pair), gas)


def _mean_half_width(values: Sequence[float]) -> float:
    """Half-width of the 95 % interval of the mean of values of turns, by the means of NUM_BATCHES or more batches.

    A busy or throttled device is slow for several turns on end, so that turns which follow each other are alike.
    """
    batch_size = max(1, len(values) // NUM_BATCHES)
    starts = range(0, len(values) - batch_size + 1, batch_size)
    batch_means = [fmean(values[start : start + batch_size]) for start in starts]
    return t_quantile(len(batch_means) - 1) * stdev(batch_means) * math.sqrt(batch_size / len(values))


def departure(slice_: Slice, turns: Sequence[Turn]) -> Departure | None:
    """How much more time a further micro-batch takes from g2 to the third size than from g1 to g2.

    Its value is `((T(g3)-T(g2))/(g3-g2)) / ((T(g2)-T(g1))/(g2-g1)) - 1` of the mean times, and its error follows from
    how the same difference of slopes varies over the turns. The result is None without a third size or below
    MIN_SAMPLES turns, and where the larger of g1 and g2 is not the slower one.
    """
    if slice_.third is None or len(turns) < MIN_SAMPLES:
        return None
    regular_turns = without_accidents(turns, slice_.sizes)
    first_slope_s, later_slope_s = _slopes_s(slice_, mean_turn(turns, slice_.sizes))
    if first_slope_s <= 0:
        return None
    ratio = later_slope_s / first_slope_s
    slopes_of_turns = (_slopes_s(slice_, turn) for turn in regular_turns)
    half_width = _mean_half_width(
        [(later_s - ratio * first_s) / first_slope_s for first_s, later_s in slopes_of_turns]
    )
    return Departure(value=ratio - 1, error=half_width / TWO_SIDED)


def _slopes_s(slice_: Slice, turn: Turn) -> tuple[float, float]:
    """Seconds of a further micro-batch from g1 to g2, and from g2 to the third size."""
    assert slice_.third is not None
    first_s, second_s, third_s = (turn[size] for size in slice_.sizes)
    return (second_s - first_s) / (slice_.g2 - slice_.g1), (third_s - second_s) / (slice_.third - slice_.g2)


def extrapolation_error_rel(
    slice_: Slice, turns: Sequence[Turn], gas: int, departure: Departure | None
) -> float | None:
    """What the departure adds in quadrature to the interval of the turns, as a half-width relative to the whole step.

    The departure acts on all micro-batches beyond g2. Its value is a bias, which does not average out with the noise of
    the turns: the interval of both is the 95 % quantile of the distance from 0 of a normal variable whose mean is that
    bias and whose variance is that of the turns and of the departure (Armstrong and Kolesar,
    doi:10.3982/ECTA14434). The result is None where the departure is unknown.
    """
    if departure is None or not turns:
        return None
    line = mean_turn(turns, slice_.pair)
    whole_s = step_s(slice_, line, gas)
    later_share = max(0.0, whole_s - line[slice_.g2]) / whole_s
    turns_half_width, expected = turns_ci95_rel(slice_, turns, gas) or 0.0, departure.expected
    error = math.hypot(turns_half_width / TWO_SIDED, later_share * expected.error)
    half_width = biased_half_width(later_share * expected.value, error)
    return math.sqrt(max(0.0, half_width**2 - turns_half_width**2))


def biased_half_width(bias: float, error: float) -> float:
    """The distance from 0 that 95 % of a normal variable with this mean and standard deviation do not exceed."""
    if error <= 0:
        return abs(bias)
    ratio = abs(bias) / error
    low, high = ratio + _ONE_SIDED, ratio + TWO_SIDED
    for _ in range(30):
        middle = (low + high) / 2
        is_enough = _NORMAL.cdf(middle - ratio) - _NORMAL.cdf(-middle - ratio) >= 0.95
        low, high = (low, middle) if is_enough else (middle, high)
    return high * error


def whole_step_ci95_rel(
    slice_: Slice, turns: Sequence[Turn], gas: int, departure: Departure | None
) -> float | None:
    """Half-width of the 95 % interval of the time of the whole step, relative to it.

    It holds the error of the turns and that of the straight line, and is None where one of them is unknown.
    """
    return with_error(
        turns_ci95_rel(slice_, turns, gas), extrapolation_error_rel(slice_, turns, gas, departure)
    )


UNKNOWN_DEPARTURE = Departure(value=0.0, error=1000.0)
"""The departure of runs that start twice and have no third size: it says nothing, so that the interval holds what is
expected of any kind of runs (DEPARTURE_SD)."""


def two_starts_error_rel(slice_: Slice, turns: Sequence[Turn], gas: int) -> float:
    """How much the time of the whole step may be off because two starts differ, relative to it, at 95 %.

    What makes a start slower or faster, such as the place of memory or a neighbour on the network, does not cancel
    in the difference of two starts: with a standard deviation e of a start, the line through both is off by
    `e sqrt((1+w)^2 T(g2)^2 + w^2 T(g1)^2)` seconds, w = (gas-g2)/(g2-g1).
    """
    turn = mean_turn(turns, slice_.pair)
    weight = slice_.steps_beyond(gas)
    error_s = 2 * START_SD * math.hypot((1 + weight) * turn[slice_.g2], weight * turn[slice_.g1])
    return error_s / step_s(slice_, turn, gas)


class PartTimes(NamedTuple):
    """The measured parts of the steps of a run."""

    slice: Slice
    """The slice that counts: the last one with enough turns."""
    gas: int
    """Micro-batches of a whole step."""
    turns: tuple[Turn, ...]
    """The turns of this slice."""
    departure: Departure | None
    """The departure by the turns with a third size, which may have come before; None if there were too few."""

    @property
    def whole_step_times_s(self) -> list[float]:
        """Seconds of the whole step by each turn."""
        return whole_step_times_s(self.slice, self.turns, self.gas)


def two_starts_times(
    slice_: Slice, first_times_s: Sequence[float], second_times_s: Sequence[float], gas: int
) -> PartTimes | None:
    """The steps of two starts as turns: the n-th measured steps of both are one turn; None before the first turn.

    Accidents are left out of each start, since those of one say nothing about the steps of the other.

    Args:
        first_times_s: seconds of the measured steps of the start with g1 micro-batches.
        second_times_s: the same of the start with g2.
        gas: micro-batches of a whole step.
    """
    times_by_size = ((slice_.g1, first_times_s), (slice_.g2, second_times_s))
    parts = (
        (n, size, step[size])
        for size, times_s in times_by_size
        for n, step in enumerate(without_accidents([{size: seconds} for seconds in times_s], (size,)))
    )
    return part_times(parts, gas)


def part_times(parts: Iterable[tuple[int, int, float]], gas: int, min_turns: int = 1) -> PartTimes | None:
    """The turns of a run from its measured parts, in order; None before the first turn has two sizes.

    Args:
        parts: the number of the turn, the micro-batches and the seconds of each part.
        gas: micro-batches of a whole step.
        min_turns: number of turns from which on those of a wider slice count in place of those before it.
    """
    turn_by_number = dict[int, dict[int, float]]()
    for number, size, seconds in parts:
        turn_by_number.setdefault(number, {})[size] = seconds
    smallest = min((min(turn) for turn in turn_by_number.values()), default=0)
    # A turn that goes backwards is not over until it has the smallest size.
    turns = [turn for turn in turn_by_number.values() if len(turn) > 1 and smallest in turn]
    if not turns:
        return None
    turns_by_pair = dict[tuple[int, ...], list[Turn]]()
    for turn in turns:
        turns_by_pair.setdefault((*sorted(turn)[:2],), []).append(turn)
    pairs = [*turns_by_pair]
    g1, g2 = next((pair for pair in reversed(pairs) if len(turns_by_pair[pair]) >= min_turns), pairs[-1])
    last_turns = tuple(turns_by_pair[g1, g2])
    triples = [turn for turn in turns if len(turn) > 2]
    first, second, third = sorted(triples[0]) if triples else (g1, g2, None)
    measured_departure = departure(Slice(g1=first, g2=second, third=third), triples)
    return PartTimes(Slice(g1=g1, g2=g2), gas, last_turns, measured_departure)
