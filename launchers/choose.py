"""Chooses the launcher that a configuration names, and decides how much of a cluster it takes."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ultrabench.errors import ConfigError, counted
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.local import LocalLauncher
from ultrabench.launchers.slurm.launcher import UNKNOWN_CLUSTER, SlurmLauncher
from ultrabench.launchers.slurm.script import array_script, require_plain
from ultrabench.launchers.slurm.site import Limits, Site
from ultrabench.store.allocation import Allocation
from ultrabench.store.folder import SweepFolder
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.sweep.config.sweep_config import SweepConfig

PARTITION_DIVISOR = 4
"""By default a sweep takes at most 1/PARTITION_DIVISOR of the nodes of its partition."""


def choose_launcher(config: SweepConfig, folder: SweepFolder, *, submits: bool = True) -> Launcher:
    """The launcher that `config` names; a Slurm launcher stays within the limits of the cluster.

    Args:
        submits: False for a launcher that only ends jobs; it does not ask the cluster for its limits.

    Raises:
        ConfigError: the configuration asks for more than the cluster gives.
        ClusterError: Slurm does not answer.
    """
    return _LAUNCHERS[config.launcher.name](config, folder, submits)


def _slurm_launcher(config: SweepConfig, folder: SweepFolder, submits: bool) -> Launcher:
    if not submits:
        return SlurmLauncher(config, folder)
    require_plain(folder.path, Path.cwd())
    launcher_config, settings = config.launcher, config.launcher.slurm
    limits = Site().limits(settings.partition, settings.account, settings.qos)
    partition = f"partition {limits.name}"
    _require_at_most(limits.cpus_per_node, "cpus", settings.cpus, f"nodes of {partition} have")
    _require_at_most(limits.job_minutes, "time_minutes", launcher_config.time_minutes, f"{partition} allows")
    job_limits = JobLimits(
        max_jobs=min(launcher_config.max_jobs, limits.max_submit or launcher_config.max_jobs),
        max_nodes=max_sweep_nodes(config, limits),
        max_array=limits.max_array_size,
        max_limit_s=60.0 * (limits.job_minutes or math.inf),
    )
    return SlurmLauncher(config, folder, job_limits, limits.cluster or UNKNOWN_CLUSTER)


_LAUNCHERS: dict[str, Callable[[SweepConfig, SweepFolder, bool], Launcher]] = {
    "local": lambda config, folder, submits: LocalLauncher(folder),
    "slurm": _slurm_launcher,
}
"""Name of a launcher -> what makes it from a configuration, a folder, and whether it submits."""
_SCRIPTS: dict[str, Callable[[Sequence[Allocation], SweepConfig], str]] = {"slurm": array_script}
"""Name of a launcher that submits scripts -> the script of allocations that it submits together."""


def script_of(array: Sequence[Allocation], config: SweepConfig) -> str:
    """The script that submits these allocations, with a launcher that submits scripts."""
    return _SCRIPTS[config.launcher.name](array, config)


def max_sweep_nodes(config: SweepConfig, limits: Limits) -> int:
    """The number of nodes that the sweep may hold or queue for at the same time.

    Raises:
        ConfigError: the largest runs of the sweep need more nodes.
    """
    require_max_nodes(config)
    launcher_config, run_nodes = config.launcher, max(config.axes.nodes)
    max_nodes_per_user = limits.max_nodes_per_user
    max_nodes = min(n for n in (limits.max_nodes, limits.total_nodes, max_nodes_per_user) if n is not None)
    sweep_nodes = launcher_config.max_nodes or max(1, limits.total_nodes // PARTITION_DIVISOR)
    partition_text = f"partition {limits.name} has {counted(limits.total_nodes, 'node')}"
    if limits.max_nodes is not None:
        partition_text += f", at most {limits.max_nodes} per job"
    if max_nodes_per_user is not None:
        partition_text += f", at most {max_nodes_per_user} per user"
    if run_nodes > max_nodes:
        fitting_nodes = ",".join(str(n) for n in sorted(set(config.axes.nodes)) if n <= max_nodes)
        example = f", such as sweep.nodes=[{fitting_nodes}]" if fitting_nodes else ""
        raise ConfigError(f"sweep.nodes up to {run_nodes}; {partition_text}: use fewer nodes{example}")
    if run_nodes > sweep_nodes:
        problem = f"sweep.nodes up to {run_nodes}; {partition_text}, by default a sweep uses {sweep_nodes}"
        raise ConfigError(f"{problem}: set launcher.max_nodes={run_nodes}")
    return sweep_nodes if max_nodes_per_user is None else min(sweep_nodes, max_nodes_per_user)


def require_max_nodes(config: SweepConfig) -> None:
    """Raises ConfigError if a run of the sweep needs more nodes than launcher.max_nodes allows."""
    max_nodes, run_nodes = config.launcher.max_nodes, max(config.axes.nodes)
    if config.launcher.holds_nodes and max_nodes and run_nodes > max_nodes:
        rule = f"the sweep may use launcher.max_nodes={max_nodes}"
        raise ConfigError(f"sweep.nodes up to {run_nodes}; {rule}: set launcher.max_nodes={run_nodes}")


def _require_at_most(max_value: int | None, option: str, value: int | None, rule: str) -> None:
    """Raises ConfigError if launcher.`option` asks for more than the site allows."""
    if max_value is not None and value is not None and value > max_value:
        raise ConfigError(f"launcher.{option}={value}; {rule} {max_value}: set at most that, or null")
