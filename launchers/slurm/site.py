"""The configuration, partitions, accounts and limits that Slurm shows this user; each is queried once."""

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from ultrabench.errors import ClusterError, ConfigError, counted, unknown_name
from ultrabench.launchers.slurm.job import duration_s
from ultrabench.launchers.slurm.query import CommandError, ask
from ultrabench.processes import own_name

_SINFO_FORMAT = "%R|%D|%c|%m|%T|%G"
_ASSOCIATION = "Account,Partition,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES,QOS,DefaultQOS"
_QOS = "Name,Flags,MaxJobsPU,MaxSubmitPU,MaxWall,MaxTRES,MaxTRESPU,GrpTRES"
_USABLE = re.compile(r"(idle|allocated|mixed|completing|planned|reserved|blocked|power\w*)[~#!%+@^-]*")
"""States of sinfo in which a node runs jobs, now or later.

The states down, drained, in maintenance ($) and not responding (*) are not among them.
"""

NEEDED = ("sbatch", "squeue", "scontrol", "scancel")
"""Programs without which no sweep can run on Slurm."""
REACH_SLURMCTLD = "run this on a login node, wait until `scontrol ping` says UP, or set launcher=local"

Rules = Sequence[Mapping[str, str]]
"""Rows of sacctmgr; the first row that sets a limit counts."""


def absent_programs() -> tuple[str, str] | None:
    """Which of the programs of NEEDED are not on PATH, and the remedy; None if all are there."""
    absent = ", ".join(program for program in NEEDED if shutil.which(program) is None)
    remedy = "log in to a node of the cluster or `module load slurm`; or set launcher=local"
    return (f"not on PATH: {absent}", remedy) if absent else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition; None means that there is no limit, or that Slurm did not show it."""

    name: str
    is_default: bool = False
    state: str | None = None
    """UP, DOWN (starts no jobs), DRAIN (takes no jobs) or INACTIVE."""
    total_nodes: int = 0
    up_nodes: int | None = None
    """Number of nodes that are not down, drained, in maintenance or unresponsive."""
    max_nodes: int | None = None
    """Largest number of nodes of one job."""
    max_time_minutes: int | None = None
    partition_qos: str | None = None
    """QOS of the partition; its limits take precedence over those of the QOS of a job."""
    cpus_per_node: int | None = None
    """CPUs of the most common kind of node; the next three fields describe the same kind."""
    mem_mb_per_node: int | None = None
    gpus_per_node: int | None = None
    gres: str | None = None
    """Generic resources of a node, such as gpu:h100:8(S:0-1)."""
    kinds: tuple[str, ...] = ()
    """Each kind of node in words, the most common first: `8 nodes of 16 CPUs, 2000 MB, gpu:h100:8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Partition):
    """A partition and the limits of this user there; None means that there is no limit or it is unknown."""

    cluster: str | None = None
    accounting: bool = False
    """Whether the cluster records jobs for sacct."""
    max_array_size: int = 1
    """Largest number of elements of an array; array indices are smaller than this."""
    max_submit: int | None = None
    """Largest number of queued and running jobs of this user; each element of an array counts."""
    max_jobs: int | None = None
    """Largest number of running jobs of this user."""
    max_nodes_per_user: int | None = None
    max_wall_minutes: int | None = None
    """Longest time limit of one job by QOS or account, in minutes."""

    @property
    def job_minutes(self) -> int | None:
        """The longest time limit of one job, in minutes, by partition, QOS and account."""
        return _least(self.max_time_minutes, self.max_wall_minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account that this user may use, with the limits that sacctmgr shows for it."""

    account: str
    partition: str
    """The only partition for which it is valid; empty if it is valid for all partitions."""
    qos: tuple[str, ...]
    default_qos: str
    limits: Mapping[str, str]
    """MaxJobs, MaxSubmit, MaxWall, MaxTRES and GrpTRES as sacctmgr prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounts that Slurm knows for this user."""

    default: str | None = None
    """The account of jobs that do not name one."""
    mine: tuple[Association, ...] = ()
    error: str | None = None
    """Why sacctmgr failed; None if it did not."""

    def usable(self, partition: str, account: str | None = None) -> list[Association]:
        """The associations that are valid for a partition, of one account or, with None, of all accounts."""
        of_partition = [a for a in self.mine if a.partition in ("", partition)]
        return [a for a in of_partition if account is None or a.account.lower() == account.lower()]


class Site:
    """A Slurm cluster; its facts are queried when they are first needed."""

    ask = staticmethod(ask)

    def __init__(self) -> None:
        self.user = own_name()

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
        """What Slurm enforces: associations, limits, qos, ...; empty if Slurm accepts any account."""
        words = set(re.split(r"[, ]+", self.config.get("AccountingStorageEnforce", "").lower()))
        # Each of these words implies that jobs need an association (slurm.conf(5)).
        return frozenset(words & {"all", "associations", "limits", "qos", "safe", "wckeys"})

    @cached_property
    def partitions(self) -> list[Partition]:
        """All partitions, including hidden ones, in the order of slurm.conf.

        Raises:
            ClusterError: slurmctld does not answer.
        """
        text = self._ask_controller("scontrol", "--all", "--oneliner", "show", "partition")
        nodes = ""
        with contextlib.suppress(CommandError):
            # Without --exact, different nodes share a line, with numbers such as `16+`.
            nodes = self.ask("sinfo", "--all", "--noheader", "--exact", f"--format={_SINFO_FORMAT}")
        rows = [fields for line in nodes.splitlines() if len(fields := line.split("|", 5)) == 6]
        shown = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines())
        return [_partition(facts, rows) for facts in shown if facts.get("PartitionName")]

    def partition(self, name: str | None) -> Partition:
        """The partition with this name; None stands for the default partition.

        Raises:
            ConfigError: there is no such partition.
            ClusterError: slurmctld does not answer.
        """
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.is_default):
                return partition
        names = [partition.name for partition in self.partitions]
        if name is not None:
            raise ConfigError(unknown_name("launcher.partition", name, names))
        raise ConfigError("there is no default partition", f"set launcher.partition= ({', '.join(names)})")

    @cached_property
    def accounts(self) -> Accounts:
        """The associations of this user on this cluster."""
        where = ("where", f"user={self.user}", f"cluster={self.config.get('ClusterName', '')}")
        try:
            rows = self.table("assoc", *where, columns=_ASSOCIATION)
            users = self.table("user", "where", f"name={self.user}", columns="DefaultAccount")
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
        """The account that jobs in a partition must name; None if they need not name one."""
        names = [a.account for a in self.accounts.usable(partition)]
        return names[0] if self.enforced and names and self.accounts.default not in names else None

    def table(self, *words: str, columns: str) -> list[dict[str, str]]:
        """The rows that `sacctmgr show` prints.

        Raises:
            CommandError: sacctmgr fails.
        """
        text = self.ask("sacctmgr", "--noheader", "--parsable2", "show", *words, f"format={columns}")
        names = columns.split(",")
        rows = (line.split("|") for line in text.splitlines() if line.strip())
        return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]

    def limits(self, partition: str | None, account: str | None, qos: str | None) -> Limits:
        """The limits of this user in a partition; None as an argument stands for the site's default.

        `max_nodes` of the result is the smallest of the limits of partition, QOS and account on one job.

        Raises:
            ConfigError: there is no such partition, or no default partition.
            ClusterError: Slurm does not answer.
        """
        config, chosen = self.config, self.partition(partition)
        rules = self._rules(chosen, account, qos)
        nodes_of_rules = (_nodes(rules, key, chosen) for key in ("MaxTRES", "GrpTRES"))
        max_nodes = _least(chosen.max_nodes, *nodes_of_rules)
        recorded = config.get("AccountingStorageType", "").endswith("dbd")
        return Limits(
            **asdict(chosen) | {"max_nodes": max_nodes},
            cluster=known(config.get("ClusterName")),
            accounting=recorded and "nojobs" not in config.get("AccountingStorageEnforce", ""),
            max_array_size=count(config.get("MaxArraySize")) or 1,
            max_submit=_first(rules, ("MaxSubmitPU", "MaxSubmit"), count),
            max_jobs=_first(rules, ("MaxJobsPU", "MaxJobs"), count),
            max_nodes_per_user=_nodes(rules, "MaxTRESPU", chosen),
            max_wall_minutes=_first(rules, ("MaxWall",), minutes),
        )

    def _rules(self, partition: Partition, account: str | None, qos: str | None) -> Rules:
        """The limits that this cluster enforces: those of the QOS of partition and job, then of the association.

        Slurm applies them in this order (slurm.schedmd.com/resource_limits.html). The association includes
        what it inherits from parent accounts.
        """
        if not self.enforced & {"limits", "safe"}:
            return []
        mine = self.accounts.usable(partition.name, account or self.accounts.default or "")
        mine = sorted(mine, key=lambda a: a.partition == "")[:1]
        job_qos = qos or next((a.default_qos or ",".join(a.qos) for a in mine), "")
        qos_names = [name for name in (partition.partition_qos, job_qos) if name and "," not in name]
        rows = list[dict[str, str]]()
        with contextlib.suppress(CommandError):  # for a QOS that does not exist, or it prints nothing
            if qos_names:
                rows = self.table("qos", "where", f"name={','.join(qos_names)}", columns=_QOS)
        of_qos = sorted((r for r in rows if r["Name"] in qos_names), key=lambda r: qos_names.index(r["Name"]))
        if "OverPartQOS" in (of_qos[-1]["Flags"] if of_qos else ""):
            of_qos.reverse()
        return [*of_qos, *(a.limits for a in mine)]

    def _ask_controller(self, *words: str) -> str:
        try:
            return self.ask(*words)
        except CommandError as error:
            reason, remedy = absent_programs() or (str(error), REACH_SLURMCTLD)
            raise ClusterError(f"cannot query Slurm: {reason}", remedy) from error


def _partition(facts: Mapping[str, str], rows: Sequence[Sequence[str]]) -> Partition:
    """One partition, from the `facts` of scontrol and the `rows` of sinfo in _SINFO_FORMAT."""
    name, nodes = facts["PartitionName"], Counter[tuple[str, ...]]()
    mine = [(count(number) or 0, state, (*kind, gres)) for p, number, *kind, state, gres in rows if p == name]
    for number, _, kind in mine:
        nodes[kind] += number
    kinds = nodes.most_common()
    cpus, mem, gres = kinds[0][0] if kinds else (None, None, None)
    gpus = re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres or "")
    return Partition(
        name=name,
        is_default=facts.get("Default") == "YES",
        state=known(facts.get("State")),
        total_nodes=count(facts.get("TotalNodes")) or 0,
        up_nodes=sum(n for n, state, _ in mine if _USABLE.fullmatch(state)) if mine else None,
        max_nodes=count(facts.get("MaxNodes")),
        max_time_minutes=minutes(facts.get("MaxTime")),
        partition_qos=known(facts.get("QoS")),
        cpus_per_node=count(cpus),
        mem_mb_per_node=count(mem),
        gpus_per_node=sum(map(int, gpus)) if mine else None,
        gres=known(gres),
        kinds=tuple(
            f"{counted(number, 'node')} of {cpus} CPUs, {mem} MB, {known(gres) or 'no gres'}"
            for (cpus, mem, gres), number in kinds
        ),
    )


def _first(rules: Rules, keys: Sequence[str], read: Callable[[str], int | None]) -> int | None:
    """The value of the first rule that sets one of the keys; None if none does."""
    values = (read(rule[key]) for rule in rules for key in keys if key in rule)
    return next((value for value in values if value is not None), None)


def _nodes(rules: Rules, key: str, partition: Partition) -> int | None:
    """The number of whole nodes, at least 1, that limits such as `cpu=64,gres/gpu=16,node=4` allow."""
    gpus, per_node = _first(rules, (key,), lambda text: _tres(text, "gres/gpu")), partition.gpus_per_node
    by_gpus = max(1, gpus // per_node) if gpus is not None and per_node else None
    return _least(_first(rules, (key,), lambda text: _tres(text, "node")), by_gpus)


def _tres(text: str, name: str) -> int | None:
    return _least(*map(int, re.findall(rf"(?:^|,){name}(?::\w+)?=(\d+)", text)))


def _least(*limits: int | None) -> int | None:
    """The smallest limit; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def known(text: str | None) -> str | None:
    """The text that Slurm printed; None if it means that there is no value."""
    return None if text in (None, "", "(null)", "N/A", "NONE", "none", "UNLIMITED") else text


def count(text: str | None) -> int | None:
    """The number at the beginning of a text (`300 sec`, `2000+`); None for UNLIMITED and similar words."""
    digits = re.match(r"\d+", text or "")
    return int(digits[0]) if digits else None


def minutes(text: str | None) -> int | None:
    """Whole minutes of a time limit; None for UNLIMITED and similar words."""
    seconds = duration_s(text or "")
    return None if seconds is None else int(seconds // 60)
