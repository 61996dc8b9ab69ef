"""A rank's memory: the limit of a CPU rank, and the peaks of any rank."""

import contextlib
import resource
from pathlib import Path

import torch


def _status_bytes(field: str) -> int:
    """A size from /proc/self/status, which gives KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"\n{field}:")[2].split()[0]) * 1024


def limit_cpu_memory(rank_mem_bytes: int) -> None:
    """Lets this process allocate `rank_mem_bytes` more than it has now, and no more.

    RLIMIT_DATA counts private writable memory; RLIMIT_AS would count reserved address space, of
    which torch takes far more than it uses.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = _status_bytes("VmData") + rank_mem_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def account() -> dict[str, int]:
    """Bytes of this rank's memory now, by which a later lack of it is explained.

    free_bytes, total_bytes and torch_bytes (what torch holds) of a GPU that is in use; data_bytes of the
    process, and limit_bytes where they are limited.
    """
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    found = {"data_bytes": _status_bytes("VmData")}
    if limit != resource.RLIM_INFINITY:
        found["limit_bytes"] = limit
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # a GPU that failed may answer nothing more
            found["free_bytes"], found["total_bytes"] = torch.cuda.mem_get_info()
            found["torch_bytes"] = torch.cuda.memory_reserved()
    return found


def reset_peak(device: torch.device) -> None:
    """Starts the peaks anew, on CPUs where the system permits it.

    A forked rank inherits the resident set of the server it came from.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> tuple[int | None, int]:
    """Largest allocated and largest reserved bytes of this rank since `reset_peak`.

    On CPUs the resident set stands for what is reserved; nobody knows what was allocated.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return None, _status_bytes("VmHWM")
