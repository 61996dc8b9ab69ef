"""The options of `ultrabench doctor`."""

from typing import Annotated

import typer

from ultrabench.allowed import NonNegative
from ultrabench.cli.options import Json, Overrides, number_option
from ultrabench.errors import ConfigError

_WAIT_HELP = "Seconds to wait for the one-node job; 0 submits none."
Wait = Annotated[float, number_option("--wait", NonNegative, _WAIT_HELP)]


def doctor(
    overrides: Overrides,
    write: bool = typer.Option(
        False, "--write", help="Write what Slurm reports to ultrabench/cluster/NAME.yaml."
    ),
    name: str = typer.Option("mine", help="Name of the configuration that --write writes."),
    partition: str | None = typer.Option(
        None, help="Partition for --write; default: launcher.partition, else the site's."
    ),
    force: bool = typer.Option(False, "--force", help="Let --write overwrite the file."),
    wait: Wait = 300.0,
    deep: bool = typer.Option(False, "--deep", help="Then run small sweeps: 1-2 nodes, <= 3 GPU hours."),
    verify: bool = typer.Option(False, "--verify", help="Only compare the GPUs of this machine bit by bit."),
    json_: Json = False,
) -> int:
    """Check that this cluster is ready for sweeps.

    Each failed check shows a remedy. The doctor submits a one-node job in the same way as a sweep. Without
    launcher=, it checks Slurm if Slurm responds, else this machine. With --deep, it then runs small sweeps:
    they check that all layouts have the same loss and gradient, that out-of-memory errors are recognised, and
    that a published speed is reached. With --verify, each GPU of this machine computes a fixed chain of
    operations twice, which is compared with itself, with equal GPUs and with its past. The exit code is 1 if a
    check fails and 3 if Slurm does not respond.
    """
    from ultrabench.cli.run_doctor import print_checks, run_doctor, run_verify

    if verify:
        if deep or write:
            raise ConfigError("--verify examines this machine only", "leave out --deep and --write")
        return print_checks(*run_verify(overrides), json_, "GPUs of this machine, compared bit by bit")
    return print_checks(*run_doctor(overrides, name if write else None, partition, force, wait, deep), json_)
