"""The files in which the ranks of a node report their progress: their reports, and the logs of programs of the user."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ultrabench.log_patterns import LOG_PATTERNS, compile_pattern, parse_log_line
from ultrabench.rank_report import NewLines, parse_line
from ultrabench.run import Task


class ReportSource(NamedTuple):
    """A file in which a rank reports its progress line by line."""

    writer_rank: int
    """The rank that writes the file."""
    described_rank: int
    """The rank for which the lines count."""
    new_lines: NewLines
    parse: Callable[[str], dict[str, Any] | None]
    """Turns a line of the file into a line of a report; None if it says nothing about the progress."""


def report_sources(task: Task, ranks: range, run_folder: Path) -> list[ReportSource]:
    """The reports of a node's ranks, and the logs that the patterns of the kernel read."""
    reports = [ReportSource(n, n, NewLines(run_folder / f"rank{n}.report"), parse_line) for n in ranks]
    return reports if task.forked else [*reports, *_log_sources(task, ranks, run_folder)]


def _log_sources(task: Task, ranks: range, run_folder: Path) -> Iterator[ReportSource]:
    """A source for each pattern of the kernel and each log of this node to which it applies.

    Steps and MFU count as those of rank 0, whichever rank prints them; memory counts for the rank that prints it.
    """
    spec, kernel = task.spec, task.spec.kernel
    tokens_per_gpu = spec.tokens_per_step / spec.layout.world_size
    for option, log_pattern in LOG_PATTERNS.items():
        if pattern_text := getattr(kernel, option):
            pattern = compile_pattern(option, pattern_text)
            parse = partial(parse_log_line, pattern=pattern, tokens_per_gpu=tokens_per_gpu, option=option)
            source_ranks = ranks if log_pattern.every_rank else [spec.logging_rank]
            for rank in (rank for rank in source_ranks if rank in ranks):
                log_lines = NewLines(run_folder / f"rank{rank}.log")
                yield ReportSource(rank, rank if log_pattern.every_rank else 0, log_lines, parse)
