"""The commands `ultrabench collect`, `heatmap` and `report`, which make a table, a picture or a page of results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, RankBy, ResultsDir, Source, table_file
from ultrabench.errors import ConfigError, SweepFolderError, counted
from ultrabench.store.folder import find_sweep, write_whole

if TYPE_CHECKING:  # for other commands these would be slow imports
    from collections.abc import Callable

    from matplotlib.figure import Figure

Output = Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")]
Table = Annotated[Path | None, table_file("The file to write.")]
Sweeps = Annotated[
    list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Names or folders; default: the newest.")
]


def collect_sweeps(sweeps: Sweeps = None, output: Table = None, results_dir: ResultsDir = RESULTS) -> None:
    """Collect the journals of sweeps into one parquet file."""
    from ultrabench.analysis.cells import doubts
    from ultrabench.analysis.collect import collect, parquet
    from ultrabench.cli.tables import say, warn

    named = [find_sweep(name, results_dir) for name in sweeps or (None,)]
    folders = [*{folder.path.resolve(): folder for folder in named}.values()]
    table = collect(folders, warn)
    path = output or (folders[0].path if len(folders) == 1 else results_dir) / "runs.parquet"
    write_result(path, parquet(table))
    rows = f"{counted(len(table), 'row')} ({counted(len(table['attempt'].drop_null()), 'attempt')})"
    say(f"wrote {rows} of {', '.join(f.name for f in folders)} to {path}", *doubts(table))


def heatmap(
    source: Source = None,
    output: Output = None,
    rank_by: RankBy = "tokens_per_s_per_gpu",
    include_suspects: bool = typer.Option(False, "--include-suspects", help="Let suspect runs win, too."),
    other: str | None = typer.Option(
        None, "--compare", metavar="SWEEP or FILE", help="Show ratios to the best runs of this one."
    ),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Draw the best layout of each model and number of nodes."""
    from ultrabench.analysis.cells import compared_with, notes
    from ultrabench.analysis.collect import open_results
    from ultrabench.analysis.ranking import DEFAULT_RANK_BY, rank
    from ultrabench.cli.tables import print_json, say, warn

    name, default, table = open_results(source, results_dir, warn)
    cells, label = rank(table, rank_by=rank_by, include_suspects=include_suspects), ""
    if other is not None:
        label, _, others = open_results(other, results_dir, warn)
        cells = compared_with(cells, rank(others, rank_by=rank_by, include_suspects=include_suspects))
    if json_:
        print_json([cell.to_json() for cell in cells])
    if json_ and output is None:
        return
    from ultrabench.analysis.figures.heatmap import figure

    by = sorted({cell.ranked_by for cell in cells if cell.ranked_by} - {DEFAULT_RANK_BY})
    note = "".join(f"Ranked by {column}. " for column in by[:1]) + notes(table, include_suspects)
    path = output or default
    draw(path, lambda: figure(cells, title=name, notes=note, compared_with=label))
    close = sum(bool(cell.as_good_as_best) for cell in cells)
    tied = f"; in {close} of them several layouts are as good as the best, see ultrabench sweep top"
    say(f"drew {counted(len(cells), 'cell')} to {path}{tied if close else ''}")


def report(
    source: Source = None,
    output: Output = None,
    public: bool = typer.Option(False, "--public", help="Leave out hosts, paths, users and all free texts."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Write one page with all results, which opens without a network."""
    if output is not None and output.suffix not in (".html", ".htm"):
        raise ConfigError(f"-o {output}; the page is HTML: name a file that ends in .html")
    from ultrabench.analysis.collect import open_results
    from ultrabench.analysis.page.page import page
    from ultrabench.analysis.page.rows import document
    from ultrabench.cli.tables import print_json, say, warn

    name, default, table = open_results(source, results_dir, warn)
    path = output or default.with_name("report.html")
    held = document(table, public=public)
    made = page(held, title=name).encode()
    write_result(path, made)
    if json_:
        print_json({"path": str(path), "bytes": len(made), "rows": len(table), "cells": len(held["cells"])})
        return
    say(f"wrote {counted(len(table), 'row')} as a page of {len(made) / 1e6:.1f} MB to {path}")


def draw(path: Path, make: "Callable[[], Figure]") -> None:
    """Writes the figure that `make` draws; the suffix of `path` gives the format."""
    from ultrabench.analysis.figures.picture import render

    write_result(path, render(make, path))


def write_result(path: Path, data: bytes) -> None:
    """Writes a file that the user asked for, whole or not at all."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise SweepFolderError(f"cannot write {path}: {error.strerror}; choose another -o FILE") from error
