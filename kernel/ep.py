"""Expert parallelism: each rank holds whole experts, and tokens travel to the ranks of their experts and back.

The ranks of a pipeline stage are cut into groups of ep consecutive ranks. Rank i of a group holds the i-th part of the
experts of each sparse layer. A rank sorts its T*k rows, one for each token and expert, by expert. Forward sends
them to the ranks of their experts and sends the results back; backward does the same with their gradients. So a
layer costs 4 all-to-alls of T*k*H elements of which (ep-1)/ep leave the rank, and 2 of T*k scores. The
score of a row is multiplied into what `down` gets, so that no output of an expert is kept for backward.

No token is dropped. If experts are chosen by position, every rank computes how many rows each rank sends; with
routing=learned one all-gather of E numbers a rank, which the host reads, tells it before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ultrabench.kernel import cp
from ultrabench.kernel.activation import activate, input_gradient
from ultrabench.kernel.compat import all_gather, all_to_all, grouped_mm, mark_as_kept, wait
from ultrabench.kernel.compile import as_operator
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.moe import Experts, Route, Routing, RowCounts, SparseFeedForward
from ultrabench.kernel.tp import TensorParallel
from ultrabench.layout import Layout
from ultrabench.routing import LEARNED_ROUTING


@dataclass(slots=True)
class ExpertParallel:
    """The ranks of the ep axis, which share the experts of a layer."""

    group: dist.ProcessGroup
    tp_ranks: TensorParallel
    """The ranks of the tp axis, which know which gradients a split backward pass must compute."""
    rank_routings: list[tuple[Routing, int]]
    """For each rank of the group, the routing of its tokens and its index on the tp axis."""
    route_by_num_tokens: dict[int, Route] = field(default_factory=dict)
    """Number of tokens of a micro-batch -> their route, where positions choose the experts."""

    def route(self, x_BSH: Tensor) -> Route | None:
        """The route of the tokens of a micro-batch; None if the routers choose."""
        num_tokens, ep_rank = x_BSH.shape[0] * x_BSH.shape[1], self.group.rank()
        if self.rank_routings[0][0].name == LEARNED_ROUTING:
            return None
        if num_tokens not in self.route_by_num_tokens:
            experts_by_rank = [r.token_experts(num_tokens, tp_rank) for r, tp_rank in self.rank_routings]
            counter_by_rank = [Counter(chain.from_iterable(experts_Tk)) for experts_Tk in experts_by_rank]
            all_experts = range(self.rank_routings[0][0].shape.num_experts)
            counts_by_rank = [[counter[expert] for expert in all_experts] for counter in counter_by_rank]
            experts_Tk = torch.tensor(experts_by_rank[ep_rank], device=x_BSH.device)
            self.route_by_num_tokens[num_tokens] = self._route(experts_Tk, counts_by_rank)
        return self.route_by_num_tokens[num_tokens]

    def learned_route(self, num_experts: int, experts_Tk: Tensor) -> Route:
        """The route to the experts that a router chose among `num_experts`."""
        # torch.bincount would make the host wait once more, since it reads the largest index back.
        rows = experts_Tk.flatten()
        counts_E = rows.new_zeros(num_experts).scatter_add_(0, rows, torch.ones_like(rows))
        return self._route(experts_Tk, wait(all_gather(counts_E, self.group)).view(-1, num_experts).tolist())

    def _route(self, experts_Tk: Tensor, counts_by_rank: list[list[int]]) -> Route:
        """The route of this rank's tokens.

        `counts_by_rank` holds, for each rank of the group, its number of rows for each of all experts.
        """
        num_ranks, ep_rank, device = self.group.size(), self.group.rank(), experts_Tk.device
        num_local_experts = len(counts_by_rank[0]) // num_ranks
        local_experts = slice(ep_rank * num_local_experts, (ep_rank + 1) * num_local_experts)
        expert_order = experts_Tk.flatten().argsort(stable=True)
        received_counts = [counts[local_experts] for counts in counts_by_rank]
        expert_counts = tuple(map(sum, zip(*received_counts, strict=True)))
        expert_perm = rank_perm = None
        if num_ranks > 1:
            expert_of_count = torch.arange(num_local_experts, device=device).repeat(num_ranks)
            flat_counts = torch.tensor([*chain.from_iterable(received_counts)], device=device)
            expert_of_arrival = expert_of_count.repeat_interleave(flat_counts, output_size=sum(expert_counts))
            expert_perm = expert_of_arrival.argsort(stable=True)
            rank_perm = expert_perm.argsort()
        own_counts = counts_by_rank[ep_rank]
        first_experts = range(0, len(own_counts), num_local_experts)
        send_counts = tuple(sum(own_counts[i : i + num_local_experts]) for i in first_experts)
        return Route(
            experts_Tk, expert_order // experts_Tk.shape[1], expert_order, expert_order.argsort(), expert_perm,
            rank_perm,
            torch.tensor(expert_counts, device=device).cumsum(0).to(torch.int32), expert_counts,
            (send_counts, tuple(map(sum, received_counts))),
        )  # fmt: skip

    def send_to_experts(self, rows: Tensor, expert_perm: Tensor | None, row_counts: RowCounts) -> Tensor:
        """Sends this rank's rows, sorted by expert; returns the rows that its own experts get, sorted by expert."""
        if expert_perm is None:
            return rows
        rows = wait(all_to_all(rows, *row_counts, self.group))  # which frees what was sent
        return rows.index_select(0, expert_perm)

    def return_to_tokens(self, rows: Tensor, rank_perm: Tensor | None, row_counts: RowCounts) -> Tensor:
        """The opposite of `send_to_experts`."""
        if rank_perm is None:
            return rows
        return wait(all_to_all(rows.index_select(0, rank_perm), *row_counts[::-1], self.group))


def _sum_by_token(rows: Tensor, token_order: Tensor, top_k: int) -> Tensor:
    """The sum of the rows of each token."""
    return rows.index_select(0, token_order).unflatten(0, (-1, top_k)).sum(1)  # type: ignore[no-untyped-call,no-any-return]


class _Dispatch(torch.autograd.Function):
    """Sends the rows of tokens, and their scores, to the ranks of their experts."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, ep, row_counts, row_tokens, token_order, expert_perm, rank_perm, expert_order, x_TH, weights_Tk
    ):
        ctx.ep, ctx.row_counts, ctx.top_k = ep, row_counts, weights_Tk.shape[1]
        ctx.save_for_backward(token_order, rank_perm)
        send = mark_as_kept(ep.send_to_experts)  # by selective recomputation, which would send them again
        scores = send(weights_Tk.flatten().index_select(0, expert_order), expert_perm, row_counts)
        return send(x_TH.index_select(0, row_tokens), expert_perm, row_counts), scores

    @staticmethod
    def backward(ctx, grad_rows, grad_scores):  # type: ignore[no-untyped-def]
        token_order, rank_perm = ctx.saved_tensors
        grad_rows = ctx.ep.return_to_tokens(grad_rows, rank_perm, ctx.row_counts)
        grad_scores = ctx.ep.return_to_tokens(grad_scores, rank_perm, ctx.row_counts)
        grad_weights_Tk = grad_scores.index_select(0, token_order).view(-1, ctx.top_k)
        return *[None] * 7, _sum_by_token(grad_rows, token_order, ctx.top_k), grad_weights_Tk


class _Combine(torch.autograd.Function):
    """Returns the results of experts to the ranks of their tokens, and sums the rows of each token."""

    @staticmethod
    def forward(ctx, ep, row_counts, row_tokens, token_order, expert_perm, rank_perm, top_k, rows):  # type: ignore[no-untyped-def]
        # Of saved tensors recomputation would repeat what precedes them, so that it would send the results again.
        ctx.ep, ctx.row_counts, ctx.row_tokens, ctx.expert_perm = ep, row_counts, row_tokens, expert_perm
        return _sum_by_token(ep.return_to_tokens(rows, rank_perm, row_counts), token_order, top_k)

    @staticmethod
    def backward(ctx, grad_TH):  # type: ignore[no-untyped-def]
        grad_rows = grad_TH.index_select(0, ctx.row_tokens)
        return *[None] * 7, ctx.ep.send_to_experts(grad_rows, ctx.expert_perm, ctx.row_counts)


def _empty_product(rows: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[1])


@as_operator(_empty_product)
def _grouped_products(rows: Tensor, weight: Tensor, expert_ends: Tensor, counts: Sequence[int]) -> Tensor:
    """The product of each expert's rows with its weight, which is output x input, as in a linear layer.

    `expert_ends` and `counts` are the expert_ends and expert_counts of a Route.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(rows, weight.transpose(1, 2), expert_ends)
    outputs = rows.new_empty(len(rows), weight.shape[1])
    for x, y, expert_weight in zip(rows.split([*counts]), outputs.split([*counts]), weight, strict=True):  # type: ignore[no-untyped-call]
        torch.mm(x, expert_weight.t(), out=y)
    return outputs


def _empty_gradients(output_grads: Tensor, rows: Tensor, _: Tensor, expert_counts: Sequence[int]) -> Tensor:
    return rows.new_empty(len(expert_counts), output_grads.shape[1], rows.shape[1])


@as_operator(_empty_gradients)
def _grouped_gradients(grads: Tensor, rows: Tensor, expert_ends: Tensor, counts: Sequence[int]) -> Tensor:
    """The gradients of the weights of `_grouped_products`, from the gradients of its outputs."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(grads.t(), rows, expert_ends)
    grad_w = rows.new_empty(len(counts), grads.shape[1], rows.shape[1])
    for grad_y, x, grad_weight in zip(grads.split([*counts]), rows.split([*counts]), grad_w, strict=True):  # type: ignore[no-untyped-call]
        torch.mm(grad_y.t(), x, out=grad_weight)
    return grad_w


class _ExpertProducts(torch.autograd.Function):
    """Products of the experts' rows with one or several weights of each expert."""

    @staticmethod
    def forward(ctx, ep, expert_ends, expert_counts, rows, *weights):  # type: ignore[no-untyped-def]
        ctx.ep, ctx.expert_counts = ep, expert_counts
        ctx.save_for_backward(expert_ends, rows, *weights)
        expert_weights = (weight.unflatten(0, (len(expert_counts), -1)) for weight in weights)
        return tuple(_grouped_products(rows, weight, expert_ends, expert_counts) for weight in expert_weights)

    @staticmethod
    def backward(ctx, *output_grads):  # type: ignore[no-untyped-def]
        expert_ends, rows, *weights = ctx.saved_tensors
        expert_counts, tp_ranks = ctx.expert_counts, ctx.ep.tp_ranks
        grad_rows, grad_weights = None, [None] * len(weights)
        if tp_ranks.wants_input_grads:
            for grad, weight in zip(output_grads, weights, strict=True):
                weight_transposed = weight.unflatten(0, (len(expert_counts), -1)).transpose(1, 2)
                summand = _grouped_products(grad.contiguous(), weight_transposed, expert_ends, expert_counts)
                grad_rows = summand if grad_rows is None else grad_rows.add_(summand)
                del summand  # or it would stay beside the gradients of the weights
        if tp_ranks.wants_weight_grads:
            grouped_rows = rows, expert_ends, expert_counts
            grad_weights = [
                _grouped_gradients(g.contiguous(), *grouped_rows).flatten(0, 1) for g in output_grads
            ]
        return None, None, None, grad_rows, *grad_weights


class _WeightedActivation(torch.autograd.Function):
    """act(gate) * up * score, or act(up) * score; only the factors are kept for backward."""

    @staticmethod
    def forward(ctx, hidden_act: str, scores: Tensor, *products: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.hidden_act = hidden_act
        ctx.save_for_backward(scores, *products)
        activated, *gated = products
        activations = activate(hidden_act, activated)
        for up in gated:
            activations = activations * up
        return activations * scores[:, None].to(activated.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        hidden_act, (scores, activated, *gated) = ctx.hidden_act, ctx.saved_tensors
        grad_unweighted, activation = grad * scores[:, None].to(grad.dtype), activate(hidden_act, activated)
        if not gated:
            grad_scores = (grad * activation).sum(1, dtype=scores.dtype)
            return None, grad_scores, input_gradient(hidden_act, grad_unweighted, activated)
        (up,) = gated
        grad_scores = (grad * activation * up).sum(1, dtype=scores.dtype)
        grad_gate = input_gradient(hidden_act, grad_unweighted * up, activated)
        return None, grad_scores, grad_gate, grad_unweighted * activation


def _mix(ep: ExpertParallel, x_TH: Tensor, weights_Tk: Tensor, route: Route, experts: Experts) -> Tensor:
    """The sum of the outputs of each token's experts, T x H, as `moe.mixture` defines it."""
    row_orders = route.row_tokens, route.token_order, route.expert_perm, route.rank_perm
    rows, scores = _Dispatch.apply(ep, route.row_counts, *row_orders, route.expert_order, x_TH, weights_Tk)  # type: ignore[no-untyped-call]
    product_args = ep, route.expert_ends, route.expert_counts
    products = _ExpertProducts.apply(*product_args, rows, *experts.input_weights)  # type: ignore[no-untyped-call]
    activations = _WeightedActivation.apply(experts.hidden_act, scores, *products)  # type: ignore[no-untyped-call]
    (out,) = _ExpertProducts.apply(*product_args, activations, experts.down)  # type: ignore[no-untyped-call]
    y_TH: Tensor = _Combine.apply(ep, route.row_counts, *row_orders, weights_Tk.shape[1], out)  # type: ignore[no-untyped-call]
    return y_TH


def apply_ep(
    model: Decoder, layout: Layout, group: dist.ProcessGroup, tp_ranks: TensorParallel, seq_len: int
) -> None:
    """Gives this rank its part of the experts of `model`, in place, and makes tokens travel to all of them."""
    rank_routings = list[tuple[Routing, int]]()
    for coordinates in map(layout.coordinates, dist.get_process_group_ranks(group)):
        positions = cp.local_positions(seq_len, layout.cp, coordinates.cp)
        rank_routings.append((Routing(model.routing.name, model.shape, positions), coordinates.tp))
    ep = ExpertParallel(group, tp_ranks, rank_routings)
    for layer in model.layers.values():
        if isinstance(block := layer.ffn, SparseFeedForward):
            for name, weight in block.experts.named_parameters():
                setattr(block.experts, name, nn.Parameter(weight.chunk(group.size())[0].detach().clone()))
            block.mix = partial(_mix, ep)
            block.make_route = partial(ep.learned_route, model.shape.num_experts)
    model.route = ep.route
