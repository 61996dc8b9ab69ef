"""Where a run happens: `python -P -m ultrabench.kernel.environment [--peak]` prints it as JSON."""

import contextlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

PEAK_SIZE = 2048
"""Edge of the square matrices whose product measures a core."""
PEAK_S = 3.0
LEFT_OUT_OF_ENV_ID = ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING")  # set by launchers and by torch itself


def facts() -> dict[str, Any]:
    """The facts of this process: its devices, versions, and the variables that steer CUDA and NCCL."""
    cuda = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None  # type: ignore[no-untyped-call]
    steering = {n: v for n, v in sorted(os.environ.items()) if n.startswith(("NCCL_", "CUDA_"))}
    return {
        "gpus": torch.cuda.device_count() if cuda else 0,
        "gpu_name": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "nccl_version": nccl,
        "driver_version": driver_version(),
        "omp_num_threads": torch.get_num_threads(),
        "variables": {n: v for n, v in steering.items() if n not in LEFT_OUT_OF_ENV_ID},
    }


def cpu_name() -> str:
    """The processor's own name, `cpu` where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def driver_version() -> str | None:
    """The loaded NVIDIA driver, None without one."""
    with contextlib.suppress(OSError):
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...
        words = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None


def _core_rate(seconds: float) -> float:
    """Best rate of fp32 products on one thread, in FLOPs per second.

    The best, not the median: other work on the machine only ever slows a product down, and a peak
    that is too low gives an mfu above 1.
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
    """Rate of one core while all of them compute, in FLOPs per second.

    One process per core, because a core alone clocks higher than it does in a run.
    """
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        return median(pool.map(_core_rate, [seconds] * cores, chunksize=1))


def main(argv: list[str]) -> int:
    """Prints the facts, and with --peak the measured rate of a core."""
    out = {**facts(), "cores": len(os.sched_getaffinity(0))}
    if "--peak" in argv:
        out["core_flops_per_s"] = core_flops_per_s()
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
