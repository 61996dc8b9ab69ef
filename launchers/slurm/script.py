"""Writes the job script of an array of allocations, which runs our agents."""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.processes import own_name
from ultrabench.store.allocation import JOB_LOG, Allocation
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.variant import fill_in_container

SRUN_WAIT_S = 60
"""Seconds that srun gives the other agents after the first one has ended."""

MAX_PARALLEL_JOBS = 256
"""Number of jobs of an array that run at the same time."""

JOB_PREFIX = "ub-"
"""The beginning of the names of all jobs of ultrabench."""


def array_name(allocation: Allocation) -> str:
    """The common part of the names of an array's allocations, such as `n2-1a2b3c4d` of `n2-1a2b3c4d.0`."""
    return allocation.name.rpartition(".")[0]


def job_name(sweep: str, sweep_id: str, array: str) -> str:
    """The name of the jobs of an array, by which squeue shows the sweep they belong to.

    Args:
        sweep: name of the sweep when the array was planned.
        sweep_id: id of the sweep; empty if an earlier version planned the array.
        array: the common part of the names of its allocations, as `array_name` gives it.
    """
    return JOB_PREFIX + "-".join(filter(None, (sweep, sweep_id[:8], array)))


def require_plain(*folders: Path) -> None:
    """Raises if a job script cannot name one of `folders`.

    Raises:
        ConfigError: a path has a line break, or a backslash, which disables patterns in Slurm's file names.
    """
    for path in map(str, folders):
        if re.search(r"[\\\r\n]", path):
            raise ConfigError(f"{path!r} has a backslash or a line break; Slurm needs a path without these")


def array_script(
    array: Sequence[Allocation], config: SweepConfig, exclude: Sequence[str] = (), module: Sequence[str] = ()
) -> str:
    """The job script of allocations that have the same nodes and time limit.

    Args:
        exclude: nodes that must not be used.
        module: the Python module that runs on each node, and its arguments; our agent if empty.
    """
    allocation, settings = array[0], config.launcher.slurm
    array_path = allocation.folder.parent / array_name(allocation)
    # In Slurm's patterns for file names %% stands for a percent sign.
    log_path = f"{str(array_path).replace('%', '%%')}.%a/{JOB_LOG}"
    # Without --cpu-bind=none many clusters bind the single task of a node to a single core.
    srun_options = [
        "--unbuffered", "--kill-on-bad-exit=1", f"--wait={SRUN_WAIT_S}", "--open-mode=append", f"--output={log_path}",
        "--cpu-bind=none",
    ]  # fmt: skip
    if settings.cpus:
        srun_options.append(f"--cpus-per-task={settings.cpus}")
    variant = allocation.tasks[0].spec.variant if allocation.tasks else {}
    default_python = config.launcher.python or (sys.executable,)
    python = (str(variant["python"]),) if "python" in variant else fill_in_container(variant, default_python)
    sweep_dir = Path(allocation.sweep_dir)
    owner_text = f"ultrabench sweep {sweep_dir.name} of {own_name()}, results in {sweep_dir}"
    comment = f"{owner_text}; to free the nodes: ultrabench sweep pause {sweep_dir.name}"
    options = {
        "array": f"0-{len(array) - 1}%{min(len(array), MAX_PARALLEL_JOBS)}",
        "job-name": job_name(sweep_dir.name, allocation.sweep_id, array_name(allocation)),
        "signal": f"USR2@{int(allocation.warning_s)}",
        "open-mode": "append",
        "output": log_path,
        "comment": comment,
        **_sbatch_options(allocation, config, exclude),
    }
    srun = shlex.join(["srun", *srun_options, *fill_in_container(variant, settings.srun)])
    agent = shlex.join([*python, "-P", "-m", *(module or ("ultrabench.agent", str(array_path)))])
    lines = [
        "#!/bin/bash", "", "# Parameters", *(_header_line(name, options[name]) for name in sorted(options)), "",
        "# setup", "export PYTHONSAFEPATH=1", *_checked_setup(settings.setup), "", "# command", f"{srun} {agent}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _header_line(name: str, value: Any) -> str:
    """The line of the script that gives sbatch an option; True stands for an option without a value."""
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _checked_setup(setup: Sequence[str]) -> list[str]:
    """The lines of launcher.setup, each followed by a line that ends the job if the command failed."""
    lines = []
    for line_number, line in enumerate(setup, start=1):
        message = shlex.quote(f"line {line_number} of launcher.setup failed: {line}")
        lines += [line, f"status=$?; [ $status -eq 0 ] || {{ echo {message} >&2; exit $status; }}"]
    return lines


def _sbatch_options(allocation: Allocation, config: SweepConfig, exclude: Sequence[str]) -> dict[str, Any]:
    """The options of sbatch; those that the user sets in launcher.sbatch replace ours."""
    settings, hardware = config.launcher.slurm, config.hardware
    num_gpus = hardware.gpus_per_node if hardware.has_gpus and settings.gres is None else None
    options: dict[str, Any] = {
        "nodes": allocation.nodes,
        "ntasks-per-node": 1,
        "time": math.ceil(allocation.limit_s / 60),
        "chdir": allocation.work_dir,
        "exclude": ",".join(filter(None, [settings.exclude, *exclude])) or None,
        "cpus-per-task": settings.cpus,
        "gpus-per-node": num_gpus,
        "exclusive": settings.exclusive or None,
        "requeue" if settings.requeue else "no-requeue": True,
        **{k: getattr(settings, k) for k in ("partition", "account", "qos", "mem", "nice", "gres")},
        **{k.replace("_", "-"): True if v == "" else v for k, v in settings.sbatch.items()},
    }
    # sbatch treats a backslash as an escape character even inside single quotes.
    escaped_texts = {k: v.replace("\\", "\\\\") for k, v in options.items() if isinstance(v, str)}
    return {k: v for k, v in (options | escaped_texts).items() if v is not None}
