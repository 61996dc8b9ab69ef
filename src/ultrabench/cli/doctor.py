"""The options of `ultrabench doctor`."""

import typer

from ultrabench.cli.options import Json, Overrides


def doctor(
    overrides: Overrides,
    write: bool = typer.Option(False, "--write", help="Write ultrabench/cluster/NAME.yaml by asking Slurm."),
    name: str = typer.Option("mine", help="Name of the configuration to write."),
    partition: str | None = typer.Option(None, help="Its partition; else launcher.partition or the site's."),
    force: bool = typer.Option(False, "--force", help="Let --write overwrite."),
    wait: float = typer.Option(300.0, min=0.0, help="Seconds to wait for the job on a node; 0: no job."),
    deep: bool = typer.Option(False, "--deep", help="Then do an acceptance run: 1-2 nodes, <= 3 GPU hours."),
    json_: Json = False,
) -> int:
    """Check whether this cluster can be used.

    Each failure has a remedy. A job of one node is submitted in the same way as the jobs of a sweep. Without
    launcher=, Slurm is checked where it answers, else this machine. With --deep small sweeps follow: they
    check that every layout has the same loss and gradient, that a lack of memory is recognised, and that a
    published speed is reached. The exit code is 1 when a check fails and 3 when Slurm cannot be asked.
    """
    from ultrabench.cli.run_doctor import report, run_doctor

    return report(*run_doctor(overrides, name if write else None, partition, force, wait, deep), json_)
