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
    second_loss: float
    """What the second of several losses that share a gradient of the head's weights needs beyond a later one."""
    table: float
    """The gradient of the head's weights that the backward of the loss makes."""
    table_kept: float
    """The gradient of the head's weights that the loss keeps for backward; it is fp32 where it is a sum."""
    work: tuple[float, float]
    """What the backward of a layer has at most beyond what the layer keeps; and of the stage's last layer, where the
    gradient of its output came as a message, which stays."""
    work_in_place: tuple[float, float]
    """What `work` is where the gradients of weights are added in place to those of earlier micro-batches."""
    norm_work: float
    rope: float

    def layer_kept(self, number: int) -> float:
        """What layer `number` of the model keeps."""
        return self.hidden if self.full and (number + 1) % self.full == 0 else self.kept

    def left_by(self, stage: Stage) -> float:
        """Activations of a stage when only its first layer is left, with its output where that was sent."""
        return self.rope + self.layer_kept(stage.first_layer) + self.hidden * (not stage.has_norm)

    def kept_by(self, stage: Stage) -> float:
        """Activations that a stage keeps: its layers, its output or the input of the norm, and tables."""
        again = stage.num_recomputed(self.full)
        layers = (stage.num_layers - again) * self.kept + again * self.hidden
        ends = 9 * self.tokens * stage.has_embedding + stage.has_head * (self.gathered + self.table_kept)
        both = stage.has_norm and not (stage.has_head or stage.num_layers)
        return layers + self.hidden * (1 + both) + self.rope * (stage.num_layers > 0) + ends


@lru_cache(maxsize=16384)
def micro_batch(
    shape: ModelShape,
    tokens: int,
    own_len: int,
    tp: int,
    cp: int,
    recompute: str,
    every: int,
    word: int,
    layer: int,
    compiled: bool,
    losses: int,
) -> MicroBatch:
    """The sizes of a micro-batch of `tokens`, with `own_len` tokens of a sequence on the rank.

    Each `every`-th layer keeps its input only; `layer` is the number of parameters of a layer. The backward of a
    compiled layer computes silu(gate) again. `losses` micro-batches share one gradient of the head's weights.
    """
    h, q, kv, f = shape.hidden_size, shape.q_width, shape.kv_width, shape.intermediate_size
    a, gathers, t = shape.num_attention_heads, tp > 1, tokens / tp
    tw, hidden, gathered = t * word, t * word * h, tokens * word * h
    wide = (3 if compiled else 4) * f
    whole = tw * (4 * h + 2 * q + 2 * kv + wide) + 4 * t * (a + 2)
    whole += shape.qk_norm * (tw * (q + kv) + 4 * t * (a + shape.num_key_value_heads))
    selective = tw * (h + 2 * q + kv + f + 2 * h * gathers) + 4 * t * a
    kept = {"selective": selective, "attention": whole - 4 * t * a}.get(recompute, whole)
    loss, second, table, before, table_kept = loss_bytes(shape, tp, word, tokens, losses)
    got = gathers * gathered * (2 + (tokens > own_len))  # tokens of several sequences are put in order
    norm_work = t * h * (20 if word == 2 else 4 * word)
    down, out, core = f * h // tp * word, q * h // tp * word, tw * (2 * q + 2 * kv)
    if cp > 1:  # keys and values on their way, fp32 sums, and the gradients of a turn and of the one before
        core = tw * (1.5 * q + (8 if cp > 2 else 6) * kv) + 4 * t * (q + 4 * kv)
        core += max(tw * (q + 2 * kv), 8 * t * kv)

    def work(new: int) -> tuple[float, float]:
        """`MicroBatch.work`, with gradients of all weights so far if `new` is 1, and those of one product if it is 0."""
        attention = hidden - tw * (wide + 2 * h) - 4 * t + new * 3 * down
        freed = 3 * hidden - whole  # of the layer only its input is left
        ffn = hidden + max(f * tw + max(f * tw + new * down, down), norm_work - wide * tw + new * 3 * down)
        rest = max(attention + new * out + core, freed + norm_work + new * word * layer)
        if gathers:
            columns = max(4 * gathered + new * down, 2 * hidden + 2 * gathered + (2 + new) * down)
            ffn = max(ffn, hidden + got, hidden - 2 * f * tw + columns)
            rest = max(rest, freed + tw * (q + 2 * kv) + 4 * gathered + new * (3 * down + out))
        return max(ffn, rest), max(ffn - hidden, rest)

    rope = own_len * shape.head_width * word
    loss = hidden + max(loss + gathered * (1 + gathers), before + got)
    return MicroBatch(
        word, tokens, hidden, gathered, whole, kept, every, loss, second, table, table_kept,
        work(1), work(0), norm_work, rope,
    )  # fmt: skip


def loss_bytes(shape: ModelShape, tp: int, word: int, tokens: int, losses: int) -> tuple[float, ...]:
    """The most bytes in the head's forward, and `second_loss`; its weight's gradient in backward, before and after it.

    kernel/loss.py makes them. A chunk has its logits, and besides either the softmax of a part in fp32 (twice in
    bf16) or a new gradient of the weights. From the second chunk on gradients are added in fp32, those of `losses`
    micro-batches too; the first one is converted then. 25 bytes a token are targets and their like.
    """
    vocabulary, h = max(1, shape.vocab_size // tp), shape.hidden_size
    rows = min(tokens, max(1, LOGITS // vocabulary))
    wide = min(rows, max(1, WIDE_LOGITS // vocabulary))
    table, total, chunks = vocabulary * h * word, 4.0 * vocabulary * h, -(-tokens // rows)
    sums, softmax = (0.0, table, total), wide * vocabulary * (8 if word == 2 else word)
    before, last = min((losses - 1) * chunks, 2), min(losses * chunks - 1, 2)
    needs = [s + max(softmax, table + total * (n == 1 and word == 2)) for n, s in enumerate(sums)]
    most = rows * vocabulary * word + max(needs[before : last + 1]) + 25 * tokens
    return most, needs[1] - needs[2], table, sums[before], sums[min(losses * chunks, 2)]
