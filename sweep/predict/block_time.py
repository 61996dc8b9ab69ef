"""The time of each block of a model for one micro-batch in closed form: dense layers, layers with experts, and the head.

The symbols are those of `step_time`; docs/design/prediction.md derives each term.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from ultrabench.model_shape import ModelShape
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.time_constants import TimeConstants

NARROW_HEAD = 128
"""Width of a head from which attention reaches its full rate."""


class Work(NamedTuple):
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
    word: int
    """Bytes of one number."""
    ep: int
    busiest: float
    """Rows of the busiest rank of ep over the mean of all."""


class Rates(NamedTuple):
    """What a GPU reaches in the precision of a run."""

    linear: float
    """FLOPs per second of large products of linear layers."""
    product: float
    """FLOPs per second of other large products: those of the head, routers and experts, which fp8 leaves in bf16."""
    attention: float
    """FLOPs per second of attention with wide heads."""
    stream: float
    """Bytes per second of the memory."""
    cast_bytes: float
    """Memory traffic of scaling and casting a number of an operand of a linear layer; 0 where nothing is cast."""


class Parts(NamedTuple):
    """Seconds of one layer or of the head, for one micro-batch."""

    gemm: float
    attention: float
    memory_bound: float
    tp: float
    cp: float
    ep: float = 0.0


Times = tuple[float, ...]
"""Seconds of a dense layer, what recomputation adds to it, those of the head, and those of a layer with experts and
what recomputation adds to it."""


class Blocks(NamedTuple):
    """The times of the blocks of a model for one micro-batch, by part as in `Parts`."""

    gemm: Times
    attention: Times
    memory_bound: Times
    tp: Times
    cp: Times
    ep: Times
    whole: Times
    """The sums of the parts."""


_NO_PARTS = Parts(0.0, 0.0, 0.0, 0.0, 0.0)


class _FeedForward(NamedTuple):
    """Forward of what follows attention in a layer for one micro-batch: a feed-forward block, or router and experts."""

    up: float
    """Seconds of the products up to the activation."""
    down: float
    operands: float
    """Numbers in the inputs, weights and outputs of those products that are of linear layers."""
    selected: float
    """Seconds of those products that recompute=selective keeps."""
    token_bytes: float
    """Memory traffic of the activation for each token of the rank, forward and backward."""
    routed_bytes: float = 0.0
    """Memory traffic of routing for each token of the rank, forward and backward."""
    tp_share: float = 1.0
    """Share of a layer's collectives over tp that it makes with attention."""
    alltoall: float = 0.0
    """Seconds of an all-to-all over ep."""


@lru_cache(maxsize=65536)
def block_times(work: Work, links: Network, rates: Rates, c: TimeConstants) -> Blocks:
    """The times of the blocks that `work` describes."""
    shape, h, logits = work.shape, work.shape.hidden_size, work.shape.vocab_size / work.tp
    dense = _layer(work, _dense(work, shape.intermediate_size, rates, c), links, rates, c)
    head_gemm = 3 * _gemm_s(work.tokens, logits, h, rates.product, c)
    head_bytes = c.logit_bytes * work.tokens * logits
    call = _tp_call_s(work.tokens * h * work.word, work.tp, links, c)
    head = Parts(head_gemm, 0.0, head_bytes / rates.stream, call * c.tp_end_calls, 0.0)
    sparse = _NO_PARTS, _NO_PARTS
    if shape.num_experts:
        sparse = _layer(work, _experts(work, links, rates, c), links, rates, c)
    blocks = (*dense, head, *sparse)
    return Blocks._make([*zip(*blocks, strict=True), (*map(sum, blocks),)])


def _dense(work: Work, width: int, rates: Rates, c: TimeConstants) -> _FeedForward:
    """A feed-forward block of this width, cut by tp."""
    tokens, h, f = work.tokens, work.shape.hidden_size, width / work.tp
    up, down = (_gemm_s(tokens, 2 * f, h, rates.linear, c), _gemm_s(tokens, h, f, rates.linear, c))
    operands = _operands(tokens, 2 * f, h) + _operands(tokens, h, f)
    return _FeedForward(up, down, operands, up / 2, c.ffn_bytes * width)


def _experts(work: Work, links: Network, rates: Rates, c: TimeConstants) -> _FeedForward:
    """Router, experts and shared experts of a layer, on the busiest rank of ep.

    Each of its E/ep experts has the rows that the t = T/tp tokens of ep ranks send it, M = t*ep*k/E on average.
    """
    shape, h, t = work.shape, work.shape.hidden_size, work.tokens / work.tp
    num_experts, top_k, width = shape.num_experts, shape.num_experts_per_tok, shape.moe_intermediate_size
    rows, rows_of_token = t * work.ep * top_k / num_experts * work.busiest, top_k * work.busiest
    shared = _FeedForward(0.0, 0.0, 0.0, 0.0, 0.0)
    if shape.n_shared_experts:
        shared = _dense(work, shape.n_shared_experts * width, rates, c)
    router = _gemm_s(t, num_experts, h, rates.product, c)
    sent_bytes = rows_of_token * t * h * work.word
    return _FeedForward(
        up=router + shared.up + num_experts / work.ep * _gemm_s(rows, 2 * width, h, rates.product, c),
        down=shared.down + num_experts / work.ep * _gemm_s(rows, h, width, rates.product, c),
        operands=shared.operands,
        selected=shared.selected or router,
        token_bytes=shared.token_bytes + rows_of_token * c.ffn_bytes * width,
        routed_bytes=rows_of_token * c.routed_bytes * h + c.router_bytes * num_experts,
        tp_share=1.0 if shape.n_shared_experts else 0.5,
        alltoall=(c.tp_call_s + links.alltoall_s(sent_bytes, work.ep)) if work.ep > 1 else 0.0,
    )


def _layer(
    work: Work, ffn: _FeedForward, links: Network, rates: Rates, c: TimeConstants
) -> tuple[Parts, Parts]:
    """The times of a layer with this feed-forward, and what recomputation adds to them."""
    shape, tokens, tp, h = work.shape, work.tokens, work.tp, work.shape.hidden_size
    q, kv, stream = shape.q_width, shape.kv_width, rates.stream
    qkv = _gemm_s(tokens, (q + 2 * kv) / tp, h, rates.linear, c)
    forward = qkv + _gemm_s(tokens, h, q / tp, rates.linear, c) + ffn.up + ffn.down
    attention = _attention_s(work, rates.attention, c)
    head_norms = c.head_norm_bytes * (q + kv) * shape.qk_norm
    own = tokens / tp if work.sequence_parallel else tokens  # tokens of the residual stream and of norms
    traffic_s = (own * c.hidden_bytes * h + tokens / tp * (ffn.token_bytes + head_norms)) / stream
    traffic_s *= c.compiled_traffic if work.compiled else 1
    traffic_s += tokens / tp * ffn.routed_bytes / stream
    call = _tp_call_s(tokens * h * work.word, tp, links, c) * ffn.tp_share
    # Only an output that nothing follows is not computed again; eager products of fp8 save what they get after it.
    kept_down = ffn.down if tp == 1 and (work.compiled or not rates.cast_bytes) else 0.0
    gemm_again = attention_again = tp_again = ep_again = 0.0
    if work.recompute == "attention":
        attention_again = attention
    elif work.recompute == "selective":
        gemm_again = forward - kept_down - qkv * (q + kv) / (q + 2 * kv) - ffn.selected
        attention_again, tp_again = attention * (1 - 1 / work.cp), call * c.tp_recompute_calls / 2
    elif work.recompute != "none":
        gemm_again, attention_again, tp_again = forward - kept_down, attention, call * c.tp_recompute_calls
    if gemm_again and work.recompute != "selective":
        ep_again = ffn.alltoall  # rows are sent again, results are not
    traffic_again = traffic_s * (c.recompute_traffic - 1) * (gemm_again > 0)
    if (
        rates.cast_bytes
    ):  # both operands of three products in forward and backward, a third of them in forward
        operands = _operands(tokens, (q + 2 * kv) / tp, h) + _operands(tokens, h, q / tp) + ffn.operands
        cast_s = 2 * operands * rates.cast_bytes / stream
        traffic_s, traffic_again = traffic_s + cast_s, traffic_again + cast_s / 3 * gemm_again / forward
    ring_s = _ring_s(work, 3.5 * attention, links, c)
    return (
        Parts(3 * forward, 3.5 * attention, traffic_s, call * c.tp_calls, ring_s, 4 * ffn.alltoall),
        Parts(gemm_again, attention_again, traffic_again, tp_again, 0.0, ep_again),
    )


def _gemm_s(m: float, n: float, k: float, rate: float, c: TimeConstants) -> float:
    """Seconds of a product of M x K and K x N: 2MNK / (rate * M/(M+m0) * N/(N+n0) * K/(K+k0))."""
    return 2 * (m + c.gemm_m0) * (n + c.gemm_n0) * (k + c.gemm_k0) / rate


def _operands(m: float, n: float, k: float) -> float:
    """Numbers in the input, the weights and the output of a linear layer; each is an operand of two of its three
    products of forward and backward, the output by its gradient."""
    return m * k + k * n + m * n


def _attention_s(work: Work, rate: float, c: TimeConstants) -> float:
    """Seconds of the forward of attention in one layer: 4 FLOPs for each pair of tokens and query channel.

    A token attends to s/2 tokens on average, and to w (1 - w/(2s)) within a window of w tokens.
    """
    shape = work.shape
    window = min(work.seq_len, shape.sliding_window or work.seq_len)
    pairs = window * (1 - window / (2 * work.seq_len)) * work.tokens
    width_factor = math.pow(min(1.0, shape.head_width / NARROW_HEAD), c.attention_width_power)
    return 4 * shape.q_width / work.tp * pairs / (rate * width_factor)


def _tp_call_s(num_bytes: float, tp: int, links: Network, c: TimeConstants) -> float:
    """Seconds of an all-gather or reduce-scatter of `num_bytes` bytes over tp ranks."""
    if tp == 1:
        return 0.0
    moved_bytes = (tp - 1) / tp * num_bytes
    if tp <= links.gpus_per_node:
        return c.tp_call_s + moved_bytes / (links.link_bytes_per_s * c.tp_link_efficiency)
    node_bytes_per_s = links.node_link_bytes_per_s * links.gpus_per_node * c.tp_node_link_efficiency
    return tp_hops_s(tp, links, c) + moved_bytes / node_bytes_per_s


def tp_hops_s(tp: int, links: Network, c: TimeConstants) -> float:
    """Seconds of a collective over tp ranks on several nodes beside its transfer; 0 inside a node."""
    return (tp - 1) * (c.tp_hop_s + c.tp_probe_hops * links.hop_s) if tp > links.gpus_per_node else 0.0


def _ring_s(work: Work, attention: float, links: Network, c: TimeConstants) -> float:
    """Seconds for which a ring of cp ranks waits for keys and values in one layer.

    Keys and values travel cp - 1 times in forward and as often in backward, and their gradients cp times, while
    each rank computes attention with the part that it has. What is gathered instead arrives before attention, and its
    gradients are summed after it.
    """
    if work.cp == 1:
        return 0.0
    calls_s, moves_s = ring_parts_s(work, links, c)
    hidden_s = attention * (1 - 1 / work.cp) if work.cp_exchange == "ring" else 0.0
    return calls_s + max(0.0, moves_s - hidden_s)


def ring_parts_s(work: Work, links: Network, c: TimeConstants) -> tuple[float, float]:
    """Seconds of the calls of a ring in one layer, and those in which its keys, values and gradients travel."""
    is_in_node = work.cp * work.tp <= links.gpus_per_node
    bytes_per_s = links.link_bytes_per_s if is_in_node else links.node_link_bytes_per_s
    num_bytes, num_calls = 2 * work.shape.kv_width / work.tp * work.tokens * work.word, 3.0 * work.cp - 2
    num_moves = num_calls
    if work.cp_exchange == "allgather":  # in forward and in backward; gradients are summed in 4 bytes
        num_calls, num_moves = 3.0, (work.cp - 1) * (2 + 4 / work.word)
    return num_calls * c.tp_call_s, num_moves * num_bytes / (bytes_per_s * c.tp_link_efficiency)
