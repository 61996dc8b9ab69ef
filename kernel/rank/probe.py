"""Measures devices and the links between them, in the preflight of an allocation or in a run of kernel=probe.

`ultrabench.device_rates` says what the numbers mean, and how much is measured.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.device_rates import ProbeSettings, crossing_share
from ultrabench.kernel.cp import RingTransfer
from ultrabench.kernel.device import kind_of
from ultrabench.kernel.rank.clock import run_timed

GEMM_ROWS = {"cuda": 8192, "cpu": 512}
GEMM_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
NUM_CLOCK_GEMMS = 50
"""Matrix products that a GPU computes while its clock is read, about 80 ms of an H100."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**25}
"""Bytes of a copy; they are more than any cache holds."""
COPY_TIME_SHARE = 1 / 3
"""Seconds spent on copies, as a share of the seconds spent on matrix products."""
ELEMENT_BYTES = 4
"""Bytes of an element of the buffers, which are fp32."""

Call = Callable[[], object]
"""One product, copy or collective, which is launched and timed."""
Group = dist.ProcessGroup | None
"""The ranks that take part; None stands for all ranks."""
BandwidthRows = list[dict[str, float]]
"""One row for each size: bytes (the S of the bus bandwidth), median seconds, and the median, 5th and 95th
percentile of the bus bandwidth: busbw_bytes_per_s, busbw_p5_bytes_per_s and busbw_p95_bytes_per_s."""


def _make_calls(all_parts: Tensor, receive_buffer: Tensor, own_part: Tensor, group: Group) -> dict[str, Call]:
    """Operation -> a call of it; `all_parts` and `receive_buffer` have the size of all ranks' parts together."""
    return {
        "allreduce": partial(dist.all_reduce, all_parts, group=group),
        "allgather": partial(dist.all_gather_into_tensor, all_parts, own_part, group=group),
        "reducescatter": partial(dist.reduce_scatter_tensor, own_part, all_parts, group=group),
        "alltoall": partial(dist.all_to_all_single, receive_buffer, all_parts, group=group),
        "sendrecv": lambda: RingTransfer(all_parts, receive_buffer, group).wait(),
    }


def probe(
    device: torch.device, gpus_per_node: int, settings: ProbeSettings, report_progress: Callable[[], None]
) -> dict[str, Any]:
    """Measures all devices and the links between them; returns the same JSON value on every rank.

    Every rank of the default process group has to call it. Ranks are numbered node by node.

    Args:
        report_progress: called after each measurement, on every rank.

    Returns:
        gemm_flops_per_s: rate of square matrix products by rank, all ranks at once (bf16 on GPUs, fp32 on
        CPUs); gemm_sm_clock_hz: the clock of GPUs while they multiply, by rank, left out where unknown;
        memory_copy_bytes_per_s: bytes per second read and written by a copy in the device's memory, by rank;
            collectives: operation -> {all, intra_node}, lists of {bytes, seconds, busbw_bytes_per_s,
        busbw_p5_bytes_per_s, busbw_p95_bytes_per_s} in order of size. `all` is over all ranks, and empty if
        there is only one rank. `intra_node` is over the ranks of each node, with all nodes at once, and has
        the values of the slowest node; it is null if a node has only one rank. With one node both are the
        same measurement.
    """
    num_ranks = dist.get_world_size()
    assert num_ranks % gpus_per_node == 0, f"{num_ranks} ranks on nodes of {gpus_per_node}"
    device_values = _gemm_rates_and_clock(device, settings.device_s)
    report_progress()
    device_values["memory_copy_bytes_per_s"] = _copy_rates(device, settings.device_s * COPY_TIME_SHARE)
    report_progress()
    intra_node_rows = all_ranks_rows = _measure_collectives(device, None, settings, report_progress)
    if 1 < gpus_per_node < num_ranks:
        # Every rank has to make the groups of all nodes, in the same order.
        node_ranks = [range(r, r + gpus_per_node) for r in range(0, num_ranks, gpus_per_node)]
        node_group = [dist.new_group(list(ranks)) for ranks in node_ranks][dist.get_rank() // gpus_per_node]
        intra_node_rows = _measure_collectives(device, node_group, settings, report_progress)
        dist.destroy_process_group(node_group)
    results_by_operation = {
        op: {"all": all_ranks_rows[op], "intra_node": intra_node_rows[op] if gpus_per_node > 1 else None}
        for op in settings.operations
    }
    return {**device_values, "collectives": results_by_operation}


def _mean_call_s(device: torch.device, call: Call, num_calls: int) -> float:
    """The mean seconds of a call on this rank, over `num_calls` calls that are timed together."""

    def call_repeatedly() -> None:
        for _ in range(num_calls):
            call()

    return run_timed(device, call_repeatedly)[0] / num_calls


def _gemm_rates_and_clock(device: torch.device, measuring_s: float) -> dict[str, list[float]]:
    """FLOP/s of a matrix product (its median time counts) and the clock of GPUs meanwhile, by rank,
    as `probe` returns them.
    """
    num_rows = GEMM_ROWS[device.type]
    # The values are random, since a product of zeros takes less power and so runs at a higher clock.
    left_matrix, right_matrix = torch.randn(2, num_rows, num_rows, device=device).to(GEMM_DTYPE[device.type])
    multiply = partial(torch.mm, left_matrix, right_matrix)
    gemm_values = {"gemm_flops_per_s": _rates_by_rank(device, multiply, 2 * num_rows**3, measuring_s)}
    if kind_of(device).has_gpus:
        for _ in range(NUM_CLOCK_GEMMS):
            multiply()
        if all(clock_hz_by_rank := _gather_by_rank(device, _present_clock_hz(device))):
            gemm_values["gemm_sm_clock_hz"] = clock_hz_by_rank
    return gemm_values


def _present_clock_hz(device: torch.device) -> float:
    """The present clock of a GPU; 0 where its driver does not report it."""
    try:
        return torch.cuda.clock_rate(device) * 1e6
    except Exception:  # each vendor's library has errors of its own, and no run may fail for want of a clock
        return 0.0


def _copy_rates(device: torch.device, measuring_s: float) -> list[float]:
    """Bytes read and written / median time of a copy, by rank."""
    source, target = torch.zeros(2, COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    return _rates_by_rank(device, partial(target.copy_, source), 2 * source.numel(), measuring_s)


def _rates_by_rank(device: torch.device, call: Call, work_per_call: float, measuring_s: float) -> list[float]:
    """`work_per_call` / median time of a call, by rank, while all ranks do the same for about `measuring_s` seconds."""
    num_calls = 5 if kind_of(device).has_gpus else 1
    _mean_call_s(device, call, 1)
    dist.barrier()
    times_s, end_s = list[float](), time.perf_counter() + measuring_s
    while time.perf_counter() < end_s or len(times_s) < 3:
        times_s.append(_mean_call_s(device, call, num_calls))
    return _gather_by_rank(device, work_per_call / median(times_s))


def _gather_by_rank(device: torch.device, value: float) -> list[float]:
    """The values of all ranks."""
    value_by_rank = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    value_by_rank[dist.get_rank()] = value
    dist.all_reduce(value_by_rank)
    return [float(value) for value in value_by_rank.tolist()]


def _measure_collectives(
    device: torch.device, group: Group, settings: ProbeSettings, report_progress: Callable[[], None]
) -> dict[str, BandwidthRows]:
    """Measures every operation in every size over `group`; returns no rows for a group of one rank."""
    rows_by_operation: dict[str, BandwidthRows] = {operation: [] for operation in settings.operations}
    num_ranks = dist.get_world_size(group)
    for requested_bytes in settings.sizes_bytes if num_ranks > 1 else ():
        elements_per_rank = max(1, requested_bytes // ELEMENT_BYTES // num_ranks)
        all_parts, receive_buffer = torch.zeros(2, elements_per_rank * num_ranks, device=device)
        calls = _make_calls(all_parts, receive_buffer, torch.zeros(elements_per_rank, device=device), group)
        for operation in settings.operations:
            rounds = range(settings.warmup + settings.iterations)
            times_s = [_mean_call_s(device, calls[operation], settings.calls) for _ in rounds]
            # The slowest rank of all nodes counts. This also lets all ranks begin the next size together.
            slowest_times_s = torch.tensor(times_s[settings.warmup :], dtype=torch.float64, device=device)
            dist.all_reduce(slowest_times_s, dist.ReduceOp.MAX)
            size_bytes = all_parts.numel() * ELEMENT_BYTES
            bytes_over_link = size_bytes * crossing_share(operation, num_ranks)
            row = _bandwidth_row(size_bytes, bytes_over_link, slowest_times_s.tolist())
            rows_by_operation[operation].append(row)
            report_progress()
    return rows_by_operation


def _bandwidth_row(size_bytes: int, bytes_over_link: float, times_s: list[float]) -> dict[str, float]:
    time_percentiles_s = quantiles(times_s, n=20, method="inclusive")
    return {
        "bytes": size_bytes,
        "seconds": median(times_s),
        "busbw_bytes_per_s": bytes_over_link / median(times_s),
        "busbw_p5_bytes_per_s": bytes_over_link / time_percentiles_s[-1],
        "busbw_p95_bytes_per_s": bytes_over_link / time_percentiles_s[0],
    }
