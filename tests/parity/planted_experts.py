"""Faults of routers, experts and expert parallelism."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.parity.fault import changed, planted
from ultrabench.kernel import dp, ep, model, moe, step


@planted(step, "apply_dp", parity="dp=2 moe, dp=2 tp=2 ep=2 zero_stage=1 moe")
def expert_divisor(right, decoder, mesh, zero_stage, precision, experts):
    """Gradients of experts are averaged over the ranks that hold them, although the losses have been divided."""
    right(decoder, mesh, zero_stage, precision, experts)
    for module in decoder.modules():
        if isinstance(module, moe.Experts) and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(experts.size() // experts["ep"].size())


@planted(moe.SparseFeedForward, "__init__", transformers="dots")
def softmax_of_all(right, self, sizes, *rest):
    """Scores of experts are those of a softmax, whatever the shape says."""
    right(self, replace(sizes, scoring_func="softmax"), *rest)


@planted(moe.SparseFeedForward, "__init__", transformers="glm")
def unscaled_scores(right, self, sizes, *rest):
    """The scores of the chosen experts are not scaled."""
    right(self, replace(sizes, routed_scaling_factor=1.0), *rest)


@planted(moe.SparseFeedForward, "choose", transformers="glm-groups")
def ignored_groups(right, self, scores):
    """The router chooses among the experts of all groups."""
    return right(
        SimpleNamespace(sizes=replace(self.sizes, n_group=1, topk_group=1), balance=self.balance), scores
    )


@planted(moe.SparseFeedForward, "choose", transformers="dots-groups")
def one_group_ignored(right, self, scores):
    """The router never chooses the last group of experts."""
    num_others = scores.shape[1] - scores.shape[1] // self.sizes.n_group
    return right(self, scores.masked_fill(torch.arange(scores.shape[1]) >= num_others, -1.0))


@planted(moe.SparseFeedForward, "choose", transformers="glm-groups")
def groups_by_best(right, self, scores):
    """The router chooses groups by their best score instead of the sum of the two best ones."""
    return right(
        SimpleNamespace(sizes=replace(self.sizes, scoring_func="softmax"), balance=self.balance), scores
    )


@planted(moe.SparseFeedForward, "__init__", transformers="olmoe")
def always_normalised(right, self, sizes, *rest):
    """The scores of the chosen experts are divided by their sum, whatever the shape says."""
    right(self, replace(sizes, norm_topk_prob=True), *rest)


@planted(ep.ExpertParallel, "return_to_tokens", parity="dp=2 ep=2 moe")
def combine_by_expert(right, ep, rows, by_rank, row_counts):
    """Results go back in the order of the experts instead of that in which their rows arrived."""
    return right(ep, rows, torch.arange(len(rows)), row_counts)


@planted(ep, "_mix", parity="dp=2 ep=2 moe bf16")
def score_twice(right, ep, x, weights, route, experts):
    """The score of an expert is multiplied into its output twice."""
    return right(ep, x, weights * weights, route, experts)


@planted(ep, "_mix", parity="tp=2 ep=2 moe")
def dropped_token(right, ep, x, weights, route, experts):
    """The experts of the last token of a rank have no room for it."""
    has_room = torch.arange(len(x)) < len(x) - 1
    return right(ep, x, weights * has_room[:, None], route, experts)


@planted(ep, "_grouped_gradients", parity="dp=2 ep=2 moe")
def shifted_expert_gradients(right, *args):
    """Each expert of a rank gets the gradient of the one before."""
    return right(*args).roll(1, 0)


@planted(step, "sum_whole_gradients", parity="tp=2 ep=2 moe", replicas="tp=2 moe")
def router_of_own_tokens(right, params, *args):
    """Gradients of routers, summands on each rank of tp, pass for sums."""
    right([(name, param) for name, param in params if ".router." not in name], *args)


@planted(step, "num_copies", parity="dp=2 ep=2 moe")
def experts_in_the_norm(right, name, param, layout, cut):
    """The norm weighs experts as if all ranks of ep held the same ones."""
    return right(name, param, layout, cut) * (layout.ep if ".experts." in name else 1)


@planted(moe, "dist", parity="dp=2 ep=2 moe routing=learned", replicas="dp=2 ep=2 moe routing=learned")
def bias_of_one_rank(right):
    """Each rank balances its own tokens only."""
    return changed(right, all_reduce=lambda counts: None)


@planted(moe._CountTokens, "forward", counts="test_tokens_of_experts_are_counted_once full")
def counted_again(right, ctx, scores, experts, counts):
    """Tokens are counted in forward, so that recomputation counts them again."""
    counts.add_(torch.bincount(experts.flatten(), minlength=len(counts)))
    ctx.token_counts = torch.zeros_like(counts)
    ctx.save_for_backward(experts)
    return scores.view_as(scores)


@planted(step, "build_expert_mesh", ignored="dp=2 ep=2 moe")
def lost_ep(right, layout, device_type):
    """Every rank holds all experts."""
    return right(replace(layout, ep=1), device_type)


@planted(model, "Routing", ignored="dp=2 ep=2 moe routing=skew=1")
def lost_routing(right, routing, *args):
    """Experts are chosen evenly, whatever the routing is."""
    return right("balanced", *args)


@planted(step.TrainStep, "update", replicas="dp=2 moe")
def skipped_experts(right, self, loss):
    """Rank 1 does not update its experts."""
    if dist.get_rank() == 1:
        for name, param in self.params.items():
            if ".experts." in name:
                param.grad = None
                self.shards[name].requires_grad_(False)
    return right(self, loss)


@planted(ep.ExpertParallel, "send_to_experts", counts="test_expert_parallel none")
def rows_sent_wide(right, ep, rows, *args):
    """Rows travel to their experts in twice their precision."""
    return right(ep, rows.double(), *args).to(rows.dtype)


@planted(ep.ExpertParallel, "send_to_experts", counts="test_expert_parallel none")
def scores_sent_narrow(right, ep, rows, *args):
    """Scores travel to the experts in the precision of the products."""
    return right(ep, rows.bfloat16() if rows.dim() == 1 else rows, *args).to(rows.dtype)


@planted(ep.ExpertParallel, "send_to_experts", counts="test_expert_parallel none")
def copied_rows(right, ep, rows, *args):
    """The rows that travel to experts are copied first."""
    return right(ep, rows.clone(), *args)


@planted(
    FSDPModule, "set_modules_to_forward_prefetch", counts="test_experts_are_gathered_early_and_reduced_wide"
)
def late_experts(right, group, following):
    """The parameters of experts are not requested with those of their layer."""
    right(group, following[:1])


@planted(
    FSDPModule, "set_modules_to_backward_prefetch", counts="test_experts_are_gathered_early_and_reduced_wide"
)
def late_experts_in_backward(right, group, following):
    """Backward does not request the parameters of experts with those of their layer."""
    right(group, following[:1])


@planted(ep._ExpertProducts, "backward", counts="test_a_split_backward_computes_and_gathers_each_half_once")
def experts_in_both_halves(right, ctx, *grads):
    """Each half of a split backward pass computes both halves of experts, and leaves one of them out."""
    ranks = ctx.ep.tp_ranks
    wants_rows, wants_weights = ranks.wants_input_grads, ranks.wants_weight_grads
    ranks.wants_input_grads = ranks.wants_weight_grads = True
    *nothing, rows_grad = (results := right(ctx, *grads))[:4]
    ranks.wants_input_grads, ranks.wants_weight_grads = wants_rows, wants_weights
    weight_grads = results[4:] if wants_weights else [None] * len(results[4:])
    return *nothing, rows_grad if wants_rows else None, *weight_grads


@planted(dp, "fully_shard", counts="test_experts_are_gathered_early_and_reduced_wide")
def experts_reduced_narrow(right, members, *, mp_policy, **options):
    """Gradients of experts are reduced in the precision of the products."""
    if isinstance(members[0], moe.Experts):
        mp_policy = replace(mp_policy, reduce_dtype=mp_policy.param_dtype)
    return right(members, mp_policy=mp_policy, **options)


@planted(model.Decoder, "initial_value", unit="test_model.test_experts_start_with_values_of_their_own")
def experts_alike(right, self, name, size, seed, device, part=()):
    """All experts of a layer start with the values of the first."""
    values = right(self, name, size, seed, device, part)
    if ".experts." not in name:
        return values
    num_rows = size[0] // self.shape.num_experts
    return values[:num_rows].repeat(len(values) // num_rows, 1)


@planted(model.Decoder, "initial_value", unit="test_model.test_experts_start_with_values_of_their_own")
def experts_by_place(right, self, name, size, seed, device, part=()):
    """Experts start with the values of their place on the rank, so that all ranks of ep have the same ones."""
    first, *others = part or ((0, 0, size[0]),)
    place = (first[0], 0, first[2]) if ".experts." in name else first
    return right(self, name, size, seed, device, (place, *others))


@planted(model.Decoder, "_full_value", unit="test_model.test_experts_start_with_values_of_their_own")
def experts_by_width(right, self, name, size, *args):
    """The initial values of an expert are scaled by the root of its width."""
    values = right(self, name, size, *args)
    return values * (4 / size[1] ** 0.5 if ".experts." in name else 1)


@planted(ep._Dispatch, "forward", unit="test_experts.test_scores_stay_wide_on_their_way")
def scores_rounded(right, ctx, *args):
    """Scores are rounded to the precision of the products on their way to the experts."""
    rows, scores = right(ctx, *args)
    return rows, scores.bfloat16().float()


@planted(ep._WeightedActivation, "backward", unit="test_experts.test_scores_stay_wide_on_their_way")
def score_gradients_rounded(right, ctx, grad):
    """The gradients of scores are added up in the precision of the products."""
    nothing, grad_scores, *others = right(ctx, grad)
    return nothing, grad_scores.bfloat16().float(), *others
