"""Tables and consoles of Rich: tables go to stdout, progress and warnings to stderr."""

import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ultrabench.column import NUMBER
from ultrabench.result import Status, tier

PIPE_WIDTH = 1000
"""Width in characters when the output is no terminal, so that nothing is cut in a pipe."""
LEFT_OUT_FIRST = (
    "", "run id", "run", "on", "policy", "GPUs", "host", "microbatches", "part", "at", "loss_final", "seconds",
    "for example", "x predicted", "candidates", "valid", "first seen", "last seen", "attempt", "share", "cost",
    "limited by",
    "tokens_per_s", "predicted_step_time_s", "peak_mem_reserved_bytes", "predicted_peak_mem_bytes", "days", "mfu",
    "similar", "tokens_per_s_per_gpu", "precision",
    "likely to fit", "p_oom",
    "why", "note",
    "step_time_s", "gpu_hours",
)  # fmt: skip
"""Columns of any table that are left out on a narrow terminal, the least important one first: ids and constants, then
shares and cost, last what says how sure a number is. An interval stands in the cell of its value. The name of a column
of results stands for its headings."""
SETTINGS = frozenset({"model", "nodes", "hardware", "kernel", "precision", "seq_len", "gbs"})
"""Columns that are left out before all others if several rows have the same value, which the command set."""
BAR_CHAR = "\u2588"
"""The character of which bars are made."""
MIN_TEXT_WIDTH, MAX_WORD_WIDTH = 12, 24
"""A column of text may shrink to 12 characters or its longest word; only words longer than 24 are broken."""

_CONTROL_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Escape sequences of terminals, control characters except tab and newline, and marks that reverse text."""


def plain_text(text: str) -> str:
    """The text without escape sequences and control characters, so that logs cannot control a terminal."""
    return _CONTROL_SEQUENCES.sub("", text)


class PlainConsole(Console):
    """A console that prints only plain text; all colours and cursor movements come from Rich."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed, without control characters in their text;
        an ASCII console gets bars of #.
        """
        bar_char = "#" if self.options.ascii_only else BAR_CHAR
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else plain_text(segment.text).replace(BAR_CHAR, bar_char)
            yield segment._replace(text=text)

    def print_line(self, renderable: RenderableType) -> None:
        """Prints a line or a table. A line is never broken, so that a command in it can be copied;
        a terminal wraps it.
        """
        self.print(renderable, soft_wrap=True)


def output_console(stderr: bool = False, pipe_width: int = PIPE_WIDTH) -> PlainConsole:
    """The console for tables on stdout, or one for stderr.

    Args:
        pipe_width: width in characters when the output is no terminal.
    """
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else pipe_width
    return PlainConsole(stderr=stderr, width=width, highlight=False, markup=False)


def show(*renderables: RenderableType, stderr: bool = False) -> None:
    """Prints lines of text, tables and groups of both on stdout, or on stderr."""
    console = output_console(stderr)
    for renderable in renderables:
        console.print_line(renderable)


def say(*renderables: RenderableType) -> None:
    """Prints progress on stderr: lines of text, tables and groups of both."""
    show(*renderables, stderr=True)


def warn(message: str) -> None:
    """Prints one line of warning."""
    say(Text(f"warning: {message}", "yellow"))


def can_ask() -> bool:
    """Whether standard input is a terminal, on which a question can be answered."""
    return sys.stdin is not None and sys.stdin.isatty()


def print_json(document: Any) -> None:
    """Prints the only JSON document of a command with `--json`."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


@functools.cache
def _position_by_heading() -> dict[str, int]:
    """Heading of a column in a table -> its position in LEFT_OUT_FIRST."""
    from ultrabench.analysis.results.columns import column_of  # most tables fit, and need no columns

    columns = [column_of(name) for name in LEFT_OUT_FIRST]
    return {
        heading: position
        for position, column in reversed([*enumerate(columns)])
        for heading in (column.heading, column.short_heading, column.bare_heading)
    }


class FittedTable(Table):
    """A table that fits the width of its terminal.

    Text wraps between words. If that is not enough, columns are left out: first those that are empty in all rows,
    then settings that are the same in all, then in the order of LEFT_OUT_FIRST, then from the right.
    The first one names the rows and stays. No number and no run id is ever cut.
    """

    always_shown: str | None = None
    """Name of another column that is never left out."""
    note_by_column: Mapping[str, str] = MappingProxyType({})
    """Name of a column -> a line about it, which follows the table where the column is shown."""
    requested_names: Sequence[str] = ()
    """Names of columns that an option asked for; a line after the table names those that are left out."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitted = copy(self)
        widths = self._widths(options.max_width).items()
        # Rich finds the padding of a column by its index, which changes when other columns are left out.
        fitted.columns = [replace(self.columns[i], width=w, _index=n) for n, (i, w) in enumerate(widths)]
        yield from Table.__rich_console__(fitted, console, options)
        shown_names = {str(column.header) for column in fitted.columns}
        yield from (Text(note) for name, note in self.note_by_column.items() if name in shown_names)
        if missing_names := [name for name in self.requested_names if name not in shown_names]:
            yield Text(
                f"no room for {' and '.join(missing_names)}: widen the terminal, or use --json", "yellow"
            )

    def _widths(self, max_width: int) -> dict[int, int]:
        """Index of each column that fits -> its width; `max_width` includes two blanks between columns."""
        full_widths, widths = {}, {}
        for index, column in enumerate(self.columns):
            cell_texts = [str(column.header), *map(str, column.cells)]
            full_widths[index] = widths[index] = max(map(cell_len, cell_texts))
            if column.justify != "right":
                word_width = max(map(cell_len, " ".join(cell_texts).split()), default=0)
                widths[index] = min(full_widths[index], max(MIN_TEXT_WIDTH, min(word_width, MAX_WORD_WIDTH)))

        def row_width() -> int:
            return sum(widths.values()) + 2 * (len(widths) - 1)

        def importance_key(index: int) -> tuple[bool, bool, bool, int, int]:
            header, values = str(self.columns[index].header), [*map(str, self.columns[index].cells)]
            is_constant = header in SETTINGS and len(values) > 1 and len({*values}) == 1
            is_kept = (index == 0 and not is_constant) or header == self.always_shown
            position = _position_by_heading().get(header, len(LEFT_OUT_FIRST))
            return is_kept, any(values), not is_constant, position, -index

        by_importance = sorted(full_widths, key=importance_key)[:-1] if row_width() > max_width else []
        for index in by_importance:
            if row_width() > max_width:
                del widths[index]
        spare_width = max_width - row_width()
        while spare_width > 0 and (narrow := [i for i in widths if widths[i] < full_widths[i]][:spare_width]):
            widths |= {i: widths[i] + 1 for i in narrow}
            spare_width -= len(narrow)
        return widths


def table(title: str, *columns: str, rows: Iterable[Iterable[object]] = ()) -> FittedTable:
    """A table in our style; None is an empty cell.

    Args:
        columns: names of the columns; one such as `>step` is aligned to the right and never broken.
    """
    new_table = FittedTable(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column_name in columns:
        justify: Literal["left", "right"] = "right" if column_name.startswith(">") else "left"
        new_table.add_column(column_name.removeprefix(">"), justify=justify, header_style="dim")
    for row in rows:
        new_table.add_row(*(cell if isinstance(cell, Text | None) else str(cell) for cell in row))
    return new_table


def style_of(status: str | None, has_caveat: bool = False) -> str:
    """The style of a status: green for ok, yellow for ok with a caveat, red for failed, dim for not run."""
    if status == Status.OK:
        return "yellow" if has_caveat else "green"
    return "red" if tier(status) == tier(Status.CRASH) else "dim"


def three_digits(value: float) -> str:
    """A number as people write it: with three digits, or as a whole number from 100 on, never with an exponent."""
    return NUMBER.bare_text(value)


def duration_text(seconds: float) -> str:
    """Seconds as a text such as 45s, 3m20s or 2h05m."""
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest_s:02d}s" if minutes else f"{rest_s}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
