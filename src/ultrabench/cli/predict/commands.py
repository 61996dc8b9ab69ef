"""The commands `ultrabench predict ...`, which check predictions against runs and fit them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Source
from ultrabench.cli.results import Output


class _LayoutFirst(TyperGroup):
    """The group `predict`, whose command `layout` need not be named before NAME=VALUE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with `layout` in front where they begin with no command."""
        given = args[:1] and args[0] not in (*self.commands, "--help")
        named = given and any("=" in word for word in args)
        return super().parse_args(ctx, ["layout", *args] if named else args)


predict_app = typer.Typer(
    cls=_LayoutFirst, no_args_is_help=True, rich_markup_mode=None,
    help="Predict one layout, check predictions against runs, and fit them.\n\nFor example: ultrabench predict model=llama3-8b tp=4.",
)  # fmt: skip
Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=VALUE]...", default_factory=list, show_default=False,
        help="Layout, such as tp=2 pp=2 gas=4 recompute=full; model, hardware, nodes, seq_len, kernel, profile.",
    ),
]  # fmt: skip
ProfileName = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Default: that of the runs' program.")
]


Rows = Annotated[Path | None, typer.Option("--rows", help="Write each row with its prediction, as .parquet.")]
LeaveOut = Annotated[
    str | None,
    typer.Option(
        metavar="model or nodes", help="Fit anew without each model or number of nodes, and score on it."
    ),
]
Sources = Annotated[
    list[str] | None, typer.Argument(metavar="[SWEEP or FILE.parquet]...", help="Default: the newest sweep.")
]
Mine = Annotated[Path, typer.Option("-o", "--output", help="The profile to write.")]
MINE = Path("ultrabench/profiles/mine.yaml")
Strategy = Annotated[
    str, typer.Option("--strategy", metavar="NAME", help="adaptive, exhaustive, random or predicted.")
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Runs that are made at the same time.")]


@predict_app.command()
def layout(arguments: Arguments, json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """Show memory and step time of one layout by part.

    It also shows P(OOM), and measured runs like it."""
    from ultrabench.cli.predict.layout import run_predict

    run_predict(arguments, json_, results_dir)


@predict_app.command()
def validate(
    source: Source = None,
    profile: ProfileName = None,
    rows: Rows = None,
    leave_out: LeaveOut = None,
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Compare predictions with measured runs; -o draws them."""
    from ultrabench.cli.predict.validate import run_validate

    run_validate(source, profile, rows, leave_out, output, json_, results_dir)


@predict_app.command()
def calibrate(
    sources: Sources = None,
    profile: ProfileName = None,
    output: Mine = MINE,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Fit a profile to measured runs.

    It tells the errors on runs left out of the fit."""
    from ultrabench.cli.predict.calibrate import run_calibrate

    run_calibrate(sources or [None], profile, output, json_, results_dir)


@predict_app.command()
def replay(
    source: Source = None,
    strategy: Strategy = "adaptive",
    batch: Batch = 1,
    profile: ProfileName = None,
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Replay a finished sweep as if live.

    It tells GPU hours and regret of a strategy, drawn with -o FILE.png."""
    from ultrabench.cli.predict.replay import run_replay

    run_replay(source, strategy, batch, profile, output, json_, results_dir)
