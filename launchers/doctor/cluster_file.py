"""Makes a cluster configuration from the answers of Slurm, for `ultrabench doctor --write`."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ultrabench.batch_system import NO_CLUSTER
from ultrabench.errors import ConfigError
from ultrabench.launchers.doctor.site_checks import partition_text
from ultrabench.launchers.slurm.site import Limits, Site
from ultrabench.store.folder import write_whole
from ultrabench.sweep.config.launcher_config import SlurmSettings


def write_cluster_file(
    folder: Path, cluster_name: str, site: Site, limits: Limits, settings: SlurmSettings, force: bool
) -> Path:
    """Writes FOLDER/NAME.yaml for the partition of `limits`; returns its path.

    Raises:
        ConfigError: `cluster_name` is not possible for a cluster, the file exists and `force` is not set, or the file
            cannot be written.
    """
    path = folder / f"{cluster_name}.yaml"
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", cluster_name, re.ASCII) or cluster_name == NO_CLUSTER:
        raise ConfigError(
            f"--name {cluster_name}; use letters, digits, _ and -, but not the name {NO_CLUSTER}"
        )
    if path.exists() and not force:
        raise ConfigError(f"--write: {path} exists; give --force to overwrite it, or another --name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, _file_text(cluster_name, site, limits, settings))
    except OSError as error:
        raise ConfigError(f"--write: cannot write {path}: {error.strerror}; use another folder") from error
    return path


def _file_text(cluster_name: str, site: Site, limits: Limits, settings: SlurmSettings) -> str:
    """The text of the file: the options that jobs in the partition need, and further facts as comments."""
    account = settings.account or site.needed_account(limits.name)
    gpu_match = re.search(r"(?:^|,)(gpu:[^:,(\d][^:,(]*:\d+)", limits.gres or "")
    option_values: dict[str, Any] = {
        "name": cluster_name, "partition": limits.name, "account": account, "qos": settings.qos,
        "gres": settings.gres or (gpu_match[1] if gpu_match else None),
    }  # fmt: skip
    up_text = "unknown" if limits.up_nodes is None else str(limits.up_nodes)
    lines = [
        f"# Partition {limits.name} of {limits.cluster or 'this cluster'}: "
        f"{'; '.join(limits.node_kinds) or 'nodes unknown'}",
        f"# By `ultrabench doctor --write` on {time.strftime('%Y-%m-%d')}, from the answers of Slurm; "
        "edit it as you like.",
        f"# {partition_text(limits)}; nodes up: {up_text}",
        *(yaml.safe_dump({k: v}, width=1000).strip() for k, v in option_values.items() if v is not None),
        *_hints(site, limits, option_values),
    ]
    return "\n".join(lines) + "\n"


def _hints(site: Site, limits: Limits, option_values: Mapping[str, Any]) -> list[str]:
    """Lines in comments that name options the user could also set."""
    account, default = option_values["account"], site.accounts.default
    associations = site.accounts.usable(limits.name)
    accounts = list(dict.fromkeys(a.account for a in associations))
    association = next((a for a in associations if a.account == (account or default)), None)
    hints = []
    if account is None and accounts:
        default_text = f"the default is {default}" if default else "no default"
        hints.append(f"# account: {default or accounts[0]}  # {default_text}; you have {', '.join(accounts)}")
    if option_values["qos"] is None and association and association.qos:
        qos = association.default_qos or association.qos[0]
        hints.append(f"# qos: {qos}  # account {association.account} has {', '.join(association.qos)}")
    if limits.mem_mb_per_node:
        hints.append(f"# mem: {limits.mem_mb_per_node}M  # per node; unset: the default of the site")
    return [*hints, "# python: /path/of/python  # if nodes need another", '# setup: ["module load cuda"]']
