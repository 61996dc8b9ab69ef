"""The command `ultrabench plot`, which draws figures of results."""

from pathlib import Path

import typer

from ultrabench.analysis.figures.kinds import KINDS
from ultrabench.cli.options import RESULTS, ResultsDir
from ultrabench.cli.results import Output, draw
from ultrabench.errors import ConfigError, counted, require_known, require_once

_WORDS = (
    "Results (default: the newest sweep); only rows with these values, such as nodes=4, or a layout to show."
)


def plot(
    kind: str | None = typer.Argument(None, metavar="KIND", help="What to draw; --list shows the kinds."),
    given: list[str] | None = typer.Argument(
        None, metavar="[SWEEP or FILE.parquet] [NAME=VALUE]...", help=_WORDS
    ),
    output: Output = None,
    axis: str | None = typer.Option(None, metavar="NAME", help="What is across, as --list shows."),
    list_: bool = typer.Option(False, "--list", help="Show the kinds of figures."),
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Draw another figure of the results, as .png, .svg or .pdf."""
    from ultrabench.analysis.figures.kinds import prepared, rows_where, runs_drawn
    from ultrabench.cli.tables import say, warn

    if list_ or kind is None:
        _print_kinds()
        return
    require_known("figure", KINDS, kind)
    from ultrabench.analysis.collect import open_results

    source, settings = _split(given or [])
    if KINDS[kind].of_layout:
        name, default, table = open_results(source, results_dir, warn) if source else ("", Path(kind), None)
        options = {"layout": settings}
    else:
        name, default, table = open_results(source, results_dir, warn)
        table, options = rows_where(table, settings), {}
    path = output or default.with_name(f"{kind}.png")
    drawn, make = prepared(kind, table, title=name, axis=axis, **options)
    draw(path, make)
    runs = runs_drawn(kind, drawn)
    say(f"drew {path}" if runs is None else f"drew {counted(runs, 'run')} to {path}")


def _print_kinds() -> None:
    """Prints one line for each kind of figure."""
    for kind, told in KINDS.items():
        axes = f" (--axis {', '.join(told.axes)})" if told.axes else ""
        typer.echo(f"{kind:<11}{told.shows}{axes}")


def _split(words: list[str]) -> tuple[str | None, dict[str, str]]:
    """The sweep or file among the words, None for the newest, and the values of columns.

    Raises:
        ConfigError: two words are no COLUMN=VALUE, or have the same column.
    """
    require_once(words)
    sources = [word for word in words if "=" not in word]
    if len(sources) > 1:
        raise ConfigError(f"{' '.join(sources)}: name one sweep or file; all else is COLUMN=VALUE")
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    return (sources[0] if sources else None), settings
