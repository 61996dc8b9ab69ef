"""The commands `ultrabench collect`, `heatmap`, `plot` and `report`: tables, figures and pages of results."""

from pathlib import Path
from typing import Annotated

import typer

from ultrabench.analysis.figures.kinds import KINDS, prepare_figure, runs_drawn
from ultrabench.analysis.results.selected_rows import open_rows, rows_where, source_and_values
from ultrabench.cli.options import (
    RESULTS,
    Json,
    Output,
    RankBy,
    RankByAlias,
    ResultsDir,
    SelectedRows,
    table_option,
)
from ultrabench.cli.output import draw, write_result
from ultrabench.errors import ConfigError, counted, require_known
from ultrabench.store.folder import find_sweep

_ARGUMENTS_HELP = (
    "Results to draw (default: the newest sweep). AXIS is for figures that show any axis. "
    "NAME=VALUE selects rows, such as nodes=4, or sets a layout; memory of a plan draws its best layout by default."
)
Parquet = Annotated[Path | None, table_option("File to write.")]
"""Output for a command that writes parquet."""
Sweeps = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SWEEP]...", help="Names or folders; default: the newest sweep."),
]


def collect_sweeps(sweeps: Sweeps = None, output: Parquet = None, results_dir: ResultsDir = RESULTS) -> None:
    """Collect the results of sweeps in one parquet file."""
    from ultrabench.analysis.results.cells import caveats
    from ultrabench.analysis.results.collect import merged, newest_table, parquet, readable_tables
    from ultrabench.cli.tables import say, warn

    if sweeps:
        folders = [find_sweep(name, results_dir) for name in sweeps]
        distinct_folders = {folder.path.resolve(): folder for folder in folders}.values()
        table_by_folder = readable_tables(distinct_folders, warn)
    else:
        table_by_folder = newest_table(results_dir, warn)
    folders, result_table = [*table_by_folder], merged(table_by_folder.values())
    output_path = output or (folders[0].path if len(folders) == 1 else results_dir) / "runs.parquet"
    write_result(output_path, parquet(result_table))
    rows_text = f"{counted(len(result_table), 'row')} ({counted(len(result_table['attempt'].drop_null()), 'attempt')})"
    say(f"wrote {rows_text} of {', '.join(f.name for f in folders)} to {output_path}", *caveats(result_table))


def heatmap(
    rows: SelectedRows = None,
    output: Output = None,
    rank_by: RankBy = "tokens_per_s_per_gpu",
    by: RankByAlias = None,
    include_suspects: bool = typer.Option(
        False, "--include-suspects", help="Let suspect runs win their cells."
    ),
    other_source: str | None = typer.Option(
        None, "--compare", metavar="SWEEP or FILE", help="Show ratios to the best runs of this sweep or file."
    ),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Draw the best layout per model and node count."""
    from ultrabench.analysis.results.cells import compared_with, left_out, notes, require_comparable
    from ultrabench.analysis.results.collect import distinct_names, open_results
    from ultrabench.analysis.results.ranking import DEFAULT_RANK_BY, rank
    from ultrabench.cli.tables import print_json, say, warn

    rank_by = by or rank_by
    name, path_prefix, result_table = open_rows(rows, results_dir, warn)
    cells, other_name = rank(result_table, rank_by=rank_by, include_suspects=include_suspects), ""
    if other_source is not None:
        _, value_by_column = source_and_values(rows or [])
        other_name, other_prefix, other_table = open_results(other_source, results_dir, warn)
        other_table = rows_where(other_table, value_by_column)
        name, other_name = distinct_names((name, path_prefix), (other_name, other_prefix))
        other_cells = rank(other_table, rank_by=rank_by, include_suspects=include_suspects)
        cells = compared_with(cells, other_cells)
        require_comparable(cells, other_cells)
    if json_:
        print_json([cell.to_json() for cell in cells])
    if json_ and output is None:
        say(*left_out(result_table))
        return
    from ultrabench.analysis.figures.heatmap import figure

    rank_columns = sorted({cell.ranked_by for cell in cells if cell.ranked_by} - {DEFAULT_RANK_BY})
    notes_text = "".join(f"Ranked by {column}. " for column in rank_columns[:1])
    notes_text += notes(result_table, include_suspects)
    output_path = output or Path(f"{path_prefix}heatmap.png")
    draw(output_path, lambda: figure(cells, title=name, notes=notes_text, compared_name=other_name))
    num_tied = sum(bool(cell.as_good_as_best) for cell in cells)
    tied_text = f"; in {num_tied} of them, several layouts tie for best: see ultrabench sweep top"
    drawn_text = f"drew {counted(len(cells), 'cell')} to {output_path}{tied_text if num_tied else ''}"
    say(drawn_text, *left_out(result_table))


def plot(
    kind: str | None = typer.Argument(None, metavar="KIND", help="Kind of figure; --list shows all kinds."),
    arguments: list[str] | None = typer.Argument(
        None, metavar="[AXIS] [SWEEP or FILE.parquet] [NAME=VALUE]...", help=_ARGUMENTS_HELP
    ),
    output: Output = None,
    axis: str | None = typer.Option(None, metavar="NAME", help="The x axis; --list shows the choices."),
    by_column: str | None = typer.Option(
        None, "--by", metavar="COLUMN", help="The y axis, for kinds that --list shows with --by."
    ),
    list_: bool = typer.Option(False, "--list", help="List the kinds of figures."),
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Draw another figure of the results (.png, .svg or .pdf)."""
    from ultrabench.cli.tables import say, warn

    if list_ or kind is None:
        _print_kinds()
        return
    require_known("figure", KINDS, kind)
    from ultrabench.analysis.results.collect import open_results

    words_left = [*(arguments or [])]
    if KINDS[kind].takes_any_axis and axis is None:
        axis = next((word for word in words_left if "=" not in word and not word.endswith(".parquet")), None)
        if axis:
            words_left.remove(axis)
    source, value_by_column = source_and_values(words_left)
    if KINDS[kind].shows_layout:
        no_results = "", f"{Path.cwd()}/", None
        name, path_prefix, result_table = open_results(source, results_dir, warn) if source else no_results
        options = {"layout": value_by_column}
    else:
        name, path_prefix, result_table = open_results(source, results_dir, warn)
        result_table, options = rows_where(result_table, value_by_column), {}
    output_path = output or Path(f"{path_prefix}{'-'.join(filter(None, (kind, axis, by_column)))}.png")
    drawn_data, make_figure = prepare_figure(
        kind, result_table, title=name, axis=axis, by=by_column, **options
    )
    draw(output_path, make_figure)
    runs_text = runs_drawn(drawn_data)
    say(f"drew {runs_text} to {output_path}" if runs_text else f"drew {output_path}")


def _print_kinds() -> None:
    """Prints one line for each kind of figure."""
    for kind, traits in KINDS.items():
        axes_text = f" (--axis {', '.join(traits.axes)})" if traits.axes else ""
        columns_text = f" (--by COLUMN, default {traits.default_column})" if traits.default_column else ""
        typer.echo(f"{kind:<14}{traits.summary}{axes_text}{columns_text}")


def report(
    rows: SelectedRows = None,
    output: Output = None,
    public: bool = typer.Option(False, "--public", help="Leave out hosts, paths, users and free text."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Write all results to one HTML page that works offline."""
    if output is not None and output.suffix not in (".html", ".htm"):
        raise ConfigError(f"-o {output}: the page is HTML; give a name that ends in .html")
    from ultrabench.analysis.page.page import page
    from ultrabench.analysis.page.rows import document
    from ultrabench.cli.tables import print_json, say, warn

    name, path_prefix, result_table = open_rows(rows, results_dir, warn)
    output_path = output or Path(f"{path_prefix}report.html")
    page_data = document(result_table, public=public)
    html = page(page_data, title=name).encode()
    write_result(output_path, html)
    if json_:
        counts = {"rows": len(result_table), "cells": len(page_data["cells"])}
        print_json({"path": str(output_path), "bytes": len(html), **counts})
        return
    say(f"wrote a page of {counted(len(result_table), 'row')} ({len(html) / 1e6:.1f} MB) to {output_path}")
