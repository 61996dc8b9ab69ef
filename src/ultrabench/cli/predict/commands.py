"""The group `ultrabench predict`; its command `layout` predicts one layout."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ultrabench.cli.options import RESULTS, Json, ResultsDir, words_argument


class _LayoutByDefault(TyperGroup):
    """The group `predict`, whose command `layout` need not be named before NAME=VALUE.

    Its other commands take `profile=NAME` like all of ultrabench, besides `--profile NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with `layout` in front where they begin with no command."""
        if args[:1] and args[0] in self.commands.keys() - {"layout"}:
            args = [f"--{argument}" if argument.startswith("profile=") else argument for argument in args]
            args = [*_with_repeated_option("--from", args)]
        names_no_command = args[:1] and args[0] not in (*self.commands, "--help")
        is_layout = names_no_command and any("=" in argument for argument in args)
        return super().parse_args(ctx, ["layout", *args] if is_layout else args)


def _with_repeated_option(option: str, args: list[str]) -> Iterator[str]:
    """The arguments with the option in front of each file that follows it; the files end at the next option or
    NAME=VALUE."""
    is_list = False
    for argument in args:
        if argument == option:
            is_list = True
        elif argument.startswith("-") or ("=" in argument and not argument.endswith(".parquet")):
            is_list = False
            yield argument
        else:
            yield from (option, argument) if is_list else (argument,)
    if args and args[-1] == option:
        yield option


predict_app = typer.Typer(
    cls=_LayoutByDefault, no_args_is_help=True, rich_markup_mode=None,
    help="Predict a layout; validate and calibrate predictions.\n\nFor example: "
    "ultrabench predict model=llama3-8b tp=4.",
)  # fmt: skip
_LAYOUT_HELP = (
    "Layout, such as tp=2 pp=2 gas=4 recompute=full; also model, hardware, nodes, seq_len, "
    "kernel and profile."
)
Arguments = Annotated[list[str], words_argument("[NAME=VALUE]...", _LAYOUT_HELP)]


@predict_app.command()
def layout(arguments: Arguments, json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """Predict the memory and step time of a layout, part by part.

    It also shows P(OOM) and the most similar measured runs."""
    from ultrabench.cli.predict.layout import run_predict

    run_predict(arguments, json_, results_dir)
