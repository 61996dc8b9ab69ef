"""The CPUs on which each rank of a node runs: those nearest to its GPU."""

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ultrabench.agent.ranks.forks import Cpus


def rank_cpus(
    gpus_per_node: int, on_gpus: bool, sysfs: Path = Path("/sys"), gpu_bus_ids: Sequence[str] = ()
) -> list[Cpus] | None:
    """The CPUs of each local rank; None if all usable CPUs are on one NUMA node.

    With GPUs a rank gets the CPUs of its GPU's NUMA node; without GPUs the ranks are spread over
    the NUMA nodes in order. Only CPUs that this process may use count, since Slurm may have limited them.
    A rank gets all of them if the NUMA node of its GPU is unknown or has none of them.

    Args:
        sysfs: the folder in which Linux describes its devices.
        gpu_bus_ids: the PCI bus of the GPU of each local rank, as sysfs or NVML writes it.
    """
    everything = tuple(sorted(os.sched_getaffinity(0)))
    nodes = _numa_nodes(sysfs, set(everything))
    if len(nodes) < 2:
        return None
    if not on_gpus:
        order = sorted(nodes)
        return [nodes[order[rank * len(order) // gpus_per_node]] for rank in range(gpus_per_node)]
    near = [nodes.get(_numa_node_of(sysfs, bus_id), everything) for bus_id in gpu_bus_ids[:gpus_per_node]]
    return near + [everything] * (gpus_per_node - len(near))


def cpu_list(text: str) -> Cpus:
    """The CPUs of a list such as `0-3,8`, as sysfs writes it.

    Raises:
        ValueError: the text is not such a list.
    """
    cpus = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus |= set(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(cpus))


def cpu_text(cpus: Sequence[int]) -> str:
    """CPUs as a list that `cpu_list` reads: `0-3,8` for (0, 1, 2, 3, 8)."""
    numbered = groupby(enumerate(sorted(set(cpus))), lambda pair: pair[1] - pair[0])
    runs = [[cpu for _, cpu in run] for _, run in numbered]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _numa_nodes(sysfs: Path, allowed: set[int]) -> dict[int, Cpus]:
    """NUMA node -> its allowed CPUs; nodes without any, such as those of memory alone, are left out."""
    nodes = {}
    for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist"):
        cpus = allowed & set(cpu_list(path.read_text()))
        if cpus:
            nodes[int(path.parent.name.removeprefix("node"))] = tuple(sorted(cpus))
    return nodes


def _numa_node_of(sysfs: Path, bus_id: str) -> int:
    """The NUMA node of a PCI device; -1 if Linux does not know it."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    try:  # sysfs writes 0000:1b:00.0 where NVML writes 00000000:1B:00.0
        return int((sysfs / f"bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return -1
