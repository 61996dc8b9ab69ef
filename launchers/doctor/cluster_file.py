"""Cluster configurations from what Slurm says: the files of `ultrabench doctor --write`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ultrabench.errors import ConfigError
from ultrabench.folder import write_whole
from ultrabench.launchers.slurm.accounts import Accounts
from ultrabench.launchers.slurm.limits import Limits
from ultrabench.launchers.slurm.partition import Partition
from ultrabench.sweep.launcher_choice import LauncherChoice

TAKEN = ("local",)
"""Names of the package's own clusters."""


def cluster_files(
    name: str,
    limits: Limits,
    others: Sequence[Partition],
    accounts: Accounts,
    choice: LauncherChoice,
    today: str,
) -> dict[str, str]:
    """Name -> text: one configuration for the partition of `limits`, and one NAME-PARTITION for each other.

    Raises:
        ConfigError: `name` cannot be one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) or name in TAKEN:
        rule = f"letters, digits, _ and -, not {' or '.join(TAKEN)}"
        raise ConfigError(f"--name {name}; a cluster's name has {rule}: choose another")
    found = {name: _text(name, limits, accounts, choice, limits.cluster, today)}
    for place in others:
        if place.partition != limits.partition:
            own = f"{name}-{re.sub(r'[^A-Za-z0-9_-]', '_', place.partition)}"
            while own in found:
                own += "_"
            found[own] = _text(own, place, accounts, choice, limits.cluster, today)
    return found


def write_cluster_files(folder: Path, texts: Mapping[str, str], force: bool) -> list[Path]:
    """Writes each text as FOLDER/NAME.yaml; the files.

    Raises:
        ConfigError: one of them is there already (nothing was written), or they cannot be written.
    """
    paths = {folder / f"{name}.yaml": text for name, text in texts.items()}
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise ConfigError(
            f"--write: {', '.join(there)} exists; give --force to overwrite it, or another --name"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            f"--write: cannot write {folder}: {error.strerror}; go to another folder"
        ) from error
    return list(paths)


def _text(
    name: str, place: Partition, accounts: Accounts, choice: LauncherChoice, cluster: str | None, today: str
) -> str:
    """One configuration: what jobs there need, and in comments what was found."""
    account = choice.account or accounts.needed(place.partition)
    typed = re.search(r"(?:^|,)(gpu:[^:,(\d][^:,(]*:\d+)", place.gres or "")
    values: dict[str, Any] = {
        "name": name, "partition": place.partition, "account": account, "qos": choice.qos,
        "gres": choice.gres or (typed[1] if typed else None),
    }  # fmt: skip
    limit = "none" if place.max_time_minutes is None else f"{place.max_time_minutes} minutes"
    most = "any number" if place.max_nodes is None else str(place.max_nodes)
    up = "unknown" if place.up_nodes is None else str(place.up_nodes)
    lines = [
        f"# Partition {place.partition} of {cluster or 'this cluster'}: {'; '.join(place.kinds) or 'nodes unknown'}",
        f"# By `ultrabench doctor --write` on {today}, from what Slurm said; yours to edit.",
        f"# nodes: {place.total_nodes}, {up} up; of one job: {most}; time limit: {limit}; state: "
        f"{place.partition_state or 'unknown'}",
        *(_line(key, value) for key, value in values.items() if value is not None),
        *_hints(place, accounts, account, values),
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    return yaml.safe_dump({key: value}, width=1000).strip()


def _hints(place: Partition, accounts: Accounts, account: str | None, values: Mapping[str, Any]) -> list[str]:
    """Commented lines: what else could be set, with what there is."""
    usable = accounts.usable(place.partition)
    names = list(dict.fromkeys(a.account for a in usable))
    own = next((a for a in usable if a.account == (account or accounts.default)), None)
    hints = []
    if account is None and names:
        default = f"the default is {accounts.default}" if accounts.default else "no default"
        hints.append(f"# account: {accounts.default or names[0]}  # {default}; yours are {', '.join(names)}")
    if values["qos"] is None and own and own.qos:
        hints.append(
            f"# qos: {own.default_qos or own.qos[0]}  # account {own.account} has {', '.join(own.qos)}"
        )
    if place.mem_mb_per_node:
        hints.append(f"# mem: {place.mem_mb_per_node}M  # of a node; unset, jobs get what the site gives")
    return [*hints, "# python: /path/of/python  # where nodes have another", '# setup: ["module load cuda"]']
