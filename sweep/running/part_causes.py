"""Why whole steps of a run took another time than its parts said, by what was measured of its starts.

Each cause has its evidence: a lower clock, a rank that is late between steps, pauses in parts, slower links, the load
of other programs. Evidence counts if it is on the slower side and explains half of the difference. In a single start
it may be chance, so only two starts decide.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from statistics import fmean, median, quantiles
from typing import NamedTuple

from ultrabench.errors import counted
from ultrabench.partial_step import ACCIDENT_SPREADS
from ultrabench.result import RESULT_COLUMNS, RunResult
from ultrabench.step_time import MIN_SAMPLES

LEAST_SHARE = 0.5
"""The share of a difference of step times that evidence must explain, both as logarithms."""
LINK_TOLERANCE = 0.15
"""Relative difference up to which two probes of links are alike."""
LOAD_TOLERANCE = 0.1
"""Difference up to which other programs used as large a share of a node's cores."""
MIN_PAUSES, MIN_STARTS = 2, 2
"""Fewest turns of parts with a pause that are evidence, and fewest starts whose own records show it that decide."""
NO_LINE = "steps that are on no straight line"
"""The cause that no record excludes."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Whole steps of a run that took another time than its parts said, beyond their intervals."""

    ratio: float
    """Time of whole steps over that by parts."""
    interval: float
    """Half-width of the interval of the ratio."""
    _: KW_ONLY
    whole: RunResult
    """The start that measured the whole steps."""
    parts: Sequence[RunResult] = ()
    """Starts that measured the run by parts alone; those of other jobs where one start measured both."""
    in_one_start: bool = False
    """Whether the start that measured the whole steps measured the parts that differ, too."""
    whole_links: Mapping[str, float] = field(default_factory=dict)
    """Column -> bandwidth of the links in the preflight before the whole steps; empty where it is unknown."""
    part_links: Mapping[str, float] = field(default_factory=dict)
    """Column -> bandwidth of the links in the preflight before the parts; empty where it is unknown."""

    @property
    def is_whole_slower(self) -> bool:
        """Whether whole steps are slower than their parts said."""
        return self.ratio > 1

    @property
    def slow_starts(self) -> Sequence[RunResult]:
        """The starts of the slower side."""
        return (self.whole,) if self.is_whole_slower else self.parts

    @property
    def fast_starts(self) -> Sequence[RunResult]:
        """The starts of the faster side."""
        return self.parts if self.is_whole_slower else (self.whole,)

    @property
    def slow_name(self) -> str:
        """What the slower side measured, as sentences name it."""
        return "whole steps" if self.is_whole_slower else "parts"

    @property
    def fast_name(self) -> str:
        """What the faster side measured, as sentences name it."""
        return "parts" if self.is_whole_slower else "whole steps"

    def is_explained_by(self, factor: float) -> bool:
        """Whether a slower side that is slower by this factor explains LEAST_SHARE of the difference."""
        return factor > 0 and math.log(factor) >= LEAST_SHARE * abs(math.log(self.ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is known of the program, whatever happened in a start."""

    trains_itself: bool
    """Whether it is the embedded kernel, which makes the data of a step before its clock starts and collects no garbage
    while it measures."""
    num_ranks: int


class Evidence(NamedTuple):
    """What the records say about one cause of one difference."""

    text: str | None = None
    """What was measured that points to it; None: nothing."""
    shown_by: Sequence[RunResult] = ()
    """The starts of the slower side whose records show it."""
    is_possible: bool = True
    """Whether the records leave it possible."""


POSSIBLE, EXCLUDED = Evidence(), Evidence(is_possible=False)


def cause_text(differences: Sequence[Difference], program: Program) -> str:
    """Why whole steps differ from parts: the causes with evidence, or those that remain possible.

    Args:
        differences: one for each start of the run whose whole steps differ.
    """
    if len({difference.is_whole_slower for difference in differences}) > 1:
        return "starts differ in opposite directions, so no cause is named"
    evidence_by_cause = {
        cause: [find(difference, program) for difference in differences]
        for cause, find in _finders(program).items()
    }
    if texts := [*_texts_with_evidence(evidence_by_cause)]:
        return "; ".join(texts)
    possible = [cause for cause, found in evidence_by_cause.items() if any(e.is_possible for e in found)]
    causes_text = f"{', '.join(possible)}{' or ' if possible else ''}{NO_LINE}"
    return f"nothing measured tells the cause; possible: {causes_text}"


def _texts_with_evidence(evidence_by_cause: Mapping[str, Sequence[Evidence]]) -> Iterator[str]:
    """A clause for each cause with evidence; only for those that enough starts show, if there are any."""
    shown = {cause: [e for e in of_starts if e.text] for cause, of_starts in evidence_by_cause.items()}
    # The same start by parts may stand beside several starts with whole steps.
    num_starts = {
        cause: len({id(start) for evidence in of_starts for start in evidence.shown_by})
        for cause, of_starts in shown.items()
    }
    is_decided = max(num_starts.values()) >= MIN_STARTS
    for cause, of_starts in shown.items():
        if of_starts and (num_starts[cause] >= MIN_STARTS or not is_decided):
            certainty = (
                f"{cause} ({num_starts[cause]} starts)" if is_decided else f"maybe {cause} (one start)"
            )
            yield f"{certainty}: {of_starts[0].text}"


def _finders(program: Program) -> dict[str, Callable[[Difference, Program], Evidence]]:
    """Possible cause, as sentences name it -> the function that looks for its evidence."""
    pauses = "pauses of a rank" if program.trains_itself else "the garbage collector or other pauses"
    return {
        "heat or the power cap": _heat,
        "the data loader": _late_rank,
        pauses: _pauses,
        "the network": _slow_links,
        "other programs": _other_load,
    }


def _heat(difference: Difference, program: Program) -> Evidence:
    """Throttled GPUs, or a lower SM clock, on the slower side alone. CPU clocks are not recorded."""
    slow, fast = difference.slow_starts, difference.fast_starts
    throttled = [start for start in slow if start.throttled]
    if throttled and not any(start.throttled for start in fast):
        fact = f"GPUs were throttled in the start with {difference.slow_name}"
        return Evidence(f"{fact}: {throttled[0].throttled}", throttled)
    clocks_hz = [hz for start in fast if (hz := start.sm_clock_hz)]
    slow_clocks = [(start, hz) for start in slow if (hz := start.sm_clock_hz)]
    if not clocks_hz or not slow_clocks:
        return POSSIBLE
    fast_hz = median(clocks_hz)
    lower = [(start, hz) for start, hz in slow_clocks if difference.is_explained_by(fast_hz / hz)]
    if not lower:
        return EXCLUDED
    slow_text, fast_text = map(RESULT_COLUMNS["sm_clock_hz"].text, (lower[0][1], fast_hz))
    fact = f"{difference.slow_name} ran at a lower clock: {slow_text} of {fast_text}"
    return Evidence(fact, [start for start, _ in lower])


def _late_rank(difference: Difference, program: Program) -> Evidence:
    """A rank that began the slower steps later than the others, which waited for it within their timed steps."""
    if not program.trains_itself:
        return POSSIBLE  # its steps hold the loading of data
    if program.num_ranks == 1:
        return EXCLUDED
    fast_lags = [lag for start in difference.fast_starts if (lag := _rank_lag(start))]
    slow_lags = [(start, lag) for start in difference.slow_starts if (lag := _rank_lag(start))]
    if not fast_lags or not slow_lags:
        return POSSIBLE
    late = [(start, lag) for start, lag in slow_lags if difference.is_explained_by(lag / median(fast_lags))]
    if not late:
        return EXCLUDED
    start, lag = late[0]
    times_s = start.rank_step_times_s
    late_rank, waiting = min(times_s, key=times_s.__getitem__), max(times_s, key=times_s.__getitem__)
    fact = f"rank {late_rank} was late between steps: its own took {1 / lag:.2f} x the time of those of rank {waiting}"
    return Evidence(f"{fact}, which waited", [start for start, _ in late])


def _rank_lag(result: RunResult) -> float | None:
    """The step time of the slowest rank over that of the fastest; None where they are unknown."""
    times_s = [time_s for time_s in result.rank_step_times_s.values() if time_s > 0]
    return max(times_s) / min(times_s) if len(times_s) > 1 else None


def _pauses(difference: Difference, program: Program) -> Evidence:
    """Turns of parts with a pause, which their mean leaves out, while whole steps are long enough to hold them all."""
    if not difference.is_whole_slower:
        return EXCLUDED
    starts = [part for part in difference.parts if len(part.step_times_s) >= MIN_SAMPLES]
    if not starts:
        return POSSIBLE
    regular_s = [_without_pauses(start.step_times_s) for start in starts]
    num_turns, num_regular = sum(len(start.step_times_s) for start in starts), sum(map(len, regular_s))
    if num_turns - num_regular < MIN_PAUSES:
        return EXCLUDED
    # A pause of one size moves the time by a turn as far as all pauses move whole steps, on average.
    all_s = fmean(chain(*(start.step_times_s for start in starts)))
    if not difference.is_explained_by(all_s / fmean(chain(*regular_s))):
        return POSSIBLE
    shown_by = [
        start
        for start, times_s in zip(starts, regular_s, strict=True)
        if len(times_s) < len(start.step_times_s)
    ]
    return Evidence(
        f"{num_turns - num_regular} of {counted(num_turns, 'turn')} of its parts had a pause", shown_by
    )


def _without_pauses(times_s: Sequence[float]) -> list[float]:
    """The times that are not as far from the others as an accident of a step is."""
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    margin_s = ACCIDENT_SPREADS * (third - first)
    return [time_s for time_s in times_s if first - margin_s <= time_s <= third + margin_s]


def _slow_links(difference: Difference, program: Program) -> Evidence:
    """Links that the preflight of the slower side measured as slower. One start has one preflight."""
    if program.num_ranks == 1:
        return EXCLUDED
    if difference.in_one_start:
        return POSSIBLE
    sides = difference.whole_links, difference.part_links
    slow_links, fast_links = sides if difference.is_whole_slower else sides[::-1]
    for column, slow in slow_links.items():
        fast = fast_links.get(column)
        if fast and fast > (1 + LINK_TOLERANCE) * slow and difference.is_explained_by(fast / slow):
            ratio_text = f"{slow / fast:.2f} x that before {difference.fast_name}"
            fact = f"{column} before {difference.slow_name} was {ratio_text}, in the preflights of their jobs"
            return Evidence(fact, difference.slow_starts[:1])
    return POSSIBLE


def _other_load(difference: Difference, program: Program) -> Evidence:
    """Other programs that used more cores during the slower side. One start has one number for both."""
    if difference.in_one_start:
        load = difference.whole.foreign_load
        return EXCLUDED if load is not None and load <= LOAD_TOLERANCE else POSSIBLE
    fast_loads = [load for start in difference.fast_starts if (load := start.foreign_load) is not None]
    slow_loads = [
        (start, load) for start in difference.slow_starts if (load := start.foreign_load) is not None
    ]
    if not fast_loads or not slow_loads:
        return POSSIBLE
    fast_load = median(fast_loads)
    loaded = [(start, load) for start, load in slow_loads if load - fast_load > LOAD_TOLERANCE]
    if not loaded:
        return EXCLUDED
    slow_text, fast_text = map(RESULT_COLUMNS["foreign_load"].text, (loaded[0][1], fast_load))
    fact = f"they used {slow_text} of the cores of a node during {difference.slow_name}, else {fast_text}"
    return Evidence(fact, [start for start, _ in loaded])
