"""Tells which layouts a kernel can run, and the reason for each that it cannot run."""

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import split_stages


def context_split(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Context parallelism gives each rank two chunks of the sequence, all of the same length."""
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        return f"2*cp={2 * layout.cp} does not divide seq_len={seq_len}"
    return None


def stage_params(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """A stage without parameters has nothing to train (it holds only the cast or the loss)."""
    for stage in split_stages(shape, layout.num_stages):
        if stage.num_params(shape) == 0:
            layers = f"num_hidden_layers={shape.num_hidden_layers}"
            return f"pp={layout.pp} is too large for {layers}: stage {stage.index} has no parameters"
    return None


def zero2_pipeline(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Torch's pipeline schedules reduce gradients once in each step, so ZeRO-2 would be just ZeRO-1."""
    if layout.zero_stage == 2 and layout.pp > 1:
        return f"zero_stage=2 with pp={layout.pp} would run as zero_stage=1"
    return None


def schedule(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """1F1B needs at least pp micro-batches; interleaved cuts gas into gas // pp rounds of equal size, as torch does."""
    if layout.pp_schedule == "1f1b" and layout.gas < layout.pp:
        return f"1f1b needs gas >= pp; gas={layout.gas}, pp={layout.pp}"
    rounds = max(1, layout.gas // layout.pp)
    if layout.pp_schedule == "interleaved" and layout.gas % rounds:
        given = f"gas={layout.gas}, pp={layout.pp}"
        return f"interleaved needs gas to be a multiple of its {rounds} rounds; {given}"
    return None


def split_backward(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """With zbv and ZeRO-3, torch silently loses some gradients of the sharded parameters."""
    if layout.pp_schedule == "zbv" and layout.zero_stage == 3:
        return "zbv with zero_stage=3 loses gradients in torch; take zero_stage 0 or 1, or another schedule"
    return None


def tensor_split(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Tensor parallelism splits heads, feed-forward and vocabulary, and sequence parallelism the tokens."""
    cut = {
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "seq_len/cp": seq_len // layout.cp,
    }
    for name, size in cut.items():
        if size % layout.tp:
            return f"tp={layout.tp} does not divide {name}={size}"
    return None


EMBEDDED = (context_split, stage_params, zero2_pipeline, schedule, split_backward, tensor_split)


def refusal(kernel: KernelConfig, layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Why `kernel` cannot run `layout`, or None when it can."""
    if kernel.kind == "embedded":
        for rule in EMBEDDED:
            if reason := rule(layout, shape, seq_len):
                return reason
        if layout.pp_schedule == "zbv" and (kernel.compile or kernel.recompute == "selective"):
            named = "compile=true" if kernel.compile else "recompute=selective"
            return f"zbv splits the backward pass, which torch cannot do with {named}"
        return None
    for word, allowed in kernel.supports.items():
        value = getattr(layout, word, getattr(shape, word, None))
        if value is None:
            return f"kernel.supports names {word!r}, which is no word of a layout or a model"
        alike = word == "zero_stage" and layout.dp == 1  # with dp=1 no stage shards anything
        if value not in allowed and not alike:
            return f"kernel {kernel.name} supports {word} in {list(allowed)}; {word}={value}"
    return None
