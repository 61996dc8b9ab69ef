"""The feed-forward block of a sparse layer: a router chooses experts for each token.

Shapes: T tokens, E experts, k experts of a token, H hidden, M width of an expert. With the score s_e of expert e,
y = sum over the k chosen e of down_e(s_e act(gate_e(x)) up_e(x)), plus the output of the shared experts. Experts
without a gate compute down_e(s_e act(up_e(x))).

The functions here are the specification, which `ep.py` replaces by sorted tokens and grouped products.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ultrabench import feed_forward_type
from ultrabench.kernel.activation import activate
from ultrabench.kernel.compat import kept_linear
from ultrabench.kernel.cut import EXPERTS, OF_TOKENS
from ultrabench.model_shape import ModelShape
from ultrabench.routing import LEARNED_ROUTING, expert_shares

BIAS_STEP = 1e-3
"""What a step adds to the bias of an expert with fewer tokens than the mean (arXiv 2408.15664, section 4.1)."""
GOLDEN_FRACTION = (5**0.5 - 1) / 2
"""Fractional part of the golden ratio: its multiples, taken modulo 1, fill the interval from 0 to 1 evenly."""


RowCounts = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of rows that this rank sends to each rank, and receives from each, on their way to their experts."""


class Route(NamedTuple):
    """The experts of this rank's tokens, and how their rows travel, a row for each token and expert."""

    experts_Tk: Tensor  # noqa: N815  the suffix is its shape
    row_tokens: Tensor | None = None
    """The token of each row, in the order of the experts."""
    expert_order: Tensor | None = None
    """Index of each row among the T*k that lie token by token, in the order of the experts."""
    token_order: Tensor | None = None
    """Index of each row among the T*k that lie expert by expert, in the order of the tokens."""
    expert_perm: Tensor | None = None
    """Permutation of the rows that arrive rank by rank into the order of this rank's experts; None with one rank."""
    rank_perm: Tensor | None = None
    """The inverse permutation, from the order of this rank's experts to that in which the rows arrive."""
    expert_ends: Tensor | None = None
    """Index after the last row of each of this rank's experts, int32 as grouped products need it."""
    expert_counts: tuple[int, ...] = ()
    """Number of rows of each of this rank's experts."""
    row_counts: RowCounts = ((), ())
    """Numbers of rows to send and to receive."""


@lru_cache(maxsize=4)
def _cumulative_shares(routing_name: str, num_experts: int, top_k: int) -> tuple[float, ...]:
    """The sums of the shares of the first experts, from none of them to all."""
    return (0.0, *accumulate(expert_shares(routing_name, num_experts, top_k)))


def static_experts(routing_name: str, shape: ModelShape, position: int) -> tuple[int, ...]:
    """The experts of the token at `position` of any sequence.

    balanced takes the next k experts for each token in turn. skew=A draws k different ones systematically: each
    expert has a part of the interval from 0 to k as long as its share, which holds at most one of the k points
    u, u+1, ...
    """
    num_experts, top_k = shape.num_experts, shape.num_experts_per_tok
    if routing_name == "balanced":
        return tuple((position * top_k + j) % num_experts for j in range(top_k))
    cumulative_shares = _cumulative_shares(routing_name, num_experts, top_k)
    first_point = position * GOLDEN_FRACTION % 1
    return tuple(min(bisect_right(cumulative_shares, first_point + j), num_experts) - 1 for j in range(top_k))


class _CountTokens(torch.autograd.Function):
    """Counts the tokens of each expert in backward, which runs once, where forward may be repeated."""

    @staticmethod
    def forward(ctx, scores_TE: Tensor, experts_Tk: Tensor, token_counts_E: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.token_counts = token_counts_E
        ctx.save_for_backward(experts_Tk)
        return scores_TE.view_as(scores_TE)

    @staticmethod
    def backward(ctx, grad_scores: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (experts_Tk,) = ctx.saved_tensors
        # torch.bincount would make the host wait, since it reads the largest index back.
        rows = experts_Tk.flatten()
        ctx.token_counts.scatter_add_(0, rows, torch.ones_like(rows, dtype=ctx.token_counts.dtype))
        return grad_scores, None, None


class Experts(nn.Module):
    """The weights of all experts of this rank, under each other."""

    def __init__(self, sizes: feed_forward_type.Experts, hidden_size: int) -> None:
        super().__init__()
        num_experts, h, m = sizes.num_experts, hidden_size, sizes.moe_intermediate_size
        self.hidden_act = sizes.hidden_act
        self.gate = nn.Parameter(torch.empty(num_experts * m, h)) if sizes.gated else None
        self.up = nn.Parameter(torch.empty(num_experts * m, h))
        self.down = nn.Parameter(torch.empty(num_experts * h, m))

    @property
    def input_weights(self) -> tuple[Tensor, ...]:
        """The weights by which an expert begins: gate and up, or up alone."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


def mixture(x_TH: Tensor, weights_Tk: Tensor, route: Route, experts: Experts) -> Tensor:
    """The sum of the outputs of each token's experts, T x H."""
    h = x_TH.shape[1]
    num_experts, out = len(experts.down) // h, torch.zeros_like(x_TH)
    weights_of_experts = zip(
        *(w.chunk(num_experts) for w in (*experts.input_weights, experts.down)), strict=True
    )
    for expert_index, (*input_weights, down) in enumerate(weights_of_experts):
        token_index, choice_index = torch.where(route.experts_Tk == expert_index)
        expert_x = x_TH[token_index]
        activated, *factors = (functional.linear(expert_x, weight) for weight in input_weights)
        activations = activate(experts.hidden_act, activated)
        for factor in factors:
            activations = activations * factor
        weighted_activations = activations * weights_Tk[token_index, choice_index, None].to(activations.dtype)
        out = out.index_add(0, token_index, functional.linear(weighted_activations, down))
    return out


class SparseFeedForward(nn.Module):
    """A router, experts among which it chooses, and experts that every token passes."""

    mix: Callable[[Tensor, Tensor, Route, Experts], Tensor]
    """`mixture`, or what replaces it under expert parallelism."""
    make_route: Callable[[Tensor], Route]
    """Returns the route of tokens to the experts T x k that the router chose;
    expert parallelism adds how they travel."""
    balance: Tensor
    """The bias of each expert, which is added to its scores when experts are chosen, and only then."""
    token_counts: Tensor
    """The number of this rank's tokens of each expert in the backward passes of a step."""

    cuts = {"router": OF_TOKENS, "experts": EXPERTS}  # noqa: RUF012  one for all blocks

    def __init__(
        self, sizes: feed_forward_type.Experts, hidden_size: int, shared_experts: nn.Module | None
    ) -> None:
        super().__init__()
        self.sizes, self.mix, self.make_route = sizes, mixture, Route
        self.router = nn.Linear(hidden_size, sizes.num_experts, bias=False)
        self.experts = Experts(sizes, hidden_size)
        self.shared = shared_experts
        self.register_buffer("balance", torch.zeros(sizes.num_experts))
        self.register_buffer("token_counts", torch.zeros(sizes.num_experts, dtype=torch.int64))

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The experts of each token, T x k, by their scores with the biases, out of the best groups of experts.

        A token cannot choose experts of other groups, also where all scores of its groups are below 0.
        """
        sizes, biased_scores = self.sizes, scores_TE + self.balance
        if sizes.n_group > 1:
            by_group = biased_scores.unflatten(1, (sizes.n_group, -1))  # type: ignore[no-untyped-call]
            num_best = min(2, by_group.shape[2]) if sizes.scoring_func == "sigmoid" else 1
            group_scores = by_group.topk(num_best).values.sum(2)
            is_other = torch.ones_like(group_scores, dtype=torch.bool)
            is_other = is_other.scatter(1, group_scores.topk(sizes.topk_group).indices, False)
            biased_scores = by_group.masked_fill(is_other[..., None], -torch.inf).flatten(1)
        return biased_scores.topk(sizes.num_experts_per_tok).indices

    def scores_of(self, logits_TE: Tensor) -> Tensor:
        """The scores of all experts, T x E, in at least fp32, from the logits of the router."""
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        return logits_TE.sigmoid() if self.sizes.scoring_func == "sigmoid" else logits_TE.softmax(-1)

    def forward(self, x_BSH: Tensor, route: Route | None) -> Tensor:
        """The x_BSH that the block adds to the residual; without a route the router chooses."""
        shared_out, x_TH = None if self.shared is None else self.shared(x_BSH), x_BSH.flatten(0, 1)
        scores = self.scores_of(kept_linear(x_TH, self.router.weight))
        if route is None:
            experts_Tk = self.choose(scores)
            scores = _CountTokens.apply(scores, experts_Tk, self.token_counts)  # type: ignore[no-untyped-call]
            route = self.make_route(experts_Tk)
        weights_Tk = scores.gather(1, route.experts_Tk)
        if self.sizes.norm_topk_prob:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
        weights_Tk = weights_Tk * self.sizes.routed_scaling_factor
        routed_out = self.mix(x_TH, weights_Tk, route, self.experts).view_as(x_BSH)
        return routed_out if shared_out is None else routed_out + shared_out


class Routing:
    """Chooses the experts of all tokens of a micro-batch by their positions, unless the routers choose."""

    def __init__(self, name: str, shape: ModelShape, positions: Sequence[range]) -> None:
        """`positions` are the positions of a sequence that this rank holds."""
        self.name, self.shape, self.positions = name, shape, positions

    @cached_property
    def experts_by_position(self) -> list[tuple[int, ...]]:
        """The experts of the token at each position that this rank holds."""
        return [static_experts(self.name, self.shape, position) for position in chain(*self.positions)]

    def token_experts(self, num_tokens: int, tp_rank: int = 0) -> list[tuple[int, ...]]:
        """The experts of `num_tokens` tokens, from token tp_rank*num_tokens of the flattened micro-batch on."""
        token_indices = range(tp_rank * num_tokens, (tp_rank + 1) * num_tokens)
        return [self.experts_by_position[index % len(self.experts_by_position)] for index in token_indices]

    def route(self, x_BSH: Tensor) -> Route | None:
        """The route of the tokens of a micro-batch; None if the routers choose."""
        if self.name == LEARNED_ROUTING:
            return None
        return Route(torch.tensor(self.token_experts(x_BSH.shape[0] * x_BSH.shape[1]), device=x_BSH.device))


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """The biases of the routers of a model, by name; all ranks of a pipeline stage hold the same."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(".balance")}


def update_router_biases(models: Sequence[Any], shape: ModelShape) -> None:
    """Adds to the bias of each expert that got fewer tokens in this step than the mean, and subtracts from the others.

    All ranks have to call it; it sums one number for each expert of each layer of the whole model.
    """
    num_layers = shape.num_hidden_layers + shape.num_nextn_predict_layers
    numbered_ffns = ((int(n), layer.ffn) for model in models for n, layer in model.layers.items())
    block_by_number = {n: ffn for n, ffn in numbered_ffns if isinstance(ffn, SparseFeedForward)}
    device = next(models[0].parameters()).device
    token_counts = torch.zeros(num_layers, shape.num_experts, dtype=torch.int64, device=device)
    for layer_number, block in block_by_number.items():
        token_counts[layer_number] = block.token_counts
    if dist.is_initialized():
        dist.all_reduce(token_counts)
    for layer_number, block in block_by_number.items():
        layer_counts = token_counts[layer_number].double()
        block.balance += BIAS_STEP * (layer_counts.mean() - layer_counts).sign().to(block.balance.dtype)
        block.token_counts.zero_()
