"""The command `ultrabench history`, which says when the rates of the same runs changed for good over nights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Since, percent_option
from ultrabench.cli.results import draw
from ultrabench.errors import counted

if TYPE_CHECKING:
    from ultrabench.analysis.history import History, Series

Folders = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER]...", help="Sweeps, .parquet files or folders of them; default: --results-dir."
    ),
]
FailAbove = Annotated[float, percent_option("--fail-above", "Ignore smaller losses of speed.")]
MAX_RUNS = 20
"""Number of runs that are printed, those with the latest changes first."""


def history(
    folders: Folders = None,
    fail_above: FailAbove = 2.0,
    since: Since = None,
    output: Path | None = typer.Option(None, "-o", "--output", help="Draw a .png, .svg or .pdf figure."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> int:
    """Show how the speed of runs changed from night to night.

    The exit code is 1 if the latest significant change of a run is a loss of more than --fail-above."""
    from ultrabench.analysis.history import history as history_of
    from ultrabench.analysis.history import read_nights
    from ultrabench.cli.tables import print_json, say, warn

    nights = read_nights(folders or [str(results_dir)], results_dir, warn)
    first_day = f"{since:%Y-%m-%d}" if since else ""
    over_nights = history_of([night for night in nights if night.name >= first_day])
    losses = over_nights.losses(fail_above / 100)
    if output is not None:
        from ultrabench.analysis.figures.nights import figure

        draw(output, lambda: figure(over_nights))
        say(f"drew {counted(len(over_nights.series), 'run')} to {output}")
    if json_:
        print_json(_document(over_nights) | {"fail_above": fail_above, "losses": len(losses)})
    else:
        _print(over_nights)
    if over_nights.warning:
        warn(over_nights.warning)
    if losses:
        say(f"a loss of more than {fail_above:g} %: {over_nights.text(losses[-1])}")
    return int(bool(losses))


def _document(history: "History") -> dict[str, Any]:
    """The nights, the rates and changes of each run, and the moves."""
    from dataclasses import asdict

    return {
        "nights": [
            {"name": night.name, "sweep": night.sweep, "differing": history.differing(number)}
            for number, night in enumerate(history.nights)
        ],
        "runs": [asdict(series) for series in history.series],
        "moves": [asdict(move) | {"text": history.text(move)} for move in history.moves],
        "notes": history.notes,
        "warning": history.warning,
    }


def _print(history: "History") -> None:
    """Prints the moves and a line for each run, those with the latest changes first."""
    from ultrabench.cli.tables import show, table

    span_text = f"{history.nights[0].name} to {history.nights[-1].name}"
    num_changes = counted(len(history.moves), "significant change")
    show(
        f"{counted(len(history.nights), 'night')}, {span_text}: {counted(len(history.series), 'run')}, {num_changes}"
    )
    show(*(f"  {history.text(move)}" for move in history.moves))
    latest_first = sorted(history.series, key=lambda s: -max(s.changes, default=-1))
    remark = f" ({MAX_RUNS} of {len(latest_first):,}; all: --json)" * (len(latest_first) > MAX_RUNS)
    heads = ("model", ">nodes", "layout", ">nights", ">first rate", ">last rate", "unit", ">change", "since")
    show(table(f"\nruns{remark}", *heads, rows=(_cells(history, s) for s in latest_first[:MAX_RUNS])))
    show(*(f"\n{note}" for note in history.notes[:1]), *history.notes[1:])


def _cells(history: "History", series: "Series") -> tuple[object, ...]:
    """The columns of one run: its rates, and its last change."""
    nights, night = series.counted_nights, max(series.changes, default=None)
    rates = [f"{series.rates[n]:,.4g}" for n in (nights[0], nights[-1])] if nights else [None, None]
    change = (None, None) if night is None else (f"{series.changes[night]:+.1%}", history.nights[night].name)
    unit = f"x {series.control}" if series.control else "tokens/s/GPU"
    return series.cell["model"], series.cell["nodes"], series.layout, len(nights), *rates, unit, *change
