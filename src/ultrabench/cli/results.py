"""The commands `ultrabench collect`, `heatmap` and `plot`, which make tables and figures of results."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pyarrow as pa

RESULTS = Path("results")
FIGURES = {"comm": "bandwidth over node counts"}
"""Kind of figure, whose module in analysis/figures/ has that name, and what it shows."""
ResultsDir = Annotated[Path, typer.Option("--results-dir", help="Where sweeps are.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")]


def collect(
    sweeps: Annotated[
        list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Names or folders; the newest.")
    ] = None,
    output: Output = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Collect the journals of sweeps into one parquet file."""
    from ultrabench.analysis.cells import doubts
    from ultrabench.analysis.collect import collect as rows_of
    from ultrabench.analysis.collect import parquet
    from ultrabench.cli.tables import say, warn
    from ultrabench.errors import ConfigError, counted
    from ultrabench.store.folder import find_sweep

    if output is not None and output.suffix != ".parquet":
        raise ConfigError(f"-o {output}; results are written as parquet: name a file that ends in .parquet")
    named = [find_sweep(name, results_dir) for name in sweeps or (None,)]
    folders = [*{folder.path.resolve(): folder for folder in named}.values()]
    table = rows_of(folders, warn)
    path = output or (folders[0].path if len(folders) == 1 else results_dir) / "runs.parquet"
    _write(path, parquet(table))
    attempts = len(table) - table["attempt"].null_count
    rows = f"{counted(len(table), 'row')} ({counted(attempts, 'attempt')})"
    say(f"wrote {rows} of {', '.join(f.name for f in folders)} to {path}")
    for line in doubts(table):
        say(line)


def heatmap(
    source: Annotated[
        str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="The newest sweep.")
    ] = None,
    output: Output = None,
    rank_by: Annotated[
        str, typer.Option("--rank-by", help="A numeric column of the result table.")
    ] = "tokens_per_s_per_gpu",
    include_suspects: Annotated[
        bool, typer.Option("--include-suspects", help="Let suspect runs win, too.")
    ] = False,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="SWEEP or FILE", help="Show ratios to its bests.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Draw the best layout of each model and number of nodes, as .png, .svg or .pdf."""
    from ultrabench.analysis.cells import compare as compare_cells
    from ultrabench.analysis.cells import notes
    from ultrabench.analysis.ranking import DEFAULT_RANK_BY, rank
    from ultrabench.cli.tables import print_json, say
    from ultrabench.errors import counted

    name, default, table = open_results(source, results_dir)
    cells, label = rank(table, rank_by=rank_by, include_suspects=include_suspects), None
    if compare is not None:
        label, _, others = open_results(compare, results_dir)
        bests = rank(others, rank_by=rank_by, include_suspects=include_suspects)
        cells = compare_cells(cells, bests)
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
    say(f"drew {counted(len(cells), 'cell')} to {path}" + tied * bool(close))


def plot(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="; ".join(": ".join(f) for f in FIGURES.items()))
    ],
    source: Annotated[
        str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="The newest sweep.")
    ] = None,
    output: Output = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Draw another figure of the results, as .png, .svg or .pdf."""
    from ultrabench.errors import ConfigError, counted, unknown_name

    if kind not in FIGURES:
        raise ConfigError(unknown_name("figure", kind, FIGURES))
    from ultrabench.analysis.figures.picture import render
    from ultrabench.cli.tables import say

    name, default, table = open_results(source, results_dir)
    path = output or default.with_name(f"{kind}.png")
    module = import_module(f"ultrabench.analysis.figures.{kind}")
    drawn = module.points(table)
    _write(path, render(lambda: module.figure(drawn, title=name, notes=module.notes(table)), path))
    say(f"drew {counted(len(drawn), 'point')} to {path}")


def _write(path: Path, data: bytes) -> None:
    """Writes a file that the user asked for, whole or not at all."""
    from ultrabench.errors import SweepFolderError
    from ultrabench.store.folder import write_whole

    try:
        write_whole(path, data)
    except OSError as error:
        told = f"cannot write {path}: {error.strerror}; choose another with -o FILE"
        raise SweepFolderError(told) from error


def open_results(source: str | None, results: Path) -> "tuple[str, Path, pa.Table]":
    """The name, the default path of a figure, and the result table of a sweep or a parquet file."""
    from ultrabench.analysis.collect import collect as rows_of
    from ultrabench.analysis.collect import read_parquet
    from ultrabench.cli.tables import warn
    from ultrabench.errors import ConfigError
    from ultrabench.store.folder import find_sweep

    if source is not None and source.endswith(".parquet"):
        path = Path(source)
        return path.stem, path.with_suffix(".png"), read_parquet(path)
    if source is not None and (Path(source).is_file() or source.endswith(".csv")):
        raise ConfigError(
            f"{source} is no parquet file; name a sweep, or a file that ultrabench collect made"
        )
    folder = find_sweep(source, results)
    return folder.name, folder.path / "heatmap.png", rows_of([folder], warn)
