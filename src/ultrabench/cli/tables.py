"""Rich tables and consoles: tables to stdout, progress and warnings to stderr."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 1000
"""Columns when stdout is no terminal, so that nothing is cut in a pipe."""


def out() -> Console:
    """The console of tables."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)


def err() -> Console:
    """The console of progress and warnings."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDE, highlight=False, markup=False)


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
