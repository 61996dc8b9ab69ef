"""The partitions of a cluster and the nodes in them, from what scontrol and sinfo print."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ultrabench.errors import counted
from ultrabench.launchers.slurm.job import duration_s

_USABLE = re.compile(r"(idle|allocated|mixed|completing|planned|reserved|blocked|power\w*)[~#!%+@^-]*")
"""States of sinfo in which a node runs jobs, now or later. Not among them: down, drained, maintenance ($), silent (*)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition; None means that there is no limit, or that Slurm did not say."""

    name: str
    is_default: bool = False
    state: str | None = None
    """UP, DOWN (starts no jobs), DRAIN (takes no jobs) or INACTIVE."""
    total_nodes: int = 0
    up_nodes: int | None = None
    """Number of nodes that are not down, drained, in maintenance or silent."""
    max_nodes: int | None = None
    """Largest number of nodes of one job."""
    max_time_minutes: int | None = None
    partition_qos: str | None = None
    """QOS of the partition; its limits come before those of a job's own QOS."""
    cpus_per_node: int | None = None
    """CPUs of the most common kind of node; the next three fields describe the same kind."""
    mem_mb_per_node: int | None = None
    gpus_per_node: int | None = None
    gres: str | None = None
    """Such as gpu:h100:8(S:0-1)."""
    kinds: tuple[str, ...] = ()
    """All kinds of nodes, the most common first, such as `8 nodes of 16 CPUs, 2000 MB, gpu:h100:8`."""


SINFO_FORMAT = "%R|%D|%c|%m|%T|%G"


def read_partitions(text: str, nodes: str) -> list[Partition]:
    """Every partition in `text` of scontrol; `nodes` is what sinfo prints in SINFO_FORMAT, or nothing."""
    rows = [fields for line in nodes.splitlines() if len(fields := line.split("|", 5)) == 6]
    found = []
    for line in text.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := facts.get("PartitionName"):
            partition = Partition(
                name=name,
                is_default=facts.get("Default") == "YES",
                state=known(facts.get("State")),
                total_nodes=count(facts.get("TotalNodes")) or 0,
                max_nodes=count(facts.get("MaxNodes")),
                max_time_minutes=minutes(facts.get("MaxTime")),
                partition_qos=known(facts.get("QoS")),
            )
            found.append(_with_nodes(partition, [row[1:] for row in rows if row[0] == name]))
    return found


def _with_nodes(partition: Partition, rows: Sequence[Sequence[str]]) -> Partition:
    """The partition with its nodes; a row of sinfo is their number, CPUs, memory in MB, state and gres."""
    nodes: dict[tuple[str, str, str], int] = {}
    for number, cpus, mem, _, gres in rows:
        kind = (cpus, mem, known(gres) or "no gres")
        nodes[kind] = nodes.get(kind, 0) + (count(number) or 0)
    if not nodes:
        return partition
    kinds = sorted(nodes, key=lambda kind: -nodes[kind])
    cpus, mem, gres = kinds[0]
    return replace(
        partition,
        up_nodes=sum(count(row[0]) or 0 for row in rows if _USABLE.fullmatch(row[3])),
        cpus_per_node=count(cpus),
        mem_mb_per_node=count(mem),
        gpus_per_node=sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres)),
        gres=None if gres == "no gres" else gres,
        kinds=tuple(
            f"{counted(nodes[kind], 'node')} of {kind[0]} CPUs, {kind[1]} MB, {kind[2]}" for kind in kinds
        ),
    )


def known(text: str | None) -> str | None:
    """A text of Slurm's; None for its words for nothing."""
    return None if text in (None, "", "(null)", "N/A", "NONE", "none", "UNLIMITED") else text


def count(text: str | None) -> int | None:
    """The number that a text begins with (`300 sec`, `2000+`); None for UNLIMITED and the like."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None


def minutes(text: str | None) -> int | None:
    """Whole minutes of a time limit; None for UNLIMITED and the like."""
    seconds = duration_s(text or "")
    return None if seconds is None else int(seconds // 60)
