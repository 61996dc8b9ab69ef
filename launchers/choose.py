"""The launcher that a configuration names."""

from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.local import LocalLauncher
from ultrabench.store.folder import SweepFolder
from ultrabench.sweep.config.sweep_config import SweepConfig


def choose_launcher(config: SweepConfig, folder: SweepFolder, *, submits: bool = True) -> Launcher:
    """The launcher that `config` names; a Slurm launcher keeps to the limits of the cluster.

    Args:
        submits: False for a launcher that only ends jobs; then the cluster is not asked for its limits.

    Raises:
        ConfigError: the configuration asks for what the cluster does not give.
        ClusterError: Slurm cannot be asked.
    """
    if config.launcher.name == "local":
        return LocalLauncher(folder)
    from ultrabench.launchers.slurm.share import slurm_launcher  # it needs submitit, which takes a while

    return slurm_launcher(config, folder, limited=submits)
