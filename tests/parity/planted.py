"""Faults that are planted into the kernel of a process, by name.

Each is a function from what is right to what takes its place; `planted` says where. docs/mutations.md shows which
check catches which fault.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage

from ultrabench.kernel import cp, data, model, pp, recompute, step, tp
from ultrabench.kernel.dryrun import counts, rank_cost
from ultrabench.layout import Layout


@dataclass(frozen=True)
class Fault:
    """What takes the place of the attribute `name` of a module or class; a call plants it."""

    owner: Any
    name: str
    instead_of: Callable[[Any], Any]

    def __call__(self) -> None:
        setattr(self.owner, self.name, self.instead_of(getattr(self.owner, self.name)))

    @property
    def place(self) -> str:
        """The module and the name in it, such as `cp._meet`."""
        owner = self.owner
        full = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{full}.{self.name}".removeprefix("ultrabench.kernel.")

    @property
    def text(self) -> str:
        """What is wrong, in one line."""
        return (self.instead_of.__doc__ or "").splitlines()[0]


FAULTS: dict[str, Fault] = {}


def planted(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Adds the function to FAULTS, planted in the attribute `name` of a module or class."""

    def add(instead_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[instead_of.__name__] = Fault(owner, name, instead_of)
        return instead_of

    return add


def changed(module: ModuleType, **names: Any) -> SimpleNamespace:
    """A module with other values for some names."""
    return SimpleNamespace(**{**vars(module), **names})


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


# Options that are ignored: training is correct or nearly so.


@planted(step, "apply_recompute")
def no_recompute(right):
    """Layers keep everything."""
    return lambda *_: None


@planted(step, "apply_recompute")
def full_for_selective(right):
    """Layers keep only their input, whatever is asked for."""
    return lambda decoder, layout: right(decoder, replace(layout, recompute="full"))


@planted(pp, "SCHEDULES")
def other_schedule(right):
    """Under 1f1b all forwards run first."""
    return right | {"1f1b": right["afab"]}


@planted(step, "apply_dp")
def gathered_parameters(right):
    """Parameters stay gathered after forward."""
    return lambda decoder, mesh, zero_stage, *more: right(decoder, mesh, 1, *more)


@planted(step, "apply_dp")
def shards_everywhere(right):
    """All ranks of dp share the parameters, where dp_shard says how many do."""

    def apply_dp(decoder, mesh, *args):
        names = ("dp_replicate", "dp_shard")
        right(decoder, init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=names), *args)

    return apply_dp


@planted(step, "begin_microbatch")
def zero2_as_1(right):
    """Gradients are reduced in the last micro-batch only."""
    return lambda decoder, zero_stage, *, last: right(decoder, min(zero_stage, 1), last=last)


@planted(step, "apply_dp")
def no_bf16(right):
    """Layers compute in the precision of the optimizer."""
    return lambda decoder, mesh, zero_stage, precision: right(decoder, mesh, zero_stage, "fp32")


@planted(step, "apply_compile")
def no_compile(right):
    """Layers are marked as compiled, but torch compiles nothing."""
    return lambda decoder, _: [
        setattr(layer, "forward", torch.compiler.disable(layer.forward)) for layer in decoder.layers.values()
    ]


@planted(step, "apply_attention")
def any_attention(right):
    """Torch chooses the implementation of attention."""
    return lambda *_: None


@planted(step, "apply_attention")
def plain_attention(right):
    """The plain implementation of attention runs, which keeps all scores."""
    return lambda decoder, _, group: right(decoder, "math", group)


@planted(step, "load")
def half_the_micro_batches(right):
    """Half of the samples train, and each of them reduces gradients."""
    begin = step.begin_microbatch
    step.begin_microbatch = lambda decoder, zero_stage, **_: begin(decoder, zero_stage, last=True)
    return lambda indices, *args: right(indices[: len(indices) // 2], *args)


# The model itself: common to a layout and to the process with which it is compared.


@planted(model, "rotate")
def no_rope(right):
    """Queries and keys are not rotated."""
    return lambda x, cos, sin: x


@planted(model, "rotate")
def neighbours_rotate(right):
    """The pairs that rotate together are (2i, 2i + 1) instead of (i, i + D/2)."""

    def rotate(x, cos, sin):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    return rotate


@planted(model, "rope_frequencies")
def no_rope_scaling(right):
    """The llama3 scaling of the rotation is ignored."""
    return lambda shape, half: right(replace(shape, rope_scaling=None), half)


@planted(model, "rope_frequencies")
def fixed_rope_theta(right):
    """The base of the rotation is always 10,000."""
    return lambda shape, half: right(replace(shape, rope_theta=10000.0), half)


def sdpa_with(change):
    """For `functional`: attention of changed arguments."""

    def instead_of(right):
        def attention(q, k, v, **options):
            tensors, more = change(q, k, v)
            return right.scaled_dot_product_attention(*tensors, **(options | more))

        return changed(right, scaled_dot_product_attention=attention)

    return instead_of


@planted(model, "functional")
def not_causal(right):
    """Each token attends to all tokens."""
    return sdpa_with(lambda q, k, v: ((q, k, v), {"is_causal": False}))(right)


@planted(model, "functional")
def wrong_scale(right):
    """Scores of attention are divided by D instead of its root."""
    return sdpa_with(lambda q, k, v: ((q, k, v), {"scale": 1 / q.shape[-1]}))(right)


@planted(model, "functional")
def reordered_groups(right):
    """Query head n reads key head n mod K instead of n K / N."""

    def tiled(q, k, v):
        return (q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))), {"enable_gqa": False}

    return sdpa_with(tiled)(right)


@planted(model, "functional")
def gelu(right):
    """The activation function is GELU instead of SiLU."""
    return changed(right, silu=right.gelu)


@planted(model.RmsNorm, "__init__")
def fixed_eps(right):
    """The eps of all norms is 1e-6, whatever the shape says."""
    return lambda self, width, eps: right(self, width, 1e-6)


@planted(model.RmsNorm, "forward")
def no_qk_norm(right):
    """Queries and keys are not normalised."""
    return lambda self, x: x if x.dim() == 4 else right(self, x)


@planted(model.FeedForward, "forward")
def gate_for_up(right):
    """The activation function is applied to `up` instead of `gate`."""

    def forward(self, x):
        up, gate = self.columns(x, self.gate.weight, self.up.weight)
        return self.row(model.functional.silu(gate) * up, self.down.weight)

    return forward


@planted(model.Decoder, "tie")
def not_tied(right):
    """Embedding and head are two parameters although the shape ties them."""
    return lambda self: None


@planted(model.Decoder, "initial_value")
def keys_like_queries(right):
    """Keys of a layer start with the values of its queries."""
    return lambda self, name, *args: right(self, name.replace("attention.k", "attention.q"), *args)


@planted(model.Decoder, "initial_value")
def all_layers_alike(right):
    """All layers start with the values of the first."""

    def initial_value(self, name, *args):
        return right(self, ".".join("0" if part.isdigit() else part for part in name.split(".")), *args)

    return initial_value


@planted(model.Decoder, "initial_value")
def wide_values(right):
    """Initial values are ten times too large."""
    return lambda self, name, *args: right(self, name, *args) * 10


@planted(data, "sample")
def same_sample(right):
    """All samples of a step are the same."""
    return lambda seed, step, index, *args: right(seed, step, 0, *args)


@planted(data, "sample")
def same_data(right):
    """All steps train on the same tokens."""
    return lambda seed, step, *args: right(seed, 1, *args)


@planted(data, "load")
def copied_targets(right):
    """A target is the token itself instead of the next one."""

    def load(*args):
        inputs, _ = right(*args)
        return inputs, inputs

    return load


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
