"""Reads the log of a rank that failed, once and whole, and reduces it to its record.

Most of a log is progress. So blocks of it are searched for the few words that every failure has,
and only excerpts around these, and the end, are read line by line.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ultrabench.agent.diagnose.log_lines import split_lines
from ultrabench.agent.diagnose.log_record import WORDS, LogParser, LogRecord, tail_of
from ultrabench.agent.ranks.cleanup import file_size_bytes
from ultrabench.rank_report import read_or_nothing

MAX_LOG_BYTES = 64 * 2**20
"""Largest number of bytes of a log that are read: half from its beginning, half from its end."""
END_BYTES = 2**18
"""Bytes at the end of a log in which every line is read."""
BLOCK_BYTES = 4 * 2**20
"""Bytes that are searched in one step."""
BYTES_BEFORE, BYTES_AFTER = 8 * 2**10, 24 * 2**10
"""Bytes of an excerpt before and after a word."""
NUM_FIRST_EXCERPTS, NUM_LAST_EXCERPTS = 8, 32
"""Excerpts that are read line by line: the first and the last ones."""
SAMPLE_BYTES = 8 * 2**10
"""Bytes in the middle of a part that is left out, which show how much of it is progress."""
BYTES_PER_LINE = 100
"""Length of a line that is assumed where lines are not counted."""
_WORDS = [word.encode() for word in WORDS]
_GLOG_FATAL = re.compile(rb"F\d{3,4} ")
"""The date of a fatal line of glog, for which no word stands."""


class Span(NamedTuple):
    """A part of a file, in bytes."""

    start: int
    end: int


def read_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> LogRecord:
    """The record of a log; an empty one if there is no file.

    Args:
        max_bytes: the largest number of bytes that are read, half from the beginning and half from the end.
    """
    num_bytes, parser, lines, position = file_size_bytes(path), LogParser(), list[str](), 0
    for span in _excerpts(path, num_bytes, max_bytes):
        if span.start > position:
            sample_start = max(position, (position + span.start - SAMPLE_BYTES) // 2)
            sample_text = _text_of(path, Span(sample_start, min(span.start, sample_start + SAMPLE_BYTES)))
            # The first and the last line of the sample may be cut.
            sample_lines = split_lines(sample_text)[1:-1]
            parser.skip((span.start - position) // BYTES_PER_LINE, sample_lines)
        lines, position = split_lines(_text_of(path, span)), span.end
        parser.feed(lines)
    return parser.record(tail_of(lines))


def _text_of(path: Path, span: Span) -> str:
    return read_or_nothing(path, span.start, span.end - span.start).decode(errors="replace")


def _excerpts(path: Path, num_bytes: int, max_bytes: int) -> Iterator[Span]:
    """The parts of a log that are read line by line, in their order and without overlaps; the end is the last."""
    end_start = max(0, num_bytes - min(END_BYTES, max_bytes))
    half_bytes = max_bytes // 2
    searched = [Span(0, end_start)]
    if num_bytes > max_bytes:
        searched = [Span(0, half_bytes), Span(num_bytes - half_bytes, end_start)]
    word_spans = [
        Span(max(0, p - BYTES_BEFORE), p + BYTES_AFTER) for s in searched for p in _positions(path, s)
    ]
    if len(word_spans) > NUM_FIRST_EXCERPTS + NUM_LAST_EXCERPTS:
        word_spans = word_spans[:NUM_FIRST_EXCERPTS] + word_spans[-NUM_LAST_EXCERPTS:]
    merged = [*word_spans[:1]]
    for span in [*word_spans[1:], Span(end_start, num_bytes)]:
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(span.end, merged[-1].end))
        else:
            merged.append(span)
    return (span for span in merged if span.end > span.start)


def _positions(path: Path, searched: Span) -> list[int]:
    """Where words stand in a part of a log, in order; words that one excerpt shows together are one position."""
    positions = list[int]()
    longest_word = max(map(len, _WORDS))
    for block_start in range(searched.start, searched.end, BLOCK_BYTES):
        block_end = min(searched.end, block_start + BLOCK_BYTES)
        block = read_or_nothing(path, block_start, block_end - block_start + longest_word)
        block_positions = list[int]()
        for word in _WORDS:
            position = block.find(word)
            while position >= 0:
                block_positions.append(block_start + position)
                position = block.find(word, position + BYTES_AFTER // 2)
        block_positions += [block_start + match.start() for match in _GLOG_FATAL.finditer(block)]
        positions += sorted(block_positions)
    return positions
