"""Facts about this machine: `python -P -m ultrabench.kernel.rank.environment [--peak]` prints them as JSON."""

import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

PEAK_SIZE = 2048
"""Number of rows and columns of the matrices whose product measures the rate of a core."""
PEAK_S = 3.0
CPU_NAME = ("/proc/cpuinfo", r"^model name[^:]*: *(.*\S)")
DRIVER_VERSION = ("/proc/driver/nvidia/version", r"^NVRM version:.*? (\d+\.\S+)")
"""A file and a pattern: NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ..."""
LEFT_OUT_OF_ENV_ID = ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING")  # launchers and torch set them


def facts() -> dict[str, Any]:
    """The facts of this process: its devices, versions, and the variables that configure CUDA and NCCL."""
    cuda = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None  # type: ignore[no-untyped-call]
    steering = {n: v for n, v in sorted(os.environ.items()) if n.startswith(("NCCL_", "CUDA_"))}
    return {
        "gpus": torch.cuda.device_count() if cuda else 0,
        "gpu_name": torch.cuda.get_device_name() if cuda else _first_match(*CPU_NAME) or "cpu",
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "nccl_version": nccl,
        "driver_version": _first_match(*DRIVER_VERSION),
        "omp_num_threads": torch.get_num_threads(),
        "variables": {n: v for n, v in steering.items() if n not in LEFT_OUT_OF_ENV_ID},
    }


def _first_match(path: str, pattern: str) -> str | None:
    """What the group of `pattern` matches first in a file; None if it matches nothing or there is no file."""
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _core_rate(seconds: float) -> float:
    """The best rate of fp32 matrix products on one thread, in FLOPs per second.

    It is the best and not the median, since other work on the machine can only slow a product down, and a
    peak that is too low gives an mfu above 1.
    """
    torch.set_num_threads(1)
    a, b = torch.rand(2, PEAK_SIZE, PEAK_SIZE)
    rates = list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        torch.mm(a, b)
        rates.append(2 * PEAK_SIZE**3 / (time.perf_counter() - start))
    return max(rates)


def core_flops_per_s(seconds: float = PEAK_S) -> float:
    """The rate of one core while all cores compute, in FLOPs per second.

    It uses one process per core, because a core that computes alone runs at a higher clock than in a run.
    """
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        return median(pool.map(_core_rate, [seconds] * cores, chunksize=1))


if __name__ == "__main__":
    out = {**facts(), "cores": len(os.sched_getaffinity(0))}
    if "--peak" in sys.argv:
        out["core_flops_per_s"] = core_flops_per_s()
    print(json.dumps(out))
