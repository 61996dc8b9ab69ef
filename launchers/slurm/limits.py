"""The limits of this user in a partition: those of the partition, of the QOS and of the account."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.site import Partition, Site, count, known, minutes

_QOS = ("Name", "Flags", "MaxJobsPU", "MaxSubmitPU", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES")

Rules = Sequence[Mapping[str, str]]
"""Rows of sacctmgr; the first row that sets a limit counts."""


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


def read_limits(site: Site, partition: str | None, account: str | None, qos: str | None) -> Limits:
    """The limits of this user in a partition; None as an argument stands for the site's default.

    `max_nodes` of the result is the smallest of the limits of partition, QOS and account on one job.

    Raises:
        ConfigError: there is no such partition, or no default partition.
        ClusterError: Slurm does not answer.
    """
    config, found = site.config, site.partition(partition)
    rules = _rules(site, found, account, qos)
    most = _least(found.max_nodes, _nodes(rules, "MaxTRES", found), _nodes(rules, "GrpTRES", found))
    recorded = config.get("AccountingStorageType", "").endswith("dbd")
    return Limits(
        **asdict(found) | {"max_nodes": most},
        cluster=known(config.get("ClusterName")),
        accounting=recorded and "nojobs" not in config.get("AccountingStorageEnforce", ""),
        max_array_size=count(config.get("MaxArraySize")) or 1,
        max_submit=_first(rules, ("MaxSubmitPU", "MaxSubmit"), count),
        max_jobs=_first(rules, ("MaxJobsPU", "MaxJobs"), count),
        max_nodes_per_user=_nodes(rules, "MaxTRESPU", found),
        max_wall_minutes=_first(rules, ("MaxWall",), minutes),
    )


def _rules(site: Site, partition: Partition, account: str | None, qos: str | None) -> Rules:
    """The limits that this cluster enforces: those of the QOS of partition and job, then of the association.

    Slurm applies them in this order (slurm.schedmd.com/resource_limits.html). The association includes what
    it inherits from parent accounts.
    """
    if not site.enforced & {"limits", "safe"}:
        return []
    mine = site.accounts.usable(partition.name, account or site.accounts.default or "")
    mine = sorted(mine, key=lambda a: a.partition == "")[:1]
    own = qos or next((a.default_qos or ",".join(a.qos) for a in mine), "")
    wanted = [name for name in (partition.partition_qos, own) if name and "," not in name]
    try:
        # For a QOS that does not exist, sacctmgr prints nothing or an error.
        rows = site.table("qos", "where", f"name={','.join(wanted)}", columns=_QOS) if wanted else []
    except CommandError:
        rows = []
    found = sorted((r for r in rows if r["Name"] in wanted), key=lambda r: wanted.index(r["Name"]))
    if "OverPartQOS" in (found[-1]["Flags"] if found else ""):
        found.reverse()
    return [*found, *(a.limits for a in mine)]


def _first(rules: Rules, keys: Sequence[str], read: Callable[[str], int | None]) -> int | None:
    """The value of the first rule that sets one of the keys; None if none does."""
    values = (read(rule[key]) for rule in rules for key in keys if key in rule)
    return next((value for value in values if value is not None), None)


def _nodes(rules: Rules, key: str, partition: Partition) -> int | None:
    """The number of whole nodes, at least 1, that limits such as `cpu=64,gres/gpu=16,node=4` allow."""
    gpus, own = _first(rules, (key,), lambda text: _tres(text, "gres/gpu")), partition.gpus_per_node
    by_gpus = max(1, gpus // own) if gpus is not None and own else None
    return _least(_first(rules, (key,), lambda text: _tres(text, "node")), by_gpus)


def _tres(text: str, name: str) -> int | None:
    return _least(*map(int, re.findall(rf"(?:^|,){name}(?::\w+)?=(\d+)", text)))


def _least(*limits: int | None) -> int | None:
    """The smallest limit; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
