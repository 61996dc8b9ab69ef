"""The commands `ultrabench kernel ...`, which run the embedded kernel without a sweep."""

from typing import Annotated

import typer

kernel_app = typer.Typer(
    help="Try the embedded training kernel by itself.", no_args_is_help=True, rich_markup_mode=None
)


@kernel_app.callback()
def kernel() -> None:
    """Try the embedded training kernel by itself."""


@kernel_app.command("check")
def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD=VALUE]...", help="dp=2 tp=2 pp=2 zero_stage=1 gas=4 model=tiny"),
    ] = None,
    dump: Annotated[
        str | None, typer.Option("--dump", help="Folder for the gradients and parameters of both.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Compare loss, gradients and parameters of a layout with one process in fp64; exit 1 above 1e-10."""
    from ultrabench.cli.kernel.check import run_check

    raise typer.Exit(run_check(words or [], dump, json_))


@kernel_app.command("dryrun")
def dryrun(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD=VALUE]...",
            help="model=llama3-8b nodes=8 tp=8 zero_stage=3 seq_len=8192 recompute=full",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show memory, collectives and FLOPs of a rank at any world size, by a step without data."""
    from ultrabench.cli.kernel.dryrun import run_dryrun

    run_dryrun(words or [], json_)
