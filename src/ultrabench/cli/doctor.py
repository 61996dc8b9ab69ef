"""`ultrabench doctor`."""

from typing import Annotated

import typer

WAIT_S = 300.0


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OVERRIDES]...", help="Hydra overrides, such as cluster=mine hardware=h100x8."
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write ./ultrabench/cluster/NAME.yaml from what Slurm says.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="Name of the configuration to write.")] = "mine",
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition", help="Partition to write it for; by default launcher.partition or the site's."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --write overwrite.")] = False,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0.0, metavar="SECONDS", help="For the job on a node; 0: submit none."),
    ] = WAIT_S,
    deep: Annotated[
        bool, typer.Option("--deep", help="Then an acceptance run of at most 3 GPU hours on 1 and 2 nodes.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Tell whether this cluster is usable, each failure with its remedy.

    A job of one node is submitted as a sweep's jobs are. Without launcher= it is Slurm that is looked
    at where it answers, else this machine. With --deep small sweeps follow: the same loss in every layout, a lack of
    memory on purpose, a published speed. Exit code: 1 when a check fails, 3 when Slurm cannot be asked.
    """
    from ultrabench.cli.run_doctor import run_doctor

    raise typer.Exit(
        run_doctor(overrides or [], name if write else None, partition, force, wait, deep, json_)
    )
