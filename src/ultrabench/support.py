"""Which layouts a kernel can run, each refusal with its reason."""

from collections.abc import Callable

from ultrabench.kernel_choice import KernelChoice
from ultrabench.layout import Layout
from ultrabench.shape import ModelShape
from ultrabench.stages import split_stages

Refusal = Callable[[Layout, ModelShape, int], str | None]


def context_parallel(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """The embedded kernel has no context parallelism."""
    return f"cp={layout.cp}: the embedded kernel supports cp=1 only" if layout.cp > 1 else None


def virtual_stages(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """One pipeline stage on each rank."""
    if layout.virtual_stages > 1:
        return f"virtual_stages={layout.virtual_stages}: the embedded kernel supports 1 only"
    return None


def stage_params(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """A stage without parameters has nothing to train (it holds only the cast or the loss)."""
    for stage in split_stages(shape, layout.pp):
        if stage.num_params(shape) == 0:
            return f"stage {stage.index} has no parameters"
    return None


def zero2_pipeline(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Torch's pipeline schedules reduce gradients once a step, so ZeRO-2 would be ZeRO-1."""
    if layout.zero_stage == 2 and layout.pp > 1:
        return f"zero_stage=2 with pp={layout.pp} would run as zero_stage=1"
    return None


def schedule(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """1F1B needs at least pp micro-batches."""
    if layout.pp_schedule == "1f1b" and layout.gas < layout.pp:
        return f"1f1b needs gas >= pp; gas={layout.gas}, pp={layout.pp}"
    return None


def tensor_split(layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Tensor parallelism cuts heads, feed-forward, vocabulary and (sequence parallel) tokens."""
    cut = {
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "seq_len": seq_len,
    }
    for name, size in cut.items():
        if size % layout.tp:
            return f"tp={layout.tp} does not divide {name}={size}"
    return None


EMBEDDED: tuple[Refusal, ...] = (
    context_parallel,
    virtual_stages,
    stage_params,
    zero2_pipeline,
    schedule,
    tensor_split,
)


def refusal(kernel: KernelChoice, layout: Layout, shape: ModelShape, seq_len: int) -> str | None:
    """Why `kernel` cannot run `layout`, or None when it can."""
    if kernel.kind == "embedded":
        for rule in EMBEDDED:
            reason = rule(layout, shape, seq_len)
            if reason:
                return reason
        return None
    for word, allowed in kernel.supports.items():
        value = getattr(layout, word, None)
        if value is None:
            return f"kernel.supports names {word!r}, which is no word of a layout"
        if value not in allowed:
            return f"kernel {kernel.name} supports {word} in {list(allowed)}; {word}={value}"
    return None
