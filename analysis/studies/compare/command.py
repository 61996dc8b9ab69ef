"""The command `ultrabench compare`, which says what is slower, faster or failing in a second table of results."""

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, percent_option
from ultrabench.cli.output import draw, write_result
from ultrabench.errors import ConfigError, counted

if TYPE_CHECKING:
    from ultrabench.analysis.studies.compare.compare import Comparison

FirstResults = Annotated[str, typer.Argument(metavar="A", help="Sweep or FILE.parquet.", show_default=False)]
SecondResults = Annotated[str, typer.Argument(metavar="B", help="Sweep or FILE.parquet.", show_default=False)]
Threshold = Annotated[float, percent_option("--threshold", "Ignore smaller differences of step times.")]
ResultRow = dict[Any, Any]
"""Column -> value of one row of a comparison."""
PUBLISHED = "published"
"""Word that stands for the rates of configs/published/ in the place of results B."""
MAX_ROWS = 10
"""Number of layouts and of cells that are printed."""
MAX_UNPROVEN = 5
"""Number of layouts without a finding that are printed, those with the largest differences in either direction."""


def compare(
    a: FirstResults,
    b: SecondResults,
    threshold_percent: Threshold = 5.0,
    output: Path | None = typer.Option(
        None, "-o", "--output", help="Write all layouts (.parquet) or a figure (.png, .svg or .pdf)."
    ),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> int:
    """Compares two results, or one with published rates; returns 1 if anything is slower or newly failing."""
    if a == PUBLISHED:
        arguments = shlex.join([a, b])
        remedy = "write: ultrabench compare SWEEP published"
        raise ConfigError(f"compare {arguments}: published must come second", remedy)
    if b == PUBLISHED:
        return _beside_published(a, output, json_, results_dir)
    from ultrabench.analysis.results.collect import distinct_names, open_results
    from ultrabench.analysis.studies.compare.compare import compare as compare_tables
    from ultrabench.cli.tables import print_json, say, warn

    (name_a, prefix_a, table_a), (name_b, prefix_b, table_b) = (
        open_results(source, results_dir, warn) for source in (a, b)
    )
    names = distinct_names((name_a, prefix_a), (name_b, prefix_b))
    comparison = compare_tables(table_a, table_b, threshold_percent / 100, names)
    if output is not None:
        _write_comparison(comparison, output)
        say(f"wrote {counted(len(comparison.rows), 'layout')} to {output}")
    if json_:
        num_only_a, num_only_b = comparison.num_only
        sides = {"a": names[0], "b": names[1], "only_a": num_only_a, "only_b": num_only_b}
        fields = ("threshold", "differing", "regressions", "median_ratio", "checkpoints", "notes", "warning")
        frames = {"winners": comparison.winners, "rows": comparison.rows}
        row_lists = {key: json.loads(frame.to_json(orient="records")) for key, frame in frames.items()}
        print_json(sides | {key: getattr(comparison, key) for key in fields} | row_lists)
    else:
        _print_comparison(comparison)
    if comparison.warning:
        warn(comparison.warning)
    return int(comparison.regressions > 0)


def _beside_published(source: str, output: Path | None, as_json: bool, results_dir: Path) -> int:
    """Prints the best run of each cell beside the nearest published rate; those that match come first."""
    from dataclasses import asdict

    from ultrabench.analysis.results.collect import open_results
    from ultrabench.analysis.results.published import beside_published, none_comparable
    from ultrabench.cli.tables import print_json, show, warn

    if output is not None:
        raise ConfigError(f"-o {output}: compare {PUBLISHED} writes no file; use --json")
    name, _, result_table = open_results(source, results_dir, warn)
    runs = sorted(beside_published(result_table), key=lambda run: run.share is None)
    num_matched = sum(run.share is not None for run in runs)
    if as_json:
        rows = [
            {"cell": run.cell.to_json(), "published": asdict(run.published), "differing": run.differing,
                "share": run.share}
            for run in runs
        ]  # fmt: skip
        print_json({"name": name, "matched": num_matched, "rows": rows})
    if not runs:
        raise ConfigError(f"{name}: no cell has a rate to compare: {none_comparable(result_table)}")
    if not as_json:
        show(f"{name}: {num_matched} of {counted(len(runs), 'cell')} with a rate match a published rate")
        show(*(f"  {run.text}" for run in runs))
    if not num_matched:
        rule = "only rates of equal model, GPU, precision, seq_len and gbs are compared"
        raise ConfigError(
            f"{name}: no published rate matches; {rule}: add your own to ./ultrabench/published/"
        )
    return 0


def _write_comparison(comparison: "Comparison", path: Path) -> None:
    """Writes the compared layouts as parquet, or draws them."""
    if path.suffix == ".parquet":
        import pyarrow as pa

        from ultrabench.analysis.results.collect import parquet

        write_result(path, parquet(pa.Table.from_pandas(comparison.rows, preserve_index=False)))
        return
    from ultrabench.analysis.studies.compare.figure import figure

    draw(path, lambda: figure(comparison), (".parquet",))


def _print_comparison(comparison: "Comparison") -> None:
    """Prints what differs, layouts with a finding or a large difference, cells with another winner, and the notes."""
    from ultrabench.analysis.results.numbers import with_unit
    from ultrabench.analysis.studies.compare.compare import FAILING, FASTER, RUNNING_AGAIN, SLOWER
    from ultrabench.cli.tables import show, table

    num_by_finding = comparison.rows["finding"].value_counts()
    counts = [f"{num_by_finding.get(name, 0)} {name}" for name in (SLOWER, FASTER, FAILING, RUNNING_AGAIN)]
    ratio_text = "unknown" if comparison.median_ratio is None else f"{comparison.median_ratio:.3f}"
    counts_line = f"{', '.join(counts)} (threshold {comparison.threshold:.1%})"
    show(f"{comparison.title}: median ratio of step times {ratio_text}; {counts_line}")
    show(f"  A is {comparison.names[0]}, B is {comparison.names[1]}; ratios are B / A")
    show(*(f"  {column}: {a} -> {b}" for column, (a, b) in comparison.differing.items()))
    findings = comparison.findings.to_dict("records")
    headings = ("finding", "model", ">nodes", "layout", ">step A", ">step B", ">ratio", ">p")
    if findings:
        shown_rows = map(_table_row, findings[:MAX_ROWS])
        show(table(f"\nfindings{_count_text(findings)}", *headings, rows=shown_rows))
    unproven_rows = comparison.unproven.to_dict("records")
    if unproven_rows:
        unproven_columns = ("model", ">nodes", "layout", ">ratio", ">p", ">steps A", ">steps B")
        shown_unproven = [
            (*_table_row(row)[1:4], *_table_row(row)[-2:], row["steps_a"], row["steps_b"])
            for row in unproven_rows[:MAX_UNPROVEN]
        ]
        count_text = f"({len(shown_unproven)} of {len(unproven_rows):,})"
        title = f"\nlargest differences that are no findings {count_text}"
        show(table(title, *unproven_columns, rows=shown_unproven))
    winners = comparison.winners.to_dict("records")
    columns = ("model", ">nodes", "best of A", "best of B", "note")
    if winners:
        rows = [(w["model"], w["nodes"], w["best_a"], w["best_b"], _note_text(w)) for w in winners[:MAX_ROWS]]
        show(table(f"\ncells with another winner{_count_text(winners)}", *columns, rows=rows))
    median_rows = [
        [c["column"], *(with_unit(c["column"], c[side]) for side in "ab"), c["layouts"]]
        for c in comparison.checkpoints
    ]
    if median_rows:
        show(table("\ncheckpoints (medians, not tested)", "column", ">A", ">B", ">layouts", rows=median_rows))
    show("", *comparison.notes)


def _count_text(rows: list[ResultRow]) -> str:
    """How many of these rows a table shows; empty if it shows all."""
    return f" ({MAX_ROWS} of {len(rows):,}; all: -o FILE.parquet)" if len(rows) > MAX_ROWS else ""


def _table_row(row: ResultRow) -> tuple[object, ...]:
    """The row of the table of findings for one layout; a status replaces a step time that was not measured."""
    from ultrabench.analysis.results.numbers import with_unit

    sides = ((row[f"runs_{side}"], row[f"step_time_{side}_s"], row[f"status_{side}"]) for side in "ab")
    time_texts = (
        with_unit("step_time_s", time_s) if num_runs else status for num_runs, time_s, status in sides
    )
    ratio_text = None
    if row["runs_a"] and row["runs_b"]:
        ratio_text = f"{row['ratio']:.3f}{' by parts' * row['by_parts']}"
    p_text = None if math.isnan(row["p_corrected"]) else f"{row['p_corrected']:.2g}"
    return row["finding"], row["model"], row["nodes"], row["layout"], *time_texts, ratio_text, p_text


def _note_text(winner: ResultRow) -> str:
    """The note on a cell with another winner: what it would cost to keep the best layout of A."""
    if winner["as_good"]:
        return "in B, the best of A ties for best"
    if math.isnan(winner["cost"]):
        return "the best of A was not measured in B"
    return f"in B, the best of A takes {winner['cost']:.3f} x the step time of the best of B"
