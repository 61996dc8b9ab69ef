"""Describes how devices and links are measured: briefly at the start of every allocation, and at length in a
sweep of its own.

The bus bandwidth is that of nccl-tests, S / t * f(n), with S the bytes of a rank's largest buffer, t the
time, n the number of ranks, and f the share of S that has to cross the link of each rank in one direction:

    allreduce       f = 2 (n-1) / n    a reduce-scatter, then an all-gather of the sums
    allgather       f = (n-1) / n      each rank receives the parts of the n-1 others, S/n bytes each
    reducescatter   f = (n-1) / n      each rank sends away all of its S bytes but its own part
    alltoall        f = (n-1) / n      each rank sends S/n bytes to each of the n-1 others
    sendrecv        f = 1              each rank sends S bytes to the next one of a ring

So the bus bandwidth can be compared with the rate of a link for every n.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and src/sendrecv.cu there.
"""

import contextlib
import itertools
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from ultrabench.rank_report import is_number, to_float

_NUM_CROSSINGS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1}
OPERATIONS = (*_NUM_CROSSINGS, "sendrecv")
DEVICE_RATES = ("gemm_flops_per_s", "memory_copy_bytes_per_s", "gemm_sm_clock_hz")
"""Keys of the `probe` event with one rate of each device, and columns with the rate of the slowest device."""
NODE_RATES = tuple(f"node_{name}" for name in DEVICE_RATES[:2])
"""Columns with the rates of the slowest device of each node."""
INFIXES = {"all": "", "intra_node": "_intra_node"}
"""Ranks that take part in an operation, all or those of each node -> infix of its columns' names."""

LINK_FIELDS = ("bytes", "seconds", "busbw_bytes_per_s", "busbw_p5_bytes_per_s", "busbw_p95_bytes_per_s")
"""Values of one operation in one size: S, the median time, and the median, 5th and 95th percentile of the bus
bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """The operations and sizes that are measured, and how often each of them.

    The defaults are those of a brief measurement. It has only the operations that all training needs; `short_probe`
    adds the all-to-all, which connects every pair of ranks, where experts need it.
    """

    operations: tuple[str, ...] = OPERATIONS[:3]
    sizes_bytes: tuple[int, ...]
    """Values of S, powers of two. A buffer that ranks share is rounded down to whole elements for each."""
    calls: int
    """Calls that are timed together; GPUs run them back to back, so that their launch is not timed."""
    warmup: int = 2
    """Rounds of such calls before the timed ones."""
    iterations: int = 9
    """Timed rounds, over which the median is taken."""
    device_s: float = 0.3
    """Seconds for which each device multiplies matrices."""


PROBES = {
    "cuda": ProbeSettings(sizes_bytes=(2**20, 2**25, 2**28), calls=5),
    "cpu": ProbeSettings(sizes_bytes=(2**16, 2**20), calls=1),
}
"""Device type -> the brief measurement, which takes about a second."""
EXPERT_OPERATIONS = OPERATIONS[:4]
"""Operations that training needs where tokens travel to experts."""
LONG_SIZES_BYTES = {"cuda": (2**16, 2**20, 2**23, 2**26, 2**28, 2**30), "cpu": (2**14, 2**18, 2**22)}


def short_probe(device: str, *, experts: bool) -> ProbeSettings:
    """The brief measurement, with the all-to-all if the model to be trained has experts."""
    return replace(PROBES[device], operations=EXPERT_OPERATIONS) if experts else PROBES[device]


def long_probe(device: str, warmup: int, iterations: int) -> ProbeSettings:
    """The long measurement: all operations in all sizes, as often as the measuring policy of a sweep says."""
    probe = replace(PROBES[device], operations=OPERATIONS, sizes_bytes=LONG_SIZES_BYTES[device], device_s=1.0)
    return replace(probe, warmup=warmup, iterations=iterations)


def crossing_share(operation: str, num_ranks: int) -> float:
    """The share f(n) that the module's docstring explains, for n = `num_ranks`."""
    return _NUM_CROSSINGS[operation] * (num_ranks - 1) / num_ranks if operation in _NUM_CROSSINGS else 1.0


def summary(probe: dict[str, Any]) -> dict[str, float | None]:
    """Result column -> its value; None for a value that was not measured or cannot be read.

    Args:
        probe: what `ultrabench.kernel.rank.probe.probe` returns, or the `probe` event of a report.

    Returns:
        The rates of the slowest device, and for each operation in its largest size the median bus
        bandwidth over all ranks (such as `allreduce_busbw_bytes_per_s`) and inside the slowest node
        (such as `allreduce_intra_node_busbw_bytes_per_s`).
    """
    rates = {name: min_rate(probe.get(name)) for name in DEVICE_RATES}
    rates |= {f"{name}{infix}_busbw_bytes_per_s": None for infix in INFIXES.values() for name in OPERATIONS}
    # The largest size comes last, so that its bandwidth replaces those of smaller ones.
    for link in sorted(link_measurements(probe), key=itemgetter("bytes")):
        rates[f"{link['operation']}{INFIXES[link['scope']]}_busbw_bytes_per_s"] = link["busbw_bytes_per_s"]
    return rates


def preflight_rates(preflight: dict[str, Any]) -> dict[str, Any]:
    """Result column -> rate in what the preflight of an allocation wrote; empty where that cannot be read."""
    probe, nodes = preflight.get("probe"), preflight.get("nodes")
    if not isinstance(probe, dict):
        return {}
    return summary(probe) | (rates_by_node(probe, len(nodes)) if isinstance(nodes, list) else {})


def rates_by_node(probe: dict[str, Any], num_nodes: int) -> dict[str, list[float]]:
    """Column of NODE_RATES -> the rate of the slowest device of each node, in node order; unreadable ones are left out.

    Args:
        probe: what `summary` takes.
        num_nodes: number of nodes, which have equally many ranks each.
    """
    columns = {}
    for column in NODE_RATES:
        rates: Any = probe.get(column.removeprefix("node_"))
        if num_nodes and min_rate(rates) is not None and len(rates) % num_nodes == 0:
            num_local = len(rates) // num_nodes  # devices of a node
            columns[column] = [float(min(rates[n : n + num_local])) for n in range(0, len(rates), num_local)]
    return columns


def link_measurements(probe: dict[str, Any]) -> list[dict[str, Any]]:
    """All measurements of links in one list, with `operation` and `scope`; unreadable ones are left out."""
    measurements = []
    for operation, scope in itertools.product(OPERATIONS, INFIXES):
        ids = {"operation": operation, "scope": scope}
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError, AttributeError):
            rows = [(row, int(row["bytes"])) for row in probe["collectives"][operation][scope]]
            measurements += [
                ids | {k: to_float(row.get(k)) for k in LINK_FIELDS} | {"bytes": size} for row, size in rows
            ]
    return measurements


def min_rate(rates: Any) -> float | None:
    """The lowest rate; None unless the rates of all devices are known."""
    are_known = isinstance(rates, list) and rates and all(map(is_number, rates))
    return float(min(rates)) if are_known else None
