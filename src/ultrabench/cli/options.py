"""The arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("results")

Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="[OVERRIDES]...", default_factory=list, show_default=False,
        help="Hydra overrides, such as hardware=h100x8 cluster=mine.",
    ),
]  # fmt: skip
Source = Annotated[str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="Default: the newest.")]
RankBy = Annotated[str, typer.Option(metavar="COLUMN", help="A numeric column of the result table.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ResultsDir = Annotated[Path, typer.Option(help="The folder that holds the sweeps.")]
