"""The bytes of one micro-batch on a rank of our own kernel, by what holds them.

The symbols are those of `ultrabench_memory`.
"""

from functools import lru_cache
from typing import NamedTuple

from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage

LOGITS, WIDE_LOGITS = 2**29, 2**27
"""Largest numbers of logits in a chunk of the loss and in one softmax: those of kernel/loss.py."""


class MicroBatch(NamedTuple):
    """Bytes of one micro-batch on a rank."""

    word: int
    """Bytes of a number in forward and backward."""
    hidden: float
    """The residual stream of the rank's tokens, t*h*w."""
    whole_hidden: float
    """The residual stream of the tokens of all ranks of tp, T*h*w."""
    kept: float
    """What a layer keeps with its recomputation."""
    full_every: int
    """n if every n-th layer keeps its input only; 0 if none does."""
    feed_forward: float
    """What the backward of a layer's feed-forward needs at most, all that the layer keeps included."""
    attention: float
    """What the backward of a layer's attention and of the norm before it needs, without gradients of weights as above."""
    norm: float
    """What the backward of the last norm needs."""
    loss: float
    """What the forward of head and loss needs at most, the gradients that it makes included."""
    table: float
    """The gradient of the head's weights that the backward of the loss makes."""
    table_kept: float
    """The gradient of the head's weights that the loss keeps for backward; it is fp32 where it is a sum."""

    def layer_kept(self, number: int) -> float:
        """What layer `number` of the model keeps."""
        return self.hidden if self.full_every and (number + 1) % self.full_every == 0 else self.kept

    def kept_by(self, stage: Stage) -> float:
        """What the layers of a stage keep, and its output; and the input of a norm that another stage sent."""
        recomputed = stage.num_recomputed(self.full_every)
        hiddens = recomputed + 1 + (stage.has_norm and not (stage.num_layers or stage.has_head))
        return (stage.num_layers - recomputed) * self.kept + hiddens * self.hidden


@lru_cache(maxsize=16384)
def micro_batch(
    shape: ModelShape, tokens: int, tp: int, sequence_parallel: bool, cp: int, cp_exchange: str, recompute: str, full_every: int, word: int,
    compiled: bool, losses: int,
) -> MicroBatch:  # fmt: skip
    """The sizes of a micro-batch, of which the ranks of tp have `tokens`.

    Args:
        losses: number of micro-batches that add to one gradient of the head's weights, at most 3.
    """
    h, q, kv, f = shape.hidden_size, shape.q_width, shape.kv_width, shape.intermediate_size
    heads, t = shape.num_attention_heads, tokens / tp
    own = t if sequence_parallel else tokens  # tokens of the residual stream and of norms
    channel_bytes, hidden, whole_hidden = t * word, own * h * word, tokens * h * word
    # A layer keeps the inputs and outputs of both norms, q, k, v and the output of attention, and gate, up, silu(gate)
    # and the product; and in fp32 a number for each norm and each head. A compiled one computes silu(gate) again.
    layer = 4 * hidden + channel_bytes * (2 * q + 2 * kv + 4 * f) + 4 * (t * heads + 2 * own)
    if shape.qk_norm:
        layer += channel_bytes * (q + kv) + 4 * t * (heads + shape.num_key_value_heads)
    sums = (1 if compiled else 2) * (tp > 1)  # what the second one adds to is the output of the layer
    selected = (1 + sums) * hidden + channel_bytes * (2 * q + kv + f) + 4 * t * heads
    whole = layer - channel_bytes * f * compiled
    kept = {"selective": selected, "attention": whole - 4 * t * heads}.get(recompute, whole)
    # Backward of the feed-forward: the gradient of the output and those of the product and of up; with tp the gathered
    # input, and its gradient before it is summed and scattered.
    feed_forward = layer + hidden + channel_bytes * 2 * f
    if tp > 1:
        # Without sequence parallelism that gradient is copied while it is summed.
        feed_forward = max(feed_forward, layer + hidden + 2 * whole_hidden) + (3 * hidden) * (
            not sequence_parallel
        )
    norm = own * h * (20 if word == 2 else 16)  # five copies in fp32, of which fp32 has one already
    feed_forward = max(feed_forward, layer - channel_bytes * 4 * f + hidden + norm)  # the norm before it
    # Of attention: the gradients of q, k, v and the output; with cp keys and values of other ranks and fp32 sums, too.
    core = channel_bytes * (2 * q + 2 * kv)
    if cp > 1 and cp_exchange == "ring":
        core = channel_bytes * (2.5 * q + 8 * kv) + 4 * t * (q + 4 * kv)
    elif cp > 1:  # keys and values of all ranks, and sums for all of them
        core = channel_bytes * (2.5 * q + (4 + 2 * cp) * kv) + 4 * t * (q + 2 * (cp + 1) * kv)
    attention = max(layer + hidden + core - 2 * hidden - channel_bytes * 4 * f, 3 * hidden + norm)
    logits, table, table_kept = _head_bytes(shape, tp, word, tokens, losses)
    loss = hidden + whole_hidden * (1 + (tp > 1)) + logits
    return MicroBatch(
        word, hidden, whole_hidden, kept, full_every, feed_forward, attention, norm, loss, table, table_kept
    )


def _head_bytes(
    shape: ModelShape, tp: int, word: int, tokens: int, losses: int
) -> tuple[float, float, float]:
    """The bytes of logits and of gradients of the head's weights; that gradient after backward, and before it.

    kernel/loss.py makes them. A chunk has its logits, and either the softmax of a part in fp32, twice in bf16, or a new
    gradient of the weights, beside the sum of those before.
    """
    vocabulary = max(1, shape.vocab_size // tp)
    rows = min(tokens, max(1, LOGITS // vocabulary))
    table = vocabulary * shape.hidden_size * word
    softmax = min(rows * vocabulary, WIDE_LOGITS) * (8 if word == 2 else word)
    sums = 4.0 * vocabulary * shape.hidden_size if losses > 1 or rows < tokens else 0.0
    # The first gradient is there in bf16 while it becomes fp32 for the second one.
    new_gradient = table * (2 if word == 2 and (rows < tokens or losses == 2) else 1)
    return rows * vocabulary * word + sums + max(softmax, new_gradient), table, sums or table
