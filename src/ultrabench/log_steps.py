"""The steps of a program that only logs: which lines count, how many steps each is for,
and what speaks against them.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from ultrabench.errors import counted
from ultrabench.log_lines import LogLine, Sighting, bar_step
from ultrabench.log_numbers import UnreadableError, decimal_mark_in, is_readable, unit_beside
from ultrabench.log_patterns import LOG_PATTERNS, TIME_GROUPS, MisreadError, quantities, search_line
from ultrabench.time_labels import PARTS_OF_STEP

_COUNTER = re.compile(
    r"\b(global_step|optimizer[ _]step|step|iteration|iter|update)\b\W{0,4}(\d+)\b(?!\.\d)", re.IGNORECASE
)
"""A number that counts steps, with its name."""
_MICRO_COUNTER = re.compile(
    r"\b(micro(?:[-_ ]?(?:batch|step))?|mb|accum(?:ulation)?(?:[-_ ]step)?|grad_accum(?:_step)?)\b\W{0,4}(\d+)\b",
    re.IGNORECASE,
)
"""A number that counts micro-batches, with its name."""
_EVALUATION = re.compile(r"\b(?:eval|evaluation|valid|validate|validation|val)(?:\b|_)", re.IGNORECASE)
"""Words of lines that are not about training."""
_RANK = re.compile(r"\b(?:local_)?rank\W{0,3}(\d+)\b|^\s*\[?(?:default|gpu|node)?(\d+)\]?:", re.IGNORECASE)
"""The rank that a line names: [rank0]: of torch, rank=0, [default0]: of torchrun, 0: of srun --label."""
_CLOCKS = re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d+:\d\d(?::\d\d)?(?:[.,]\d+)?")
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
_BAR_UNIT = re.compile(r"\d *(it/s|s/it)\b")
"""The unit of the speed that a tqdm bar shows; it is s/it for steps of more than a second."""
_ONE_STEP = re.compile(
    r"(?:per|/)[ _-]?(?:iteration|iter|it|step|batch|update)\b|(?:iteration|iter|step|batch)[ _-]?time"
    r"|time[ _/-](?:per[ _-])?(?:iteration|iter|it|step|batch)\b"
    r"|(?:average|avg|mean)[ _-]?(?:iteration|iter|step|batch|time)",
    re.IGNORECASE,
)
"""Words which say that a time is that of one step."""
_SEVERAL_STEPS = re.compile(
    r"\b(?:for|over|last|past|previous)\s+(\d+)\s*(?:steps|iterations|iters|batches|updates)\b", re.IGNORECASE
)
"""Words which say for how many steps a line is."""
_PART_LABEL = re.compile(
    rf"(?<![a-z])(?:{PARTS_OF_STEP})(?![a-z])[^\d|,;:=]*[:=]?[^\d|,;:=]*$", re.IGNORECASE
)
"""The label of a time that is only a part of a step, before its number."""
_PART_TIME = re.compile(
    r"(?<![a-z])(?:forward|fwd|backward|bwd)(?![a-z])[^\d|,;]{0,20}?[:=]\s*(\d+(?:\.\d+)?)", re.IGNORECASE
)
"""A time of a part of a step, with its label."""

GROWING_RATES = (
    "each rate is about as much larger than the one before: they are probably counts since the start"
)
"""The sentence about lines whose rates grow like a count."""
MAX_PACE_RATIO = 1.5
"""Ratio between the distance of two lines and the time that they print from which the time is in doubt."""
GAS_TOLERANCE = 0.25
"""Relative difference from `gas` up to which a ratio shows that a line is of one micro-batch."""
MAX_UNREAD_SHARE = 0.1
"""Share of the matching lines that may lack a readable time, besides one line."""
NUM_DISTANCES = 21
"""Number of distances between lines whose median is the usual one."""
MIN_GROWING_LINES = 5
"""Smallest number of times that grow evenly from which they are those since the start of the program."""
MIN_PACE_LINES = 3
"""Smallest number of distances between lines that are compared with the times that they print."""


class StepSize(NamedTuple):
    """What one step of a run trains on, from which the time of a step follows where a line has a rate."""

    tokens: int
    samples: int
    gpus: int

    def seconds(self, values: dict[str, float]) -> float | None:
        """The time of a step from the quantities of a line; None if it has no time and no rate."""
        amount_by_rate = {
            "steps_per_s": 1,
            "samples_per_s": self.samples,
            "tokens_per_s": self.tokens,
            "tokens_per_s_per_gpu": self.tokens / self.gpus,
        }
        seconds = (amount / values[rate] for rate, amount in amount_by_rate.items() if rate in values)
        return values.get("seconds", next(seconds, None))


class StepLine(NamedTuple):
    """A line that counts."""

    number: int
    """Number of the line in its log, from 1 on."""
    values: dict[str, float]
    """Quantity -> value; `seconds` is that of one step."""
    num_steps: int
    """Number of steps that ended between the line before and this one."""
    sighting: Sighting | None


class DroppedLine(NamedTuple):
    """A line that matches but does not count."""

    number: int
    text: str
    reason: str
    kind: str
    """repeat (of a step that has counted), unreadable, misread (another quantity than the group says) or no_time (a
    number that is not the time of a step)."""
    loss: float | None = None
    """The loss of a repeat."""


@dataclass(slots=True)
class _Counted:
    """What is remembered of the last line that counted."""

    line: LogLine
    match_text: str
    numbers: Counter[str]
    rank: str | None
    values: dict[str, float]


@dataclass(slots=True)
class StepReader:
    """Reads the steps in the lines of one log, in their order, with the pattern of a step_line.

    A line whose step has counted is dropped: a bar that is drawn again, or another rank's line. A group `step`, or the
    state of a tqdm bar, numbers the steps. Without a number, a line counts once with the equal text that follows it
    within half a step.
    """

    pattern: re.Pattern[str]
    divided_by: int | None = None
    """By what the last time was divided, since its line was for so many steps; None if it was not."""
    inner_lines: int = 0
    """Lines that repeat the number of a step with another time, by the same rank."""
    num_equal_lines: int = 0
    """Lines that equal the line before, although nothing shows that they are of the same step."""
    num_counted: int = 0
    num_repeats: int = 0
    """Lines of steps that had counted."""
    are_of_one_step: bool = False
    """Whether words say that the times of lines are those of one step."""
    num_parts: int = 0
    """Lines that count although their time is that of a part of a step, such as the backward pass."""
    num_evaluation: int = 0
    """Lines that count although they have a word for evaluation, which is not training."""
    _number: int = 0
    _decimal_mark: str | None = None
    _last: _Counted | None = None
    _max_step: int | None = None
    _counted_steps: set[int] = field(default_factory=set)
    _rank_of_max: str | None = None
    _strides: Counter[int] = field(default_factory=Counter)
    _first_line: StepLine | None = None
    """The first line, while it is not known for how many steps it is."""
    _printed_s: float = 0.0
    _distance_s: float = 0.0
    """Sums over lines for several steps: what they print, and how far apart they are."""
    _distances_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_DISTANCES))
    """The latest distances between lines that count."""
    _counters: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Name of a counter in the lines that count -> its last value, its number of lines and of values."""
    _counter_strides: dict[str, Counter[int]] = field(default_factory=dict)
    """Name of a counter -> by how much it grew from line to line, and how often."""
    _num_steps_in_words: Counter[int] = field(default_factory=Counter)
    """Number of steps that a line is for by its words -> number of such lines."""
    _micro_counters: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Name of a counter of micro-batches -> its last value, its number of lines and how often it began again."""

    @property
    def by_arrival(self) -> bool:
        """Whether the pattern has no group for a time."""
        return not TIME_GROUPS & self.pattern.groupindex.keys()

    @property
    def lines_per_step(self) -> float:
        """How many lines of one rank show the same number of a step; 1 if each shows its own."""
        repeated = [lines / values for _, lines, values in self._counters.values() if values > 1]
        repeated += [lines / (starts + 1) for _, lines, starts in self._micro_counters.values() if starts]
        if self.num_counted and self.inner_lines:
            repeated.append(1 + self.inner_lines / self.num_counted)
        return max(repeated, default=1.0)

    @property
    def uncounted_stride(self) -> int:
        """The number of steps of a line by its counters or words, where a line counts as one step;
        1 if it is for one.
        """
        has_time = {"seconds", "milliseconds"} & self.pattern.groupindex.keys()
        if self._strides or not (has_time or self.by_arrival):
            return 1
        strides = [next(iter(counts)) for counts in self._counter_strides.values() if len(counts) == 1]
        are_all_constant = len(strides) == len(self._counter_strides)
        stride = min(strides) if strides and are_all_constant else 1
        (worded, num_lines), *_ = [*self._num_steps_in_words.most_common(1), (1, 0)]
        return max(stride, worded if 2 * num_lines > self.num_counted else 1)

    def read(self, line: LogLine) -> list[StepLine | DroppedLine]:
        """What a line adds: steps, or why it matches and does not count; nothing if it does not match."""
        self._number += 1
        match = search_line(self.pattern, line.text)
        if match is None:
            return [*self._drop_other_unit(line)]
        self._decimal_mark = decimal_mark_in(_texts(match), "") or self._decimal_mark
        try:
            values = quantities("step_line", match, self._decimal_mark)
        except MisreadError as error:
            return [DroppedLine(self._number, line.text, str(error), "misread")]
        except UnreadableError as error:
            return [self._drop_unreadable(match, str(error))]
        if not self.by_arrival and not _has_time(values):
            return [self._drop_unreadable(match, "it has no time or rate above 0")]
        if not is_readable(values.get("seconds", 1.0)):
            problem = f"{values['seconds']:g} s is not the time of a step"
            return [DroppedLine(self._number, line.text, problem, "no_time")]
        counted_line = _Counted(line, match[0], _numbers(line.text), _rank_in(line.text), values)
        step = _step_number(values, line.text)
        if reason := self._repeat_reason(counted_line, step):
            self.num_repeats += 1
            return [DroppedLine(self._number, line.text, reason, "repeat", values.get("loss"))]
        return [*self._count(counted_line, match, step)]

    def finish(self) -> list[StepLine]:
        """The first line if it was the only one."""
        first_line, self._first_line = self._first_line, None
        return [first_line] if first_line else []

    def _drop_other_unit(self, line: LogLine) -> Iterator[DroppedLine]:
        """Drops a state of a bar that has the inverse unit of the one before, so that the pattern does not match it."""
        if self._last is None or self.by_arrival or bar_step(line.text) is None:
            return
        bar_unit, last_unit = _BAR_UNIT.search(line.text), _BAR_UNIT.search(self._last.line.text)
        if (
            bar_unit
            and last_unit
            and bar_unit[1] != last_unit[1]
            and bar_step(self._last.line.text) is not None
        ):
            reason = f"the bar is in {bar_unit[1]}, the pattern reads {last_unit[1]}"
            yield DroppedLine(self._number, line.text, reason, "unreadable")

    def _drop_unreadable(self, match: re.Match[str], reason: str) -> DroppedLine:
        """Drops a line without a time; the next line is not for its step."""
        step_text = (match.groupdict().get("step") or "").strip()
        if step_text.isdecimal() and self._max_step is not None:
            self._max_step = max(self._max_step, int(step_text))
        return DroppedLine(self._number, match.string, reason, "unreadable")

    def _repeat_reason(self, new: _Counted, step: int | None) -> str | None:
        """Why a line is of a step that has counted; None if it is of a new one."""
        last = self._last
        if last is None:
            return None
        if step is None:
            return self._equal_text_reason(last, new)
        if self._max_step is None or step > self._max_step or step not in self._counted_steps:
            return None
        is_other_rank = new.rank is not None and new.rank != self._rank_of_max
        num_behind = 1 if "step" in new.values else 0  # ranks are not quite in step; a bar is of one process
        if step < self._max_step - num_behind and not is_other_rank:
            return None  # the count starts again, such as in the next epoch
        is_drawn_again = last.line.is_redrawn or new.line.is_redrawn
        if step == self._max_step and not is_drawn_again and not is_other_rank and new.values != last.values:
            self.inner_lines += _time_of(new.values) != _time_of(last.values)
        return f"step {step} has counted already"

    def _equal_text_reason(self, last: _Counted, new: _Counted) -> str | None:
        """Why a line without a number of its step repeats the last one; None if it does not."""
        has_equal_numbers = last.numbers <= new.numbers or new.numbers <= last.numbers
        if last.match_text != new.match_text or not has_equal_numbers:
            return None
        usual_s = median(self._distances_s) if self._distances_s else 0.0
        rate = new.values.get("steps_per_s")
        half_step_s = new.values.get("seconds", 1 / rate if rate else usual_s) / 2
        before, after = last.line.sighting, new.line.sighting
        if before and after and max(before.error_s, after.error_s) < half_step_s:
            is_repeat = after.at_s - before.at_s < half_step_s
            return "the same text came less than half a step before" if is_repeat else None
        if last.line.is_redrawn:
            return "it draws the line before again"
        if new.rank != last.rank:
            return "another rank prints the same"
        if before and after and self.by_arrival and after.at_s <= before.at_s:
            return "the same text came at the same time"
        self.num_equal_lines += 1
        return None

    def _count(self, new: _Counted, match: re.Match[str], step: int | None) -> Iterator[StepLine]:
        """Counts a line; yields it with the number of its steps, after the first line if that was held."""
        stride = 1
        if step is not None:
            if self._max_step is not None and step > self._max_step:
                stride = step - self._max_step
                self._strides[stride] += 1
            elif self._max_step is not None:
                self._counted_steps.clear()
            self._max_step, self._rank_of_max = step, new.rank
            self._counted_steps.add(step)
        self._note_counters(new.line.text)
        self.num_parts += _is_part_of_step(match)
        previous, self._last = self._last, new
        self.num_counted += 1
        if previous and previous.line.sighting and new.line.sighting:
            self._distances_s.append(new.line.sighting.at_s - previous.line.sighting.at_s)
        is_first = previous is None
        num_steps = self._usual_stride(stride) if step is not None and not is_first else 1
        values = self._of_one_step(new, previous, match, num_steps)
        step_line = StepLine(self._number, values, num_steps, new.line.sighting)
        if is_first and step is not None and step > 1 and not self.by_arrival:
            self._first_line = step_line
            return
        if first_line := self._first_line:
            self._first_line = None
            num_first_steps = min(int(first_line.values.get("step", num_steps)) or 1, num_steps)
            seconds = first_line.values.get("seconds")
            if seconds is not None and self.divided_by:
                first_line = first_line._replace(
                    values={**first_line.values, "seconds": seconds / num_first_steps}
                )
            yield first_line._replace(num_steps=num_first_steps)
        yield step_line

    def _usual_stride(self, stride: int) -> int:
        """The number of steps of a line: 1 where most lines are for one step, so that others are missing."""
        are_for_one_step = self._strides[1] > 0 and self._strides[1] >= self._strides[stride]
        return 1 if are_for_one_step and not self.by_arrival else stride

    def _of_one_step(
        self, new: _Counted, previous: _Counted | None, match: re.Match[str], num_steps: int
    ) -> dict[str, float]:
        """The values of a line with the time of one step, where it prints that of all its steps."""
        self.divided_by = None
        if num_steps < 2 or "seconds" not in new.values or previous is None:
            return new.values
        group = "seconds" if match.groupdict().get("seconds") is not None else "milliseconds"
        is_per_step = "/" in unit_beside(match.string, *match.span(group))
        before, after = previous.line.sighting, new.line.sighting
        if before and after and after.at_s - before.at_s > 4 * (before.error_s + after.error_s):
            self._printed_s += new.values["seconds"]
            self._distance_s += after.at_s - before.at_s
        if self._distance_s:  # all steps of a line do not take longer than the distance of two lines
            is_per_step = self._printed_s <= self._distance_s / math.sqrt(num_steps)
        elif _ONE_STEP.search(match.string):
            is_per_step = True
        if is_per_step:
            return new.values
        self.divided_by = num_steps
        return {**new.values, "seconds": new.values["seconds"] / num_steps}

    def _note_counters(self, text: str) -> None:
        """Records the counters of a line that counts, to notice several lines of one step."""
        for name, digits in {name.lower(): digits for name, digits in _COUNTER.findall(text)}.items():
            last_value, num_lines, num_values = self._counters.get(name, (-1, 0, 0))
            value = int(digits)
            self._counters[name] = (value, num_lines + 1, num_values + (value != last_value))
            if num_lines:
                self._counter_strides.setdefault(name, Counter())[value - last_value] += 1
        for name, digits in {name.lower(): digits for name, digits in _MICRO_COUNTER.findall(text)}.items():
            last_value, num_lines, num_starts = self._micro_counters.get(name, (-1, 0, 0))
            value = int(digits)
            self._micro_counters[name] = (value, num_lines + 1, num_starts + (value < last_value))
        self.num_evaluation += _EVALUATION.search(text) is not None
        self.are_of_one_step |= _ONE_STEP.search(text) is not None
        if several := _SEVERAL_STEPS.search(text):
            self._num_steps_in_words[int(several[1])] += 1


class TimedLine(NamedTuple):
    """A line that counts, with the time of each of its steps by the arrival of the lines."""

    line: StepLine
    seconds: float
    error_s: float
    """How much the time of a step may be wrong, since a line is seen some time after it was written."""
    num_together: int
    """How many lines arrived together with it, itself included."""


@dataclass(slots=True)
class ArrivalTimer:
    """Times steps by the arrival of their lines: N lines give N - 1 times.

    Lines that arrive together share the time since the line before them evenly.
    """

    _anchor: Sighting | None = None
    _waiting: list[StepLine] = field(default_factory=list)
    """Lines that arrived together with the anchor."""

    @property
    def num_untimed(self) -> int:
        """Number of lines that arrived together with the first one, while no other line has arrived."""
        return len(self._waiting)

    def add(self, lines: Sequence[StepLine]) -> Iterator[TimedLine]:
        """Times the lines that one look at the log found."""
        for sighting, group in groupby(lines, key=lambda line: line.sighting):
            if sighting is None:
                continue
            if self._anchor is None:
                self._anchor, self._waiting = sighting, [*group][1:]
                continue
            self._waiting += group
            if sighting.at_s <= self._anchor.at_s:
                continue
            num_steps = sum(line.num_steps for line in self._waiting)
            seconds = (sighting.at_s - self._anchor.at_s) / num_steps
            error_s = max(sighting.error_s, self._anchor.error_s) / num_steps
            for line in self._waiting:
                yield TimedLine(line, seconds, error_s, len(self._waiting))
            self._anchor, self._waiting = sighting, []


class LoggedStep(NamedTuple):
    """What `log_doubts` knows of a measured line."""

    seconds: float
    num_steps: int
    sighting: Sighting
    num_together: int = 1


def log_doubts(
    steps: Sequence[LoggedStep],
    *,
    by_arrival: bool,
    gas: int = 1,
    num_lines: int = 0,
    num_unread: int = 0,
    num_steps_asked: int | None = None,
    lines_per_step: float = 1.0,
    uncounted_stride: int = 1,
    are_of_one_step: bool = False,
    num_parts: int = 0,
) -> dict[str, str]:
    """Code -> sentence of each doubt about steps that were read from a log.

    Args:
        steps: the measured ones.
        by_arrival: whether the arrival of the lines timed them.
        gas: micro-batches of a step.
        num_lines: number of all lines that count.
        num_unread: number of lines that match but have no time that can be read.
        num_steps_asked: how many steps the program was asked for; None if it was not.
        lines_per_step: as `StepReader.lines_per_step` gives it.
        uncounted_stride: as `StepReader.uncounted_stride` gives it.
        are_of_one_step: whether words say that the times are those of one step.
        num_parts: number of lines with the time of a part of a step.
    """
    doubts: dict[str, str] = {}
    if by_arrival and (most := max((step.num_together for step in steps), default=1)) > 1:
        num_bursts = sum(step.num_together > 1 for step in steps)
        doubts["arrival_burst"] = (
            f"{num_bursts} of {counted(len(steps), 'line')} arrived with others, up to {most} at once: "
            "the program buffers its output, or its steps are too short to be timed by arrival"
        )
    if num_unread > 1 and num_unread > MAX_UNREAD_SHARE * (num_lines + num_unread):
        doubts["unread_lines"] = (
            f"{num_unread} of {num_lines + num_unread} lines of steps have no time that can be read"
        )
    if not by_arrival and (growth_s := even_growth_s([step.seconds for step in steps])):
        doubts["growing_times"] = (
            f"each time is about {growth_s:.4g} s longer than the one before: they are probably those since the start"
        )
    if num_parts:
        doubts["part_of_step"] = (
            f"the times of {counted(num_parts, 'line')} are those of a part of a step by their labels"
        )
    if not by_arrival and even_growth_s([1 / step.seconds for step in steps]):
        doubts["growing_rates"] = GROWING_RATES
    ratio = None if by_arrival else pace_ratio(steps)
    if uncounted_stride > 1:
        is_time_of_one = ratio is not None and _is_near(ratio, uncounted_stride)
        ratio = None if is_time_of_one else ratio
        is_unknown = ratio is None and (by_arrival or not are_of_one_step)
        is_time_of_all = ratio is not None and 1 / MAX_PACE_RATIO <= ratio <= MAX_PACE_RATIO
        if not is_time_of_one and (is_unknown or is_time_of_all):
            doubts["strided_lines"] = (
                f"each line is for {uncounted_stride} steps, and counts as one: let a group `step` match their number"
            )
    if gas > 1 and ratio is not None and _is_near(ratio, gas):
        doubts["micro_batches"] = (
            f"lines are {ratio:.3g} x as far apart as the times that they print, and a step has {gas} "
            "micro-batches: the times are probably those of one micro-batch"
        )
    elif ratio is not None and not 1 / MAX_PACE_RATIO <= ratio <= MAX_PACE_RATIO:
        distance_s = ratio * median(step.seconds for step in steps)
        doubts["log_pace"] = (
            f"steps take {median(step.seconds for step in steps):.4g} s by what the lines print, "
            f"but lines are {distance_s:.4g} s a step apart"
        )
    if by_arrival and num_steps_asked and num_lines * MAX_PACE_RATIO < num_steps_asked:
        doubts.setdefault(
            "strided_lines",
            (
                f"{counted(num_lines, 'line')} for {num_steps_asked} steps, and each counts as one: "
                "make the program write a "
                "line for each step, or let a group `step` match their number"
            ),
        )
    if "micro_batches" not in doubts:
        asked_ratio = num_lines / num_steps_asked if num_steps_asked else 1.0
        if gas > 1 and _is_near(asked_ratio, gas):
            doubts["micro_batches"] = (
                f"{counted(num_lines, 'line')} for {num_steps_asked} steps of {gas} micro-batches: "
                "the lines are probably those of micro-batches"
            )
        elif lines_per_step >= MAX_PACE_RATIO:
            doubts["micro_batches"] = (
                f"{lines_per_step:.3g} lines show the same step: they are those of micro-batches or of several ranks"
            )
    return doubts


def pace_ratio(steps: Sequence[LoggedStep]) -> float | None:
    """How much longer steps take by the distance of their lines than by the times that the lines print.

    None where the distance is not known: most lines arrived together, or the error of the arrival is too large. A
    pause between two steps does not count, since the median of the distances does.
    """
    pairs = [
        ((after.sighting.at_s - before.sighting.at_s) / after.num_steps, after)
        for before, after in pairwise(steps)
    ]
    num_apart = sum(distance_s > 0 for distance_s, _ in pairs)
    if num_apart < max(MIN_PACE_LINES, 0.75 * len(pairs)):
        return None
    span_s = steps[-1].sighting.at_s - steps[0].sighting.at_s
    error_s = max(step.sighting.error_s for step in steps)
    printed_s = sum(step.seconds * step.num_steps for _, step in pairs)
    if span_s < 10 * error_s and printed_s < 10 * error_s:
        return None
    median_ratio = median(distance_s / step.seconds for distance_s, step in pairs)
    total_ratio = span_s / printed_s
    return median_ratio if median_ratio >= 1 else max(median_ratio, total_ratio)


def even_growth_s(times_s: Sequence[float]) -> float | None:
    """By how much each time is longer than the one before, if all are by about as much; else None."""
    growths_s = [after - before for before, after in pairwise(times_s)]
    if len(times_s) < MIN_GROWING_LINES or min(growths_s) <= 0 or times_s[-1] < 1.2 * times_s[0]:
        return None
    median_s = median(growths_s)
    return median_s if max(growths_s) <= 1.5 * median_s and min(growths_s) >= 0.5 * median_s else None


def _is_near(ratio: float, count: int) -> bool:
    return ratio >= MAX_PACE_RATIO and abs(ratio - count) <= GAS_TOLERANCE * count


def _is_part_of_step(match: re.Match[str]) -> bool:
    """Whether the time of a line is that of a part of a step: by its label, or since another part takes longer."""
    groups = match.groupdict()
    name = next((name for name in ("seconds", "milliseconds") if groups.get(name)), None)
    if name is None:
        return False
    if _PART_LABEL.search(match.string[: match.start(name)]):
        return True
    number = re.match(r"\d+(?:\.\d+)?$", groups[name] or "")
    return number is not None and any(
        float(time) > float(number[0]) for time in _PART_TIME.findall(match.string)
    )


def _texts(match: re.Match[str]) -> list[str]:
    groups = {**LOG_PATTERNS["step_line"].groups, **LOG_PATTERNS["step_line"].optional_groups}
    return [text for name, text in match.groupdict().items() if text is not None and name in groups]


def _time_of(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in ("loss", "step")}


def _has_time(values: dict[str, float]) -> bool:
    """Whether a line has the time of a step, or a rate from which it follows."""
    return "seconds" in values or any(map(is_readable, _time_of(values).values()))


def _step_number(values: dict[str, float], text: str) -> int | None:
    """The number of the step that a line shows: that of its group, else that of a bar; None if it shows none."""
    if "step" in values:
        return int(values["step"]) if math.isfinite(values["step"]) else None
    return bar_step(text)


def _rank_in(text: str) -> str | None:
    match = _RANK.search(text)
    return next(filter(None, match.groups()), None) if match else None


def _numbers(text: str) -> Counter[str]:
    """The numbers in a line, without those of clocks and of its rank."""
    return Counter(_DIGITS.findall(_RANK.sub(" ", _CLOCKS.sub(" ", text))))
