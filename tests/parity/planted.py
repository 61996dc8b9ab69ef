"""Faults of parallelism, recomputation and the dry run, and the names of all faults: FAULTS.

Each is a function from what is right to what takes its place; `planted` says where. docs/mutations.md shows which
check catches which fault.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage

from tests.parity import planted_model, planted_options  # noqa: F401  their faults are in FAULTS, too
from tests.parity.fault import FAULTS, changed, planted
from ultrabench.kernel import cp, model, pp, recompute, step, tp
from ultrabench.kernel.dryrun import counts, rank_cost
from ultrabench.layout import Layout

__all__ = ["FAULTS"]


# Tensor parallelism.


@planted(step, "sum_norm_gradients")
def drop_tp_all_reduce(right):
    """Gradients of norms, summands on each rank of tp, pass for sums."""
    return lambda *_: None


@planted(step, "sum_norm_gradients")
def forgotten_head_norms(right):
    """Only norms of tokens are summed over tp, not those of queries and keys."""
    of_heads = ("q_norm", "k_norm")
    return lambda params, group: right([(n, p) for n, p in params if n.split(".")[-2] not in of_heads], group)


@planted(tp, "reduce_scatter")
def unsummed_rows(right):
    """The summands of a row-parallel product stay where they are."""
    return lambda tensor, group: tensor.chunk(group.size())[group.rank()].clone()


@planted(tp.Ranks, "scatter")
def scatter_over_dp(right):
    """The summands of a row-parallel product are summed and scattered over dp instead of tp."""

    def scatter(self, x):
        groups = dist.distributed_c10d._world.pg_map
        return right(tp.Ranks(next(g for g in groups if g.group_desc == "mesh_dp_shard")), x)

    return scatter


@planted(tp.Ranks, "gather")
def reversed_tokens(right):
    """The gathered tokens are in reverse order."""
    return lambda *args: lambda: right(*args)().flip(1)


@planted(tp, "_look_up")
def shifted_vocabulary(right):
    """All ranks of tp but the first look up embeddings one row too far."""
    return lambda ranks, embedding, tokens: right(ranks, embedding, tokens + (ranks.group.rank() > 0))


@planted(tp, "_loss")
def mean_over_wrong_tokens(right):
    """The sum of the losses is divided by tp times the number of tokens."""
    return lambda ranks, *args: right(ranks, *args) / ranks.group.size()


@planted(step, "sum_norm_gradients")
def norms_one_by_one(right):
    """Each norm has an all-reduce of its own."""
    return lambda params, group: [right([one], group) for one in params]


# Data parallelism, ZeRO and the optimizer.


def dp_with(change):
    """For `apply_dp`: also applies `change` to each module that fully_shard wraps."""

    def instead_of(right):
        def apply_dp(decoder, *args):
            right(decoder, *args)
            for module in decoder.modules():
                if isinstance(module, FSDPModule):
                    change(module)

        return apply_dp

    return instead_of


@planted(step, "apply_dp")
def wrong_divisor(right):
    """Gradients are summed over dp instead of averaged."""

    def summed(module):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    return dp_with(summed)(right)


@planted(step, "apply_dp")
def half_the_replicas(right):
    """The groups of dp_replicate are pairs of ranks, so that not all replicas get the same sum."""

    def apply_dp(decoder, mesh, *args):
        names = ("pairs", "dp_replicate", "dp_shard")
        pairs = init_device_mesh("cpu", (mesh.size() // 2, 2, 1), mesh_dim_names=names)
        right(decoder, pairs, *args)

    return apply_dp


@planted(step, "begin_microbatch")
def lost_gradients(right):
    """The gradients of all micro-batches but the last are lost."""

    def begin_microbatch(decoder, zero_stage, *, last):
        right(decoder, zero_stage, last=last)
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # only shards have gradients of the micro-batches before
        for param in decoder.parameters():
            param.grad = None

    return begin_microbatch


@planted(model, "head_loss")
def drop_microbatch(right):
    """Every third micro-batch of a rank counts nothing."""
    seen = []

    def head_loss(*args):
        seen.append(None)
        return right(*args) * (len(seen) % 3 != 0)

    return head_loss


@planted(step, "sample_indices")
def same_samples(right):
    """All ranks of dp train on the samples of the first one."""
    return lambda layout, _: right(layout, 0)


@planted(step, "dist")
def local_norm(right):
    """Each rank clips by the norm of its own part of the gradient."""

    def all_reduce(both):
        own = both[1].clone()
        dist.all_reduce(both)
        both[1] = own

    return changed(right, all_reduce=all_reduce)


@planted(step.TrainStep, "update")
def skipped_update(right):
    """Rank 1 skips the optimizer's step."""

    def update(self, loss):
        if dist.get_rank() == 1:
            self.optimizer.step = lambda: None
        return right(self, loss)

    return update


@planted(FSDPModule, "set_unshard_in_backward")
def needless_gathers(right):
    """ZeRO-3 gathers the embedding again for its backward, which does not read it."""
    return lambda *_: None


@planted(FSDPModule, "set_modules_to_forward_prefetch")
def no_prefetch(right):
    """No group requests the parameters of the next one."""
    return lambda *_: None


# The ring of context parallelism.


@planted(cp, "_meet")
def ring_sees_the_future(right):
    """Queries attend to all keys of the later ranks, too."""
    everything = slice(None), slice(None), False
    return lambda rank, other, seq: everything if other > rank else right(rank, other, seq)


@planted(cp, "_turns")
def ring_without_last_turn(right):
    """Each rank leaves out the keys and values that arrive last."""
    return lambda *args: list(right(*args))[:-1]


@planted(cp, "attention_backward")
def lost_key_gradients(right):
    """What the ranks before found for a pair of keys and values does not go on with it."""
    return lambda *args, causal: [
        grad if causal or i == 0 else grad * 0 for i, grad in enumerate(right(*args, causal=causal))
    ]


@planted(model, "rope_tables")
def positions_from_zero(right):
    """Each rank of a ring rotates its tokens as if they were the first of the sequence."""
    return lambda spans, *args: right([range(sum(map(len, spans)))], *args)


@planted(cp, "_turns")
def ring_goes_on(right):
    """Keys and values travel one turn more than needed."""

    def turns(pair, group):
        yield from right(pair, group)
        cp.Passing(pair, torch.empty_like(pair), group).wait()

    return turns


# Pipelines.


@planted(step, "sum_tied_gradients")
def untied_sum(right):
    """Each copy of a tied embedding keeps its own gradient."""
    return lambda *_: None


@planted(pp.Pipeline, "run")
def wrong_targets(right):
    """The last stage gets the targets of the micro-batch before."""
    return lambda self, inputs, targets: right(self, inputs, targets.roll(self._mbs, 0))


@planted(stage, "stage_backward_weight")
def weights_twice(right):
    """The gradients of weights are computed and added twice."""

    def stage_backward_weight(weights, groups):
        held = [*weights]
        right(iter(held), [dict(group) for group in groups], retain_graph=True)
        return right(iter(held), groups)

    return stage_backward_weight


@planted(step, "cp_group")
def group_of_two(right):
    """The first and the last rank make a group for themselves."""

    def cp_group(layout: Layout) -> Any:
        ends = [0, layout.world_size - 1]
        if dist.get_rank() in ends:
            dist.new_group(ends, use_local_synchronization=True)
        return right(layout)

    return cp_group


@planted(recompute, "checkpoint")
def stale_recompute(right):
    """A layer is computed anew from half its input."""

    def checkpoint(function: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        runs = []

        def again(y: torch.Tensor, *more: Any) -> Any:
            runs.append(None)
            return function(y if len(runs) == 1 else y * 0.5, *more)

        return right(again, x, *args, **kwargs)

    return checkpoint


@planted(recompute, "SELECTED")
def nothing_kept(right):
    """Selective recomputation keeps no results."""
    return {}


@planted(recompute, "_word")
def every_layer(right):
    """Every N-th layer means all layers, for those who apply it and for those who read back what ran."""
    return lambda layout, number: "full" if layout.full_every else right(layout, number)


# The dry run.


@planted(rank_cost, "_with_gas")
def gas_of_the_last(right):
    """The cost of many micro-batches is extrapolated from two that are alike."""
    return lambda spec, gas: right(spec, 3 * spec.layout.pp)


@planted(rank_cost, "measure_step")
def no_states(right):
    """The optimizer has no states yet in the step that a dry run measures."""
    return lambda spec: right(spec, lambda trainer: None)


@planted(counts, "_OPS")
def unseen_gathers(right):
    """All-gathers are not counted."""
    return {op: name for op, name in right.items() if name != "all_gather"}


# Ranks that die.


def on_rank_1(right: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    """Rank 1 does something in its first step."""

    def accumulate(self: step.TrainStep, *batch: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            act()
        return right(self, *batch)

    return accumulate


@planted(step.TrainStep, "accumulate")
def dead_rank(right):
    """Rank 1 ends by itself, without a word."""
    return on_rank_1(right, partial(sys.exit, "rank 1 has had enough"))


@planted(step.TrainStep, "accumulate")
def frozen_rank(right):
    """Rank 1 sleeps in its first step."""
    return on_rank_1(right, partial(time.sleep, 1000))
