"""Chooses the launcher that a configuration names, and decides how much of a cluster it takes."""

import math
from pathlib import Path

from ultrabench.errors import ConfigError, counted
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.local import LocalLauncher
from ultrabench.launchers.slurm.launcher import UNKNOWN_CLUSTER, SlurmLauncher
from ultrabench.launchers.slurm.script import require_plain
from ultrabench.launchers.slurm.site import Limits, Site
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
    launcher_config = config.launcher
    if launcher_config.name == "local":
        return LocalLauncher(folder)
    if not submits:
        return SlurmLauncher(config, folder)
    require_plain(folder.path, Path.cwd())
    limits = Site().limits(launcher_config.partition, launcher_config.account, launcher_config.qos)
    partition = f"partition {limits.name}"
    _require_at_most(limits.cpus_per_node, "cpus", launcher_config.cpus, f"nodes of {partition} have")
    _require_at_most(limits.job_minutes, "time_minutes", launcher_config.time_minutes, f"{partition} allows")
    job_limits = JobLimits(
        max_jobs=min(launcher_config.max_jobs, limits.max_submit or launcher_config.max_jobs),
        max_nodes=node_share(config, limits),
        max_array=limits.max_array_size,
        max_limit_s=60.0 * (limits.job_minutes or math.inf),
    )
    return SlurmLauncher(config, folder, job_limits, limits.cluster or UNKNOWN_CLUSTER)


def node_share(config: SweepConfig, limits: Limits) -> int:
    """The number of nodes that the sweep may hold or queue for at the same time.

    Raises:
        ConfigError: the largest runs of the sweep need more nodes.
    """
    require_max_nodes(config)
    launcher_config, most_nodes = config.launcher, max(config.axes.nodes)
    max_nodes_per_user = limits.max_nodes_per_user
    max_nodes = min(n for n in (limits.max_nodes, limits.total_nodes, max_nodes_per_user) if n is not None)
    share = launcher_config.max_nodes or max(1, limits.total_nodes // PARTITION_DIVISOR)
    partition_text = f"partition {limits.name} has {counted(limits.total_nodes, 'node')}"
    if limits.max_nodes is not None:
        partition_text += f", at most {limits.max_nodes} per job"
    if max_nodes_per_user is not None:
        partition_text += f", at most {max_nodes_per_user} per user"
    if most_nodes > max_nodes:
        fitting_nodes = ",".join(str(n) for n in sorted(set(config.axes.nodes)) if n <= max_nodes)
        example = f", such as sweep.nodes=[{fitting_nodes}]" if fitting_nodes else ""
        raise ConfigError(f"sweep.nodes up to {most_nodes}; {partition_text}: use fewer nodes{example}")
    if most_nodes > share:
        fact = f"sweep.nodes up to {most_nodes}; {partition_text}, by default a sweep uses {share}"
        raise ConfigError(f"{fact}: set launcher.max_nodes={most_nodes}")
    return share if max_nodes_per_user is None else min(share, max_nodes_per_user)


def require_max_nodes(config: SweepConfig) -> None:
    """Raises ConfigError if a run of the sweep needs more nodes than launcher.max_nodes allows."""
    max_nodes, most_nodes = config.launcher.max_nodes, max(config.axes.nodes)
    if config.launcher.name != "local" and max_nodes and most_nodes > max_nodes:
        rule = f"the sweep may use launcher.max_nodes={max_nodes}"
        raise ConfigError(f"sweep.nodes up to {most_nodes}; {rule}: set launcher.max_nodes={most_nodes}")


def _require_at_most(limit: int | None, name: str, requested: int | None, rule: str) -> None:
    """Raises ConfigError if launcher.`name` asks for more than the site allows."""
    if limit is not None and requested is not None and requested > limit:
        raise ConfigError(f"launcher.{name}={requested}; {rule} {limit}: set at most that, or null")
