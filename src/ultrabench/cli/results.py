"""The commands `ultrabench collect`, `heatmap` and `plot`, which make tables and figures of results."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, RankBy, ResultsDir, Source
from ultrabench.errors import ConfigError, SweepFolderError, counted, require_known
from ultrabench.store.folder import find_sweep, write_whole

FIGURES = {"comm": "bandwidth over node counts"}
"""Kind of figure, whose module in analysis/figures/ has that name, and what it shows."""
KINDS = "; ".join(f"{kind}: {shows}" for kind, shows in FIGURES.items())
Output = Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")]
Kind = Annotated[str, typer.Argument(metavar="KIND", help=KINDS)]
Sweeps = Annotated[
    list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Names or folders; default: the newest.")
]


def collect_sweeps(sweeps: Sweeps = None, output: Output = None, results_dir: ResultsDir = RESULTS) -> None:
    """Collect the journals of sweeps into one parquet file."""
    from ultrabench.analysis.cells import doubts
    from ultrabench.analysis.collect import collect, parquet
    from ultrabench.cli.tables import say, warn

    if output is not None and output.suffix != ".parquet":
        raise ConfigError(f"-o {output}; results are written as parquet: name a file that ends in .parquet")
    named = [find_sweep(name, results_dir) for name in sweeps or (None,)]
    folders = [*{folder.path.resolve(): folder for folder in named}.values()]
    table = collect(folders, warn)
    path = output or (folders[0].path if len(folders) == 1 else results_dir) / "runs.parquet"
    _write(path, parquet(table))
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
    """Draw the best layout of each model and number of nodes, as .png, .svg or .pdf."""
    from ultrabench.analysis.cells import compare, notes
    from ultrabench.analysis.collect import open_results
    from ultrabench.analysis.ranking import DEFAULT_RANK_BY, rank
    from ultrabench.cli.tables import print_json, say, warn

    name, default, table = open_results(source, results_dir, warn)
    cells, label = rank(table, rank_by=rank_by, include_suspects=include_suspects), None
    if other is not None:
        label, _, others = open_results(other, results_dir, warn)
        cells = compare(cells, rank(others, rank_by=rank_by, include_suspects=include_suspects))
    if json_:
        print_json([cell.to_json() for cell in cells])
    if json_ and output is None:
        return
    from ultrabench.analysis.figures.heatmap import figure
    from ultrabench.analysis.figures.picture import render

    path = output or default
    by = sorted({cell.ranked_by for cell in cells if cell.ranked_by} - {DEFAULT_RANK_BY})
    note = f"Ranked by {by[0]}. {notes(table)}" if by else notes(table)
    _write(path, render(lambda: figure(cells, title=name, notes=note, compared_with=label), path))
    close = sum(bool(cell.as_good_as_best) for cell in cells)
    tied = f"; in {close} of them several layouts are as good as the best, see ultrabench sweep top"
    say(f"drew {counted(len(cells), 'cell')} to {path}{tied if close else ''}")


def plot(kind: Kind, source: Source = None, output: Output = None, results_dir: ResultsDir = RESULTS) -> None:
    """Draw another figure of the results, as .png, .svg or .pdf."""
    require_known("figure", FIGURES, kind)
    from ultrabench.analysis.collect import open_results
    from ultrabench.analysis.figures.picture import render
    from ultrabench.cli.tables import say, warn

    name, default, table = open_results(source, results_dir, warn)
    path = output or default.with_name(f"{kind}.png")
    module = import_module(f"ultrabench.analysis.figures.{kind}")
    drawn = module.points(table)
    _write(path, render(lambda: module.figure(drawn, title=name, notes=module.notes(table)), path))
    say(f"drew {counted(len(drawn), 'point')} to {path}")


def _write(path: Path, data: bytes) -> None:
    """Writes a file that the user asked for, whole or not at all."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise SweepFolderError(f"cannot write {path}: {error.strerror}; choose another -o FILE") from error
