"""The time of each block of a model for one micro-batch in closed form: a layer of each of its types, and the head.

Symbols: c the constants, h hidden size; the others are those of `step_time`.
docs/design/prediction.md derives each term.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from ultrabench.attention_type import Attention
from ultrabench.feed_forward_type import Experts
from ultrabench.layer_products import COLUMNS, ROWS, WHOLE, Product
from ultrabench.layer_type import LayerType
from ultrabench.layout import GroupAxes, crosses_nodes, ranks_in_node
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.time_constants import TimeConstants
from ultrabench.tensor_parallel import kinds_of_ranks, padded_vocab_size

WIDE_HEAD = 128
"""Width of a head from which attention reaches its full rate."""
STATE_RATE = 0.5
"""Share of the rate of attention that linear attention and state space layers reach, by the FLOPs of their recurrence;
an estimate, not measured."""
GATED_CHANNELS = 4
"""Numbers that a gated feed-forward block keeps for each channel, to which the constant ffn_bytes belongs."""
HALF = 0.5
"""Share of a layer's collectives over tp that attention makes, and the feed-forward block."""
INPUT_SHARE = 3 / 5
"""Share of a block's collectives over tp that move its input: three of five; the others move its output."""


class LayerWork(NamedTuple):
    """What decides the time of a layer for one micro-batch, beside hardware and framework."""

    shape: ModelShape
    seq_len: int
    tokens: float
    """Tokens of a micro-batch on one rank, before tp divides them."""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_exchange: str
    recompute: str
    compiled: bool
    element_bytes: int
    """Bytes of one number of an activation or a weight."""
    ep: int
    busiest_rows_over_mean: float
    """Rows of the busiest rank of ep over the mean of all."""
    tp_axes: GroupAxes
    """Where the ranks of tp are."""
    cp_axes: GroupAxes
    """Where the ranks of cp are."""
    modules: frozenset[str] = frozenset()
    """Parts of layers that backward computes again, as `recompute_modules` names them."""


class Rates(NamedTuple):
    """What a GPU reaches in the precision of a run."""

    linear: float
    """FLOPs per second of large products of linear layers."""
    product: float
    """FLOPs per second of other large products: those of the head and of routers, which fp8 leaves in bf16."""
    expert: float
    """FLOPs per second of large products of experts, which programs compute in fp8 or leave in bf16."""
    attention: float
    """FLOPs per second of attention with wide heads."""
    hbm_bytes_per_s: float
    """Bytes per second of the memory."""
    cast_bytes: float
    """Memory traffic of scaling and casting a number of an operand of a linear layer; 0 where nothing is cast."""


class PartSeconds(NamedTuple):
    """Seconds of each kind of work of one layer or of the head, for one micro-batch."""

    gemm: float
    attention: float
    memory_bound: float
    tp: float
    cp: float
    ep: float = 0.0


SecondsByBlock = tuple[float, ...]
"""Seconds of the blocks in the order of `block_counts`."""


def block_counts(
    num_heads: int, num_by_kind: Sequence[int], num_again_by_kind: Sequence[int]
) -> tuple[int, ...]:
    """The numbers of layers of the first type, of those of them that are computed again, of heads,
    and then of layers of each other type and of those of them that are computed again.
    """
    first, *others = zip(num_by_kind, num_again_by_kind, strict=True)
    return *first, num_heads, *chain.from_iterable(others)


class BlockTimes(NamedTuple):
    """The times of the blocks of a model for one micro-batch, by part as in `PartSeconds`."""

    gemm: SecondsByBlock
    attention: SecondsByBlock
    memory_bound: SecondsByBlock
    tp: SecondsByBlock
    cp: SecondsByBlock
    ep: SecondsByBlock
    total: SecondsByBlock
    """The sums of the parts."""


class _FeedForward(NamedTuple):
    """Forward of what follows attention in a layer for one micro-batch: a feed-forward block, or router and experts."""

    up_s: float
    """Seconds of the products up to the activation."""
    down_s: float
    """Seconds of the products after it."""
    num_operands: float
    """Numbers in the inputs, weights and outputs of those products that are of linear layers."""
    kept_s: float
    """Seconds of those products that recompute=selective keeps."""
    token_bytes: float
    """Memory traffic of the activation for each token of the rank, forward and backward."""
    routed_bytes: float = 0.0
    """Memory traffic of routing for each token of the rank, forward and backward."""
    tp_share: float = HALF
    """Share of a layer's collectives over tp that it makes."""
    alltoall_s: float = 0.0
    """Seconds of an all-to-all over ep."""


@lru_cache(maxsize=65536)
def block_times(work: LayerWork, links: Network, rates: Rates, c: TimeConstants) -> BlockTimes:
    """The times of the blocks that `work` describes."""
    shape, h = work.shape, work.shape.hidden_size
    rank_vocab = padded_vocab_size(shape.vocab_size, work.tp) / work.tp
    kinds = kinds_of_ranks(shape, work.tp)
    first_layer, *other_layers = (_layer_times(work, kind, links, rates, c) for kind in kinds)
    head_gemm_s = 3 * _gemm_s(work.tokens, rank_vocab, h, rates.product, c)
    head_bytes = c.logit_bytes * work.tokens * rank_vocab
    call_s = tp_call_s(work.tokens * h * work.element_bytes, work.tp_axes, links, c)
    head = PartSeconds(head_gemm_s, 0.0, head_bytes / rates.hbm_bytes_per_s, call_s * c.tp_end_calls, 0.0)
    blocks = (*first_layer, head, *chain.from_iterable(other_layers))
    return BlockTimes._make([*zip(*blocks, strict=True), (*map(sum, blocks),)])


class _Attention(NamedTuple):
    """Forward of the attention of a layer for one micro-batch."""

    products_s: float
    """Seconds of its products with weights."""
    core_s: float
    """Seconds of what it does beside them: scores and values, or a state."""
    num_operands: float
    """Numbers in the inputs, weights and outputs of those products."""
    kept_s: float
    """Seconds of those products that recompute=selective keeps."""
    token_bytes: float
    """Memory traffic of norms within it and of what surrounds a state, for each token of the rank,
    forward and backward."""


def _product_s(work: LayerWork, product: Product, flops_per_s: float, c: TimeConstants) -> float:
    """Seconds of a product on a rank, which may have a part of its weights or of the tokens."""
    outputs, inputs, cut = product[:3]
    if cut == WHOLE:
        return _gemm_s(work.tokens / work.tp, outputs, inputs, flops_per_s, c)
    if cut == ROWS:
        return _gemm_s(work.tokens, outputs, inputs / work.tp, flops_per_s, c)
    return _gemm_s(work.tokens, outputs / work.tp, inputs, flops_per_s, c)


def _num_product_operands(work: LayerWork, product: Product) -> float:
    """Numbers of the operands of a product on a rank."""
    outputs, inputs, cut = product[:3]
    if cut == WHOLE:
        return _num_operands(work.tokens / work.tp, outputs, inputs)
    if cut == ROWS:
        return _num_operands(work.tokens, outputs, inputs / work.tp)
    return _num_operands(work.tokens, outputs / work.tp, inputs)


def _attention(work: LayerWork, kind: LayerType, rates: Rates, c: TimeConstants) -> _Attention:
    """The attention of a type of layer; all zero where it has none."""
    attention, h = kind.attention, work.shape.hidden_size
    if attention is None:
        return _Attention(0.0, 0.0, 0.0, 0.0, 0.0)
    products = attention.products(h)
    seconds = [_product_s(work, product, rates.linear, c) for product in products]
    return _Attention(
        products_s=sum(seconds),
        core_s=_core_s(work, attention, rates.attention, c) + _scores_s(work, attention, rates, c),
        num_operands=sum(_num_product_operands(work, product) for product in products),
        kept_s=sum(s * product.kept_share for s, product in zip(seconds, products, strict=True)),
        token_bytes=_inner_bytes(kind, h, c),
    )


def _inner_bytes(kind: LayerType, h: int, c: TimeConstants) -> float:
    """Memory traffic within an attention for each token; that of a state is like that of an
    activation (an estimate).
    """
    if (grouped := kind.grouped_query) is not None:
        return c.head_norm_bytes * (grouped.q_width + grouped.kv_width) * (grouped.qk_norm != "none")
    if (latent := kind.latent) is not None:
        return c.head_norm_bytes * ((latent.q_lora_rank or 0) + latent.kv_lora_rank)
    assert kind.attention is not None, "a layer without attention has no traffic in it"
    return c.ffn_bytes * kind.attention.kept(h).cut / GATED_CHANNELS


def _feed_forward(
    work: LayerWork, kind: LayerType, links: Network, rates: Rates, c: TimeConstants
) -> _FeedForward:
    """What follows attention in a type of layer; all zero where nothing does."""
    h = work.shape.hidden_size
    if kind.experts is not None:
        return _expert_ffn(work, kind.experts, links, rates, c)
    if kind.feed_forward is None:
        return _NO_FEED_FORWARD
    return _dense_ffn(work, kind.feed_forward.products(h), kind.feed_forward.kept(h).cut, rates, c)


def _dense_ffn(
    work: LayerWork, products: Sequence[Product], kept_channels: int, rates: Rates, c: TimeConstants
) -> _FeedForward:
    """A block of these products, cut by tp, which keeps so many numbers of a token."""
    up, down = products
    up_s, down_s = (_product_s(work, product, rates.linear, c) for product in products)
    num_operands = _num_product_operands(work, up) + _num_product_operands(work, down)
    token_bytes = c.ffn_bytes * kept_channels / GATED_CHANNELS
    return _FeedForward(up_s, down_s, num_operands, up_s * up.kept_share, token_bytes)


_NO_FEED_FORWARD = _FeedForward(0.0, 0.0, 0.0, 0.0, 0.0, tp_share=0.0)


def _expert_ffn(
    work: LayerWork, experts: Experts, links: Network, rates: Rates, c: TimeConstants
) -> _FeedForward:
    """Router, experts and shared experts of a layer, on the busiest rank of ep.

    Each of its E/ep experts has the rows that the t = T/tp tokens of ep ranks send it, M = t*ep*k/E on average.
    """
    h, rank_tokens = work.shape.hidden_size, work.tokens / work.tp
    num_experts, top_k, row_width = experts.num_experts, experts.num_experts_per_tok, experts.row_width(h)
    expert_rows = rank_tokens * work.ep * top_k / num_experts * work.busiest_rows_over_mean
    token_rows = top_k * work.busiest_rows_over_mean
    shared_ffn, shared_products = _NO_FEED_FORWARD, experts.shared_products(h)
    if shared_products:
        shared_ffn = _dense_ffn(work, shared_products, experts.kept(h).cut, rates, c)
    of_tokens = [product for product in experts.products(h) if product.cut == WHOLE]
    router_s = sum(_product_s(work, product, rates.product, c) for product in of_tokens)
    rank_experts = num_experts / work.ep
    expert_products = experts.expert_products(h)
    up, down = (
        _gemm_s(expert_rows, product.outputs, product.inputs, rates.expert, c) for product in expert_products
    )
    num_cast = 0.0
    if c.fp8_experts:
        num_cast = rank_experts * sum(
            _num_operands(expert_rows, p.outputs, p.inputs) for p in expert_products
        )
    sent_bytes = token_rows * rank_tokens * row_width * work.element_bytes
    alltoall_s = 0.0
    if work.ep > 1:
        groups = experts.n_group, experts.topk_group
        transfer_s = links.alltoall_s(sent_bytes, work.ep, top_k, c.ep_node_copies, groups)
        alltoall_s = (1 - c.ep_overlap) * (c.tp_call_s + transfer_s)
    kept_channels = experts.row_channels(h) - row_width
    expert_bytes = (
        c.ffn_bytes * experts.moe_intermediate_size * (kept_channels / 3 / experts.moe_intermediate_size)
    )
    return _FeedForward(
        up_s=router_s + shared_ffn.up_s + rank_experts * up,
        down_s=shared_ffn.down_s + rank_experts * down,
        num_operands=shared_ffn.num_operands + num_cast,
        kept_s=shared_ffn.kept_s or router_s,
        token_bytes=shared_ffn.token_bytes + token_rows * expert_bytes,
        routed_bytes=token_rows * c.routed_bytes * row_width + c.router_bytes * num_experts,
        tp_share=HALF if shared_products else 0.0,
        alltoall_s=alltoall_s,
    )


def _layer_times(
    work: LayerWork, kind: LayerType, links: Network, rates: Rates, c: TimeConstants
) -> tuple[PartSeconds, PartSeconds]:
    """The times of a layer of this type, and what recomputation adds to them."""
    tokens, tp, h, hbm_bytes_per_s = work.tokens, work.tp, work.shape.hidden_size, rates.hbm_bytes_per_s
    attention, ffn = _attention(work, kind, rates, c), _feed_forward(work, kind, links, rates, c)
    forward_s, attention_s = attention.products_s + ffn.up_s + ffn.down_s, attention.core_s
    # Norms and the residual stream are on all tokens, unless sequence parallelism divides them.
    norm_tokens = tokens / tp if work.sequence_parallel else tokens
    norm_bytes = (
        c.hidden_bytes * h * (kind.num_blocks + kind.num_norms) / 4
    )  # hidden_bytes is of two blocks and two norms
    traffic_bytes = norm_tokens * norm_bytes + tokens / tp * (ffn.token_bytes + attention.token_bytes)
    traffic_s = traffic_bytes / hbm_bytes_per_s * (c.compiled_traffic if work.compiled else 1)
    traffic_s += tokens / tp * ffn.routed_bytes / hbm_bytes_per_s
    tp_share = ffn.tp_share + _attention_tp_share(kind, h)
    call_s = tp_call_s(tokens * h * work.element_bytes, work.tp_axes, links, c) * tp_share
    # Only an output that nothing follows is not computed again; eager products of fp8 save what they get after it.
    kept_down_s = ffn.down_s if tp == 1 and (work.compiled or not rates.cast_bytes) else 0.0
    more_gemm_s = more_attention_s = more_tp_s = more_ep_s = 0.0
    if work.recompute == "attention":
        more_attention_s = attention_s
    elif work.recompute == "selective":
        more_gemm_s = forward_s - kept_down_s - attention.kept_s - ffn.kept_s
        more_attention_s, more_tp_s = attention_s * (1 - 1 / work.cp), call_s * c.tp_recompute_calls / 2
    elif work.recompute != "none":
        more_gemm_s, more_attention_s = forward_s - kept_down_s, attention_s
        more_tp_s = call_s * c.tp_recompute_calls
    if more_gemm_s and work.recompute != "selective":
        more_ep_s = ffn.alltoall_s  # rows are sent again, results are not
    more_traffic_s = traffic_s * (c.recompute_traffic - 1) * (more_gemm_s > 0)
    if rates.cast_bytes:
        # Both operands of three products are cast in forward and backward, a third of them in forward.
        num_operands = attention.num_operands + ffn.num_operands
        cast_s = 2 * num_operands * rates.cast_bytes / hbm_bytes_per_s
        traffic_s, more_traffic_s = traffic_s + cast_s, more_traffic_s + cast_s / 3 * more_gemm_s / forward_s
    again = _modules_again(work, kind, attention, ffn, traffic_s) if work.modules else _NOTHING_AGAIN
    tp_s, cp_s = call_s * c.tp_calls, _ring_wait_s(work, kind, 3.5 * attention_s, links, c)
    return (
        PartSeconds(
            3 * forward_s + again.gemm_s,
            3.5 * attention_s + again.attention_s,
            traffic_s + again.traffic_s,
            tp_s,
            cp_s,
            4 * ffn.alltoall_s + again.alltoall_s,
        ),
        PartSeconds(more_gemm_s, more_attention_s, more_traffic_s, more_tp_s, 0.0, more_ep_s),
    )


class _Again(NamedTuple):
    """Seconds that a layer adds to backward where parts of it are computed again."""

    gemm_s: float
    attention_s: float
    traffic_s: float
    alltoall_s: float


_NOTHING_AGAIN = _Again(0.0, 0.0, 0.0, 0.0)


def _modules_again(
    work: LayerWork, kind: LayerType, attention: _Attention, ffn: _FeedForward, traffic_s: float
) -> _Again:
    """What backward computes again of `work.modules`: products, core attention, or only norms and activations.

    mla_up_proj takes the products of latent attention in proportion to their weights; norms and activations have about
    half of a layer's traffic, of which a third is forward.
    """
    modules, h = work.modules, work.shape.hidden_size
    gemm_s = alltoall_s = 0.0
    if kind.feed_forward is not None and "mlp" in modules:
        gemm_s += ffn.up_s + ffn.down_s
    if kind.experts is not None and "moe" in modules:
        gemm_s, alltoall_s = gemm_s + ffn.up_s + ffn.down_s, ffn.alltoall_s
    if kind.latent is not None and "mla_up_proj" in modules:
        products = kind.latent.products(h)
        up_share = sum(p.params for p in products if p.cut == COLUMNS) / sum(p.params for p in products)
        gemm_s += up_share * attention.products_s
    repeated_halves = ("layernorm" in modules) + bool({"moe_act", "mlp", "moe"} & modules)
    return _Again(
        gemm_s, attention.core_s * ("core_attn" in modules), repeated_halves / 6 * traffic_s, alltoall_s
    )


def _attention_tp_share(kind: LayerType, h: int) -> float:
    """Share of a layer's collectives over tp that attention makes, in relation to those that move hidden sizes.

    Latents are gathered in forward and in backward, and their gradients scattered, in place of tokens.
    """
    if kind.attention is None:
        return 0.0
    if (latent := kind.latent) is None:
        return HALF
    gathered_channels = (latent.q_lora_rank or h) + latent.kv_lora_rank + latent.qk_rope_head_dim
    return HALF * (1 - INPUT_SHARE + INPUT_SHARE * gathered_channels / h)


def _gemm_s(m: float, n: float, k: float, flops_per_s: float, c: TimeConstants) -> float:
    """Seconds of a product of M x K and K x N: 2MNK / (rate * M/(M+m0) * N/(N+n0) * K/(K+k0))."""
    return 2 * (m + c.gemm_m0) * (n + c.gemm_n0) * (k + c.gemm_k0) / flops_per_s


def _num_operands(m: float, n: float, k: float) -> float:
    """Numbers in the input, the weights and the output of a linear layer; each is an operand of two of its three
    products of forward and backward, the output by its gradient."""
    return m * k + k * n + m * n


def _core_s(work: LayerWork, attention: Attention, flops_per_s: float, c: TimeConstants) -> float:
    """Seconds of the forward of attention in one layer beside its products with weights.

    A token attends to s/2 tokens on average, and to w (1 - w/(2s)) within a window of w tokens. Operators of a state
    compute in chunks, which is more work than its FLOPs; STATE_RATE is an estimate.
    """
    core_flops = attention.core_flops(work.seq_len, "masked", diagonal=0)
    rate_factor = STATE_RATE
    if attention.core_width:
        rate_factor = math.pow(min(1.0, attention.core_width / WIDE_HEAD), c.attention_width_power)
    return core_flops / work.tp * work.tokens / (flops_per_s * rate_factor)


def _scores_s(work: LayerWork, attention: Attention, rates: Rates, c: TimeConstants) -> float:
    """Seconds of the traffic of scores in the forward of a layer, where a program writes them to memory: of each head
    those of all s tokens for each token, also those that a mask hides."""
    if not c.score_bytes:
        return 0.0
    num_scores = attention.score_heads / work.tp * work.tokens * work.seq_len
    return c.score_bytes * num_scores / rates.hbm_bytes_per_s


def tp_call_s(num_bytes: float, tp_axes: GroupAxes, links: Network, c: TimeConstants) -> float:
    """Seconds of an all-gather or reduce-scatter of `num_bytes` bytes over the ranks of tp."""
    ((tp, _),) = tp_axes
    if tp == 1:
        return 0.0
    moved_bytes = (tp - 1) / tp * num_bytes
    if not crosses_nodes(tp_axes, links.nvlink_gpus):
        return c.tp_call_s + moved_bytes / (links.link_bytes_per_s * c.tp_link_efficiency)
    num_near = ranks_in_node(tp_axes, links.nvlink_gpus)
    node_bytes_per_s = links.leaving_bytes_per_s(num_near) * c.tp_node_link_efficiency
    return tp_hops_s(tp_axes, links, c) + moved_bytes / node_bytes_per_s


def tp_hops_s(tp_axes: GroupAxes, links: Network, c: TimeConstants) -> float:
    """Seconds of a collective over tp ranks on several nodes beside its transfer; 0 inside a node."""
    ((tp, _),) = tp_axes
    is_in_node = not crosses_nodes(tp_axes, links.nvlink_gpus)
    return 0.0 if is_in_node else (tp - 1) * (c.tp_hop_s + c.tp_probe_hops * links.hop_s)


def _ring_wait_s(
    work: LayerWork, kind: LayerType, attention_s: float, links: Network, c: TimeConstants
) -> float:
    """Seconds for which a ring of cp ranks waits for keys and values in one layer.

    Keys and values travel cp - 1 times in forward and as often in backward, and their gradients cp times, while
    each rank computes attention with the part that it has. What is gathered instead arrives before attention, and its
    gradients are summed after it.
    """
    if work.cp == 1 or kind.attention is None:
        return 0.0
    calls_s, moves_s = ring_s(work, kind.attention, links, c)
    hidden_s = attention_s * (1 - 1 / work.cp) if work.cp_exchange == "ring" else 0.0
    return calls_s + max(0.0, moves_s - hidden_s)


def ring_s(work: LayerWork, attention: Attention, links: Network, c: TimeConstants) -> tuple[float, float]:
    """Seconds of the calls of a ring in one layer, and those in which its keys, values and gradients travel."""
    crosses = crosses_nodes(work.cp_axes, links.nvlink_gpus)
    bytes_per_s = links.node_link_bytes_per_s if crosses else links.link_bytes_per_s
    kv_bytes = attention.exchanged_channels() / work.tp * work.tokens * work.element_bytes
    num_calls = num_transfers = 3.0 * work.cp - 2
    if work.cp_exchange == "allgather":  # in forward and in backward; gradients are summed in 4 bytes
        num_calls, num_transfers = 3.0, (work.cp - 1) * (2 + 4 / work.element_bytes)
    return num_calls * c.tp_call_s, num_transfers * kv_bytes / (bytes_per_s * c.tp_link_efficiency)
