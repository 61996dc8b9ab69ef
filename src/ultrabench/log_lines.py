"""The lines of a program's log: a line feed or a carriage return ends one, and codes of terminals are no part of it."""

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ultrabench.rank_report import MAX_LINE_BYTES, MAX_SKIPPED_CHUNKS, read_or_nothing

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]+[0-~]|[0-Z\\^-~])"
    r"|\x9b[0-?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1f\x7f]"
)
"""Codes that terminals obey: colours, moves of the cursor, titles, links, and single control characters.

Source: ECMA-48, sections 5.3 to 5.6.
"""
_LINE_END = re.compile(r"\r\n|\n|\r")
_CLOCK = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
"""A date and a time of day, as loggers write them before a line."""


_BAR = re.compile(r"(?<![\d.])(\d+)/\d+ \[\d+:\d\d")
"""The state of a tqdm bar, such as 3/9 [00:01<00:02, its first number counting steps."""


class Sighting(NamedTuple):
    """When a line was written."""

    at_s: float
    """The latest time at which it may have been written, in seconds of any clock."""
    error_s: float
    """How much earlier it may have been written, in seconds."""


class LogLine(NamedTuple):
    """A line of a log, without codes of terminals."""

    text: str
    sighting: Sighting | None = None
    """When it was written; None where that is not known."""
    is_redrawn: bool = False
    """Whether a carriage return ended the line, so that the next text is written over it."""


def without_escapes(text: str) -> str:
    """A text without the codes of terminals in it."""
    return _ESCAPES.sub("", text)


def split_log(text: str) -> list[LogLine]:
    """All lines of a log that is read afterwards, in order, with the times that they show themselves; empty ones too.

    The number of a line counts line feeds and carriage returns alike.
    """
    lines, start = [], 0
    for line_end in _LINE_END.finditer(text):
        lines.append(_line(text[start : line_end.start()], line_end[0]))
        start = line_end.end()
    return [*lines, _line(text[start:], "\n")] if text[start:] else lines


def _line(text: str, line_end: str) -> LogLine:
    plain_text = without_escapes(text)
    return LogLine(plain_text, clock_time(plain_text), is_redrawn=line_end == "\r")


def clock_time(text: str) -> Sighting | None:
    """The time that a line shows, which loggers cut off at their last digit; None if it shows no date with a time."""
    match = _CLOCK.search(text)
    if match is None:
        return None
    fraction = match[7] or ""
    try:
        seconds = datetime(*map(int, match.groups()[:6]), tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]
    except ValueError:
        return None
    resolution_s = 10.0 ** -len(fraction)
    return Sighting(seconds + int(fraction or 0) * resolution_s, resolution_s)


def bar_step(text: str) -> int | None:
    """The number of steps that a tqdm bar in a line shows; None if it shows none."""
    bar = _BAR.search(text)
    return int(bar[1]) if bar else None


class LogLines:
    """Reads the new lines of a log that another process writes, and when each of them arrived.

    A text without its end is not returned before its end arrives; its arrival is when it was first seen whole. So the
    last state of a progress bar has its own time, although the next state ends it.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LINE_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.has_more = False
        """Whether there may be more in the file than the last call has read."""
        self._offset = 0
        self._is_skipping = False
        """Whether the next byte to read is inside a line that is longer than `max_bytes` and therefore skipped."""
        self._last_look_s = time.monotonic()
        self._tail_bytes = 0
        """Number of bytes of the text without an end at the last look."""
        self._tail_sighting: Sighting | None = None

    def read(self, *, is_last: bool = False) -> list[LogLine]:
        """The lines after those of the last call.

        Args:
            is_last: whether nobody writes the log any more, so that a text without an end is a line.
        """
        look_s = time.monotonic()
        sighting = Sighting(look_s, look_s - self._last_look_s)
        chunk = self._read_chunk()
        self._last_look_s = look_s
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if is_last and not self.has_more:
            end = len(chunk)
        if not end:
            self._see_tail(len(chunk), sighting)
            return []
        first_end = min(n for n in (chunk.find(b"\n"), chunk.find(b"\r"), end) if n >= 0)
        lines = split_log(chunk[:end].decode(errors="replace"))
        tail_sighting = self._tail_sighting if first_end == self._tail_bytes else None
        self._offset += end
        self._tail_bytes, self._tail_sighting = 0, None
        self._see_tail(len(chunk) - end, sighting)
        timed_lines = [line._replace(sighting=sighting) for line in lines]
        if tail_sighting is not None and timed_lines:
            timed_lines[0] = timed_lines[0]._replace(sighting=tail_sighting)
        if self._is_skipping:
            self._is_skipping = False
            return timed_lines[1:]
        return timed_lines

    def _see_tail(self, num_bytes: int, sighting: Sighting) -> None:
        """Records that a text without an end had this length at a look."""
        if num_bytes != self._tail_bytes:
            self._tail_bytes, self._tail_sighting = num_bytes, sighting

    def _read_chunk(self) -> bytes:
        """The bytes after the last line, with at least one end of a line if there are `max_bytes` of them."""
        for _ in range(MAX_SKIPPED_CHUNKS):
            chunk = read_or_nothing(self.path, self._offset, self.max_bytes)
            self.has_more = len(chunk) == self.max_bytes
            if not self.has_more or b"\n" in chunk or b"\r" in chunk:
                break
            self._offset += len(chunk)
            self._is_skipping, self._tail_bytes, self._tail_sighting = True, 0, None
        return chunk
