"""The launcher that a configuration names."""

from ultrabench.folder import SweepFolder
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.local import LocalLauncher
from ultrabench.sweep.config import SweepConfig


def choose_launcher(config: SweepConfig, folder: SweepFolder, *, submits: bool = True) -> Launcher:
    """The launcher of `config`; of a cluster, its limits are read and held against the sweep.

    Args:
        submits: False for one that only ends what there is, whatever the limits have become.

    Raises:
        ConfigError: the configuration asks for what the cluster does not give.
        ClusterError: Slurm cannot be asked.
    """
    if config.launcher.name == "local":
        return LocalLauncher(folder)
    from ultrabench.launchers.slurm.share import slurm_launcher  # it needs submitit, which takes a while

    return slurm_launcher(config, folder, limited=submits)
