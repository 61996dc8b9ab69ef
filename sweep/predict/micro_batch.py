"""The bytes of one micro-batch on a rank of our own kernel.

The symbols are those of `ultrabench_memory`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.layer_products import ROWS, WHOLE
from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.experts import busiest_share
from ultrabench.tensor_parallel import kinds_of_ranks, padded_vocab_size

CHUNK_LOGITS, SOFTMAX_LOGITS = 2**29, 2**27
"""Largest numbers of logits in a chunk of the loss and in one softmax: those of kernel/loss.py."""


class LayerBytes(NamedTuple):
    """Bytes of a layer for one micro-batch."""

    stored: float
    """What forward keeps for backward, without recomputation in full."""
    forward: float
    """What the end of forward needs beside what it keeps."""
    feed_forward: float
    """What the backward of the feed-forward or of the experts needs, all that the layer keeps included."""
    attention: float
    """What the backward of attention needs, all that the layer still keeps included."""
    qkv: float
    """What the backward of the products with q, k and v needs, all that the layer still keeps included."""
    qkv_weights: float
    """The gradients of the weights of q, k and v, which are made at once."""
    input_half: float
    """What the input half of a backward needs beside what the layer keeps."""
    halfway: float
    """The gradients that the input half of a backward keeps for the weight half."""


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class MicroBatch:
    """Bytes of one micro-batch on a rank."""

    shape: ModelShape
    element: int
    """Bytes of a number in forward and backward: w."""
    hidden: float
    """The residual stream of the rank's tokens, t*h*w."""
    whole_hidden: float
    """The residual stream of the tokens of all ranks of tp, T*h*w."""
    layers: tuple[LayerBytes, ...]
    """Those of a layer of each type of the model."""
    stored: tuple[float, ...]
    """`LayerBytes.stored` of each type."""
    halfway: tuple[float, ...]
    """`LayerBytes.halfway` of each type."""
    loss: float
    """What the forward of the head and the loss needs, the gradients that it makes included."""
    table: float
    """The gradient of the head's weights that the loss keeps for backward."""


class MicroBatchWork(NamedTuple):
    """What decides the bytes of a micro-batch."""

    shape: ModelShape
    tokens: int
    """T, as `rank_tokens` counts them."""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_exchange: str
    recompute: str
    compiled: bool
    is_fp8: bool
    element: int
    """Bytes of a number in forward and backward: w."""
    ep: int
    busiest_share: float
    """Rows of the busiest rank of ep over the mean of all."""
    pads_values: bool
    """Whether the implementation of attention pads values that are narrower than keys: flash does."""
    num_deferred: int
    """Micro-batches whose losses come before this one's while no backward has begun: those of afab."""
    whole_logits: float = 0.0
    """Bytes of each logit in a program whose loss takes all of them at once; 0: chunks, as in kernel/loss.py."""


def micro_batch_work(spec: RunSpec, whole_logits: float = 0.0) -> MicroBatchWork:
    """What decides the bytes of one micro-batch of a run; those of a run in fp64 are the bytes in fp32.

    Args:
        whole_logits: the field of `MicroBatchWork`.
    """
    layout, kernel = spec.layout, spec.kernel
    return MicroBatchWork(
        spec.shape,
        rank_tokens(spec),
        layout.tp,
        layout.sequence_parallel == "on",
        layout.cp,
        layout.cp_exchange,
        layout.recompute,
        kernel.compiles(layout.pp_schedule),
        kernel.precision == "fp8",
        min(4, ELEMENT_BYTES[kernel.precision]),
        layout.ep,
        busiest_share(kernel, layout, spec.shape),
        kernel.attention not in ("cudnn", "math"),
        layout.gas - 1 if layout.pp_schedule == "afab" else 0,
        whole_logits,
    )


@lru_cache(maxsize=16384)  # 255 of the playbook's 6,576 layouts differ in it
def micro_batch(work: MicroBatchWork) -> MicroBatch:
    """The bytes of one micro-batch."""
    tp, element = work.tp, work.element
    whole_hidden = float(work.tokens * work.shape.hidden_size * element)
    hidden = whole_hidden / tp if work.sequence_parallel else whole_hidden
    layers = tuple([_layer(work, hidden, whole_hidden, of) for of in _widths_of_types(work.shape, tp)])
    stored, halfway = tuple([layer.stored for layer in layers]), tuple([layer.halfway for layer in layers])
    loss, table = _loss(work)
    loss += whole_hidden * (1 + (tp > 1))
    return MicroBatch(work.shape, element, hidden, whole_hidden, layers, stored, halfway, loss, table)


def rank_tokens(spec: RunSpec) -> int:
    """T: the tokens of a micro-batch that a group of tp ranks holds together, at least 1:
    plans predict refused layouts, too.
    """
    return max(1, spec.layout.mbs * spec.workload.seq_len // spec.layout.cp)


class _LayerWidths(NamedTuple):
    """What a type of layer keeps of a token, in numbers."""

    norms: float
    """Inputs and outputs of norms, in hidden sizes."""
    attention: int
    """What attention keeps, divided by tp."""
    latents: int
    """What attention keeps of the rank's own tokens, whole: the latents of latent attention."""
    padding: int
    """What an implementation that pads adds to values: the channels by which they are narrower than keys."""
    kept_attention: int
    """What of attention recompute=selective keeps."""
    q: float
    """Width of the queries, and of the output of attention."""
    kv: float
    """Width of the keys, and of the values."""
    input_params: float
    """Parameters of the products by which attention begins on a rank."""
    output_params: float
    """Parameters of the product with which attention ends on a rank."""
    block: int
    """What a dense feed-forward block keeps, or that of shared experts."""
    width: int
    """Width of this block."""
    recomputed_block: int
    """What of this block a compiled layer computes again: the activation of a gate."""
    kept_block: int
    """What of a feed-forward block, or of a router, recompute=selective keeps."""
    scores: int
    """Experts whose scores a router keeps in fp32 of the rank's own tokens; 0 without experts."""
    row: int
    """Width of a token on its way to an expert; 0 without experts."""
    expert: int
    """Width of an expert."""
    kept_of_experts: int
    """Numbers that an expert keeps for each of its channels; 0 without experts."""


@lru_cache(maxsize=1024)  # a plan asks for those of a few types for each of its candidates
def _widths_of_types(shape: ModelShape, tp: int) -> tuple[_LayerWidths, ...]:
    """What each type of layer of a model keeps of a token, on all ranks of tp together."""
    return tuple(_widths(kind, shape.hidden_size, tp) for kind in kinds_of_ranks(shape, tp))


def _widths(kind: LayerType, h: int, tp: int) -> _LayerWidths:
    """What a type of layer keeps of a token."""
    attention, experts, block, width = kind.attention, kind.experts, 0, 0
    kept, latents, padding, q, kv, kept_attention = 0, 0, 0, 0.0, 0.0, 0
    input_params, output_params = 0.0, 0.0
    if attention is not None:
        (kept, latents), products = attention.kept(h), attention.products(h)
        q, kv = kept / 2, 0.0
        if kind.grouped_query is not None:
            q, kv = kind.grouped_query.q_width, kind.grouped_query.kv_width
        elif kind.latent is not None:
            num_heads, key_width = kind.latent.num_attention_heads, kind.latent.qk_head_dim
            q = num_heads * max(key_width, kind.latent.v_head_dim)
            kv = kind.latent.exchanged_channels() / 2
            padding = num_heads * max(0, key_width - kind.latent.v_head_dim)
        kept_attention = sum(p.inputs if p.cut == ROWS else round(p.kept_share * p.outputs) for p in products)
        input_params = sum(p.params if p.cut == WHOLE else p.params / tp for p in products if p.cut != ROWS)
        output_params = sum(p.params / tp for p in products if p.cut == ROWS)
    block_type = kind.feed_forward or experts
    if kind.feed_forward is not None:
        block, width = kind.feed_forward.kept(h).cut, kind.feed_forward.intermediate_size
    elif experts is not None:
        block, width = sum(experts.kept(h)), experts.shared_expert_intermediate_size
    return _LayerWidths(
        norms=kind.norm_channels(h) / h,
        attention=kept,
        latents=latents,
        padding=padding,
        kept_attention=kept_attention,
        q=q,
        kv=kv,
        input_params=input_params,
        output_params=output_params,
        block=block,
        width=width,
        recomputed_block=width * bool(block_type and block_type.gated),
        kept_block=width or (experts.num_experts if experts else 0),
        scores=experts.num_experts if experts else 0,
        row=experts.row_width(h) if experts else 0,
        expert=experts.moe_intermediate_size if experts else 0,
        kept_of_experts=experts.kept_of_experts if experts else 0,
    )


def _layer(work: MicroBatchWork, hidden: float, whole_hidden: float, of: _LayerWidths) -> LayerBytes:
    """The bytes of a layer of the type that keeps `of` of a token.

    It keeps the inputs and outputs of its norms, what attention keeps (q, k, v and the output), and gate, up,
    silu(gate) and the product of its feed-forward or its shared experts. Of the rows of its routed experts it keeps
    the input, gate, up and the product with their weights, and of its router the scores. A compiled layer computes
    silu(gate) again. Without a gate it keeps up and its activation, compiled or not.
    """
    compiled, is_sparse, tp = work.compiled, of.kept_of_experts > 0, work.tp
    channel = whole_hidden / work.shape.hidden_size / tp  # of the tokens of a rank, t*w
    q, width, rows, products = of.q, of.width, 0.0, 0.0
    if is_sparse:
        row_channel = channel * work.shape.num_experts_per_tok * work.busiest_share
        rows, products = row_channel * of.row, row_channel * of.expert
    block = channel * of.block + rows + of.kept_of_experts * products
    block += hidden / work.shape.hidden_size * 4 / work.element * of.scores
    latents = hidden / work.shape.hidden_size * of.latents
    layer = of.norms * hidden + channel * of.attention + latents + block
    if compiled and work.is_fp8 and not is_sparse:
        layer -= hidden * (2 if tp == 1 else 1)  # backward computes the outputs of norms again
    stored = layer - channel * of.recomputed_block * compiled
    if work.recompute == "selective":  # the inputs of both blocks, q, v, the output of attention, and gate
        sums = (1 + (width > 0 and not compiled)) * (tp > 1)
        stored = (1 + sums) * hidden + channel * (of.kept_attention + of.kept_block)
        stored += rows * (work.ep > 1)
        if work.pads_values and not compiled:
            stored += channel * of.padding  # eager calls keep the output of the implementation
    # The rows of experts before and after their way, those of each token side by side, and what recomputation drops.
    forward = (2 + (work.ep > 1)) * rows + hidden * (width > 0)
    forward += (rows + of.kept_of_experts * products + 2 * hidden) * (work.recompute in ("selective", "full"))
    # The gradients of the output, and of gate and up or the product; with tp the gathered input and its gradient.
    feed_forward = (
        layer + hidden + ((1 + of.kept_of_experts) * products if is_sparse else channel * of.block / 2)
    )
    if tp > 1 and not is_sparse:
        feed_forward = max(feed_forward, layer - channel * of.block / 2 + 2 * hidden + 2 * whole_hidden)
        # The gradient of the output, gathered for the product with down, and the gradient of what that product got.
        gathered = whole_hidden * work.sequence_parallel
        feed_forward = max(feed_forward, layer + hidden + gathered + channel * width)
    if is_sparse:  # the gradients of the rows, on their way back
        feed_forward = max(feed_forward, layer + hidden + (2 + (work.ep > 1)) * rows)
    gradients = channel * _gradients_of_attention(work, q, of.kv, of.padding)
    attention = layer - block - hidden + gradients
    qkv = layer - block - channel * q + 2 * whole_hidden * (tp > 1)
    qkv_weights, out_weights = (float(work.element * num) for num in (of.input_params, of.output_params))
    # The backward of a norm has three copies in fp32 beside the gradients of its output and of the residual stream.
    # That of the feed-forward block comes before the gradient of the output projection, that of attention comes last.
    of_norm = (2 + 12 / work.element) * hidden
    attention = max(attention, layer - block - hidden + of_norm - out_weights)
    qkv = max(qkv, hidden + of_norm)
    # The gradients of the feed-forward and of its norm, and then those of attention.
    halfway = 2 * hidden + channel * of.block / 2 + rows + 2 * products
    input_half = max(feed_forward - layer, halfway + gradients)
    halfway += 2 * hidden + channel * (of.attention - q)
    input_half = max(input_half, halfway + whole_hidden * (tp > 1))
    return LayerBytes(stored, forward, feed_forward, attention, qkv, qkv_weights, input_half, halfway)


def _gradients_of_attention(work: MicroBatchWork, q: float, kv: float, padding: float) -> float:
    """Channels of the gradients of q, k, v and the output; with cp of keys and values of others and fp32 sums, too.

    With cp there are those of a part beside those of the part before. A ring has the pair of keys and values of the
    rank, the one at work and the one on its way, and of the sums two; a third one begins to arrive
    when a part is done. An implementation that pads values needs wide copies of values, output and its gradient, and
    makes a wide gradient of the values; with cp a part has half of the queries.
    """
    cp, element = work.cp, work.element
    is_padded = work.pads_values and padding > 0
    if cp == 1:
        return 2 * q + 2 * kv - padding + 4 * q * is_padded
    pairs, sums = (cp + 1, cp) if work.cp_exchange == "allgather" else (min(3, cp), 2)
    channels = 2.5 * q + (4 + 2 * pairs) * kv - padding + 4 / element * (q + 2 * sums * kv)
    third_sum = ((8 / element - 2) * kv - q) * (work.cp_exchange == "ring")
    return channels + max(0, third_sum, 3 * q * is_padded)


def _loss(work: MicroBatchWork) -> tuple[float, float]:
    """The bytes of logits with gradients of the head's weights, and of those gradients after the loss.

    kernel/loss.py makes them. A chunk has its logits, and either the softmax of a part in fp32, twice in bf16, or a new
    gradient of the weights, beside the sum of those before, which is in fp32 from the second one on. Generated code
    has a new gradient of the logits instead, and a softmax only where ranks share the vocabulary.
    """
    tp, tokens, element = work.tp, work.tokens, work.element
    vocabulary = padded_vocab_size(work.shape.vocab_size, tp) // tp
    if work.whole_logits:
        return work.whole_logits * tokens * vocabulary, 0.0
    table, table_sum = (vocabulary * work.shape.hidden_size * width for width in (float(element), 4.0))
    softmax_width = element + 4 * (tp > 1) if work.compiled else 8 if element == 2 else element
    rows = min(tokens, max(1, CHUNK_LOGITS // vocabulary))
    chunks, peak_bytes = -(-tokens // rows), 0.0
    sums_before = chunks * work.num_deferred
    for chunk in range(min(3, chunks)):
        logits = vocabulary * (rows if chunk < chunks - 1 else tokens - chunk * rows)
        num_earlier = min(2, sums_before + chunk)
        before = (0.0, table, table_sum)[num_earlier]
        # The first gradient is there in bf16 while it becomes fp32 for the second one.
        after = (table, table_sum + (2 if element == 2 else 1) * table, table_sum + table)[num_earlier]
        peak_bytes = max(
            peak_bytes, logits * element + max(before + softmax_width * min(logits, SOFTMAX_LOGITS), after)
        )
    return peak_bytes, table_sum if sums_before + chunks > 1 else table
