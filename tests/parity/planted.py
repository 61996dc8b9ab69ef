"""Faults of parallelism, recomputation and the dry run, and the names of all faults: FAULTS.

Each function takes the place of what `planted` names, which it gets as `right`. tests/mutations.md shows which check
catches those that name one; the others are planted by the test that a comment names.
"""

import sys
import time
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage

from tests.parity import (  # noqa: F401  their faults are in FAULTS, too
    planted_clock,
    planted_digest,
    planted_experts,
    planted_gpu,
    planted_latent,
    planted_model,
    planted_options,
    planted_parts,
    planted_products,
    planted_training,
)
from tests.parity.fault import FAULTS, changed, planted
from ultrabench.kernel import cp, loss, model, pp, recompute, step, tp
from ultrabench.kernel.cut import OF_HEADS
from ultrabench.kernel.dryrun import counts, rank_cost

__all__ = ["FAULTS"]


# Tensor parallelism.


@planted(
    step, "sum_whole_gradients", parity="tp=2 gas=2 fp32, dp=2 tp=2 zero_stage=1 bf16", replicas="tp=2 gas=2"
)  # fmt: skip
def drop_tp_all_reduce(right, *_):
    """Gradients of norms, summands on each rank of tp, pass for sums."""


@planted(step, "sum_whole_gradients", parity="tp=2 qwen")
def forgotten_head_norms(right, params, cuts, ranks):
    """Only norms of tokens are summed over tp, not those of queries and keys."""
    right([(n, p) for n, p in params if cuts[n] != OF_HEADS], cuts, ranks)


@planted(step, "sum_whole_gradients", parity="tp=2 gas=2 biased")
def summed_biases(right, params, cuts, ranks):
    """Gradients of biases, of which each rank of tp has all of its columns, are summed over tp."""
    right(params, cuts, ranks)
    for name, param in params:
        if name.endswith(".bias"):
            dist.all_reduce(param.grad.to_local(), group=ranks.group)


@planted(model.Decoder, "initial_value", parity="tp=2 gas=2 biased")
def biases_of_the_first(right, self, name, size, seed, device, part=()):
    """All ranks of tp start with the biases of the first."""
    first = tuple((dim, 0, length) for dim, _, length in part)
    return right(self, name, size, seed, device, first if name.endswith(".bias") else part)


@planted(tp, "reduce_scatter", parity="tp=2 bf16")
def unsummed_rows(right, tensor, group):
    """The summands of a row-parallel product stay where they are."""
    return tensor.chunk(group.size())[group.rank()].clone()


@planted(tp.TensorParallel, "scatter", parity="dp=2 tp=2 zero_stage=1")
def scatter_over_dp(right, ranks, x):
    """The summands of a row-parallel product are summed and scattered over dp instead of tp."""
    groups = dist.distributed_c10d._world.pg_map
    return right(tp.TensorParallel(next(g for g in groups if g.group_desc == "mesh_dp_shard")), x)


@planted(tp.TensorParallel, "gather", parity="tp=2 bf16")
def reversed_tokens(right, *args):
    """The gathered tokens are in reverse order."""
    return lambda: right(*args)().flip(1)


@planted(tp, "_look_up", parity="tp=2")
def shifted_vocabulary(right, ranks, embedding, tokens):
    """All ranks of tp but the first look up embeddings one row too far."""
    return right(ranks, embedding, tokens + (ranks.group.rank() > 0))


@planted(tp, "_loss", parity="tp=2")
def mean_over_wrong_tokens(right, ranks, *args):
    """The sum of the losses is divided by tp times the number of tokens."""
    return right(ranks, *args) / ranks.group.size()


@planted(tp.TensorParallel, "scatter", counts="test_tensor_parallel_overlaps compile")
def late_scatter(right, *args):
    """Sums over tp begin only when they are waited for."""
    return lambda: right(*args)()


@planted(tp, "reduce_scatter", counts="test_tensor_parallel_overlaps eager")
def copied_tokens(right, tensor, group):
    """What is summed and scattered over tp is copied first."""
    return right(tensor.clone(), group)


@planted(step, "sum_whole_gradients", counts="test_tensor_parallel gas=1")
def norms_one_by_one(right, params, *args):
    """Each norm has an all-reduce of its own."""
    for param in params:
        right([param], *args)


@planted(
    tp, "all_reduce", counts="test_without_sequence_parallelism_all_reduces_take_the_place_of_all_gathers"
)
def wide_sums_of_tokens(right, tensor, group):
    """Without sequence parallelism the summands of tokens are summed in fp32."""
    return right(tensor.float(), group).to(tensor.dtype)


@planted(step, "sum_whole_gradients", counts="test_tensor_parallel gas=1")
def norms_summed_narrow(right, params, cuts, ranks):
    """Gradients of norms travel over tp in the precision of the products."""
    grads = [param.grad.to_local() for name, param in params if cuts[name].dim is None]
    flat_grad = torch.cat(grads).bfloat16()
    dist.all_reduce(flat_grad, group=ranks.group)
    for grad, grad_sum in zip(grads, flat_grad.split([len(grad) for grad in grads]), strict=True):
        grad.copy_(grad_sum)


@planted(tp, "_columns_backward", counts="test_a_split_backward_computes_and_gathers_each_half_once")
def both_halves_twice(right, x, grads, weights, *options):
    """Each half of a split backward pass computes both halves, and leaves one of them out."""
    *others, wants_input, wants_weights = options
    input_grad, *weight_grads = right(x, grads, weights, *others, True, True)
    return [input_grad] * wants_input + weight_grads * wants_weights


@planted(loss, "mask_padding", parity="tp=2 uneven, tp=4 padded")
def unmasked_padding(right, *_):
    """Rows that pad the vocabulary have a share in the softmax."""


@planted(loss, "torch", unit="test_loss.test_the_softmax_of_half_precision_is_wide")
def narrow_softmax(right):
    """The softmax of the loss is computed in the precision of the logits."""
    return changed(right, log_softmax=lambda x, dim, dtype: right.log_softmax(x, dim).to(dtype))


@planted(
    step, "sum_copied_gradients",
    parity="tp=2 gas=2 uneven, dp=2 tp=2 zero_stage=3 uneven biased bf16", replicas="tp=2 gas=2 uneven, tp=4 padded",
)  # fmt: skip
def unsummed_copies(right, *_):
    """Each copy of a key/value head keeps its own gradient, that of the query heads of its rank."""


@planted(step, "sum_copied_gradients", parity="tp=2 uneven")
def copies_summed_twice(right, *args):
    """The gradients of copies are summed over their ranks twice."""
    right(*args)
    right(*args)


@planted(step, "sum_copied_gradients", parity="tp=2 uneven biased")
def forgotten_key_biases(right, params, *args):
    """Of the gradients of copies only those of weights are summed, not those of biases."""
    right([(name, param) for name, param in params if not name.endswith(".bias")], *args)


@planted(step, "kv_group", parity="tp=4 padded")
def copies_summed_over_tp(right, layout, copies, group):
    """The gradients of key/value heads are summed over all ranks of tp, also over those with another head."""
    return group


@planted(step, "num_copies", parity="tp=2 uneven, dp=2 tp=2 zero_stage=3 uneven")
def copies_in_the_norm(right, name, param, layout, cut):
    """The norm weighs copied key/value heads as if each rank of tp had heads of its own."""
    return right(name, param, layout, cut) // (layout.tp if cut.num_heads else 1)


@planted(step, "part_of", parity="tp=4 padded")
def head_of_other_queries(right, cut, param, group, *args):
    """The third rank of tp starts with the key/value head of the first two, not with that of its query heads."""
    part = right(cut, param, group, *args)
    if cut.num_heads and group.rank() == 2:
        (dim, _, length), *further_cuts = part
        return (dim, 0, length), *further_cuts
    return part


# Data parallelism, ZeRO and the optimizer.


@planted(step, "apply_dp", parity="dp=2 zero_stage=1 gas=2, dp=2 pp=2 zero_stage=3 gas=2 bf16")
def wrong_divisor(right, decoder, mesh, *args):
    """Gradients are averaged over dp, although the losses have been divided by its degree."""
    right(decoder, mesh, *args)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(mesh["dp_shard"].size())


@planted(step, "apply_dp", replicas="dp=4")
def half_the_replicas(right, decoder, mesh, *args):
    """The groups of dp_replicate are pairs of ranks, so that not all replicas get the same sum."""
    names = ("pairs", "dp_replicate", "dp_shard")
    right(decoder, init_device_mesh("cpu", (mesh.size() // 2, 2, 1), mesh_dim_names=names), *args)


@planted(step, "begin_microbatch", ignored="dp=2 zero_stage=2 gas=2")
def lost_gradients(right, decoder, zero_stage, *, is_last, overlap):
    """The gradients of all micro-batches but the last are lost."""
    right(decoder, zero_stage, is_last=is_last, overlap=overlap)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # only shards have gradients of the micro-batches before
    for param in decoder.parameters():
        param.grad = None


losses = count(1)  # of this process, which has no other fault


@planted(model, "head_loss", parity="dp=2 gas=4, pp=2 gas=4 bf16")
def drop_microbatch(right, *args):
    """Every third micro-batch of a rank counts nothing."""
    return right(*args) * (next(losses) % 3 != 0)


@planted(step, "sample_indices", parity="dp=2")
def same_samples(right, layout, _):
    """All ranks of dp train on the samples of the first one."""
    return right(layout, 0)


@planted(step, "dist", parity="dp=2 zero_stage=1")
def local_norm(right):
    """Each rank clips by the norm of its own part of the gradient."""

    def all_reduce(loss_and_norm):
        norm = loss_and_norm[1].clone()
        dist.all_reduce(loss_and_norm)
        loss_and_norm[1] = norm

    return changed(right, all_reduce=all_reduce)


@planted(step, "clip_factor", parity="gas=2")
def stretched_gradients(right, norm, max_norm):
    """Gradients whose norm is below the largest one are made as large."""
    return max_norm / (norm + 1e-6)


@planted(step.TrainStep, "update", replicas="dp=2", parity="dp=2 zero_stage=1 fp32")
def skipped_update(right, self, loss):
    """Rank 1 skips the optimizer's step."""
    if dist.get_rank() == 1:
        self.optimizer.step = lambda: None
    return right(self, loss)


@planted(FSDPModule, "set_unshard_in_backward", counts="test_step dp=2 zero_stage=3")
def needless_gathers(right, *_):
    """ZeRO-3 gathers the embedding again for its backward, which does not read it."""


@planted(FSDPModule, "set_modules_to_forward_prefetch", counts="test_order")
def no_prefetch(right, *_):
    """No group requests the parameters of the next one."""


updates = count(1)  # of this process, which has no other fault


@planted(step.TrainStep, "update")  # by test_worker.py: replicas that differ
def flipped_bit(right, self, loss):
    """Rank 1 changes the last bit of one number after its eighth update."""
    out = right(self, loss)
    if next(updates) == 8 and dist.get_rank() == 1:
        self.shards["layers.1.ffn.up.weight"].view(torch.int32).flatten()[0] ^= 1
    return out


# The ring of context parallelism.


@planted(cp, "_attended_slices", parity="cp=2 bf16")
def ring_sees_the_future(right, rank, other, seq):
    """Queries attend to all keys of the later ranks, too."""
    return (slice(None), slice(None), False) if other > rank else right(rank, other, seq)


@planted(cp, "_visits", parity="cp=2")
def ring_without_last_turn(right, *args):
    """Each rank leaves out the keys and values that arrive last."""
    return list(right(*args))[:-1]


@planted(cp, "attention_backward", parity="cp=2 bf16")
def lost_key_gradients(right, *args, causal):
    """What the ranks before found for a pair of keys and values does not go on with it."""
    query, *others = right(*args, causal=causal)
    return [query, *(grad if causal else grad * 0 for grad in others)]


@planted(model, "rope_tables", parity="cp=2")
def positions_from_zero(right, spans, *args):
    """Each rank of a ring rotates its tokens as if they were the first of the sequence."""
    return right([range(sum(map(len, spans)))], *args)


@planted(cp, "_visits", counts="test_ring")
def ring_goes_on(right, pair, seq_len, group, exchange):
    """Keys and values travel one turn more than needed."""
    yield from right(pair, seq_len, group, exchange)
    cp.RingTransfer(pair, torch.empty_like(pair), group).wait()


@planted(cp, "RingTransfer", counts="test_ring")
def ring_gradients_sent_narrow(right, sent, received, *group):
    """The gradients of keys and values travel in the ring in the precision of the products."""
    return right(sent.bfloat16(), received.bfloat16(), *group)


@planted(cp, "reduce_scatter", counts="test_gathered_keys_and_values")
def gathered_gradients_sent_narrow(right, gradients, group):
    """The gradients of gathered keys and values are summed in the precision of the products."""
    return right(gradients.bfloat16(), group)


@planted(cp, "_visits", counts="test_gathered_keys_and_values")
def gathered_twice(right, kv, length, group, exchange):
    """Keys and values are gathered once more before they are visited."""
    if exchange == "allgather":
        cp.wait(cp.all_gather(kv, group))
    return right(kv, length, group, exchange)


@planted(cp, "all_gather", counts="test_gathered_keys_and_values")
def gathered_once(right, kv, group, kept={}):  # noqa: B006  it lives as long as the fault
    """Backward keeps the keys and values that forward has gathered."""
    key = float(kv.double().sum())
    if key not in kept:
        kept[key] = cp.wait(right(kv, group))
    return kept[key]


@planted(cp, "torch", unit="test_attention.test_parts_of_a_ring_are_merged_in_at_least_fp32")
def rounded_parts(right):
    """The parts of attention are combined in the precision of the products."""
    shares = {"sigmoid": lambda x: right.sigmoid(x).bfloat16()}  # the precision of the products in that test
    return changed(right, promote_types=lambda narrow, _: narrow, **shares)


@planted(cp, "torch", unit="test_attention.test_parts_of_a_ring_are_merged_in_at_least_fp32")
def rounded_query_gradients(right):
    """The gradients of queries are added up over the parts in the precision of the products."""
    return changed(right, zeros_like=lambda x, dtype: right.zeros_like(x))


# Pipelines.


@planted(
    step, "sum_tied_gradients",
    parity="pp=2 gas=2 tied fp32, pp=2 gas=2 zbv tied bf16", replicas="pp=2 gas=2 tied, pp=2 gas=4 mtp",
)  # fmt: skip
def untied_sum(right, *_):
    """Each copy of an embedding keeps its own gradient."""


@planted(pp.Pipeline, "run", parity="pp=2 gas=2")
def wrong_targets(right, self, inputs, targets):
    """The last stage gets the targets of the micro-batch before."""
    return right(self, inputs, targets.roll(self._mbs, 0))


@planted(stage, "stage_backward_weight", parity="pp=2 gas=2 zbv")
def weights_twice(right, weights, groups):
    """The gradients of weights are computed and added twice."""
    weight_list = [*weights]
    right(iter(weight_list), [dict(group) for group in groups], retain_graph=True)
    return right(iter(weight_list), groups)


@planted(step, "cp_group", groups="dp=3")
def group_of_two(right, layout):
    """The first and the last rank make a group for themselves."""
    ends = [0, layout.world_size - 1]
    if dist.get_rank() in ends:
        dist.new_group(ends, use_local_synchronization=True)
    return right(layout)


@planted(recompute, "checkpoint", parity="full bf16")
def stale_recompute(right, function, *args, **kwargs):
    """A layer is computed anew from half its input."""
    runs = count()

    def from_half(x, *rest):
        return function(x * 0.5 if next(runs) else x, *rest)

    return right(from_half, *args, **kwargs)


@planted(recompute, "keeps_result", counts="test_recompute")
def nothing_kept(right, *_, **__):
    """Selective recomputation keeps no results."""
    return False


@planted(model, "kept_linear", cost="test_recomputation_keeps_what_docs_say 1")
def unmarked_products(right, x, weight):
    """Selective recomputation keeps no products."""
    return model.functional.linear(x, weight)


@planted(recompute, "_layer_recompute", cost="test_recomputation_keeps_what_docs_say 1")
def every_layer(right, layout, number):
    """Every N-th layer means all layers, for those who apply it and for those who read back what ran."""
    return "full" if layout.full_every else right(layout, number)


# The dry run.


@planted(rank_cost, "_with_gas", cost="test_a_dry_run_equals_a_real_step dp=2 zero_stage=2 gas=6")
def gas_of_the_last(right, spec, gas):
    """The cost of many micro-batches is extrapolated from two that are alike."""
    return right(spec, 3 * spec.layout.pp)


@planted(rank_cost, "measure_step", cost="test_a_dry_run_equals_a_real_step dp=2 gas=3")
def no_states(right, spec):
    """The optimizer has no states yet in the step that a dry run measures."""
    return right(spec, lambda trainer: None)


@planted(counts, "_OPERATION_NAMES", counts="test_step dp=2 zero_stage=1")
def unseen_gathers(right):
    """All-gathers are not counted."""
    return {op: name for op, name in right.items() if name != "all_gather"}


# Ranks that die.


@planted(step.TrainStep, "accumulate", death="dp=2")
def dead_rank(right, *args):
    """Rank 1 ends by itself, without a word."""
    if dist.get_rank() == 1:
        sys.exit("rank 1 has had enough")
    return right(*args)


@planted(step.TrainStep, "accumulate")  # by test_faults.py: a rank that is killed
def frozen_rank(right, *args):
    """Rank 1 sleeps in its first step."""
    if dist.get_rank() == 1:
        time.sleep(1000)
    return right(*args)


@planted(model.Decoder, "copy_of_last_stage", parity="pp=2 gas=4 mtp, pp=2 gas=4 zbv mtp")
def third_gradient_lost(right, decoder):
    """The copy of the embedding for modules that predict more tokens does not add its gradient."""
    copy = right(decoder)
    if copy is not None and copy.weight.grad is not None:
        copy.weight.grad.zero_()
    return copy


@planted(step.TrainStep, "batch", parity="cp=2 gas=2 mtp")
def later_targets_of_own_chunks(right, self, number):
    """The second target of a token of a ring is the target of the next token that its rank holds."""
    inputs, targets = right(self, number)
    targets[..., 1] = targets[..., 0].roll(-1, 1)
    return inputs, targets
