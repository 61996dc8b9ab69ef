"""The commands `ultrabench kernel ...`, which run the embedded kernel without a sweep."""

from pathlib import Path
from typing import Annotated

import typer

from ultrabench.cli.options import Json, words_argument

kernel_app = typer.Typer(help="Test a kernel without a sweep.", no_args_is_help=True, rich_markup_mode=None)
_LAYOUT_HELP = "Layout and model, such as tp=2 pp=2 gas=4 model=tiny recompute=full; for dryrun also nodes=8."
Arguments = Annotated[list[str], words_argument("[NAME=VALUE]...", _LAYOUT_HELP)]


@kernel_app.command()
def check(
    arguments: Arguments,
    device: str = typer.Option("cpu", help="cpu (processes, gloo) or cuda (one GPU per rank, NCCL)."),
    precision: str = typer.Option("fp64", help="Precision of the layout: fp64, fp32, bf16 or fp8."),
    compile_: bool = typer.Option(False, "--compile", help="Compile the layers; on CPUs, only trace them."),
    dump: str | None = typer.Option(None, help="Write the gradients and parameters of both to this folder."),
    json_: Json = False,
) -> int:
    """Compare a layout with one process in fp64.

    It compares loss, gradients and parameters. The exit code is 1 if they differ."""
    from ultrabench.cli.kernel.check import run_check

    options = {"device": device, "precision": precision, "compile": compile_, "dump": dump}
    return run_check(arguments, options, json_)


@kernel_app.command()
def dryrun(
    arguments: Arguments,
    compile_: bool = typer.Option(False, "--compile", help="Trace the layers as for compilation."),
    json_: Json = False,
) -> None:
    """Show memory, collectives and FLOPs per rank at any world size.

    It traces one step without data and without GPUs."""
    from ultrabench.cli.kernel.dryrun import run_dryrun

    run_dryrun(arguments, compile_, json_)


@kernel_app.command(name="try-log")
def try_log(
    pattern: Annotated[
        str, typer.Argument(help="A regular expression as in kernel.step_line, or the name of a kernel.")
    ],
    file: Annotated[Path, typer.Argument(help="A log of the program.")],
    json_: Json = False,
) -> int:
    """Show what the patterns of a kernel match in a log.

    If a pattern matches nothing, the nearest lines are shown and the exit code is 1."""
    from ultrabench.cli.kernel.try_log import run_try_log

    return run_try_log(pattern, file, json_)
