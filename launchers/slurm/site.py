"""The configuration, partitions, accounts and limits that Slurm shows this user; each is queried once."""

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

from ultrabench.errors import ClusterError, ConfigError, counted, unknown_name
from ultrabench.host_list import expand_hosts
from ultrabench.launchers.slurm.job import duration_s
from ultrabench.launchers.slurm.query import CommandError, ask
from ultrabench.processes import own_name
from ultrabench.sweep.config.launcher_config import SlurmSettings

_SINFO_FORMAT = "%R|%D|%c|%m|%T|%G"
_ASSOCIATION_COLUMNS = "Account,Partition,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES,QOS,DefaultQOS"
_QOS_COLUMNS = "Name,Flags,MaxJobsPU,MaxSubmitPU,MaxWall,MaxTRES,MaxTRESPU,GrpTRES"
_UP_STATE = re.compile(r"(idle|allocated|mixed|completing|planned|reserved|blocked|power\w*)[~#!%+@^-]*")
"""States of sinfo in which a node runs jobs, now or later.

The states down, drained, in maintenance ($) and not responding (*) are not among them.
"""

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")
"""Programs without which no sweep can run on Slurm."""
REACH_SLURMCTLD = "run this on a login node, wait until `scontrol ping` says UP, or set launcher=local"

LimitRules = Sequence[Mapping[str, str]]
"""Rows of sacctmgr; the first row that sets a limit counts."""


def absent_programs() -> tuple[str, str] | None:
    """Which of the programs in PROGRAMS are not on PATH, and the remedy; None if all are there."""
    absent = ", ".join(program for program in PROGRAMS if shutil.which(program) is None)
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
    node_kinds: tuple[str, ...] = ()
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
        return _smallest_limit(self.max_time_minutes, self.max_wall_minutes)


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
    associations: tuple[Association, ...] = ()
    error: str | None = None
    """Why sacctmgr failed; None if it did not."""

    def usable(self, partition: str, account: str | None = None) -> list[Association]:
        """The associations that are valid for a partition, of one account or, with None, of all accounts."""
        associations = [a for a in self.associations if a.partition in ("", partition)]
        return [a for a in associations if account is None or a.account.lower() == account.lower()]


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
        enforced_words = set(re.split(r"[, ]+", self.config.get("AccountingStorageEnforce", "").lower()))
        # Each of these words implies that jobs need an association (slurm.conf(5)).
        return frozenset(enforced_words & {"all", "associations", "limits", "qos", "safe", "wckeys"})

    @cached_property
    def partitions(self) -> list[Partition]:
        """All partitions, including hidden ones, in the order of slurm.conf.

        Raises:
            ClusterError: slurmctld does not answer.
        """
        scontrol_output = self._ask_controller("scontrol", "--all", "--oneliner", "show", "partition")
        sinfo_output = ""
        with contextlib.suppress(CommandError):
            # Without --exact, different nodes share a line, with numbers such as `16+`.
            sinfo_output = self.ask("sinfo", "--all", "--noheader", "--exact", f"--format={_SINFO_FORMAT}")
        rows = [fields for line in sinfo_output.splitlines() if len(fields := line.split("|", 5)) == 6]
        partition_facts = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in scontrol_output.splitlines())
        return [_partition(facts, rows) for facts in partition_facts if facts.get("PartitionName")]

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
        user_filter = ("where", f"user={self.user}", f"cluster={self.config.get('ClusterName', '')}")
        try:
            rows = self.table("assoc", *user_filter, columns=_ASSOCIATION_COLUMNS)
            users = self.table("user", "where", f"name={self.user}", columns="DefaultAccount")
        except CommandError as error:
            return Accounts(error=str(error))
        associations = [
            Association(
                account=row["Account"], partition=row["Partition"], limits=row,
                qos=tuple(filter(None, row["QOS"].split(","))), default_qos=row["DefaultQOS"],
            )
            for row in rows
        ]  # fmt: skip
        default_account = users[0]["DefaultAccount"] if users else None
        return Accounts(default=default_account, associations=tuple(associations))

    def needed_account(self, partition: str) -> str | None:
        """The account that jobs in a partition must name; None if they need not name one."""
        accounts = [a.account for a in self.accounts.usable(partition)]
        return accounts[0] if self.enforced and accounts and self.accounts.default not in accounts else None

    def table(self, *filters: str, columns: str) -> list[dict[str, str]]:
        """The rows that `sacctmgr show` prints.

        Raises:
            CommandError: sacctmgr fails.
        """
        answer = self.ask("sacctmgr", "--noheader", "--parsable2", "show", *filters, f"format={columns}")
        column_names = columns.split(",")
        rows = (line.split("|") for line in answer.splitlines() if line.strip())
        return [dict(zip(column_names, row, strict=True)) for row in rows if len(row) == len(column_names)]

    def limits(self, partition: str | None, account: str | None, qos: str | None) -> Limits:
        """The limits of this user in a partition; None as an argument stands for the site's default.

        `max_nodes` of the result is the smallest of the limits of partition, QOS and account on one job.

        Raises:
            ConfigError: there is no such partition, or no default partition.
            ClusterError: Slurm does not answer.
        """
        config, job_partition = self.config, self.partition(partition)
        rules = self._rules(job_partition, account, qos)
        node_limits = (_whole_nodes(rules, key, job_partition) for key in ("MaxTRES", "GrpTRES"))
        max_nodes = _smallest_limit(job_partition.max_nodes, *node_limits)
        has_slurmdbd = config.get("AccountingStorageType", "").endswith("dbd")
        return Limits(
            **asdict(job_partition) | {"max_nodes": max_nodes},
            cluster=text_or_none(config.get("ClusterName")),
            accounting=has_slurmdbd and "nojobs" not in config.get("AccountingStorageEnforce", ""),
            max_array_size=int_or_none(config.get("MaxArraySize")) or 1,
            max_submit=_first_limit(rules, ("MaxSubmitPU", "MaxSubmit"), int_or_none),
            max_jobs=_first_limit(rules, ("MaxJobsPU", "MaxJobs"), int_or_none),
            max_nodes_per_user=_whole_nodes(rules, "MaxTRESPU", job_partition),
            max_wall_minutes=_first_limit(rules, ("MaxWall",), minutes_or_none),
        )

    def _rules(self, partition: Partition, account: str | None, qos: str | None) -> LimitRules:
        """The limits that this cluster enforces: those of the QOS of partition and job, then of the association.

        Slurm applies them in this order (slurm.schedmd.com/resource_limits.html). The association includes
        what it inherits from parent accounts.
        """
        if not self.enforced & {"limits", "safe"}:
            return []
        associations = self.accounts.usable(partition.name, account or self.accounts.default or "")
        associations = sorted(associations, key=lambda a: a.partition == "")[:1]
        job_qos = qos or next((a.default_qos or ",".join(a.qos) for a in associations), "")
        qos_names = [name for name in (partition.partition_qos, job_qos) if name and "," not in name]
        rows = list[dict[str, str]]()
        with contextlib.suppress(CommandError):  # for a QOS that does not exist, or it prints nothing
            if qos_names:
                rows = self.table("qos", "where", f"name={','.join(qos_names)}", columns=_QOS_COLUMNS)
        rules = sorted((r for r in rows if r["Name"] in qos_names), key=lambda r: qos_names.index(r["Name"]))
        if "OverPartQOS" in (rules[-1]["Flags"] if rules else ""):
            rules.reverse()
        return [*rules, *(a.limits for a in associations)]

    def _ask_controller(self, *words: str) -> str:
        try:
            return self.ask(*words)
        except CommandError as error:
            reason, remedy = absent_programs() or (str(error), REACH_SLURMCTLD)
            raise ClusterError(f"cannot query Slurm: {reason}", remedy) from error


class PartitionNodes(NamedTuple):
    """The nodes of the partition of a launcher's jobs; both sets are empty if Slurm does not say."""

    known: frozenset[str]
    """All nodes that Slurm lists there, whatever their state."""
    usable: frozenset[str]
    """Nodes that jobs may get now or later."""


def partition_nodes(settings: SlurmSettings) -> PartitionNodes:
    """The nodes of the partition of a launcher's jobs, by one query of sinfo."""
    partition = settings.sbatch.get("partition") or settings.partition
    options = ["--noheader", "--Node", "--exact", "--format=%N|%T|%P"]
    options += [f"--partition={partition}"] if partition else []
    with contextlib.suppress(CommandError, ConfigError):
        rows = [line.split("|") for line in ask("sinfo", *options).splitlines() if line.count("|") == 2]
        # The name of the default partition has an asterisk.
        is_in_partition = (lambda name: True) if partition else (lambda name: name.endswith("*"))
        up_nodes = {
            name
            for name, state, in_partition in rows
            if _UP_STATE.fullmatch(state) and is_in_partition(in_partition)
        }
        usable_nodes = frozenset(up_nodes - {*expand_hosts(settings.exclude or "")})
        return PartitionNodes(frozenset(name for name, _, _ in rows), usable_nodes)
    return PartitionNodes(frozenset(), frozenset())


def _partition(scontrol_facts: Mapping[str, str], sinfo_rows: Sequence[Sequence[str]]) -> Partition:
    """One partition, from the `scontrol_facts` of scontrol and the `sinfo_rows` of sinfo in _SINFO_FORMAT."""
    name, num_nodes_by_kind = scontrol_facts["PartitionName"], Counter[tuple[str, ...]]()
    node_rows = [
        (int_or_none(num_nodes) or 0, state, (*node_kind, gres))
        for partition_name, num_nodes, *node_kind, state, gres in sinfo_rows
        if partition_name == name
    ]
    for num_nodes, _, node_kind in node_rows:
        num_nodes_by_kind[node_kind] += num_nodes
    ranked_kinds = num_nodes_by_kind.most_common()
    cpus_text, mem_text, gres = ranked_kinds[0][0] if ranked_kinds else (None, None, None)
    gpu_counts = re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres or "")
    return Partition(
        name=name,
        is_default=scontrol_facts.get("Default") == "YES",
        state=text_or_none(scontrol_facts.get("State")),
        total_nodes=int_or_none(scontrol_facts.get("TotalNodes")) or 0,
        up_nodes=sum(n for n, state, _ in node_rows if _UP_STATE.fullmatch(state)) if node_rows else None,
        max_nodes=int_or_none(scontrol_facts.get("MaxNodes")),
        max_time_minutes=minutes_or_none(scontrol_facts.get("MaxTime")),
        partition_qos=text_or_none(scontrol_facts.get("QoS")),
        cpus_per_node=int_or_none(cpus_text),
        mem_mb_per_node=int_or_none(mem_text),
        gpus_per_node=sum(map(int, gpu_counts)) if node_rows else None,
        gres=text_or_none(gres),
        node_kinds=tuple(
            f"{counted(num_nodes, 'node')} of {cpus_text} CPUs, {mem_text} MB, {text_or_none(gres) or 'no gres'}"
            for (cpus_text, mem_text, gres), num_nodes in ranked_kinds
        ),
    )


def _first_limit(rules: LimitRules, columns: Sequence[str], parse: Callable[[str], int | None]) -> int | None:
    """The value of the first rule that sets one of the keys; None if none does."""
    limits = (parse(rule[column]) for rule in rules for column in columns if column in rule)
    return next((limit for limit in limits if limit is not None), None)


def _whole_nodes(rules: LimitRules, column: str, partition: Partition) -> int | None:
    """The number of whole nodes, at least 1, that limits such as `cpu=64,gres/gpu=16,node=4` allow."""
    max_gpus = _first_limit(rules, (column,), lambda text: _tres_count(text, "gres/gpu"))
    gpus_per_node = partition.gpus_per_node
    node_limit = max(1, max_gpus // gpus_per_node) if max_gpus is not None and gpus_per_node else None
    return _smallest_limit(_first_limit(rules, (column,), lambda text: _tres_count(text, "node")), node_limit)


def _tres_count(text: str, resource: str) -> int | None:
    return _smallest_limit(*map(int, re.findall(rf"(?:^|,){resource}(?::\w+)?=(\d+)", text)))


def _smallest_limit(*limits: int | None) -> int | None:
    """The smallest limit; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def text_or_none(text: str | None) -> str | None:
    """The text that Slurm printed; None if it means that there is no value."""
    return None if text in (None, "", "(null)", "N/A", "NONE", "none", "UNLIMITED") else text


def int_or_none(text: str | None) -> int | None:
    """The number at the beginning of a text (`300 sec`, `2000+`); None for UNLIMITED and similar words."""
    digits = re.match(r"\d+", text or "")
    return int(digits[0]) if digits else None


def minutes_or_none(text: str | None) -> int | None:
    """Whole minutes of a time limit; None for UNLIMITED and similar words."""
    seconds = duration_s(text or "")
    return None if seconds is None else int(seconds // 60)
