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
from torch.nn import functional

from ultrabench.kernel import cp
from ultrabench.kernel.compat import all_gather, all_to_all, grouped_mm, kept, silu_backward, wait
from ultrabench.kernel.compile import operator
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.moe import LEARNED, Experts, Route, Routing, SparseFeedForward
from ultrabench.kernel.tp import Ranks
from ultrabench.layout import Layout


@dataclass(slots=True)
class ExpertRanks:
    """The ranks of the ep axis, which share the experts of a layer."""

    group: dist.ProcessGroup
    tp: Ranks
    """They know which gradients a split backward pass must compute."""
    routings: list[tuple[Routing, int]]
    """The routing of the tokens of each rank of the group, and the number of that rank on the tp axis."""
    routes: dict[int, Route] = field(default_factory=dict)
    """Number of tokens -> their route, where positions decide."""

    def route(self, x_BSH: Tensor) -> Route | None:
        """The route of the tokens of a micro-batch; None if the routers choose."""
        num_tokens, rank = x_BSH.shape[0] * x_BSH.shape[1], self.group.rank()
        if self.routings[0][0].word == LEARNED:
            return None
        if num_tokens not in self.routes:
            experts = [routing.experts(num_tokens, tp_rank) for routing, tp_rank in self.routings]
            counters = [Counter(chain.from_iterable(experts_Tk)) for experts_Tk in experts]
            numbers = range(self.routings[0][0].shape.num_experts)
            counts = [[counter[expert] for expert in numbers] for counter in counters]
            self.routes[num_tokens] = self._route(torch.tensor(experts[rank], device=x_BSH.device), counts)
        return self.routes[num_tokens]

    def learned(self, num_experts: int, experts_Tk: Tensor) -> Route:
        """The route to the experts that a router chose among `num_experts`."""
        num_rows = torch.bincount(experts_Tk.flatten(), minlength=num_experts)
        return self._route(experts_Tk, wait(all_gather(num_rows, self.group)).view(-1, num_experts).tolist())

    def _route(self, experts_Tk: Tensor, counts: list[list[int]]) -> Route:
        """The route of tokens if each rank of the group has `counts` rows for each of all experts."""
        num_ranks, rank, device = self.group.size(), self.group.rank(), experts_Tk.device
        num_local = len(counts[0]) // num_ranks
        local = slice(rank * num_local, (rank + 1) * num_local)
        order = experts_Tk.flatten().argsort(stable=True)
        block_rows = list(chain.from_iterable(sent[local] for sent in counts))
        rows_by_expert = tuple(
            sum(sent[expert] for sent in counts) for expert in range(local.start, local.stop)
        )
        arrival = departure = None
        if num_ranks > 1:
            expert = torch.arange(num_local, device=device).repeat(num_ranks)
            lengths = torch.tensor(block_rows, device=device)
            arrival = expert.repeat_interleave(lengths, output_size=sum(block_rows)).argsort(stable=True)
            departure = arrival.argsort()
        sent_counts = counts[rank]
        return Route(
            experts_Tk, order // experts_Tk.shape[1], order, order.argsort(), arrival, departure,
            torch.tensor(rows_by_expert, device=device).cumsum(0).to(torch.int32), rows_by_expert,
            tuple(sum(sent_counts[first : first + num_local]) for first in range(0, len(sent_counts), num_local)),
            tuple(sum(sent[local]) for sent in counts),
        )  # fmt: skip

    def there(
        self, rows: Tensor, arrival: Tensor | None, sends: Sequence[int], receives: Sequence[int]
    ) -> Tensor:
        """The rows of this rank's experts, by expert, for sorted rows of this rank's tokens."""
        if arrival is None:
            return rows
        rows = wait(all_to_all(rows, receives, sends, self.group))  # which frees what was sent
        return rows.index_select(0, arrival)

    def back(
        self, rows: Tensor, departure: Tensor | None, sends: Sequence[int], receives: Sequence[int]
    ) -> Tensor:
        """The opposite of `there`."""
        if departure is None:
            return rows
        return wait(all_to_all(rows.index_select(0, departure), sends, receives, self.group))


def _tokens(rows: Tensor, slots: Tensor, top_k: int) -> Tensor:
    """The sum of the rows of each token."""
    return rows.index_select(0, slots).unflatten(0, (-1, top_k)).sum(1)  # type: ignore[no-untyped-call,no-any-return]


class _Dispatch(torch.autograd.Function):
    """The rows of tokens and their scores at the ranks of their experts."""

    @staticmethod
    def forward(ctx, ranks, sends, receives, tokens, order, slots, arrival, departure, x_TH, weights_Tk):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.moved, ctx.chosen = ranks, (sends, receives), weights_Tk.shape[1]
        ctx.save_for_backward(slots, departure)
        dispatch = kept(ranks.there)  # by selective recomputation, which would send them again
        scores = dispatch(weights_Tk.flatten().index_select(0, order), arrival, sends, receives)
        return dispatch(x_TH.index_select(0, tokens), arrival, sends, receives), scores

    @staticmethod
    def backward(ctx, grad_rows, grad_scores):  # type: ignore[no-untyped-def]
        slots, departure = ctx.saved_tensors
        rows, scores = (ctx.ranks.back(grad, departure, *ctx.moved) for grad in (grad_rows, grad_scores))
        grad_weights = scores.index_select(0, slots).view(-1, ctx.chosen)
        return *[None] * 8, _tokens(rows, slots, ctx.chosen), grad_weights


class _Combine(torch.autograd.Function):
    """The sum of the rows of each token, at the rank of the token."""

    @staticmethod
    def forward(ctx, ranks, sends, receives, tokens, slots, arrival, departure, top_k, rows):  # type: ignore[no-untyped-def]
        # Of saved tensors recomputation would repeat what precedes them, so that it would send the results again.
        ctx.ranks, ctx.moved, ctx.route = ranks, (sends, receives), (tokens, arrival)
        return _tokens(ranks.back(rows, departure, sends, receives), slots, top_k)

    @staticmethod
    def backward(ctx, grad_TH):  # type: ignore[no-untyped-def]
        tokens, arrival = ctx.route
        return *[None] * 8, ctx.ranks.there(grad_TH.index_select(0, tokens), arrival, *ctx.moved)


def _product_shape(rows: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[1])


@operator(_product_shape)
def _grouped_products(rows: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """The product of each expert's rows with its weight, which is output x input, as in a linear layer."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(rows, weight.transpose(1, 2), ends)
    out = rows.new_empty(len(rows), weight.shape[1])
    for x, y, expert_weight in zip(rows.split([*counts]), out.split([*counts]), weight, strict=True):  # type: ignore[no-untyped-call]
        torch.mm(x, expert_weight.t(), out=y)
    return out


def _weights_shape(grads: Tensor, rows: Tensor, _: Tensor, counts: Sequence[int]) -> Tensor:
    return rows.new_empty(len(counts), grads.shape[1], rows.shape[1])


@operator(_weights_shape)
def _grouped_weights(grads: Tensor, rows: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """The gradients of the weights of `_grouped_products`."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(grads.t(), rows, ends)
    out = rows.new_empty(len(counts), grads.shape[1], rows.shape[1])
    for grad, x, expert_grad in zip(grads.split([*counts]), rows.split([*counts]), out, strict=True):  # type: ignore[no-untyped-call]
        torch.mm(grad.t(), x, out=expert_grad)
    return out


class _Products(torch.autograd.Function):
    """Products of the experts' rows with one or several weights of each expert."""

    @staticmethod
    def forward(ctx, ranks, ends, counts, rows, *weights):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.counts = ranks, counts
        ctx.save_for_backward(ends, rows, *weights)
        return tuple(
            _grouped_products(rows, w.unflatten(0, (len(counts), -1)), ends, counts) for w in weights
        )

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        ends, rows, *weights = ctx.saved_tensors
        counts, tp = ctx.counts, ctx.ranks.tp
        grad_rows, grad_weights = None, [None] * len(weights)
        if tp.wants_inputs:
            for grad, weight in zip(grads, weights, strict=True):
                transposed = weight.unflatten(0, (len(counts), -1)).transpose(1, 2)
                summand = _grouped_products(grad.contiguous(), transposed, ends, counts)
                grad_rows = summand if grad_rows is None else grad_rows.add_(summand)
                del summand  # or it would stay beside the gradients of the weights
        if tp.wants_weights:
            grad_weights = [
                _grouped_weights(grad.contiguous(), rows, ends, counts).flatten(0, 1) for grad in grads
            ]
        return None, None, None, grad_rows, *grad_weights


class _Weighted(torch.autograd.Function):
    """silu(gate) * up * score, of which only the factors are kept."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up, scores)
        return functional.silu(gate) * up * scores[:, None].to(gate.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        gate, up, scores = ctx.saved_tensors
        grad_unweighted, activation = grad * scores[:, None].to(grad.dtype), functional.silu(gate)
        grad_scores = (grad * activation * up).sum(1, dtype=scores.dtype)
        return silu_backward(grad_unweighted * up, gate), grad_unweighted * activation, grad_scores


def _mix(ranks: ExpertRanks, x_TH: Tensor, weights_Tk: Tensor, route: Route, experts: Experts) -> Tensor:
    """The sum of the outputs of each token's experts, T x H, as `moe.mixture` defines it."""
    splits, orders = (route.sends, route.receives), (route.slots, route.arrival, route.departure)
    rows, scores = _Dispatch.apply(ranks, *splits, route.tokens, route.order, *orders, x_TH, weights_Tk)  # type: ignore[no-untyped-call]
    product_args = ranks, route.ends, route.counts
    gate, up = _Products.apply(*product_args, rows, experts.gate, experts.up)  # type: ignore[no-untyped-call]
    weighted = _Weighted.apply(gate, up, scores)  # type: ignore[no-untyped-call]
    (out,) = _Products.apply(*product_args, weighted, experts.down)  # type: ignore[no-untyped-call]
    y_TH: Tensor = _Combine.apply(ranks, *splits, route.tokens, *orders, weights_Tk.shape[1], out)  # type: ignore[no-untyped-call]
    return y_TH


def apply_ep(model: Decoder, layout: Layout, group: dist.ProcessGroup, tp: Ranks, seq_len: int) -> None:
    """Gives this rank its part of the experts of `model`, in place, and makes tokens travel to all of them."""
    coordinates = [layout.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
    spans = [cp.spans(seq_len, layout.cp, place.cp) for place in coordinates]
    routings = [Routing(model.routing.word, model.shape, rank_spans) for rank_spans in spans]
    ranks = ExpertRanks(group, tp, [*zip(routings, (place.tp for place in coordinates), strict=True)])
    for layer in model.layers.values():
        if isinstance(block := layer.ffn, SparseFeedForward):
            for name, weight in block.experts.named_parameters():
                part = weight.chunk(ranks.group.size())[0].detach().clone()
                setattr(block.experts, name, nn.Parameter(part))
            block.mix, block.route_of = partial(_mix, ranks), partial(ranks.learned, block.shape.num_experts)
    model.route = ranks.route
