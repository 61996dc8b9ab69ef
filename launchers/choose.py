"""Chooses the launcher that a configuration names."""

from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.local import LocalLauncher
from ultrabench.store.folder import SweepFolder
from ultrabench.sweep.config.sweep_config import SweepConfig


def choose_launcher(config: SweepConfig, folder: SweepFolder, *, submits: bool = True) -> Launcher:
    """The launcher that `config` names; a Slurm launcher stays within the limits of the cluster.

    Args:
        submits: False for a launcher that only ends jobs; it does not ask the cluster for its limits.

    Raises:
        ConfigError: the configuration asks for more than the cluster gives.
        ClusterError: Slurm does not answer.
    """
    if config.launcher.name == "local":
        return LocalLauncher(folder)
    from ultrabench.launchers.slurm.share import slurm_launcher  # importing submitit is slow

    return slurm_launcher(config, folder, limited=submits)
