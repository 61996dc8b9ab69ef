"""What a site lets us do in a partition: limits of the partition, the QOS and the account."""

import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.partition import (
    Ask,
    Partition,
    ask_controller,
    ask_slurm,
    count,
    known,
    minutes,
    partitions,
)

_ASSOC = (
    "Account",
    "Partition",
    "MaxJobs",
    "MaxSubmit",
    "MaxWall",
    "MaxTRES",
    "GrpTRES",
    "QOS",
    "DefaultQOS",
)
_QOS = ("Name", "Flags", "MaxJobsPU", "MaxSubmitPU", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES")

Rules = Sequence[Mapping[str, str]]
"""Rows of sacctmgr, the one that counts first."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Partition):
    """A partition, and what this user may do there; None is: no limit, or nobody said."""

    cluster: str | None = None
    slurm_version: str | None = None
    accounting: bool = False
    """Whether jobs are recorded for sacct."""
    max_array_size: int = 1
    """Elements of an array: its indices are smaller than this."""
    max_job_count: int | None = None
    """Jobs of all users in the queue."""
    max_submit: int | None = None
    """Jobs of this user queued or running, elements of arrays counted."""
    max_jobs: int | None = None
    """Jobs of this user running."""
    max_nodes_per_user: int | None = None
    max_wall_minutes: int | None = None
    """Of one job, by QOS or account."""
    kill_wait_s: int | None = None
    """Between SIGTERM and SIGKILL at the end of a job."""
    min_job_age_s: int | None = None
    """How long squeue lists a job that is over."""


def read_limits(
    partition: str | None = None, account: str | None = None, qos: str | None = None, ask: Ask | None = None
) -> Limits:
    """What one may do in a partition; None stands for the site's default.

    Its `max_nodes` is the least that partition, QOS and account give one job.

    Raises:
        ConfigError: there is no such partition, or no default one.
        ClusterError: Slurm does not answer.
    """
    ask = ask or ask_slurm
    text = ask_controller(ask, "scontrol", "show", "config")
    config = dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE))
    place = _partition(partitions(ask), partition)
    rules = _rules(ask, config, place, account, qos)
    most = [place.max_nodes, _nodes(rules, "MaxTRES", place), _nodes(rules, "GrpTRES", place)]
    enforced = config.get("AccountingStorageEnforce", "")
    return Limits(
        **{f.name: getattr(place, f.name) for f in fields(Partition) if f.name != "max_nodes"},
        max_nodes=min((n for n in most if n is not None), default=None),
        cluster=known(config.get("ClusterName")),
        slurm_version=known(config.get("SLURM_VERSION")),
        accounting=config.get("AccountingStorageType", "").endswith("dbd") and "nojobs" not in enforced,
        max_array_size=count(config.get("MaxArraySize")) or 1,
        max_job_count=count(config.get("MaxJobCount")),
        max_submit=_first(rules, ("MaxSubmitPU", "MaxSubmit"), count),
        max_jobs=_first(rules, ("MaxJobsPU", "MaxJobs"), count),
        max_nodes_per_user=_nodes(rules, "MaxTRESPU", place),
        max_wall_minutes=_first(rules, ("MaxWall",), minutes),
        kill_wait_s=count(config.get("KillWait")),
        min_job_age_s=count(config.get("MinJobAge")),
    )


def _partition(places: Sequence[Partition], name: str | None) -> Partition:
    names = [place.partition for place in places]
    for place in places:
        if place.partition == name or (name is None and place.is_default):
            return place
    if name is None:
        raise ConfigError(f"no partition is the default here; set launcher.partition= ({', '.join(names)})")
    raise ConfigError(unknown_name("launcher.partition", name, names))


def _rules(
    ask: Ask, config: Mapping[str, str], place: Partition, account: str | None, qos: str | None
) -> Rules:
    """The limits enforced here: of the QOS of partition and job, then of the association.

    That is the order in which they count (slurm.schedmd.com/resource_limits.html); the association shows
    what it inherits from parent accounts.
    """
    enforced = set(re.split(r"[, ]+", config.get("AccountingStorageEnforce", "").lower()))
    if not enforced & {"limits", "safe"}:
        return []
    user = _user()
    where = (f"user={user}", f"cluster={config.get('ClusterName', '')}")
    rows = _table(ask, ("assoc", "where", *where), _ASSOC)
    if account is None:
        told = _table(ask, ("user", "where", f"name={user}"), ("DefaultAccount",))
        account = told[0]["DefaultAccount"] if told else ""
    mine = [r for r in rows if r["Account"].lower() == account.lower()]
    mine = [r for r in mine if r["Partition"] in ("", place.partition)]
    mine = sorted(mine, key=lambda r: r["Partition"] == "")[:1]
    own = qos or next((r["DefaultQOS"] or r["QOS"] for r in mine), "")
    wanted = [name for name in (place.partition_qos, own) if name and "," not in name]
    # Asked for a name that is not there, sacctmgr prints nothing, or complains.
    found = _table(ask, ("qos", "where", f"name={','.join(wanted)}"), _QOS) if wanted else []
    kinds = sorted((r for r in found if r["Name"] in wanted), key=lambda r: wanted.index(r["Name"]))
    if "OverPartQOS" in (kinds[-1]["Flags"] if kinds else ""):
        kinds.reverse()
    return [*kinds, *mine]


def _table(ask: Ask, what: Sequence[str], columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows of `sacctmgr show`; none when it fails, for then nobody knows of limits."""
    try:
        text = ask("sacctmgr", "--noheader", "--parsable2", "show", *what, f"format={','.join(columns)}")
    except CommandError:
        return []
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _first(rules: Rules, keys: Sequence[str], read: Callable[[str], T | None]) -> T | None:
    """The value of the first rule that sets one of the keys."""
    values = (read(rule[key]) for rule in rules for key in keys if key in rule)
    return next((value for value in values if value is not None), None)


def _nodes(rules: Rules, key: str, place: Partition) -> int | None:
    """Whole nodes within limits such as `cpu=64,gres/gpu=16,node=4`; at least one."""
    most = [_first(rules, (key,), lambda text: _tres(text, "node"))]
    gpus = _first(rules, (key,), lambda text: _tres(text, "gres/gpu"))
    if gpus is not None and place.gpus_per_node:
        most.append(max(1, gpus // place.gpus_per_node))
    return min((n for n in most if n is not None), default=None)


def _tres(text: str, name: str) -> int | None:
    found = re.findall(rf"(?:^|,){name}(?::\w+)?=(\d+)", text)
    return min((int(n) for n in found), default=None)
