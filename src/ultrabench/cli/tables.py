"""Rich tables and consoles: tables to stdout, progress and warnings to stderr."""

import json
import re
import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

WIDE = 1000
"""Columns when stdout is no terminal, so that nothing is cut in a pipe."""
GIVES_WAY = (
    "predicted", "on", "loss", "step s", "why", "policy", "GPUs", "host", "microbatches", "part", "at", "peak GiB",
    "step", "seconds", "candidates", "valid", "they fit", "attempt", "memory", "run", "tokens/s/GPU", "run id",
)  # fmt: skip
"""Columns of any table that are left out on a narrow terminal, the least important one first."""
WRAPPED, LONGEST_WORD = 12, 24
"""A column of text may shrink to 12 characters, or to its longest word; only a word longer than 24 is broken."""

_UNSEEN = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Escape sequences of terminals, control characters but tab and newline, and marks that turn text around."""


def plain(text: str) -> str:
    """Text without anything that a terminal obeys: what a run has logged may be shown, not executed."""
    return _UNSEEN.sub("", text)


class PlainConsole(Console):
    """Prints only plain text; colours and cursor movements are Rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything that is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))

    def print_line(self, text: str | Text, style: str | None = None) -> None:
        """Prints one line: a terminal gets it wrapped between words, a pipe gets it whole."""
        self.print(text, style=style, soft_wrap=not self.is_terminal)


def out(stderr: bool = False) -> PlainConsole:
    """The console of tables on stdout."""
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else WIDE
    return PlainConsole(stderr=stderr, width=width, highlight=False, markup=False)


def err() -> PlainConsole:
    """The console of progress and warnings on stderr."""
    return out(stderr=True)


def say(message: str) -> None:
    """Prints one line of progress."""
    err().print_line(message)


def warn(message: str) -> None:
    """Prints one line of warning."""
    err().print_line(f"warning: {message}", "yellow")


def print_json(document: Any) -> None:
    """The one JSON document of a `--json` command."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


class FittedTable(Table):
    """A table that fits the terminal it is printed on.

    Text wraps between its words. Where that is not enough, columns are left out in the order of
    GIVES_WAY, then from the right, so that no number and no run id is ever cut.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitted = copy(self)
        widths = self._widths(options.max_width).items()
        # Rich looks the padding of a column up by its index, which changes when others are left out.
        fitted.columns = [replace(self.columns[i], width=w, _index=n) for n, (i, w) in enumerate(widths)]
        yield from Table.__rich_console__(fitted, console, options)

    def _widths(self, room: int) -> dict[int, int]:
        """Column -> its width, of those that fit into `room` with two blanks between them."""
        whole, least = {}, {}
        for at, column in enumerate(self.columns):
            texts = [str(column.header), *map(str, column.cells)]
            whole[at] = least[at] = max(map(cell_len, texts))
            if column.justify != "right":
                longest = max(map(cell_len, " ".join(texts).split()), default=0)
                least[at] = min(whole[at], max(WRAPPED, min(longest, LONGEST_WORD)))
        order = {name: place for place, name in enumerate(GIVES_WAY)}
        for at in sorted(whole, key=lambda at: (order.get(str(self.columns[at].header), len(order)), -at))[
            :-1
        ]:
            if sum(least.values()) + 2 * (len(least) - 1) > room:
                del least[at]
        spare = room - sum(least.values()) - 2 * (len(least) - 1)
        while spare > 0 and (short := [at for at in least if least[at] < whole[at]][:spare]):
            least |= {at: least[at] + 1 for at in short}
            spare -= len(short)
        return least


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> FittedTable:
    """A table in the style of all our tables; numbers stand right and are never broken."""
    made = FittedTable(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", header_style="dim")
    return made


def style_of(status: str | None, doubtful: bool = False) -> str:
    """The colour of an end: green ok, yellow ok but not to be compared, red failed, dim not run."""
    if status == "ok":
        return "yellow" if doubtful else "green"
    return "dim" if status in (None, "pending", "running", "skipped", "rejected") else "red"


def hours(value: float) -> str:
    """GPU hours with a sensible number of digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s or 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
