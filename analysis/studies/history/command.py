"""The command `ultrabench history`, which says when the rates of the same runs changed for good over nights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Since, percent_option
from ultrabench.cli.output import draw
from ultrabench.errors import counted

if TYPE_CHECKING:
    from ultrabench.analysis.studies.history.history import History, Series

Folders = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER]...", help="Sweeps, .parquet files or folders of them; default: --results-dir."
    ),
]
FailAbove = Annotated[float, percent_option("--fail-above", "Ignore smaller losses of speed.")]
MAX_PRINTED_RUNS = 20
"""Number of runs that are printed, those with the latest changes first."""


def history(
    folders: Folders = None,
    fail_above_percent: FailAbove = 2.0,
    since: Since = None,
    output: Path | None = typer.Option(None, "-o", "--output", help="Draw a .png, .svg or .pdf figure."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> int:
    """Prints the rates of all nights; returns 1 if the latest change of a run is too large a loss."""
    from ultrabench.analysis.studies.history.history import history as build_history
    from ultrabench.analysis.studies.history.history import read_nights
    from ultrabench.cli.tables import print_json, say, warn

    nights = read_nights(folders or [str(results_dir)], results_dir, warn)
    first_day = f"{since:%Y-%m-%d}" if since else ""
    speed_history = build_history([night for night in nights if night.name >= first_day])
    speed_losses = speed_history.losses(fail_above_percent / 100)
    if output is not None:
        from ultrabench.analysis.studies.history.figure import figure

        draw(output, lambda: figure(speed_history))
        say(f"drew {counted(len(speed_history.series), 'run')} to {output}")
    if json_:
        print_json(_document(speed_history) | {"fail_above": fail_above_percent, "losses": len(speed_losses)})
    else:
        _print_history(speed_history)
    if speed_history.warning:
        warn(speed_history.warning)
    if speed_losses:
        say(f"a loss of more than {fail_above_percent:g} %: {speed_history.text(speed_losses[-1])}")
    return int(bool(speed_losses))


def _document(history: "History") -> dict[str, Any]:
    """The nights, the rates and changes of each run, and the moves."""
    from dataclasses import asdict

    return {
        "nights": [
            {"name": night.name, "sweep": night.sweep, "differing": history.differing(night_index)}
            for night_index, night in enumerate(history.nights)
        ],
        "runs": [asdict(series) for series in history.series],
        "moves": [asdict(move) | {"text": history.text(move)} for move in history.moves],
        "tested": history.num_tested,
        "notes": history.notes,
        "warning": history.warning,
    }


def _print_history(history: "History") -> None:
    """Prints the moves and a line for each run, those with the latest changes first."""
    from ultrabench.cli.tables import show, table

    nights = history.nights
    nights_text = f"{counted(len(nights), 'night')}, {nights[0].name} to {nights[-1].name}"
    changes_text = counted(len(history.moves), "significant change") if history.num_tested else "not tested"
    show(f"{nights_text}: {counted(len(history.series), 'run')}, {changes_text}")
    show(*(f"  {history.text(move)}" for move in history.moves))
    latest_first = sorted(history.series, key=lambda series: -max(series.changes, default=-1))
    num_runs = len(latest_first)
    shown_text = f" ({MAX_PRINTED_RUNS} of {num_runs:,}; all: --json)" * (num_runs > MAX_PRINTED_RUNS)
    columns = "model", ">nodes", "layout", ">nights", ">first rate", ">last rate", "unit", ">change", "since"
    rows = (_table_row(history, series) for series in latest_first[:MAX_PRINTED_RUNS])
    show(table(f"\nruns{shown_text}", *columns, rows=rows))
    show(*(f"\n{note}" for note in history.notes[:1]), *history.notes[1:])


def _table_row(history: "History", series: "Series") -> tuple[object, ...]:
    """The table row of one run: its first and last rate, and its last change with the night of that change."""
    from ultrabench.analysis.results.columns import RATE, column_of
    from ultrabench.column import NUMBER

    nights, last_change = series.counted_nights, max(series.changes, default=None)
    rate_unit = NUMBER if series.control else column_of(RATE).unit
    rates = [series.rates[night] for night in (nights[0], nights[-1])] if nights else [None, None]
    rate_texts = [rate and rate_unit.text(rate) for rate in rates]
    change_texts: tuple[str | None, ...] = (None, None)
    if last_change is not None:
        change_texts = f"{series.changes[last_change]:+.1%}", history.nights[last_change].name
    unit = f"x {series.control}" if series.control else column_of(RATE).heading
    run_texts = series.cell["model"], series.cell["nodes"], series.layout
    return *run_texts, len(nights), *rate_texts, unit, *change_texts
