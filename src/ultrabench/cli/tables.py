"""Rich tables and consoles: tables to stdout, progress and warnings to stderr."""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

WIDE = 1000
"""Columns when stdout is no terminal, so that nothing is cut in a pipe."""


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


def out() -> Console:
    """The console of tables."""
    return PlainConsole(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)


def err() -> Console:
    """The console of progress and warnings."""
    return PlainConsole(
        stderr=True, width=None if sys.stderr.isatty() else WIDE, highlight=False, markup=False
    )


def say(message: str) -> None:
    """One line of progress."""
    err().print(message, soft_wrap=True)


def warn(message: str) -> None:
    """One line of warning."""
    err().print(f"warning: {message}", soft_wrap=True, style="yellow")


def print_json(document: Any) -> None:
    """The one JSON document of a `--json` command."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table in the style of all our tables; numbers stand right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", header_style="dim")
    return made


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 run, 2,000 runs."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def hours(value: float) -> str:
    """GPU hours with a sensible number of digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def show_configs(group: str | None, as_json: bool) -> None:
    """Prints what can be named in an override, with the first comment of each file."""
    from ultrabench.errors import ConfigError, unknown_name
    from ultrabench.sweep.compose import GROUPS, describe

    if group is not None and group not in GROUPS:
        raise ConfigError(unknown_name("config group", group, GROUPS))
    names = [group] if group else list(GROUPS)
    found = {name: describe(name) for name in names}
    if as_json:
        print_json(found)
        return
    for name, options in found.items():
        made = table(f"{name}=", "name", "what it is")
        for option, text in options.items():
            made.add_row(option, text)
        out().print(made)
        out().print()
