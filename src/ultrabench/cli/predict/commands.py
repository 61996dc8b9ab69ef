"""The commands `ultrabench predict ...`, which check predictions against runs and fit them."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ultrabench.cli.options import RESULTS, Json, ResultsDir, words
from ultrabench.cli.predict.calibrate import calibrate
from ultrabench.cli.predict.replay import replay
from ultrabench.cli.predict.validate import validate


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
_LAYOUT = "Layout, such as tp=2 pp=2 gas=4 recompute=full; model, hardware, nodes, seq_len, kernel, profile."
Arguments = Annotated[list[str], words("[NAME=VALUE]...", _LAYOUT)]


@predict_app.command()
def layout(arguments: Arguments, json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """Show memory and step time of one layout by part.

    It also shows P(OOM), and measured runs like it."""
    from ultrabench.cli.predict.layout import run_predict

    run_predict(arguments, json_, results_dir)


for command in (validate, calibrate, replay):
    predict_app.command()(command)
