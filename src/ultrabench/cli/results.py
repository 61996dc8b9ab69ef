"""`ultrabench collect` and `ultrabench heatmap`."""

from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("results")


def collect(
    sweeps: Annotated[
        list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Names or folders; the newest.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The parquet file.")] = None,
    results_dir: Annotated[Path, typer.Option("--results-dir", help="Where sweeps are.")] = RESULTS,
) -> None:
    """Collect the journals of sweeps into one parquet file."""
    from ultrabench.cli.answers import run_collect

    run_collect(sweeps or [], output, results_dir)


def heatmap(
    source: Annotated[
        str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="The newest sweep.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A .png, .svg or .pdf file.")
    ] = None,
    rank_by: Annotated[
        str, typer.Option("--rank-by", help="A numeric column of the result table.")
    ] = "tokens_per_s_per_gpu",
    include_suspects: Annotated[
        bool, typer.Option("--include-suspects", help="Let suspect runs win, too.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="SWEEP or FILE", help="Show ratios to its bests."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    results_dir: Annotated[Path, typer.Option("--results-dir", help="Where sweeps are.")] = RESULTS,
) -> None:
    """Draw the best layout of each model and node count."""
    from ultrabench.cli.answers import run_heatmap

    run_heatmap(source, output, rank_by, include_suspects, compare, json_, results_dir)
