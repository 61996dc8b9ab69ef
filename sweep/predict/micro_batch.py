"""The bytes of one micro-batch on a rank of our own kernel, by what holds them.

The symbols are those of `ultrabench_memory`.
"""

from functools import lru_cache
from typing import NamedTuple

from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage

LOGITS, WIDE_LOGITS = 2**29, 2**27
"""Largest numbers of logits in a chunk of the loss and in one softmax: those of kernel/loss.py."""


class LayerBytes(NamedTuple):
    """Bytes of a layer for one micro-batch."""

    kept: float
    """What it keeps with its recomputation."""
    feed_forward: float
    """What the backward of its feed-forward or experts needs at most, all that the layer keeps included."""
    attention: float
    """What the backward of its attention and of the norm before it needs, without gradients of weights as above."""
    sent: float = 0.0
    """What the way back of the rows and the shared experts need, beside gradients of the experts' weights."""
    forward: float = 0.0
    """What the end of its forward needs beside what it keeps."""
    routed: float = 0.0
    """What it needs more there if all of it is computed again: its rows with their products, and two inputs of norms."""
    halfway: float = 0.0
    """The gradients of what its weights made, which a backward of inputs keeps for that of weights."""


class MicroBatch(NamedTuple):
    """Bytes of one micro-batch on a rank."""

    word: int
    """Bytes of a number in forward and backward."""
    hidden: float
    """The residual stream of the rank's tokens, t*h*w."""
    whole_hidden: float
    """The residual stream of the tokens of all ranks of tp, T*h*w."""
    angles: float
    """The cosines and sines of the positions of a sequence, which its layers share."""
    dense: LayerBytes
    sparse: LayerBytes
    """The bytes of a layer with experts."""
    full_every: int
    """n if every n-th layer keeps its input only; 0 if none does."""
    norm: float
    """What the backward of the last norm needs."""
    loss: float
    """What the forward of the head and the loss needs at most, the gradients that it makes included."""
    table: float
    """The gradient of the head's weights that the backward of the loss makes."""
    table_kept: float
    """The gradient of the head's weights that the loss keeps for backward; it is fp32 where it is a sum."""

    def layer_kept(self, number: int, *, is_sparse: bool) -> float:
        """What layer `number` of the model keeps."""
        if self.full_every and (number + 1) % self.full_every == 0:
            return self.hidden
        return self.sparse.kept if is_sparse else self.dense.kept

    def layers_kept(self, shape: ModelShape, first: int, number: int) -> float:
        """What `number` layers of the model from layer `first` on keep."""
        recomputed, sparse = 0, 0
        if interval := self.full_every:
            recomputed = (first + number) // interval - first // interval
        if shape.num_experts and interval != 1:
            sparse = num_whole_sparse(shape, first, number, interval)
        whole = (number - recomputed - sparse) * self.dense.kept + sparse * self.sparse.kept
        return whole + recomputed * self.hidden

    def forward(self, shape: ModelShape, stage: Stage) -> float:
        """What the end of the forward of a stage without head needs beside what it keeps."""
        last = stage.first_layer + stage.num_layers - 1
        if not (shape.num_experts and stage.num_layers and shape.is_sparse(last)):
            return 0.0
        is_whole = not self.full_every or (last + 1) % self.full_every
        return self.sparse.forward + self.sparse.routed * (not is_whole)

    def halfway(self, shape: ModelShape, stage: Stage, first: int) -> float:
        """What a stage keeps beside its activations between both halves of a backward, for its layers from `first` on.

        The first stage has no inputs, so that its second half is a whole backward.
        """
        number = stage.first_layer + stage.num_layers - first
        if stage.has_embedding:
            return 0.0
        sparse = shape.num_sparse_layers(first, number)
        return (number - sparse) * self.dense.halfway + sparse * self.sparse.halfway

    def kept_by(self, shape: ModelShape, stage: Stage) -> float:
        """What the layers of a stage keep, and its output; and the input of a norm that another stage sent."""
        layers = self.layers_kept(shape, stage.first_layer, stage.num_layers)
        hiddens = 1 + (stage.has_norm and not (stage.num_layers or stage.has_head))
        return layers + hiddens * self.hidden + (stage.num_layers > 0) * self.angles


@lru_cache(maxsize=4096)
def num_whole_sparse(shape: ModelShape, first: int, number: int, interval: int) -> int:
    """Number of the layers with experts among `number` layers that backward does not compute again in full."""
    layers = (n for n in range(first, first + number) if not interval or (n + 1) % interval)
    return sum(map(shape.is_sparse, layers))


class Tokens(NamedTuple):
    """Tokens of a micro-batch on a rank, and how it computes with them."""

    whole: int
    """Those that the ranks of tp have together."""
    of_sequence: int
    """Those of one sequence among them."""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_exchange: str
    recompute: str
    word: int
    compiled: bool
    busiest: float
    """Rows of the busiest rank of ep over the mean of all."""
    ep: int
    learned: bool
    """Whether routers choose the experts, instead of the positions of tokens."""
    fp8: bool
    """Whether products of linear layers have factors of 8 bits."""


@lru_cache(maxsize=16384)
def micro_batch(shape: ModelShape, tokens: Tokens, full_every: int, losses: int) -> MicroBatch:
    """The sizes of a micro-batch.

    Args:
        losses: number of micro-batches that add to one gradient of the head's weights, at most 3.
    """
    own = tokens.whole / tokens.tp if tokens.sequence_parallel else tokens.whole
    hidden = own * shape.hidden_size * tokens.word  # of the residual stream and of norms
    whole_hidden = float(tokens.whole * shape.hidden_size * tokens.word)
    norm = 12 * own * shape.hidden_size  # three copies in fp32
    logits, table, table_kept = _head_bytes(shape, tokens, losses)
    loss = whole_hidden * (1 + (tokens.tp > 1)) + logits
    dense = _dense_layer(shape, tokens, norm)
    sparse = _sparse_layer(shape, tokens, norm) if shape.num_experts else dense
    angles = float(tokens.of_sequence * shape.rotary_width * tokens.word)
    return MicroBatch(
        tokens.word, hidden, whole_hidden, angles, dense, sparse, full_every, norm, loss, table, table_kept
    )


def _attention_kept(shape: ModelShape, tokens: Tokens) -> float:
    """What a layer keeps beside its feed-forward or experts.

    They are the inputs and outputs of both norms, q, k, v and the output of attention, and in fp32 a number for each
    norm and each head.
    """
    t, heads = tokens.whole / tokens.tp, shape.num_attention_heads
    own = t if tokens.sequence_parallel else tokens.whole
    q, kv, channel_bytes = shape.q_width, shape.kv_width, t * tokens.word
    kept = (
        4 * (own * shape.hidden_size * tokens.word)
        + channel_bytes * (2 * q + 2 * kv)
        + 4 * (t * heads + 2 * own)
    )
    if shape.qk_norm:
        normed = 2 if shape.qk_norm_across_heads else heads + shape.num_key_value_heads
        kept += channel_bytes * (q + kv) + 4 * t * normed
    return kept


def _halfway(shape: ModelShape, tokens: Tokens) -> float:
    """The gradients of q, k, v and of the results of both norms, of attention, and of the feed-forward or experts."""
    t, q, kv = tokens.whole / tokens.tp, shape.q_width, shape.kv_width
    own = t if tokens.sequence_parallel else tokens.whole
    return tokens.word * (4 * own * shape.hidden_size + t * (q + 2 * kv + (q + kv) * shape.qk_norm))


def _attention_bytes(shape: ModelShape, tokens: Tokens, norm: float, layer: float, freed: float) -> float:
    """What the backward of attention and of the norm before it needs.

    Args:
        norm: what the backward of a norm needs.
        layer: what the layer keeps without recomputation.
        freed: the part of it that is freed by then.
    """
    t, cp = tokens.whole / tokens.tp, tokens.cp
    hidden = (t if tokens.sequence_parallel else tokens.whole) * shape.hidden_size * tokens.word
    q, kv, channel_bytes = shape.q_width, shape.kv_width, t * tokens.word
    # The gradients of q, k, v and the output; with cp keys and values of other ranks and fp32 sums, too.
    core = channel_bytes * (2 * q + 2 * kv)
    if cp > 1 and tokens.cp_exchange == "ring":
        core = channel_bytes * (2.5 * q + 8 * kv) + 4 * t * (q + 4 * kv)
    elif cp > 1:  # keys and values of all ranks, and sums for all of them
        core = channel_bytes * (2.5 * q + (4 + 2 * cp) * kv) + 4 * t * (q + 2 * (cp + 1) * kv)
    # With tp the gathered input of q, k and v, and its gradient before it is summed and scattered.
    gathered = 2 * tokens.whole * shape.hidden_size * tokens.word if tokens.tp > 1 else 0
    products = 4 * hidden + gathered + channel_bytes * (q + 2 * kv)
    return max(layer + hidden + core - 2 * hidden - freed, products, 3 * hidden + norm)


def _dense_layer(shape: ModelShape, tokens: Tokens, norm: float) -> LayerBytes:
    """The bytes of a dense layer, which also keeps gate, up, silu(gate) and the product. A compiled one computes
    silu(gate) again."""
    t, tp, f = tokens.whole / tokens.tp, tokens.tp, shape.intermediate_size
    own = t if tokens.sequence_parallel else tokens.whole
    channel_bytes, hidden = t * tokens.word, own * shape.hidden_size * tokens.word
    whole_hidden = tokens.whole * shape.hidden_size * tokens.word
    layer = _attention_kept(shape, tokens) + channel_bytes * 4 * f
    if (
        tokens.fp8 and tokens.compiled
    ):  # backward computes outputs of norms again and fuses that with scaling them
        layer -= hidden * (2 if tp == 1 else 1)
    sums = (1 if tokens.compiled else 2) * (tp > 1)  # what the second one adds to is the output of the layer
    q, kv, lse = shape.q_width, shape.kv_width, 4 * t * shape.num_attention_heads
    selected = (1 + sums) * hidden + channel_bytes * (2 * q + kv + f) + lse
    whole = layer - channel_bytes * f * tokens.compiled
    kept = {"selective": selected, "attention": whole - lse}.get(tokens.recompute, whole)
    # Backward of the feed-forward: the gradient of the output and those of the product and of up; with tp the gathered
    # input, and its gradient before it is summed and scattered.
    feed_forward = layer + hidden + channel_bytes * 2 * f
    if tp > 1:
        # Without sequence parallelism that gradient is copied while it is summed.
        feed_forward = max(feed_forward, layer - channel_bytes * 2 * f + 2 * hidden + 2 * whole_hidden)
        feed_forward += 0 if tokens.sequence_parallel else 3 * hidden
    if tokens.fp8 and not (tokens.compiled and tp == 1):
        # Before that, the gradient of the product, and its transpose: scaled in bf16, and in 8 bits. The gradient of the
        # output, which tp gathers, is there then, and no gradient of the weights, a third of which is added elsewhere.
        gathered = whole_hidden * (tp > 1 and tokens.sequence_parallel)
        scaled = channel_bytes * 2.5 * f + gathered - tokens.word * f * shape.hidden_size / tp
        feed_forward = max(feed_forward, layer + hidden + scaled)
    freed = channel_bytes * 4 * f
    feed_forward = max(feed_forward, layer - freed + hidden + norm)  # the norm before it
    halfway = _halfway(shape, tokens) + channel_bytes * 2 * f
    attention = _attention_bytes(shape, tokens, norm, layer, freed)
    return LayerBytes(kept, feed_forward, attention, halfway=halfway)


def _sparse_layer(shape: ModelShape, tokens: Tokens, norm: float) -> LayerBytes:
    """The bytes of a layer with experts.

    It keeps the rows that its experts got and, of each, gate, up and the product with its weight; of its shared experts
    what a feed-forward keeps; and in fp32 the scores of the router and the weights of the chosen ones. If the router
    chooses, a layer also keeps its route.
    """
    t, tp, h, word = tokens.whole / tokens.tp, tokens.tp, shape.hidden_size, tokens.word
    chosen, hidden, whole_hidden = t * shape.num_experts_per_tok, t * h * word, tokens.whole * h * word
    rows, lse = chosen * tokens.busiest, 4 * t * shape.num_attention_heads
    row_bytes, products = (
        rows * h * word,
        rows * shape.moe_intermediate_size * word,
    )  # of the rows, and of gate or up
    shared = t * shape.n_shared_experts * shape.moe_intermediate_size * word
    scores = 4 * t * shape.num_experts + 8 * chosen + 4 * rows + 8 * t
    routed = row_bytes + 3 * products + scores + route_bytes(shape, tokens) * tokens.learned
    layer = _attention_kept(shape, tokens) + routed + 4 * shared
    kept = layer - shared * tokens.compiled
    if tokens.recompute == "attention":
        kept -= lse
    elif tokens.recompute == "selective":
        sums = (1 + (shape.n_shared_experts > 0 and not tokens.compiled)) * (tp > 1)
        product = shared or t * shape.num_experts * word  # of gate, or of the router in its place
        kept = (1 + sums) * hidden + t * word * (2 * shape.q_width + shape.kv_width) + lse + product
        kept += (row_bytes + 4 * rows) * (tokens.ep > 1)
    # Before the gradients of gate and up: rows on their way, then five numbers for each of the products.
    moves = 1 + (tokens.ep > 1)
    experts = (
        layer + hidden + max(moves * row_bytes, row_bytes + products, 4 * products, 2 * row_bytes - products)
    )
    # After them: the gradients of the rows, which are sorted, sent and added up; and the shared experts.
    sent = layer - 3 * products + hidden + max(2 * products + row_bytes, moves * row_bytes)
    beside = max(2 * shared, 2 * (whole_hidden - shared) * (tp > 1)) if shared else 0.0
    sent = max(sent, layer - routed + 2 * hidden + beside)
    sent = max(sent, layer - routed - 4 * shared + hidden + norm)  # the norm before them
    attention = _attention_bytes(shape, tokens, norm, layer, routed + 4 * shared)
    halfway = _halfway(shape, tokens) + row_bytes + 2 * products + 2 * shared
    # The rows before and after their way, and those of each token side by side; the result of the shared experts.
    forward = (1 + moves) * row_bytes + hidden * (shared > 0)
    in_forward = row_bytes + 3 * products + 2 * hidden
    if tokens.recompute == "selective":
        forward += in_forward
    return LayerBytes(kept, experts, attention, sent, forward, in_forward, halfway)


def route_bytes(shape: ModelShape, tokens: Tokens) -> float:
    """Bytes of the route of a micro-batch: the chosen experts and the order of their rows, before and after their way."""
    orders = 4 + 2 * (tokens.ep > 1)
    return 8 * orders * tokens.whole / tokens.tp * shape.num_experts_per_tok


def _head_bytes(shape: ModelShape, tokens: Tokens, losses: int) -> tuple[float, float, float]:
    """The bytes of logits and of gradients of the head's weights; that gradient after backward, and before it.

    kernel/loss.py makes them. A chunk has its logits, and either the softmax of a part in fp32, twice in bf16, or a new
    gradient of the weights, beside the sum of those before, which is in fp32 from the second one on. Generated code
    has a new gradient of the logits instead, and a softmax only where ranks share the vocabulary.
    """
    word, vocabulary = tokens.word, max(1, shape.vocab_size // tokens.tp)
    rows = min(tokens.whole, max(1, LOGITS // vocabulary))
    summands = min(3, losses * -(-tokens.whole // rows))
    table, table_sum = vocabulary * shape.hidden_size * word, 4.0 * vocabulary * shape.hidden_size
    wide = word + 4 * (tokens.tp > 1) if tokens.compiled else 8 if word == 2 else word
    softmax = wide * min(rows * vocabulary, WIDE_LOGITS)
    before = (0, table, table_sum)[summands - 1]
    # The first gradient is there in bf16 while it becomes fp32 for the second one.
    after = table + table_sum * (summands > 1) + table * (summands == 2 and word == 2)
    return (
        rows * vocabulary * word + max(before + softmax, after),
        table,
        table_sum if summands > 1 else table,
    )
