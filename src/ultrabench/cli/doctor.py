"""The options of `ultrabench doctor`."""

from typing import Annotated

import typer

OVERRIDES = "Hydra overrides, such as cluster=mine hardware=h100x8."


def doctor(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[OVERRIDES]...", help=OVERRIDES)] = None,
    write: bool = typer.Option(
        False, "--write", help="Write ./ultrabench/cluster/NAME.yaml from what Slurm says."
    ),
    name: str = typer.Option("mine", help="Name of the configuration to write."),
    partition: str | None = typer.Option(
        None, help="Partition to write it for; by default launcher.partition or the site's."
    ),
    force: bool = typer.Option(False, "--force", help="Let --write overwrite."),
    wait: float = typer.Option(
        300.0, min=0.0, metavar="SECONDS", help="For the job on a node; 0: submit none."
    ),
    deep: bool = typer.Option(
        False, "--deep", help="Then an acceptance run of at most 3 GPU hours on 1 and 2 nodes."
    ),
    json_: bool = typer.Option(False, "--json", help="One JSON document on stdout."),
) -> None:
    """Check whether this cluster can be used, and name a remedy for each failure.

    A job of one node is submitted in the same way as the jobs of a sweep. Without launcher=, Slurm is checked
    where it answers, else this machine. With --deep small sweeps follow: they check that every layout has
    the same loss, that a lack of memory is recognised, and that a published speed is reached. The exit code
    is 1 when a check fails and 3 when Slurm cannot be asked.
    """
    from ultrabench.cli.run_doctor import run_doctor

    raise typer.Exit(
        run_doctor(overrides or [], name if write else None, partition, force, wait, deep, json_)
    )
