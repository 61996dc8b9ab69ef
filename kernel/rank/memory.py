"""Limits the memory of CPU ranks, and measures the memory of all ranks."""

import contextlib
import resource
from pathlib import Path

import torch

from ultrabench.kernel.device import kind_of


def _status_bytes(field: str) -> int:
    """The size `field` in /proc/self/status, in bytes; the file has KiB."""
    status_text = Path("/proc/self/status").read_text()
    return int(status_text.partition(f"\n{field}:")[2].split()[0]) * 1024


def limit_cpu_memory(rank_mem_bytes: int) -> None:
    """Limits this process to `rank_mem_bytes` more than it has allocated now.

    RLIMIT_DATA counts private writable memory; RLIMIT_AS would count reserved address space, of which torch
    reserves far more than it uses.
    """
    hard_limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft_limit_bytes = _status_bytes("VmData") + rank_mem_bytes
    if hard_limit_bytes != resource.RLIM_INFINITY:
        soft_limit_bytes = min(soft_limit_bytes, hard_limit_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit_bytes, hard_limit_bytes))


def usage() -> dict[str, int]:
    """The memory of this rank, in bytes, which later explains why it ran out of memory.

    For a GPU in use it has free_bytes, total_bytes and torch_bytes (held by torch); for the process it has
    data_bytes, and limit_bytes if there is a limit. data_bytes are those of the moment when the process was
    largest: torch may free much before Python learns that an allocation failed.
    """
    limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
    freed_bytes = _status_bytes("VmPeak") - _status_bytes("VmSize")
    memory_bytes = {"data_bytes": _status_bytes("VmData") + freed_bytes}
    if limit_bytes != resource.RLIM_INFINITY:
        memory_bytes["limit_bytes"] = limit_bytes
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # a GPU that failed may not answer
            memory_bytes["free_bytes"], memory_bytes["total_bytes"] = torch.cuda.mem_get_info()
            memory_bytes["torch_bytes"] = torch.cuda.memory_reserved()
    return memory_bytes


def reset_peak(device: torch.device) -> None:
    """Resets the peaks of memory; on CPUs only if the system permits it.

    It is needed because a forked rank inherits the peak resident set of the server that forked it.
    """
    if kind_of(device).has_gpus:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> dict[str, int | None]:
    """The largest allocated_bytes and reserved_bytes of this rank since `reset_peak`, and the allocator_retries.

    At a retry the allocator finds the GPU full, waits for it, gives what it holds without need back, and tries
    again. On CPUs the resident set counts as reserved bytes; the other numbers are unknown.
    """
    if not kind_of(device).has_gpus:
        return {"allocated_bytes": None, "reserved_bytes": _status_bytes("VmHWM"), "allocator_retries": None}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }
