"""The partitions of a cluster and the nodes in them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ultrabench.errors import ClusterError
from ultrabench.launchers.slurm import command
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.job import duration_s

TIMEOUT_S = 20.0
_USABLE = re.compile(r"(idle|allocated|mixed|completing|planned|reserved|blocked|power\w*)[~#!%+@^-]*")
"""States of sinfo in which a node runs jobs, now or later; not: down, drained, `$` maintenance, `*` silent."""

Ask = Callable[..., str]
"""Runs a program with its arguments and gives what it prints, or raises CommandError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition, by scontrol and sinfo; None is: no limit, or nobody said."""

    partition: str
    is_default: bool = False
    partition_state: str | None = None
    """UP, DOWN (starts nothing), DRAIN (takes nothing) or INACTIVE."""
    total_nodes: int = 0
    up_nodes: int | None = None
    """Those that are not down, drained, in maintenance or silent."""
    max_nodes: int | None = None
    """Of one job."""
    max_time_minutes: int | None = None
    default_time_minutes: int | None = None
    partition_qos: str | None = None
    """Its limits come before those of a job's own QOS."""
    cpus_per_node: int | None = None
    """This and the next three: of the commonest kind of its nodes."""
    mem_mb_per_node: int | None = None
    gpus_per_node: int | None = None
    gres: str | None = None
    """Such as gpu:h100:8(S:0-1)."""
    kinds: tuple[str, ...] = ()
    """All kinds of its nodes, the commonest first, such as `8 nodes of 16 CPUs, 2000 MB, gpu:h100:8`."""


def partitions(ask: Ask | None = None) -> list[Partition]:
    """Every partition, hidden ones too, in the order of slurm.conf.

    Raises:
        ClusterError: Slurm does not answer.
    """
    ask = ask or ask_slurm
    text = ask_controller(ask, "scontrol", "--all", "--oneliner", "show", "partition")
    try:
        # --exact: else nodes that differ share a line, as `16+` CPUs.
        seen = ask("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%T|%G")
    except CommandError:
        seen = ""
    rows = [fields for line in seen.splitlines() if len(fields := line.split("|", 5)) == 6]
    found = []
    for line in text.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := facts.get("PartitionName"):
            place = Partition(
                partition=name,
                is_default=facts.get("Default") == "YES",
                partition_state=known(facts.get("State")),
                total_nodes=count(facts.get("TotalNodes")) or 0,
                max_nodes=count(facts.get("MaxNodes")),
                max_time_minutes=minutes(facts.get("MaxTime")),
                default_time_minutes=minutes(facts.get("DefaultTime")),
                partition_qos=known(facts.get("QoS")),
            )
            found.append(_with_nodes(place, [row[1:] for row in rows if row[0] == name]))
    return found


def _with_nodes(place: Partition, rows: Sequence[Sequence[str]]) -> Partition:
    """The partition with what sinfo says of its nodes: how many, CPUs, MB, state, gres."""
    nodes: dict[tuple[str, str, str], int] = {}
    for number, cpus, mem, _, gres in rows:
        kind = (cpus, mem, known(gres) or "no gres")
        nodes[kind] = nodes.get(kind, 0) + (count(number) or 0)
    if not nodes:
        return place
    kinds = sorted(nodes, key=lambda kind: -nodes[kind])
    cpus, mem, gres = kinds[0]
    return replace(
        place,
        up_nodes=sum(count(row[0]) or 0 for row in rows if _USABLE.fullmatch(row[3])),
        cpus_per_node=count(cpus),
        mem_mb_per_node=count(mem),
        gpus_per_node=sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres)),
        gres=None if gres == "no gres" else gres,
        kinds=tuple(f"{nodes[kind]} nodes of {kind[0]} CPUs, {kind[1]} MB, {kind[2]}" for kind in kinds),
    )


def ask_slurm(*words: str) -> str:
    """What a program prints, where nobody counts; raises CommandError."""
    return command.ask(words, TIMEOUT_S)


def ask_controller(ask: Ask, *words: str) -> str:
    """What a program prints without which nothing is known.

    Raises:
        ClusterError: it fails.
    """
    try:
        return ask(*words)
    except CommandError as error:
        raise ClusterError(
            f"Slurm cannot be asked: {error}; launch from a login node of the cluster, or set launcher=local"
        ) from error


def known(text: str | None) -> str | None:
    """A text of Slurm's, None for its words for nothing."""
    return None if text in (None, "", "(null)", "N/A", "NONE", "none", "UNLIMITED") else text


def count(text: str | None) -> int | None:
    """The number a text begins with (`300 sec`, `2000+`); None for UNLIMITED and the like."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None


def minutes(text: str | None) -> int | None:
    """Whole minutes of a time limit; None for UNLIMITED and the like."""
    seconds = duration_s(text or "")
    return None if seconds is None else int(seconds // 60)
