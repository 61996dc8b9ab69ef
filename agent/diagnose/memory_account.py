"""Whether a run itself used up the memory that it lacked, by the numbers of the allocator and the rank."""

import re
from collections.abc import Mapping
from typing import Any

OWN_SHARE = 0.95
"""Share of a GPU's memory: so much must be free when the run begins, and free or its own when it gives up."""
TORCH_SHARE = 0.85
"""The share that is asked for where only torch's memory is known: the CUDA context and NCCL come on top."""
LIMIT_SHARE = 0.9
"""Share of a CPU rank's limit, below 1 because a rank frees some memory before it reports what it uses."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_TEXTS = {
    # torch 2: c10/cuda/CUDACachingAllocator.cpp; the second of each pair is torch 1's wording.
    "total": (f"total capacity of {_SIZE}", f"{_SIZE} total capacity"),
    "free": (f"of which {_SIZE} is free", f"{_SIZE} free"),
    "process": (f"this process has {_SIZE} memory in use",),
    "torch": (f"{_SIZE} reserved in total",),
}


def own_gpu_memory(text: str, memory: Mapping[str, Any], error: Mapping[str, Any]) -> bool | None:
    """Whether the run itself filled the GPU; False: somebody else held memory; None: cannot be told.

    Args:
        text: what the allocator said.
        memory: of the rank's report: free_bytes and total_bytes when the run began.
        error: of its report: free_bytes, total_bytes and torch_bytes when it gave up.
    """
    told = {name: _size(text, patterns) for name, patterns in _TEXTS.items()}
    at_start = _share(memory.get("free_bytes"), 0.0, memory.get("total_bytes"))
    if at_start is not None and at_start < OWN_SHARE:
        return False
    process = _share(told["process"], told["free"], told["total"])
    if process is not None:
        return process >= OWN_SHARE
    torch = _share(told["torch"], told["free"], told["total"])
    if torch is None:
        reserved, free = error.get("torch_bytes"), error.get("free_bytes")
        torch = _share(reserved, free, error.get("total_bytes"))
    needed = OWN_SHARE if at_start is None else TORCH_SHARE
    return True if torch is not None and torch >= needed else None


def own_limit(text: str, memory: Mapping[str, Any], error: Mapping[str, Any]) -> bool | None:
    """Whether a CPU rank met the limit that was set for it; None: cannot be told.

    Args:
        text: what the allocator said.
        memory: limit_bytes, from when the limit was set.
        error: data_bytes in use when the allocator gave up, where known.
    """
    limit, used = memory.get("limit_bytes"), error.get("data_bytes")
    if limit is None:
        return None
    requested = re.search(r"you tried to allocate (\d+) bytes", text)
    if used is None or requested is None or used + int(requested[1]) > LIMIT_SHARE * limit:
        return True
    return None


def _share(own: float | None, free: float | None, total: float | None) -> float | None:
    return None if own is None or free is None or not total else (own + free) / total


def _size(text: str, patterns: tuple[str, ...]) -> float | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return float(match[1].rstrip(".")) * _UNITS[match[2]]
    return None
