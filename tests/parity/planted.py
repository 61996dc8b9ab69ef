"""A check server whose parallel code has one fault: `python planted.py NAME`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from ultrabench.kernel import model, step
from ultrabench.kernel.check import serve


def drop_tp_all_reduce() -> None:
    """Gradients of norms are summands on each tp rank; pass them off as sums."""
    right = model._RmsNorm.backward

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x, grad_weight, none = right(ctx, grad)
        if isinstance(grad_weight, DTensor):
            mesh = grad_weight.device_mesh
            grad_weight = DTensor.from_local(grad_weight.to_local(), mesh, [Replicate()])
        return grad_x, grad_weight, none

    model._RmsNorm.backward = staticmethod(backward)  # type: ignore[assignment]


def wrong_divisor() -> None:
    """Sum over dp instead of averaging."""
    right = step.apply_dp

    def apply_dp(decoder: Any, *args: Any) -> None:
        right(decoder, *args)
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    step.apply_dp = apply_dp


def untied_sum() -> None:
    """Each copy of a tied embedding keeps its own gradient."""
    step.sum_tied_gradients = lambda *_: None


def drop_microbatch() -> None:
    """Every third micro-batch of a rank counts nothing."""
    right, seen = step.cross_entropy, []

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(None)
        loss = right(logits, targets)
        return loss * 0 if len(seen) % 3 == 0 else loss

    step.cross_entropy = cross_entropy


def dead_rank() -> None:
    """Rank 1 ends by itself, without a word."""
    right = step.TrainStep.accumulate

    def accumulate(self: step.TrainStep, *batch: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise SystemExit("rank 1 has had enough")
        return right(self, *batch)

    step.TrainStep.accumulate = accumulate  # type: ignore[method-assign]


def frozen_rank() -> None:
    """Rank 1 sleeps in its first step."""
    right = step.TrainStep.accumulate

    def accumulate(self: step.TrainStep, *batch: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            import time

            time.sleep(1000)
        return right(self, *batch)

    step.TrainStep.accumulate = accumulate  # type: ignore[method-assign]


FAULTS = {
    fault.__name__: fault
    for fault in (drop_tp_all_reduce, wrong_divisor, untied_sum, drop_microbatch, dead_rank, frozen_rank)
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    serve(sys.stdin, sys.stdout)
