"""Prints the RankCost of each rank in a real step over gloo, of the RunSpec on stdin: what a dry run predicts.

It is a script of its own because its process forks ranks, and so must not import what starts threads.
"""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.children import run_forked
from ultrabench.kernel.dryrun.rank_cost import measure_step
from ultrabench.kernel.mesh import join_process_group
from ultrabench.kernel.step import TrainStep
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

LETTING_GO_S = 0.3
"""Seconds after which gloo's thread has usually let go of what it sent."""
TIMEOUT_S = 300.0


def prepare(trainer: TrainStep) -> None:
    """Runs the first step; from now on updates end when gloo's thread has let go of what it sent."""
    right = trainer.update

    def update(loss: Tensor) -> Tensor:
        out = right(loss)
        time.sleep(LETTING_GO_S)
        return out

    trainer.update = update  # type: ignore[method-assign]
    trainer.update(trainer.accumulate(*trainer.batch(1)))


def join_ranks(rank: int, world_size: int, folder: Path) -> None:
    """Makes the default process group of the ranks that share `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    join_process_group(torch.device("cpu"), store, rank, world_size)


def rank_cost(spec: RunSpec, rank: int, folder: Path) -> dict[str, Any]:
    """The RankCost of the second step of `rank`, as JSON values."""
    join_ranks(rank, spec.layout.world_size, folder)
    return measure_step(spec, prepare)


def rank_costs(spec: RunSpec) -> list[dict[str, Any]]:
    """The RankCost of each rank, as JSON values."""
    with tempfile.TemporaryDirectory() as name:
        ranks = range(spec.layout.world_size)
        bodies = {f"rank {rank}": partial(rank_cost, spec, rank, Path(name)) for rank in ranks}
        return [*run_forked(bodies, TIMEOUT_S).values()]


if __name__ == "__main__":
    print(json.dumps(rank_costs(from_dict(RunSpec, json.load(sys.stdin)))))
