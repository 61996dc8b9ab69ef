"""The preflight of an allocation: what its devices and links do before anything is trained on them.

The bus bandwidth is that of nccl-tests, S / t * f(n), with S the bytes of the whole tensor, n the
ranks and f the share of S that has to cross the link of each rank, in one direction:

    allgather       f = (n-1) / n      each rank receives the parts of the n-1 others, S/n bytes each
    reducescatter   f = (n-1) / n      each rank sends away all of its S bytes but its own part
    allreduce       f = 2 (n-1) / n    a reduce-scatter, then an all-gather of the sums

So it can be held against the rate of a link, whatever n is.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GEMM_S = 0.3
"""How long each device multiplies matrices."""
GEMM_EDGE = {"cuda": 8192, "cpu": 512}
GEMM_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
SIZES_BYTES = {"cuda": (2**20, 2**25, 2**28), "cpu": (2**16, 2**20)}
"""S, rounded down to a multiple of the ranks' elements."""
ELEMENT_BYTES = 4
WARMUP, ITERATIONS = 2, 9
CALLS = {"cuda": 5, "cpu": 1}
"""Calls timed as one: on a GPU they are launched back to back, so that their launch is not timed."""

Group = dist.ProcessGroup | None
"""None: all ranks."""
Rows = list[dict[str, float]]
"""By size: bytes, the S of the bus bandwidth; seconds; busbw_bytes_per_s."""


def _allreduce(whole: Tensor, part: Tensor, group: Group) -> None:
    dist.all_reduce(whole, group=group)


def _allgather(whole: Tensor, part: Tensor, group: Group) -> None:
    dist.all_gather_into_tensor(whole, part, group=group)


def _reducescatter(whole: Tensor, part: Tensor, group: Group) -> None:
    dist.reduce_scatter_tensor(part, whole, group=group)


COLLECTIVES = {
    "allreduce": (_allreduce, 2),
    "allgather": (_allgather, 1),
    "reducescatter": (_reducescatter, 1),
}
"""Name -> the call, and how often S * (n-1) / n crosses the link of each rank."""


def probe(
    device: torch.device, gpus_per_node: int, progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """What all devices and the links between them do, as a JSON value; the same on every rank.

    Collective: every rank of the default process group calls it. Ranks are numbered node by node.

    Args:
        progress: called after each measurement, on every rank.

    Returns:
        gemm_flops_per_s: rate of square matrix products by rank, all ranks at once (bf16 on GPUs,
        fp32 on CPUs); collectives: name -> {all, intra_node}, lists of {bytes, seconds,
        busbw_bytes_per_s} in order of size. `all` is over all ranks, empty when there is one;
        `intra_node` over those of each node, all nodes at once, the slowest node's (null when a
        node has one rank). With one node both are the same measurement.
    """
    ranks = dist.get_world_size()
    assert ranks % gpus_per_node == 0, f"{ranks} ranks on nodes of {gpus_per_node}"
    rates = _gemm_rates(device)
    progress()
    inside = whole = _measure(device, None, progress)
    if 1 < gpus_per_node < ranks:
        # Every rank makes the groups of all nodes, in the same order.
        nodes = [range(first, first + gpus_per_node) for first in range(0, ranks, gpus_per_node)]
        own = [dist.new_group(list(node)) for node in nodes][dist.get_rank() // gpus_per_node]
        inside = _measure(device, own, progress)
        dist.destroy_process_group(own)
    collectives = {
        name: {"all": whole[name], "intra_node": inside[name] if gpus_per_node > 1 else None}
        for name in COLLECTIVES
    }
    return {"gemm_flops_per_s": rates, "collectives": collectives}


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Time of one call on this rank."""
    calls = CALLS[device.type]
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _gemm_rates(device: torch.device) -> list[float]:
    """2 * edge^3 / median time of a product, by rank: a device that is throttled shows."""
    edge = GEMM_EDGE[device.type]
    # Random: a product of zeros takes less power, and so runs at a higher clock.
    a, b = torch.randn(2, edge, edge, device=device).to(GEMM_DTYPE[device.type])
    product = partial(torch.mm, a, b)
    _seconds(device, product)
    dist.barrier()
    times, end = list[float](), time.perf_counter() + GEMM_S
    while time.perf_counter() < end or len(times) < ITERATIONS:
        times.append(_seconds(device, product))
    rates = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    rates[dist.get_rank()] = 2 * edge**3 / median(times)
    dist.all_reduce(rates)
    return [float(rate) for rate in rates.tolist()]


def _measure(device: torch.device, group: Group, progress: Callable[[], None]) -> dict[str, Rows]:
    """Every collective in every size over `group`; no rows for a group of one rank."""
    found: dict[str, Rows] = {name: [] for name in COLLECTIVES}
    ranks = dist.get_world_size(group)
    for size in SIZES_BYTES[device.type] if ranks > 1 else ():
        elements = size // ELEMENT_BYTES // ranks
        part = torch.zeros(elements, device=device)
        whole = torch.zeros(elements * ranks, device=device)
        for name, (call, crossings) in COLLECTIVES.items():
            bound = partial(call, whole, part, group)
            times = [_seconds(device, bound) for _ in range(WARMUP + ITERATIONS)]
            # Of the slowest rank of all nodes; this also makes them begin the next one together.
            slowest = torch.tensor(median(times[WARMUP:]), dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds, sent = slowest.item(), whole.numel() * ELEMENT_BYTES
            busbw = sent / seconds * crossings * (ranks - 1) / ranks
            found[name].append({"bytes": sent, "seconds": seconds, "busbw_bytes_per_s": busbw})
            progress()
    return found
