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
    tokens: int
    hidden: float
    """The residual stream of the rank's own tokens, t*h*w."""
    gathered: float
    """The residual stream of the tokens of all ranks of tp, T*h*w."""
    layer: float
    """What a layer keeps without recomputation."""
    kept: float
    """What a layer keeps with its recomputation."""
    full: int
    """n if every n-th layer keeps its input only; 0 if none does."""
    loss: float
    """Logits, their softmax and the gradients of the loss, at most."""
    table: float
    """The gradient of the head's weights, which the loss keeps for backward, as it does that of its input."""
    work: float
    """What the backward of a layer has at most beyond what the layer keeps."""
    work_in_place: float
    """What the backward of a layer has at most beyond what the layer keeps, where the gradients of weights are
    added in place to those of earlier micro-batches."""
    norm_work: float
    rope: float

    def layer_kept(self, number: int) -> float:
        """What layer `number` of the model keeps."""
        return self.hidden if self.full and (number + 1) % self.full == 0 else self.kept

    def kept_by(self, stage: Stage) -> float:
        """Activations that a stage keeps: its layers, its output or the input of the norm, and tables."""
        again = stage.num_recomputed(self.full)
        layers = (stage.num_layers - again) * self.kept + again * self.hidden
        ends = 9 * self.tokens * stage.has_embedding + stage.has_head * (self.gathered + self.table)
        both = stage.has_norm and not (stage.has_head or stage.num_layers)
        return layers + self.hidden * (1 + both) + self.rope + ends


@lru_cache(maxsize=16384)
def micro_batch(
    shape: ModelShape,
    tokens: int,
    own_len: int,
    tp: int,
    ring: bool,
    recompute: str,
    every: int,
    word: int,
    layer: int,
    compiled: bool,
) -> MicroBatch:
    """The sizes of a micro-batch of `tokens`, with `own_len` tokens of a sequence on the rank.

    Each `every`-th layer keeps its input only; `layer` is the number of parameters of a layer. The backward of a
    compiled layer computes silu(gate) again.
    """
    h, q, kv, f = shape.hidden_size, shape.q_width, shape.kv_width, shape.intermediate_size
    a, gathers, t = shape.num_attention_heads, tp > 1, tokens / tp
    tw, hidden, gathered = t * word, t * word * h, tokens * word * h
    heads, wide = a + shape.num_key_value_heads, (3 if compiled else 4) * f
    whole = tw * (4 * h + 2 * q + 2 * kv + wide) + 4 * t * (a + 2)
    whole += shape.qk_norm * (tw * (q + kv) + 4 * t * heads)
    selective = tw * (h + 2 * q + kv + f + 2 * h * gathers) + 4 * t * a
    kept = {"selective": selective, "attention": whole - 4 * t * a}.get(recompute, whole)
    loss, table = loss_bytes(shape, tp, word, tokens)
    norm_work = t * h * (20 if word == 2 else 4 * word)
    down, out, circling = f * h // tp * word, q * h // tp * word, 0.0
    if ring:
        circling = 4 * kv * tw + 4 * t * (q + 6 * kv)

    def work(new: int) -> float:
        """The most, with gradients of all weights so far if `new` is 1, and those of one product if it is 0."""
        attention = hidden - tw * (wide + 2 * h) - 4 * t + new * (3 * down + out)
        most = max(
            hidden + 2 * f * tw + down,
            attention + tw * (2 * q + 2 * kv) + circling,
            3 * hidden + norm_work + new * word * layer - whole,
        )
        if gathers:
            columns = attention + tw * (q + 2 * kv) + 4 * gathered
            most = max(most, hidden + 2 * gathered, hidden - 2 * f * tw + 4 * gathered + 2 * down, columns)
        return most

    rope = own_len * shape.head_width * word
    loss += hidden + gathered * (1 + gathers)
    return MicroBatch(
        word, tokens, hidden, gathered, whole, kept, every, loss, table, work(1), work(0), norm_work, rope
    )


def loss_bytes(shape: ModelShape, tp: int, word: int, tokens: int) -> tuple[float, float]:
    """The most bytes in the head's forward and those of its weight's gradient, as kernel/loss.py makes them.

    A chunk has its logits, and besides either the softmax of a part in fp32 (twice in bf16) or a new gradient of the
    weights. From the second chunk on gradients are added in fp32. 25 bytes a token are targets and their like.
    """
    vocabulary, h = max(1, shape.vocab_size // tp), shape.hidden_size
    rows = min(tokens, max(1, LOGITS // vocabulary))
    wide = min(rows, max(1, WIDE_LOGITS // vocabulary))
    table, total, chunks = vocabulary * h * word, 4.0 * vocabulary * h, -(-tokens // rows)
    summed = (0.0, table, total)[min(chunks, 3) - 1]
    products = table + summed + (total if chunks == 2 else 0.0)
    softmax = wide * vocabulary * (8 if word == 2 else word) + summed
    return rows * vocabulary * word + max(softmax, products) + 25 * tokens, table
