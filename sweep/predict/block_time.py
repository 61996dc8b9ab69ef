"""The time of each block of a model for one micro-batch in closed form: dense layers, layers with experts, and the head.

Symbols: c the constants, h hidden size, q and kv the widths of all queries and of all keys of a layer, with their copies;
the others are those of `step_time`. docs/design/prediction.md derives each term.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from ultrabench.layout import GroupAxes, crosses_nodes, ranks_in_node
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.time_constants import TimeConstants
from ultrabench.tensor_parallel import kv_width_of_ranks, padded_vocab_size

WIDE_HEAD = 128
"""Width of a head from which attention reaches its full rate."""


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


class Rates(NamedTuple):
    """What a GPU reaches in the precision of a run."""

    linear: float
    """FLOPs per second of large products of linear layers."""
    product: float
    """FLOPs per second of other large products: those of the head, routers and experts, which fp8 leaves in bf16."""
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
"""Seconds of a dense layer, what recomputation adds to it, those of the head, and those of a layer with experts and
what recomputation adds to it."""


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


_ZERO_SECONDS = PartSeconds(0.0, 0.0, 0.0, 0.0, 0.0)


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
    tp_share: float = 1.0
    """Share of a layer's collectives over tp that it makes with attention."""
    alltoall_s: float = 0.0
    """Seconds of an all-to-all over ep."""


@lru_cache(maxsize=65536)
def block_times(work: LayerWork, links: Network, rates: Rates, c: TimeConstants) -> BlockTimes:
    """The times of the blocks that `work` describes."""
    shape, h = work.shape, work.shape.hidden_size
    rank_vocab = padded_vocab_size(shape.vocab_size, work.tp) / work.tp
    dense_layer = _layer_times(work, _dense_ffn(work, shape.intermediate_size, rates, c), links, rates, c)
    head_gemm_s = 3 * _gemm_s(work.tokens, rank_vocab, h, rates.product, c)
    head_bytes = c.logit_bytes * work.tokens * rank_vocab
    call_s = tp_call_s(work.tokens * h * work.element_bytes, work.tp_axes, links, c)
    head = PartSeconds(head_gemm_s, 0.0, head_bytes / rates.hbm_bytes_per_s, call_s * c.tp_end_calls, 0.0)
    sparse_layer = _ZERO_SECONDS, _ZERO_SECONDS
    if shape.num_experts:
        sparse_layer = _layer_times(work, _expert_ffn(work, links, rates, c), links, rates, c)
    blocks = (*dense_layer, head, *sparse_layer)
    return BlockTimes._make([*zip(*blocks, strict=True), (*map(sum, blocks),)])


def _dense_ffn(work: LayerWork, ffn_width: int, rates: Rates, c: TimeConstants) -> _FeedForward:
    """A feed-forward block of this width, cut by tp."""
    tokens, h, rank_width = work.tokens, work.shape.hidden_size, ffn_width / work.tp
    up_s = _gemm_s(tokens, 2 * rank_width, h, rates.linear, c)
    down_s = _gemm_s(tokens, h, rank_width, rates.linear, c)
    num_operands = _num_operands(tokens, 2 * rank_width, h) + _num_operands(tokens, h, rank_width)
    return _FeedForward(up_s, down_s, num_operands, up_s / 2, c.ffn_bytes * ffn_width)


def _expert_ffn(work: LayerWork, links: Network, rates: Rates, c: TimeConstants) -> _FeedForward:
    """Router, experts and shared experts of a layer, on the busiest rank of ep.

    Each of its E/ep experts has the rows that the t = T/tp tokens of ep ranks send it, M = t*ep*k/E on average.
    """
    shape, h, rank_tokens = work.shape, work.shape.hidden_size, work.tokens / work.tp
    num_experts, expert_width = shape.num_experts, shape.moe_intermediate_size
    top_k, busiest_over_mean = shape.num_experts_per_tok, work.busiest_rows_over_mean
    expert_rows = rank_tokens * work.ep * top_k / num_experts * busiest_over_mean
    token_rows = top_k * busiest_over_mean
    shared_ffn = _FeedForward(0.0, 0.0, 0.0, 0.0, 0.0)
    if shape.n_shared_experts:
        shared_ffn = _dense_ffn(work, shape.n_shared_experts * expert_width, rates, c)
    router_s = _gemm_s(rank_tokens, num_experts, h, rates.product, c)
    rank_experts = num_experts / work.ep
    up_product_s = _gemm_s(expert_rows, 2 * expert_width, h, rates.product, c)
    sent_bytes = token_rows * rank_tokens * h * work.element_bytes
    return _FeedForward(
        up_s=router_s + shared_ffn.up_s + rank_experts * up_product_s,
        down_s=shared_ffn.down_s + rank_experts * _gemm_s(expert_rows, h, expert_width, rates.product, c),
        num_operands=shared_ffn.num_operands,
        kept_s=shared_ffn.kept_s or router_s,
        token_bytes=shared_ffn.token_bytes + token_rows * c.ffn_bytes * expert_width,
        routed_bytes=token_rows * c.routed_bytes * h + c.router_bytes * num_experts,
        tp_share=1.0 if shape.n_shared_experts else 0.5,
        alltoall_s=(c.tp_call_s + links.alltoall_s(sent_bytes, work.ep)) if work.ep > 1 else 0.0,
    )


def _layer_times(
    work: LayerWork, ffn: _FeedForward, links: Network, rates: Rates, c: TimeConstants
) -> tuple[PartSeconds, PartSeconds]:
    """The times of a layer with this feed-forward, and what recomputation adds to them."""
    shape, tokens, tp, h = work.shape, work.tokens, work.tp, work.shape.hidden_size
    q, kv, hbm_bytes_per_s = shape.q_width, kv_width_of_ranks(shape, tp), rates.hbm_bytes_per_s
    qkv_s = _gemm_s(tokens, (q + 2 * kv) / tp, h, rates.linear, c)
    forward_s = qkv_s + _gemm_s(tokens, h, q / tp, rates.linear, c) + ffn.up_s + ffn.down_s
    attention_s = _attention_s(work, rates.attention, c)
    head_norm_bytes = c.head_norm_bytes * (q + kv) * shape.qk_norm
    # Norms and the residual stream are on all tokens, unless sequence parallelism divides them.
    norm_tokens = tokens / tp if work.sequence_parallel else tokens
    traffic_bytes = norm_tokens * c.hidden_bytes * h + tokens / tp * (ffn.token_bytes + head_norm_bytes)
    traffic_s = traffic_bytes / hbm_bytes_per_s * (c.compiled_traffic if work.compiled else 1)
    traffic_s += tokens / tp * ffn.routed_bytes / hbm_bytes_per_s
    call_s = tp_call_s(tokens * h * work.element_bytes, work.tp_axes, links, c) * ffn.tp_share
    # Only an output that nothing follows is not computed again; eager products of fp8 save what they get after it.
    kept_down_s = ffn.down_s if tp == 1 and (work.compiled or not rates.cast_bytes) else 0.0
    more_gemm_s = more_attention_s = more_tp_s = more_ep_s = 0.0
    if work.recompute == "attention":
        more_attention_s = attention_s
    elif work.recompute == "selective":
        more_gemm_s = forward_s - kept_down_s - qkv_s * (q + kv) / (q + 2 * kv) - ffn.kept_s
        more_attention_s, more_tp_s = attention_s * (1 - 1 / work.cp), call_s * c.tp_recompute_calls / 2
    elif work.recompute != "none":
        more_gemm_s, more_attention_s = forward_s - kept_down_s, attention_s
        more_tp_s = call_s * c.tp_recompute_calls
    if more_gemm_s and work.recompute != "selective":
        more_ep_s = ffn.alltoall_s  # rows are sent again, results are not
    more_traffic_s = traffic_s * (c.recompute_traffic - 1) * (more_gemm_s > 0)
    if rates.cast_bytes:
        # Both operands of three products are cast in forward and backward, a third of them in forward.
        projections = _num_operands(tokens, (q + 2 * kv) / tp, h) + _num_operands(tokens, h, q / tp)
        num_operands = projections + ffn.num_operands
        cast_s = 2 * num_operands * rates.cast_bytes / hbm_bytes_per_s
        traffic_s, more_traffic_s = traffic_s + cast_s, more_traffic_s + cast_s / 3 * more_gemm_s / forward_s
    tp_s, cp_s = call_s * c.tp_calls, _ring_wait_s(work, 3.5 * attention_s, links, c)
    return (
        PartSeconds(3 * forward_s, 3.5 * attention_s, traffic_s, tp_s, cp_s, 4 * ffn.alltoall_s),
        PartSeconds(more_gemm_s, more_attention_s, more_traffic_s, more_tp_s, 0.0, more_ep_s),
    )


def _gemm_s(m: float, n: float, k: float, flops_per_s: float, c: TimeConstants) -> float:
    """Seconds of a product of M x K and K x N: 2MNK / (rate * M/(M+m0) * N/(N+n0) * K/(K+k0))."""
    return 2 * (m + c.gemm_m0) * (n + c.gemm_n0) * (k + c.gemm_k0) / flops_per_s


def _num_operands(m: float, n: float, k: float) -> float:
    """Numbers in the input, the weights and the output of a linear layer; each is an operand of two of its three
    products of forward and backward, the output by its gradient."""
    return m * k + k * n + m * n


def _attention_s(work: LayerWork, flops_per_s: float, c: TimeConstants) -> float:
    """Seconds of the forward of attention in one layer: 4 FLOPs for each pair of tokens and query channel.

    A token attends to s/2 tokens on average, and to w (1 - w/(2s)) within a window of w tokens.
    """
    shape = work.shape
    window_tokens = min(work.seq_len, shape.sliding_window or work.seq_len)
    token_pairs = window_tokens * (1 - window_tokens / (2 * work.seq_len)) * work.tokens
    rate_factor = math.pow(min(1.0, shape.head_width / WIDE_HEAD), c.attention_width_power)
    return 4 * shape.q_width / work.tp * token_pairs / (flops_per_s * rate_factor)


def tp_call_s(num_bytes: float, tp_axes: GroupAxes, links: Network, c: TimeConstants) -> float:
    """Seconds of an all-gather or reduce-scatter of `num_bytes` bytes over the ranks of tp."""
    ((tp, _),) = tp_axes
    if tp == 1:
        return 0.0
    moved_bytes = (tp - 1) / tp * num_bytes
    if not crosses_nodes(tp_axes, links.gpus_per_node):
        return c.tp_call_s + moved_bytes / (links.link_bytes_per_s * c.tp_link_efficiency)
    num_in_node = ranks_in_node(tp_axes, links.gpus_per_node)
    node_bytes_per_s = links.node_link_bytes_per_s * num_in_node * c.tp_node_link_efficiency
    return tp_hops_s(tp_axes, links, c) + moved_bytes / node_bytes_per_s


def tp_hops_s(tp_axes: GroupAxes, links: Network, c: TimeConstants) -> float:
    """Seconds of a collective over tp ranks on several nodes beside its transfer; 0 inside a node."""
    ((tp, _),) = tp_axes
    is_in_node = not crosses_nodes(tp_axes, links.gpus_per_node)
    return 0.0 if is_in_node else (tp - 1) * (c.tp_hop_s + c.tp_probe_hops * links.hop_s)


def _ring_wait_s(work: LayerWork, attention_s: float, links: Network, c: TimeConstants) -> float:
    """Seconds for which a ring of cp ranks waits for keys and values in one layer.

    Keys and values travel cp - 1 times in forward and as often in backward, and their gradients cp times, while
    each rank computes attention with the part that it has. What is gathered instead arrives before attention, and its
    gradients are summed after it.
    """
    if work.cp == 1:
        return 0.0
    calls_s, moves_s = ring_s(work, links, c)
    hidden_s = attention_s * (1 - 1 / work.cp) if work.cp_exchange == "ring" else 0.0
    return calls_s + max(0.0, moves_s - hidden_s)


def ring_s(work: LayerWork, links: Network, c: TimeConstants) -> tuple[float, float]:
    """Seconds of the calls of a ring in one layer, and those in which its keys, values and gradients travel."""
    crosses = crosses_nodes(work.cp_axes, links.gpus_per_node)
    bytes_per_s = links.node_link_bytes_per_s if crosses else links.link_bytes_per_s
    kv_bytes = 2 * kv_width_of_ranks(work.shape, work.tp) / work.tp * work.tokens * work.element_bytes
    num_calls = num_transfers = 3.0 * work.cp - 2
    if work.cp_exchange == "allgather":  # in forward and in backward; gradients are summed in 4 bytes
        num_calls, num_transfers = 3.0, (work.cp - 1) * (2 + 4 / work.element_bytes)
    return num_calls * c.tp_call_s, num_transfers * kv_bytes / (bytes_per_s * c.tp_link_efficiency)
