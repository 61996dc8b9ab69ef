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
"""Fewest turns of parts with a pause that are evidence, and fewest starts with evidence that decide."""
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
    """The same before the parts."""

    @property
    def is_whole_slower(self) -> bool:
        """Whether whole steps are slower than their parts said."""
        return self.ratio > 1

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
    texts_by_cause = {
        cause: [evidence.text for evidence in of_starts if evidence.text]
        for cause, of_starts in evidence_by_cause.items()
    }
    decided = {cause: texts for cause, texts in texts_by_cause.items() if len(texts) >= MIN_STARTS}
    for cause, texts in (decided or texts_by_cause).items():
        num_starts = len(evidence_by_cause[cause])
        starts_text = f"{len(texts)} of {num_starts} starts" if num_starts > 1 else "one start"
        if texts:
            yield f"{'' if decided else 'maybe '}{cause} ({starts_text}): {texts[0]}"


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
    part_clocks_hz = [hz for part in difference.parts if (hz := part.sm_clock_hz)]
    part_reasons = [reason for part in difference.parts if (reason := part.throttled)]
    whole_reasons = [reason for reason in [difference.whole.throttled] if reason]
    is_slow_whole = difference.is_whole_slower
    reasons, other_reasons = (whole_reasons, part_reasons) if is_slow_whole else (part_reasons, whole_reasons)
    slow_name = "whole steps" if is_slow_whole else "parts"
    if reasons and not other_reasons:
        return Evidence(f"GPUs were throttled in the start with {slow_name}: {reasons[0]}")
    whole_hz = difference.whole.sm_clock_hz
    if not whole_hz or not part_clocks_hz:
        return POSSIBLE
    part_hz = median(part_clocks_hz)
    slow_hz, fast_hz = (whole_hz, part_hz) if is_slow_whole else (part_hz, whole_hz)
    if not difference.is_explained_by(fast_hz / slow_hz):
        return EXCLUDED
    slow_text, fast_text = map(RESULT_COLUMNS["sm_clock_hz"].text, (slow_hz, fast_hz))
    return Evidence(f"{slow_name} ran at a lower clock: {slow_text} of {fast_text}")


def _late_rank(difference: Difference, program: Program) -> Evidence:
    """A rank that started whole steps later than the others, which waited for it within their timed steps."""
    if not program.trains_itself:
        return POSSIBLE  # its steps hold the loading of data
    if program.num_ranks == 1:
        return EXCLUDED
    part_lags = [lag for part in difference.parts if (lag := _rank_lag(part))]
    whole_lag = _rank_lag(difference.whole)
    if not whole_lag or not part_lags:
        return POSSIBLE
    part_lag = median(part_lags)
    slow, fast = (whole_lag, part_lag) if difference.is_whole_slower else (part_lag, whole_lag)
    if not difference.is_explained_by(slow / fast):
        return EXCLUDED
    times_s = (difference.whole if difference.is_whole_slower else difference.parts[0]).rank_step_times_s
    late, waiting = min(times_s, key=times_s.__getitem__), max(times_s, key=times_s.__getitem__)
    fact = f"rank {late} was late between steps"
    return Evidence(
        f"{fact}: its own took {1 / slow:.2f} x the time of those of rank {waiting}, which waited"
    )


def _rank_lag(result: RunResult) -> float | None:
    """The step time of the slowest rank over that of the fastest; None where they are unknown."""
    times_s = [time_s for time_s in result.rank_step_times_s.values() if time_s > 0]
    return max(times_s) / min(times_s) if len(times_s) > 1 else None


def _pauses(difference: Difference, program: Program) -> Evidence:
    """Turns of parts with a pause, which their mean leaves out, while whole steps are long enough to hold them all."""
    if not difference.is_whole_slower:
        return EXCLUDED
    turns_s = [part.step_times_s for part in difference.parts if len(part.step_times_s) >= MIN_SAMPLES]
    if not turns_s:
        return POSSIBLE
    times_s, regular_s = [*chain(*turns_s)], [*chain(*map(_without_pauses, turns_s))]
    num_pauses = len(times_s) - len(regular_s)
    if num_pauses < MIN_PAUSES:
        return EXCLUDED
    # A pause of one size moves the time by a turn as far as all pauses move whole steps, on average.
    if not difference.is_explained_by(fmean(times_s) / fmean(regular_s)):
        return POSSIBLE
    return Evidence(f"{num_pauses} of {counted(len(times_s), 'turn')} of its parts had a pause")


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
    slow_name, fast_name = (
        ("whole steps", "parts") if difference.is_whole_slower else ("parts", "whole steps")
    )
    for column, slow in slow_links.items():
        fast = fast_links.get(column)
        if fast and fast > (1 + LINK_TOLERANCE) * slow and difference.is_explained_by(fast / slow):
            fact = f"{column} before {slow_name} was {slow / fast:.2f} x that before {fast_name}"
            return Evidence(f"{fact}, in the preflights of their jobs")
    return POSSIBLE


def _other_load(difference: Difference, program: Program) -> Evidence:
    """Other programs that used more cores during the slower side. One start has one number for both."""
    whole_load = difference.whole.foreign_load
    if difference.in_one_start:
        is_alone = whole_load is not None and whole_load <= LOAD_TOLERANCE
        return EXCLUDED if is_alone else POSSIBLE
    part_loads = [load for part in difference.parts if (load := part.foreign_load) is not None]
    if whole_load is None or not part_loads:
        return POSSIBLE
    loads = whole_load, median(part_loads)
    slow_load, fast_load = loads if difference.is_whole_slower else loads[::-1]
    if slow_load - fast_load <= LOAD_TOLERANCE:
        return EXCLUDED
    slow_name = "whole steps" if difference.is_whole_slower else "parts"
    slow_text, fast_text = map(RESULT_COLUMNS["foreign_load"].text, (slow_load, fast_load))
    return Evidence(f"they used {slow_text} of the cores of a node during {slow_name}, else {fast_text}")
