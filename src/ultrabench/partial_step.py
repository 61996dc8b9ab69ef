"""The time of a whole step from steps of fewer micro-batches: `Slice` says which, `step_s` extrapolates.

All micro-batches of a step are alike, so that its time is a constant (bubble, reduction of gradients, optimizer) and
a multiple of their number. A run measures steps of two sizes g1 < g2 in turns (g1, g2, g2, g1, ...), in which what
drifts cancels. The mean times of both sizes give the time of the whole step. Each turn gives one, too; these are moved
together so that their median, which is the step time of any run, is that of the means. What the turns cannot show is
that the time is no straight line: a third size shows it as the departure.

A start that *screens* a run chooses whether the run is measured again, but does not say that it is the best: it
measures parts alone or, where no part stands for the run, few whole steps. The start that confirms a run measures few
whole steps before its parts, or all whole steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.step_time import ci95_rel, with_error

Turn = Mapping[int, float]
"""Number of micro-batches of a step -> its seconds, for the steps of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The numbers of micro-batches of the short steps that stand for the whole steps of a run."""

    g1: int
    g2: int
    third: int | None = None
    """A third number, larger than g2, with which each turn shows the departure; None where that is known."""
    departure: float | None = None
    """The departure of the same schedule and ZeRO stage as another run has measured it; None where none has."""
    wider: int | None = None
    """The number that replaces g2 where the interval misses its target; None: g2 stays."""
    keeps_memory: bool = True
    """Whether whole steps need as much memory as these, by the formulas of the prediction."""

    def __post_init__(self) -> None:
        if not 0 < self.g1 < self.g2:
            raise ConfigError(f"a slice of {self.g1} and {self.g2} micro-batches; needs 0 < g1 < g2")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of micro-batches of one turn, the smallest first."""
        return (self.g1, self.g2) if self.third is None else (self.g1, self.g2, self.third)

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """All numbers of micro-batches of which a step may be measured, the smallest first."""
        return tuple(sorted({*self.sizes, *([self.wider] if self.wider else [])}))

    @property
    def text(self) -> str:
        """The slice as results show it, such as `4,8`."""
        return f"{self.g1},{self.g2}"

    def order(self, turn: int) -> tuple[int, ...]:
        """The sizes in the order of turn number `turn`, counted from 0: every other turn goes backwards."""
        return self.sizes if turn % 2 == 0 else self.sizes[::-1]


def only_screens(slice_: Slice | None, few_steps: bool) -> bool:
    """Whether a start only chooses runs to measure again, by parts alone or by few whole steps alone.

    Args:
        slice_: the parts that are measured; None: whole steps alone are.
        few_steps: whether few whole steps are measured, before the parts if there are any.
    """
    return (slice_ is not None) != few_steps


def step_s(slice_: Slice, turn: Turn, num_microbatches: int) -> float:
    """Seconds of a step of `num_microbatches` by the straight line through the two sizes of a turn.

    `T(n) = T(g2) + (n - g2) (T(g2) - T(g1)) / (g2 - g1)`. A larger step is never the faster one: where noise says so,
    the line is level, so that the result is at least T(g2) for n > g2.
    """
    slope_s = max(0.0, turn[slice_.g2] - turn[slice_.g1]) / (slice_.g2 - slice_.g1)
    return turn[slice_.g2] + (num_microbatches - slice_.g2) * slope_s


ACCIDENT_SPREADS = 10.0
"""A time that lies further than so many interquartile ranges beyond the quartiles is an accident of a step."""


def mean_s(times_s: Sequence[float]) -> float:
    """The mean of the seconds of steps of one size, but those of accidents.

    A whole step is the sum of many micro-batches, of which some are slow, so that its time follows the mean; the
    median of steps of few micro-batches is less where their times are skewed. What happens once in a while, such as a
    pause of a second, hardly moves the median of whole steps, but a line through two sizes would multiply it.
    """
    if len(times_s) < 3:
        return fmean(times_s)
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    margin_s = ACCIDENT_SPREADS * (third - first)
    return fmean([seconds for seconds in times_s if first - margin_s <= seconds <= third + margin_s])


def mean_turn(turns: Sequence[Turn], sizes: Iterable[int]) -> Turn:
    """For each of these sizes the mean of its seconds."""
    return {size: mean_s([turn[size] for turn in turns]) for size in sizes}


def whole_step_times_s(slice_: Slice, turns: Sequence[Turn], gas: int) -> list[float]:
    """Seconds of the whole step of `gas` micro-batches by each turn, moved so that their median is that of `mean_turn`,
    which is the time of the run.
    """
    times_s = [step_s(slice_, turn, gas) for turn in turns]
    if len(times_s) < 3:
        return times_s
    factor = step_s(slice_, mean_turn(turns, (slice_.g1, slice_.g2)), gas) / median(times_s)
    return [factor * seconds for seconds in times_s]


def departure(slice_: Slice, turns: Sequence[Turn]) -> float | None:
    """How much more time a further micro-batch takes from g2 to the third size than from g1 to g2, as a fraction.

    It is `((T(g3)-T(g2))/(g3-g2)) / ((T(g2)-T(g1))/(g2-g1)) - 1` of the mean times, 0 on a straight line. The result
    is None without a third size or turns, and where the larger of g1 and g2 is not the slower one.
    """
    if slice_.third is None or not turns:
        return None
    first_s, second_s, third_s = mean_turn(turns, slice_.sizes).values()
    slope_s = (second_s - first_s) / (slice_.g2 - slice_.g1)
    return (third_s - second_s) / (slice_.third - slice_.g2) / slope_s - 1 if slope_s > 0 else None


def extrapolation_error_rel(
    slice_: Slice, turns: Sequence[Turn], gas: int, departure: float | None
) -> float | None:
    """How much the departure changes the time of the whole step, relative to it.

    The departure acts on all micro-batches beyond g2. The result is None where the departure is unknown.
    """
    if departure is None or not turns:
        return None
    whole_s = median(whole_step_times_s(slice_, turns, gas))
    g2_s = mean_s([turn[slice_.g2] for turn in turns])
    return abs(departure) * max(0.0, whole_s - g2_s) / whole_s


def whole_step_ci95_rel(
    slice_: Slice, turns: Sequence[Turn], gas: int, departure: float | None
) -> float | None:
    """Half-width of the 95 % interval of the time of the whole step, relative to it.

    It adds the error of the turns, whose times are those of `whole_step_times_s`, and that of the straight line in
    quadrature. The result is None where one of them is unknown.
    """
    return with_error(
        ci95_rel(whole_step_times_s(slice_, turns, gas)),
        extrapolation_error_rel(slice_, turns, gas, departure),
    )


class PartTimes(NamedTuple):
    """The measured parts of the steps of a run."""

    slice: Slice
    """The slice that counts: the last one with enough turns."""
    gas: int
    """Micro-batches of a whole step."""
    turns: tuple[Turn, ...]
    """The turns of this slice."""
    departure: float | None
    """The departure by the turns with a third size, which may have come before; None if there were none."""

    @property
    def whole_step_times_s(self) -> list[float]:
        """Seconds of the whole step by each turn."""
        return whole_step_times_s(self.slice, self.turns, self.gas)


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
