"""The commands `ultrabench kernel ...`, which run the embedded kernel without a sweep."""

from pathlib import Path
from typing import Annotated

import typer

from ultrabench.cli.options import Json, words

kernel_app = typer.Typer(help="Try the embedded kernel alone.", no_args_is_help=True, rich_markup_mode=None)
_LAYOUT = "Layout and model, such as tp=2 pp=2 gas=4 model=tiny recompute=full, and nodes=8 for dryrun."
Arguments = Annotated[list[str], words("[NAME=VALUE]...", _LAYOUT)]


@kernel_app.command()
def check(
    arguments: Arguments,
    device: str = typer.Option("cpu", help="cpu (processes, gloo) or cuda (a GPU each, NCCL)."),
    precision: str = typer.Option("fp64", help="fp64, fp32, bf16 or fp8: the arithmetic of the layout."),
    compile_: bool = typer.Option(False, "--compile", help="Compile the layers; on CPUs only trace them."),
    dump: str | None = typer.Option(None, help="Folder for the gradients and parameters of both."),
    json_: Json = False,
) -> int:
    """Compare a layout with one process in fp64.

    Loss, gradients and parameters are compared; exit 1 if they differ."""
    from ultrabench.cli.kernel.check import run_check

    options = {"device": device, "precision": precision, "compile": compile_, "dump": dump}
    return run_check(arguments, options, json_)


@kernel_app.command()
def dryrun(
    arguments: Arguments,
    compile_: bool = typer.Option(False, "--compile", help="Trace the layers as for compilation."),
    json_: Json = False,
) -> None:
    """Show memory, collectives and FLOPs of a rank at any world size.

    It is a step without data."""
    from ultrabench.cli.kernel.dryrun import run_dryrun

    run_dryrun(arguments, compile_, json_)


@kernel_app.command(name="try-log")
def try_log(
    pattern: Annotated[
        str, typer.Argument(help="A regular expression, as kernel.step_line has it, or the name of a kernel.")
    ],
    file: Annotated[Path, typer.Argument(help="The log of a program.")],
    json_: Json = False,
) -> int:
    """Show what the patterns of a kernel find in a log.

    Exit 1 if one of them finds nothing; the nearest lines are shown then."""
    from ultrabench.cli.kernel.try_log import run_try_log

    return run_try_log(pattern, file, json_)
