"""How long collectives of tensor parallelism run in a group of gloo: with torch's two worker threads, and with one.

`python benchmarks/gloo_workers.py [SECONDS]` starts a process of one rank for each kind of collectives and number of
threads. With two threads, those whose name torch keeps on the heap end it within seconds; where they no longer do,
`use_one_gloo_worker` of ultrabench/kernel/compat.py is needless.
"""

import argparse
import multiprocessing
import signal
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel import compat

COLLECTIVES: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "all-reduces": (compat.all_reduce,),
    "all-gathers": (compat.all_gather,),
    "both": (compat.all_gather, compat.all_reduce),
}
PENDING = 32
"""Collectives of each kind that are started before the first of them is waited for."""


def run(kind: str, num_threads: int, seconds: float, count: Any) -> None:
    """Runs collectives of one rank for so many seconds; `count` has their number at any time."""
    if num_threads == 1:
        compat.use_one_gloo_worker()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, values, start_s = dist.group.WORLD, torch.ones(1), time.monotonic()
    assert group
    while time.monotonic() - start_s < seconds:
        results = [function(values, group) for _ in range(PENDING) for function in COLLECTIVES[kind]]
        for result in results:
            compat.wait(result)
        count.value += len(results)
    dist.destroy_process_group()


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("seconds", nargs="?", type=float, default=20.0)
    seconds = cli.parse_args().seconds
    processes = multiprocessing.get_context("spawn")
    for num_threads, kind in product((2, 1), COLLECTIVES):
        count, start_s = processes.Value("q", 0), time.monotonic()
        process = processes.Process(target=run, args=(kind, num_threads, seconds, count))
        process.start()
        process.join(seconds + 60)
        elapsed_s, exit_code = time.monotonic() - start_s, process.exitcode
        process.kill()
        end = (
            "hangs"
            if exit_code is None
            else signal.Signals(-exit_code).name
            if exit_code
            else "ends in order"
        )
        print(
            f"{num_threads} threads, {kind:12} {count.value:>10,} collectives, {elapsed_s:4.0f} s: {end}",
            flush=True,
        )


if __name__ == "__main__":
    main()
