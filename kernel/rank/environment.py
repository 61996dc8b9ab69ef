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

from ultrabench.hardware import DEVICE_KINDS

PEAK_MATRIX_ROWS = 2048
"""Number of rows and columns of the matrices whose product measures the rate of a core."""
PEAK_S = 3.0
"""Seconds for which each core multiplies matrices."""
CPU_NAME_SOURCE = ("/proc/cpuinfo", r"^model name[^:]*: *(.*\S)")
"""The file with the name and a pattern for its line."""
DRIVER_VERSION_SOURCE = ("/proc/driver/nvidia/version", r"^NVRM version:.*? (\d+\.\S+)")
"""The file with the version of the NVIDIA driver and a pattern for its line, such as NVRM version:
NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ..."""
LIBRARY_PREFIXES = ("CUDA_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH")
"""Beginnings of the variables that configure CUDA, NCCL, Transformer Engine and torch."""
EXCLUDED_FROM_ENV_ID = re.compile(
    r"CUDA_(VISIBLE_DEVICES|MODULE_LOADING)|TORCHELASTIC_\w+|TORCH_(HOME|TRACE|LOGS_OUT|WARM_POOL)|"
    r"\w+_(DIR|DIRECTORY|CACHE_PATH)|(TORCH\w*|NCCL_DEBUG|\w+_DUMP)_FILE"
)
"""Variables that launchers and torch set, and paths of caches and logs; they may differ from job to job."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that configure the allocator of GPUs: the name of today, and the older one."""


def set_allocator_default() -> None:
    """Lets segments of the allocator grow where the user has not configured it; call it before CUDA is used."""
    if torch.version.cuda is not None and not os.environ.keys() & {*ALLOCATOR_VARIABLES}:
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def use_device(device_type: str, gpu_index: int) -> torch.device:
    """The CPU, or the GPU `gpu_index`, which this process uses from now on."""
    set_allocator_default()
    if not DEVICE_KINDS[device_type].has_gpus:
        return torch.device(device_type)
    device = torch.device(device_type, gpu_index)
    torch.cuda.set_device(device)
    return device


def facts() -> dict[str, Any]:
    """The facts of this process: its devices, versions, and the variables that configure its libraries."""
    has_cuda = torch.cuda.is_available()
    nccl_version = ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None  # type: ignore[no-untyped-call]
    library_names = (name for name in sorted(os.environ) if name.startswith(LIBRARY_PREFIXES))
    return {
        "gpus": torch.cuda.device_count() if has_cuda else 0,
        "gpu_name": torch.cuda.get_device_name() if has_cuda else _first_match(*CPU_NAME_SOURCE) or "cpu",
        "gpu_mem_bytes": torch.cuda.get_device_properties(0).total_memory if has_cuda else None,
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "nccl_version": nccl_version,
        "driver_version": _first_match(*DRIVER_VERSION_SOURCE),
        "omp_num_threads": torch.get_num_threads(),
        "variables": {n: os.environ[n] for n in library_names if not EXCLUDED_FROM_ENV_ID.fullmatch(n)},
    }


def _first_match(path: str, pattern: str) -> str | None:
    """What the group of `pattern` matches first in a file; None if it matches nothing or there is no file."""
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _core_rate_and_share(seconds: float) -> tuple[float, float]:
    """The best rate of fp32 matrix products on one thread, in FLOPs per second, and the share of its core that it had.

    It is the best and not the median, since other work on the machine can only slow a product down, and a
    peak that is too low gives an mfu above 1.
    """
    torch.set_num_threads(1)
    left_matrix, right_matrix = torch.rand(2, PEAK_MATRIX_ROWS, PEAK_MATRIX_ROWS)
    rates_flops_per_s = list[float]()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    end_s = begin_s + seconds
    while time.perf_counter() < end_s or len(rates_flops_per_s) < 3:
        start_s = time.perf_counter()
        torch.mm(left_matrix, right_matrix)
        rates_flops_per_s.append(2 * PEAK_MATRIX_ROWS**3 / (time.perf_counter() - start_s))
    return max(rates_flops_per_s), (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)


def measure_core_peak(seconds: float = PEAK_S) -> dict[str, float]:
    """The rate of one core while all cores compute, in FLOPs per second, and the share of the cores that it had.

    It uses one process per core, because a core that computes alone runs at a higher clock than in a run.
    """
    num_cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(num_cores) as pool:
        rates_and_shares = pool.map(_core_rate_and_share, [seconds] * num_cores, chunksize=1)
    rates_flops_per_s, core_shares = zip(*rates_and_shares, strict=True)
    return {"core_flops_per_s": median(rates_flops_per_s), "peak_core_share": median(core_shares)}


if __name__ == "__main__":
    set_allocator_default()
    machine_facts = {**facts(), "cores": len(os.sched_getaffinity(0))}
    if "--peak" in sys.argv:
        machine_facts |= measure_core_peak()
    print(json.dumps(machine_facts))
