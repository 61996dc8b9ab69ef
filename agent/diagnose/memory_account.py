"""Whether a run itself used all the memory, by the numbers of the allocator and the rank."""

import re
from collections.abc import Mapping
from typing import Any

OWN_SHARE = 0.95
"""Share of a GPU's memory that must be free when the run begins, and free or its own when it runs out."""
TORCH_SHARE = 0.85
"""The same share where only the memory of torch is known, without that of the CUDA context and NCCL."""
LIMIT_SHARE = 0.9
"""Share of a CPU rank's limit that must be used; below 1, because a rank frees memory before it reports."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_TEXTS = {
    # torch 2, c10/cuda/CUDACachingAllocator.cpp; the second of each pair is the text of torch 1.
    "total": (f"total capacity of {_SIZE}", f"{_SIZE} total capacity"),
    "free": (f"of which {_SIZE} is free", f"{_SIZE} free"),
    "process": (f"this process has {_SIZE} memory in use",),
    "torch": (f"{_SIZE} reserved in total",),
}


def own_gpu_memory(text: str, memory: Mapping[str, Any], error: Mapping[str, Any]) -> bool | None:
    """Whether the run itself filled the GPU; False: other processes held memory; None: unknown.

    Args:
        text: the message of the allocator.
        memory: the rank's report when the run began: free_bytes and total_bytes.
        error: the rank's report when it ran out: free_bytes, total_bytes and torch_bytes.
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
    """Whether a CPU rank reached the limit that was set for it; None: unknown.

    Args:
        text: the message of the allocator.
        memory: the rank's report when the limit was set: limit_bytes.
        error: the rank's report when it ran out: data_bytes in use, if known.
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
