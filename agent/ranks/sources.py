"""The files in which the ranks of a node report their progress: their reports, and the logs of programs of the user."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ultrabench.log_lines import LogLines, Sighting
from ultrabench.log_patterns import LOG_PATTERNS, OBSERVED_EVENT, compile_pattern, parse_log_line
from ultrabench.log_steps import ArrivalTimer, DroppedLine, StepLine, StepReader, StepSize
from ultrabench.rank_report import NewLines, checked_line, parse_line
from ultrabench.run import Task

ReportLine = dict[str, Any]
"""A line of a report, or what a line of a log says as one."""


class Source(Protocol):
    """A file in which a rank reports its progress line by line."""

    writer_rank: int
    """The rank that writes the file."""
    described_rank: int
    """The rank for which the lines count."""

    @property
    def has_more(self) -> bool:
        """Whether there may be more in the file than the last call of `read` has read."""

    def read(self, *, is_last: bool) -> list[ReportLine]:
        """The new lines of a report.

        Args:
            is_last: whether the writer has ended.
        """


@dataclass(slots=True)
class ReportSource:
    """The report that a rank writes."""

    writer_rank: int
    described_rank: int
    new_lines: NewLines

    @property
    def has_more(self) -> bool:  # noqa: D102 - as Source has it
        return self.new_lines.has_more

    def read(self, *, is_last: bool) -> list[ReportLine]:  # noqa: D102 - as Source has it
        return [*filter(None, map(parse_line, self.new_lines.read()))]


@dataclass(slots=True)
class ObservationSource:
    """Memory, MFU or losses in a log."""

    writer_rank: int
    described_rank: int
    log_lines: LogLines
    option: str
    pattern: re.Pattern[str]

    @property
    def has_more(self) -> bool:  # noqa: D102 - as Source has it
        return self.log_lines.has_more

    def read(self, *, is_last: bool) -> list[ReportLine]:  # noqa: D102 - as Source has it
        lines = self.log_lines.read(is_last=is_last)
        return [*filter(None, (parse_log_line(line.text, self.pattern, self.option) for line in lines))]


@dataclass(slots=True)
class StepSource:
    """The steps in a log."""

    writer_rank: int
    described_rank: int
    log_lines: LogLines
    reader: StepReader
    size: StepSize
    timer: ArrivalTimer = field(default_factory=ArrivalTimer)
    _has_finished: bool = False
    _latest_has_loss: bool = False

    @property
    def has_more(self) -> bool:  # noqa: D102 - as Source has it
        return self.log_lines.has_more

    def read(self, *, is_last: bool) -> list[ReportLine]:  # noqa: D102 - as Source has it
        step_lines, report_lines = list[StepLine](), list[ReportLine]()
        for log_line in self.log_lines.read(is_last=is_last):
            for outcome in self.reader.read(log_line):
                if isinstance(outcome, StepLine):
                    step_lines.append(outcome)
                    self._latest_has_loss = "loss" in outcome.values
                elif outcome.loss is None or not step_lines:
                    report_lines += self._observed(outcome)
                else:  # the step may be drawn again with its loss
                    step_lines[-1].values.setdefault("loss", outcome.loss)
        is_end = is_last and not self.has_more and not self._has_finished
        if is_end:
            self._has_finished = True
            step_lines += self.reader.finish()
        steps = (
            self._timed_steps(step_lines) if self.reader.by_arrival else map(self._printed_step, step_lines)
        )
        report_lines += steps
        return [*report_lines, *self._summary()] if is_end else report_lines

    def _timed_steps(self, step_lines: list[StepLine]) -> Iterator[ReportLine]:
        for timed in self.timer.add(step_lines):
            step = _step_report(timed.line, timed.seconds, "arrival")
            yield {**step, "arrival_error_s": timed.error_s, "together": timed.num_together}

    def _printed_step(self, line: StepLine) -> ReportLine:
        return _step_report(line, self.size.seconds(line.values), "log")

    def _observed(self, dropped: DroppedLine) -> Iterator[ReportLine]:
        """What a line that does not count shows of the log."""
        if dropped.kind == "misread":
            yield {"event": OBSERVED_EVENT, "misread": f"kernel.step_line: {dropped.reason}"}
        elif dropped.kind == "no_time":
            yield {"event": "step", "fault": f"a line of kernel.step_line of which {dropped.reason}"}
        elif dropped.kind == "unreadable":
            yield {"event": OBSERVED_EVENT, "unread": 1}
        elif dropped.loss is not None and not self._latest_has_loss:
            self._latest_has_loss = True
            yield {"event": OBSERVED_EVENT, "late_loss": dropped.loss}

    def _summary(self) -> Iterator[ReportLine]:
        """What only the whole log shows."""
        yield {
            "event": OBSERVED_EVENT,
            "lines_per_step": self.reader.lines_per_step,
            "uncounted_stride": self.reader.uncounted_stride,
            "are_of_one_step": self.reader.are_of_one_step,
            "parts": self.reader.num_parts,
            "untimed": self.timer.num_untimed,
            "repeats": self.reader.num_repeats,
        }


def _step_report(line: StepLine, seconds: float | None, measured_by: str) -> ReportLine:
    """A line that counts, as a line of a report; it has a `fault` if its time is none."""
    values = {"event": "step", "seconds": math.nan if seconds is None else seconds, **_loss(line)}
    sighting = line.sighting or Sighting(0.0, 0.0)
    places = {"arrived_s": sighting.at_s, "seen_within_s": sighting.error_s, "count": line.num_steps}
    return {"measured_by": measured_by, **checked_line(values), **places}


def _loss(line: StepLine) -> ReportLine:
    return {"loss": line.values["loss"]} if "loss" in line.values else {}


def report_sources(task: Task, ranks: range, run_folder: Path) -> list[Source]:
    """The reports of a node's ranks, and the logs that the patterns of the kernel read."""
    writers = {rank: ranks.start if task.starts_ranks else rank for rank in ranks}
    reports = [
        ReportSource(writer, rank, NewLines(run_folder / f"rank{rank}.report"))
        for rank, writer in writers.items()
    ]
    return [*reports] if task.forked else [*reports, *_log_sources(task, writers, run_folder)]


def _log_sources(task: Task, writers: Mapping[int, int], run_folder: Path) -> Iterator[Source]:
    """A source for each pattern of the kernel and each log of this node to which it applies.

    Its lines count for the rank that writes the log, and for the first rank of a node whose ranks share a log.

    Args:
        writers: rank of this node -> the rank whose process writes its log.
    """
    spec = task.started_spec
    size = StepSize(spec.tokens_per_step, spec.workload.gbs, spec.layout.world_size)
    for option, log_pattern in LOG_PATTERNS.items():
        if pattern_text := spec.kernel.pattern(option):
            pattern = compile_pattern(option, pattern_text)
            reads_all = log_pattern.every_rank or spec.logging_rank is None
            log_writers = {w for rank, w in writers.items() if reads_all or rank == spec.logging_rank}
            for writer in sorted(log_writers):
                log_lines = LogLines(run_folder / f"rank{writer}.log")
                if option == "step_line":
                    yield StepSource(writer, writer, log_lines, StepReader(pattern), size)
                else:
                    yield ObservationSource(writer, writer, log_lines, option, pattern)
