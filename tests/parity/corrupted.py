"""A rank that trains with one wrong bit: of the parameter that FLIP names, on rank 1 in step 8."""

import os
from typing import Any

import torch

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


def main() -> int:
    """The exit code of the rank, which is right without FLIP."""
    if os.environ.get("FLIP"):
        flip_a_bit(os.environ["FLIP"])
    return worker.main()
