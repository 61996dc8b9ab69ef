"""Tells which layouts a kernel can run, and the reason for each that it cannot run."""

from collections.abc import Iterator

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import split_stages


def refusal(kernel: KernelConfig, layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Why `kernel` cannot run `layout`, or None when it can."""
    if kernel.kind != "embedded":
        return next(_of_command(kernel, layout, shape), None)
    return next(_of_embedded(kernel, layout, shape, seq_len), None)


def _of_embedded(kernel: KernelConfig, layout: Layout, shape: ModelShape, seq_len: int) -> Iterator[str]:
    """The reasons why our own kernel cannot run a layout."""
    pp, schedule, zero_stage = layout.pp, layout.pp_schedule, layout.zero_stage
    # Context parallelism gives each rank two chunks of the sequence, all of the same length.
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        yield f"2*cp={2 * layout.cp} does not divide seq_len={seq_len}"
    # A stage without parameters has nothing to train (it holds only the cast or the loss).
    for stage in split_stages(shape, layout.num_stages):
        if stage.num_params(shape) == 0:
            large = f"pp={pp} is too large for num_hidden_layers={shape.num_hidden_layers}"
            yield f"{large}: stage {stage.index} has no parameters"
    # Torch's pipeline schedules reduce gradients once in each step, so ZeRO-2 would be just ZeRO-1.
    if zero_stage == 2 and pp > 1:
        yield f"zero_stage=2 with pp={pp} would run as zero_stage=1"
    # 1F1B fills the pipeline with pp micro-batches.
    if schedule == "1f1b" and layout.gas < pp:
        yield f"1f1b needs gas >= pp; gas={layout.gas}, pp={pp}"
    # Torch cuts gas into gas // pp rounds of equal size.
    rounds = max(1, layout.gas // pp)
    if schedule == "interleaved" and layout.gas % rounds:
        yield f"interleaved needs gas to be a multiple of its {rounds} rounds; gas={layout.gas}, pp={pp}"
    # With zbv and ZeRO-3, torch silently loses some gradients of the sharded parameters.
    if schedule == "zbv" and zero_stage == 3:
        yield "zbv with zero_stage=3 loses gradients in torch; take zero_stage 0 or 1, or another schedule"
    # Tensor parallelism splits heads, feed-forward and vocabulary, and sequence parallelism the tokens.
    cut = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = {name: getattr(shape, name) for name in cut} | {"seq_len/cp": seq_len // layout.cp}
    for name, size in sizes.items():
        if size % layout.tp:
            yield f"tp={layout.tp} does not divide {name}={size}"
    if schedule == "zbv" and (kernel.compile or kernel.recompute == "selective"):
        option = "compile=true" if kernel.compile else "recompute=selective"
        yield f"zbv splits the backward pass, which torch cannot do with {option}"


def _of_command(kernel: KernelConfig, layout: Layout, shape: ModelShape) -> Iterator[str]:
    """The reasons why a program of the user cannot run a layout, as kernel.supports says."""
    for word, allowed in kernel.supports.items():
        value = getattr(layout, word, getattr(shape, word, None))
        if value is None:
            yield f"kernel.supports names {word!r}, which is no word of a layout or a model"
        alike = word == "zero_stage" and layout.dp == 1  # with dp=1 no stage shards anything
        if value not in allowed and not alike:
            yield f"kernel {kernel.name} supports {word} in {list(allowed)}; {word}={value}"
