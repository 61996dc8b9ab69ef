"""The FLOPs and bytes that each part of a training step must at least move on one rank without tp, cp and pp.

T are the tokens of a micro-batch, h, q, kv, f and V the widths of the residual stream, of all queries, of all keys, of
the feed-forward block and of the vocabulary. What recomputation adds is left out, since it need not be done.
"""

from typing import NamedTuple

from ultrabench.hardware import Hardware
from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.run import RunSpec
from ultrabench.sweep.config.load import load_profile

ATTENTION_PRODUCTS, ATTENTION = "products q, k, v, out", "attention"
FEED_FORWARD, POINTWISE = "products gate, up, down", "norms, rotations, activation, residuals"
CASTS = "casts and scales of fp8"
"""With the norms, activations and so on that are fused into them where layers are compiled."""
HEAD, LOSS, EMBEDDING, OPTIMIZER = "head", "loss", "embedding", "clip and optimizer"
REST = "the rest"
OF_LAYERS = (ATTENTION_PRODUCTS, ATTENTION, FEED_FORWARD, CASTS, POINTWISE)
"""Parts of every layer; the others are once in a step."""
PARTS = (*OF_LAYERS, HEAD, LOSS, EMBEDDING, OPTIMIZER, REST)
PRODUCTS = (ATTENTION_PRODUCTS, FEED_FORWARD)
"""The parts that kernel.precision=fp8 computes in 8 bits."""
BACKWARD_RECOMPUTES = 3.5 / 3
"""FLOPs of fused attention over those that count for MFU: backward computes the scores again (arXiv 2205.14135)."""


class Work(NamedTuple):
    """What a part must move in a step."""

    flops: float
    bytes: float


def step_work(spec: RunSpec) -> dict[str, Work]:
    """Part -> its work in a step, forward and backward."""
    shape, number_bytes, seq_len = spec.shape, ELEMENT_BYTES[spec.kernel.precision], spec.workload.seq_len
    tokens, layers = spec.layout.mbs * seq_len, shape.num_hidden_layers
    h, q, kv, f, vocabulary = (
        shape.hidden_size, shape.q_width, shape.kv_width, shape.intermediate_size, shape.vocab_size,
    )  # fmt: skip
    factor_bytes = 1 if spec.kernel.precision == "fp8" else number_bytes
    attention = products(tokens, [(h, q), (h, kv), (h, kv), (q, h)], factor_bytes, number_bytes)
    feed_forward = products(tokens, [(h, f), (h, f), (f, h)], factor_bytes, number_bytes)
    # Forward reads each input and weight and writes it in 8 bits, and so does backward with other scales; of gradients
    # of outputs backward reads each once and writes it twice. q, k and v share an input, and so do gate and up.
    inputs_and_weights = tokens * (2 * h + q + f) + 2 * h * (q + kv) + 3 * h * f
    outputs = tokens * (q + 2 * kv + 2 * h + 2 * f)
    casts = 2 * (number_bytes + 1) * inputs_and_weights + (number_bytes + 2) * outputs
    # Forward reads 5 and writes 4 numbers of h for two norms and two residuals, the first of which goes with a norm;
    # backward reads 3 and writes 1 for each norm. Rotations read and write q and k in both. The activation reads 2 and
    # writes 1 of f forward, and reads 3 and writes 2 backward.
    pointwise = tokens * number_bytes * (17 * h + 4 * (q + kv) + 8 * f)
    causal = tokens * shape.attention_flops(seq_len, "megatron") * BACKWARD_RECOMPUTES
    time = load_profile("ultrabench").time
    micro_batch = {
        ATTENTION_PRODUCTS: _times(layers, attention),
        # Forward reads q, k and v and writes the output; backward reads these and its gradient, and writes three.
        ATTENTION: _times(layers, Work(causal, tokens * number_bytes * 6 * (q + kv))),
        FEED_FORWARD: _times(layers, feed_forward),
        **({CASTS: _times(layers, Work(0, casts))} if spec.kernel.precision == "fp8" else {}),
        POINTWISE: _times(layers, Work(0, pointwise)),
        HEAD: products(tokens, [(h, vocabulary)], number_bytes, number_bytes),
        # The loss reads the logits twice and writes their gradient.
        LOSS: Work(0, 3 * tokens * vocabulary * number_bytes),
        EMBEDDING: Work(0, number_bytes * (3 * tokens * h + vocabulary * h)),
    }
    optimizer = Work(0, shape.num_params * (time.optimizer_bytes + time.clip_bytes))
    return {part: _times(spec.layout.gas, work) for part, work in micro_batch.items()} | {
        OPTIMIZER: optimizer
    }


def products(tokens: int, weights: list[tuple[int, int]], factor_bytes: int, number_bytes: int) -> Work:
    """The work of the three products with each weight: of forward, for the gradient of the input, for its own.

    Args:
        factor_bytes: bytes of a number of a factor.
        number_bytes: bytes of a number of a result.
    """
    flops = sum(6 * tokens * rows * columns for rows, columns in weights)
    # Each of the three matrices is the result of one product and a factor of the other two.
    numbers = sum(tokens * (rows + columns) + rows * columns for rows, columns in weights)
    return Work(flops, numbers * (2 * factor_bytes + number_bytes))


def _times(number: int, work: Work) -> Work:
    return Work(number * work.flops, number * work.bytes)


def bound(part: str, work: Work, hardware: Hardware, precision: str) -> tuple[str, float] | None:
    """Whether FLOPs or bytes bound a part, and the seconds of that at the rate of the data sheet; None without rates.

    The rate of fp8 counts for the products of layers only.
    """
    rates = hardware.peak_flops_per_s
    peak = rates.get("bf16" if precision == "fp8" and part not in PRODUCTS else precision)
    if peak is None:
        return None
    flops_s, bytes_s = work.flops / peak, work.bytes / hardware.hbm_bytes_per_s
    return ("FLOPs", flops_s) if flops_s > bytes_s else ("bytes", bytes_s)
