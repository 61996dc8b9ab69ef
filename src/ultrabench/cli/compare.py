"""The command `ultrabench compare`, which says what is slower, faster or failing in a second table of results."""

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, percent_option
from ultrabench.cli.results import draw, write_result
from ultrabench.errors import ConfigError, counted

if TYPE_CHECKING:
    from ultrabench.analysis.compare import Comparison

Results = Annotated[str, typer.Argument(metavar="SWEEP or FILE.parquet", show_default=False)]
Threshold = Annotated[float, percent_option("--threshold", "Ignore smaller differences of step times.")]
Record = dict[Any, Any]
"""Column -> value of one row."""
PUBLISHED = "published"
"""Word that stands for the rates of configs/published/ in the place of results B."""
MAX_ROWS = 10
"""Number of layouts and of cells that are printed."""
MAX_UNPROVEN = 5
"""Number of layouts without a finding that are printed, those with the largest ratios."""


def compare(
    a: Results,
    b: Results,
    threshold: Threshold = 5.0,
    output: Path | None = typer.Option(
        None, "-o", "--output", help="Write all layouts (.parquet) or a figure (.png, .svg or .pdf)."
    ),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> int:
    """Compare results B with A: show slower and failing layouts.

    B can be the word `published`, which compares the best runs of A with published rates.

    The exit code is 1 if a layout is significantly slower than the threshold allows, or fails only in B."""
    if a == PUBLISHED:
        arguments = shlex.join([a, b])
        remedy = "write: ultrabench compare SWEEP published"
        raise ConfigError(f"compare {arguments}: published must come second", remedy)
    if b == PUBLISHED:
        return _beside_published(a, output, json_, results_dir)
    from ultrabench.analysis.collect import distinct_names, open_results
    from ultrabench.analysis.compare import compare as compared
    from ultrabench.cli.tables import print_json, say, warn

    (*source_a, table_a), (*source_b, table_b) = (
        open_results(source, results_dir, warn) for source in (a, b)
    )
    comparison = compared(table_a, table_b, threshold / 100, distinct_names(source_a, source_b))
    if output is not None:
        _write(comparison, output)
        say(f"wrote {counted(len(comparison.rows), 'layout')} to {output}")
    if json_:
        (name_a, name_b), (only_a, only_b) = comparison.names, comparison.num_only
        sides = {"a": name_a, "b": name_b, "only_a": only_a, "only_b": only_b}
        fields = ("threshold", "differing", "regressions", "median_ratio", "checkpoints", "notes", "warning")
        tables = {"winners": comparison.winners, "rows": comparison.rows}
        records = {name: json.loads(frame.to_json(orient="records")) for name, frame in tables.items()}
        print_json(sides | {name: getattr(comparison, name) for name in fields} | records)
    else:
        _print(comparison)
    if comparison.warning:
        warn(comparison.warning)
    return int(comparison.regressions > 0)


def _beside_published(source: str, output: Path | None, json_: bool, results_dir: Path) -> int:
    """Prints the best run of each cell beside the nearest published rate; those that match come first."""
    from dataclasses import asdict

    from ultrabench.analysis.collect import open_results
    from ultrabench.analysis.published import beside_published, none_comparable
    from ultrabench.cli.tables import print_json, show, warn

    if output is not None:
        raise ConfigError(f"-o {output}: compare {PUBLISHED} writes no file; use --json")
    name, _, table = open_results(source, results_dir, warn)
    entries = sorted(beside_published(table), key=lambda entry: entry.share is None)
    num_matched = sum(entry.share is not None for entry in entries)
    if json_:
        rows = [
            {
                "cell": e.cell.to_json(),
                "published": asdict(e.published),
                "differing": e.differing,
                "share": e.share,
            }
            for e in entries
        ]
        print_json({"name": name, "matched": num_matched, "rows": rows})
        return 0
    if not entries:
        show(f"{name}: no cell has a rate to compare: {none_comparable(table)}")
        return 0
    show(f"{name}: {num_matched} of {counted(len(entries), 'cell')} with a rate match a published rate")
    show(*(f"  {entry.text}" for entry in entries))
    return 0


def _write(comparison: "Comparison", path: Path) -> None:
    """Writes the compared layouts as parquet, or draws them."""
    if path.suffix == ".parquet":
        import pyarrow as pa

        from ultrabench.analysis.collect import parquet

        write_result(path, parquet(pa.Table.from_pandas(comparison.rows, preserve_index=False)))
        return
    from ultrabench.analysis.figures.compared import figure

    draw(path, lambda: figure(comparison))


def _print(comparison: "Comparison") -> None:
    """Prints what differs, layouts with a finding or a large ratio, cells with another winner, and the notes."""
    from ultrabench.analysis.compare import FAILING, FASTER, RUNNING_AGAIN, SLOWER
    from ultrabench.analysis.numbers import with_unit
    from ultrabench.cli.tables import show, table

    counts = comparison.rows["finding"].value_counts()
    summary = [f"{counts.get(name, 0)} {name}" for name in (SLOWER, FASTER, FAILING, RUNNING_AGAIN)]
    median_ratio = "unknown" if comparison.median_ratio is None else f"{comparison.median_ratio:.3f}"
    counts_line = f"{', '.join(summary)} (threshold {comparison.threshold:.1%})"
    show(f"{comparison.title}: median ratio of step times {median_ratio}; {counts_line}")
    show(f"  A is {comparison.names[0]}, B is {comparison.names[1]}; ratios are B / A")
    show(*(f"  {name}: {value_a} -> {value_b}" for name, (value_a, value_b) in comparison.differing.items()))
    rows = comparison.findings.to_dict("records")
    heads = ("finding", "model", ">nodes", "layout", ">step A", ">step B", ">ratio", ">p")
    if rows:
        show(table(f"\nfindings{_more(rows)}", *heads, rows=map(_cells, rows[:MAX_ROWS])))
    unproven_rows = comparison.unproven
    large_rows = unproven_rows[unproven_rows["ratio"] > 1 + comparison.threshold].to_dict("records")
    if large_rows:
        columns = ("model", ">nodes", "layout", ">ratio", ">p", ">steps A", ">steps B")
        first_rows = large_rows[:MAX_UNPROVEN]
        cells = [(*_cells(row)[1:4], *_cells(row)[-2:], row["steps_a"], row["steps_b"]) for row in first_rows]
        shown_share = f"{len(cells)} of {len(large_rows):,}"
        show(table(f"\nlargest ratios that are not significant ({shown_share})", *columns, rows=cells))
    winners = comparison.winners.to_dict("records")
    titles = ("model", ">nodes", "best of A", "best of B", "note")
    if winners:
        cells = [(w["model"], w["nodes"], w["best_a"], w["best_b"], _kept(w)) for w in winners[:MAX_ROWS]]
        show(table(f"\ncells with another winner{_more(winners)}", *titles, rows=cells))
    medians = [
        [c["column"], *(with_unit(c["column"], c[side]) for side in "ab"), c["layouts"]]
        for c in comparison.checkpoints
    ]
    if medians:
        show(table("\ncheckpoints (medians, not tested)", "column", ">A", ">B", ">layouts", rows=medians))
    show("", *comparison.notes)


def _more(rows: list[Record]) -> str:
    return f" ({MAX_ROWS} of {len(rows):,}; all: -o FILE.parquet)" if len(rows) > MAX_ROWS else ""


def _cells(row: Record) -> tuple[object, ...]:
    """The columns of a layout; the status stands for a step time that was not measured."""
    sides = ((row[f"runs_{side}"], row[f"step_time_{side}_s"], row[f"status_{side}"]) for side in "ab")
    times = (f"{time_s:.4g} s" if runs else status for runs, time_s, status in sides)
    ratio = f"{row['ratio']:.3f}" if row["runs_a"] and row["runs_b"] else None
    p = None if math.isnan(row["p_corrected"]) else f"{row['p_corrected']:.2g}"
    return row["finding"], row["model"], row["nodes"], row["layout"], *times, ratio, p


def _kept(winner: Record) -> str:
    """What it would cost to keep the best layout of A."""
    if winner["as_good"]:
        return "in B, the best of A ties for best"
    if math.isnan(winner["cost"]):
        return "the best of A was not measured in B"
    return f"in B, the best of A takes {winner['cost']:.3f} x the step time of the best of B"
