"""A rank that tells its time-outs and may train with one wrong bit: of the parameter that FLIP names, on rank 1."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ultrabench.kernel import worker
from ultrabench.kernel.step import TrainStep


def flip_a_bit(name: str) -> None:
    """Makes rank 1 change the last bit of one number of `name` after its eighth update."""
    right, seen = TrainStep.update, []

    def update(self: TrainStep, loss: torch.Tensor) -> Any:
        out = right(self, loss)
        seen.append(None)
        if len(seen) == 8 and os.environ["RANK"] == "1":
            self.shards[name].view(torch.int32).flatten()[0] ^= 1
        return out

    TrainStep.update = update  # type: ignore[method-assign]


def tell_timeouts() -> None:
    """Makes the rank write the seconds after which each of its groups gives up, at the end of its steps."""
    right = worker.require_equal_replicas

    def require_equal_replicas(trainer: TrainStep) -> None:
        groups = dist.distributed_c10d._world.pg_map
        options = {g.group_desc: g._get_backend(torch.device("cpu")).options for g in groups}
        told = {name: option._timeout.total_seconds() for name, option in options.items()}
        Path(f"{os.environ['ULTRABENCH_REPORT']}.timeouts").write_text(json.dumps(told))
        right(trainer)

    worker.require_equal_replicas = require_equal_replicas


def main() -> int:
    """The exit code of the rank, which is right without FLIP."""
    tell_timeouts()
    if os.environ.get("FLIP"):
        flip_a_bit(os.environ["FLIP"])
    return worker.main()
