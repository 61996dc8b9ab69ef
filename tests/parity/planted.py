"""Faults that are planted into the parallel code of a process, by name."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ultrabench.kernel import cp, model, pp, recompute, step, tp
from ultrabench.layout import Layout


def drop_tp_all_reduce() -> None:
    """Gradients of norms are summands on each tp rank; pass them off as sums."""
    step.sum_norm_gradients = lambda *_: None


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


def ring_sees_the_future() -> None:
    """Queries attend to all keys of the later ranks, too."""
    right = cp._meet
    cp._meet = lambda rank, other, seq: (
        (slice(None), slice(None), False) if other > rank else right(rank, other, seq)
    )


def lost_key_gradients() -> None:
    """What the ranks before found for a pair of keys and values does not go on with it."""
    right = cp.attention_backward
    cp.attention_backward = lambda *args, causal: [
        grad if causal or i == 0 else grad * 0 for i, grad in enumerate(right(*args, causal=causal))
    ]


def unsummed_rows() -> None:
    """The summands of a row-parallel product stay where they are."""
    tp.reduce_scatter = lambda tensor, group: tensor.chunk(group.size())[group.rank()].clone()


def reversed_tokens() -> None:
    """The gathered tokens are in reverse order."""
    right = tp.Ranks.gather
    tp.Ranks.gather = lambda *args: lambda: right(*args)().flip(1)  # type: ignore[method-assign]


def stale_recompute() -> None:
    """A layer is computed anew from half its input."""
    right = recompute.checkpoint

    def checkpoint(function: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        runs = []

        def again(y: torch.Tensor, *more: Any) -> Any:
            runs.append(None)
            return function(y if len(runs) == 1 else y * 0.5, *more)

        return right(again, x, *args, **kwargs)

    recompute.checkpoint = checkpoint


def drop_microbatch() -> None:
    """Every third micro-batch of a rank counts nothing."""
    right, seen = model.head_loss, []

    def head_loss(*args: torch.Tensor) -> torch.Tensor:
        seen.append(None)
        loss = right(*args)
        return loss * 0 if len(seen) % 3 == 0 else loss

    model.head_loss = head_loss


def group_of_two() -> None:
    """The first and the last rank make a group for themselves."""
    right = step.cp_group

    def cp_group(layout: Layout) -> Any:
        ends = [0, layout.world_size - 1]
        if dist.get_rank() in ends:
            dist.new_group(ends, use_local_synchronization=True)
        return right(layout)

    step.cp_group = cp_group


def no_recompute() -> None:
    """Layers keep everything."""
    step.apply_recompute = lambda *_: None


def other_schedule() -> None:
    """All forwards run first."""
    pp.SCHEDULES["1f1b"] = pp.SCHEDULES["afab"]


def gathered_parameters() -> None:
    """Parameters stay gathered after forward."""
    right = step.apply_dp
    step.apply_dp = lambda decoder, mesh, zero_stage, *more: right(decoder, mesh, 1, *more)


def no_compile() -> None:
    """Layers are marked as compiled, but torch compiles nothing."""
    step.apply_compile = lambda decoder, _: [
        setattr(layer, "forward", torch.compiler.disable(layer.forward)) for layer in decoder.layers.values()
    ]


def any_attention() -> None:
    """Torch chooses the implementation of attention."""
    step.apply_attention = lambda *_: None


def half_the_micro_batches() -> None:
    """Half of the samples train, and each of them reduces gradients."""
    right, begin = step.load, step.begin_microbatch
    step.load = lambda indices, *args: right(indices[: len(indices) // 2], *args)
    step.begin_microbatch = lambda decoder, zero_stage, **_: begin(decoder, zero_stage, last=True)


def on_rank_1(act: Callable[[], object]) -> None:
    """Rank 1 does something in its first step."""
    right = step.TrainStep.accumulate

    def accumulate(self: step.TrainStep, *batch: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            act()
        return right(self, *batch)

    step.TrainStep.accumulate = accumulate  # type: ignore[method-assign]


def dead_rank() -> None:
    """Rank 1 ends by itself, without a word."""
    on_rank_1(partial(sys.exit, "rank 1 has had enough"))


def frozen_rank() -> None:
    """Rank 1 sleeps in its first step."""
    on_rank_1(partial(time.sleep, 1000))


FAULTS = {
    fault.__name__: fault
    for fault in (
        drop_tp_all_reduce, wrong_divisor, untied_sum, ring_sees_the_future, lost_key_gradients,
        unsummed_rows, reversed_tokens, stale_recompute, drop_microbatch, no_recompute, other_schedule, gathered_parameters,
        no_compile, any_attention, half_the_micro_batches, group_of_two, dead_rank, frozen_rank,
    )
}  # fmt: skip
