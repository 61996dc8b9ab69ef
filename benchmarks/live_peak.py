"""Prints the RankCost of each rank in a real step over gloo, of the RunSpec on stdin: what a dry run predicts.

It is a script of its own because its process forks ranks, and so must not import what starts threads.
"""

import json
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ultrabench.kernel.children import run_forked
from ultrabench.kernel.dryrun.rank_cost import measure_step
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

TIMEOUT_S = 300.0


def rank(spec: RunSpec, number: int, folder: str) -> Any:
    """Trains two steps as rank `number`, the first of which makes the optimizer's states."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", spec.layout.world_size)
    dist.init_process_group("gloo", store=store, rank=number, world_size=spec.layout.world_size)
    return measure_step(spec, lambda trainer: trainer.update(trainer.accumulate(*trainer.batch(1))))


def main() -> None:
    spec = from_dict(RunSpec, json.load(sys.stdin))
    with tempfile.TemporaryDirectory() as folder:
        bodies = {str(n): partial(rank, spec, n, folder) for n in range(spec.layout.world_size)}
        print(json.dumps(list(run_forked(bodies, TIMEOUT_S).values())))


if __name__ == "__main__":
    main()
