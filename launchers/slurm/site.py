"""What Slurm says of its cluster to this user: configuration, partitions, accounts; each is asked for once."""

import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ultrabench.errors import ClusterError, ConfigError, unknown_name
from ultrabench.launchers.slurm import command
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.partition import SINFO_FORMAT, Partition, read_partitions

TIMEOUT_S = 20.0
_ASSOCIATION = (
    "Account", "Partition", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES", "GrpTRES", "QOS", "DefaultQOS",
)  # fmt: skip

Ask = Callable[..., str]
"""Runs a program with its arguments and returns what it prints, or raises CommandError."""


def ask_slurm(*words: str) -> str:
    """What a program prints.

    Raises:
        CommandError: it fails, or takes longer than TIMEOUT_S.
    """
    return command.ask(words, TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """One account of this user, with the limits that sacctmgr shows for it."""

    account: str
    partition: str
    """Empty where the account holds for all partitions."""
    qos: tuple[str, ...]
    default_qos: str
    limits: Mapping[str, str]
    """MaxJobs, MaxSubmit, MaxWall, MaxTRES and GrpTRES as sacctmgr prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounts that Slurm knows of this user."""

    default: str | None = None
    """The account of jobs that name none."""
    mine: tuple[Association, ...] = ()
    error: str | None = None
    """Why sacctmgr did not tell."""

    def usable(self, partition: str) -> list[Association]:
        """Those that hold for a partition."""
        return [a for a in self.mine if a.partition in ("", partition)]


class Site:
    """One cluster; what is not needed is not asked for."""

    def __init__(self, ask: Ask = ask_slurm) -> None:
        self.ask = ask
        try:
            self.user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            self.user = str(os.getuid())

    @cached_property
    def config(self) -> dict[str, str]:
        """The values of slurm.conf.

        Raises:
            ClusterError: slurmctld does not answer.
        """
        text = self._ask_controller("scontrol", "show", "config")
        return dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE))

    @property
    def enforced(self) -> frozenset[str]:
        """What jobs are held against: associations, limits, qos, ...; empty where Slurm takes any account."""
        words = set(re.split(r"[, ]+", self.config.get("AccountingStorageEnforce", "").lower()))
        # Each of those implies that jobs need an association (slurm.conf(5)).
        return frozenset(words & {"all", "associations", "limits", "qos", "safe", "wckeys"})

    @cached_property
    def partitions(self) -> list[Partition]:
        """Every partition, hidden ones too, in the order of slurm.conf.

        Raises:
            ClusterError: slurmctld does not answer.
        """
        text = self._ask_controller("scontrol", "--all", "--oneliner", "show", "partition")
        try:
            # Without --exact, nodes that differ share a line, such as `16+` CPUs.
            nodes = self.ask("sinfo", "--all", "--noheader", "--exact", f"--format={SINFO_FORMAT}")
        except CommandError:
            nodes = ""
        return read_partitions(text, nodes)

    def partition(self, name: str | None) -> Partition:
        """The partition of this name; None stands for the default one.

        Raises:
            ConfigError: there is none.
            ClusterError: slurmctld does not answer.
        """
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.is_default):
                return partition
        names = [partition.name for partition in self.partitions]
        if name is None:
            raise ConfigError(
                f"no partition is the default here; set launcher.partition= ({', '.join(names)})"
            )
        raise ConfigError(unknown_name("launcher.partition", name, names))

    @cached_property
    def accounts(self) -> Accounts:
        """The associations of this user on this cluster."""
        where = ("where", f"user={self.user}", f"cluster={self.config.get('ClusterName', '')}")
        try:
            rows = self.table("assoc", *where, columns=_ASSOCIATION)
            users = self.table("user", "where", f"name={self.user}", columns=("DefaultAccount",))
        except CommandError as error:
            return Accounts(error=str(error))
        mine = [
            Association(
                account=row["Account"], partition=row["Partition"], limits=row,
                qos=tuple(filter(None, row["QOS"].split(","))), default_qos=row["DefaultQOS"],
            )
            for row in rows
        ]  # fmt: skip
        return Accounts(default=users[0]["DefaultAccount"] if users else None, mine=tuple(mine))

    def needed_account(self, partition: str) -> str | None:
        """The account that jobs in a partition have to name; None where they need not name one."""
        names = [a.account for a in self.accounts.usable(partition)]
        return names[0] if self.enforced and names and self.accounts.default not in names else None

    def table(self, *what: str, columns: Sequence[str]) -> list[dict[str, str]]:
        """Rows of `sacctmgr show`.

        Raises:
            CommandError: it fails.
        """
        text = self.ask("sacctmgr", "--noheader", "--parsable2", "show", *what, f"format={','.join(columns)}")
        rows = (line.split("|") for line in text.splitlines() if line.strip())
        return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]

    def _ask_controller(self, *words: str) -> str:
        try:
            return self.ask(*words)
        except CommandError as error:
            raise ClusterError(
                f"Slurm cannot be asked: {error}; launch from a login node of the cluster, or set launcher=local"
            ) from error
