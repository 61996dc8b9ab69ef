"""The structural rules of the grid: each is a function that tells why a layout cannot exist.

The order matters, because a candidate is counted under the first rule that rejects it.
"""

from collections.abc import Callable

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import split_stages

Rule = Callable[[Layout, ModelShape], str | None]
"""A function that returns the reason why a layout cannot exist, or None when it can."""


def tp_divides_heads(layout: Layout, shape: ModelShape) -> str | None:
    """Each tensor-parallel rank holds whole attention heads."""
    if shape.num_attention_heads % layout.tp:
        return f"tp={layout.tp} does not divide num_attention_heads={shape.num_attention_heads}"
    return None


def tp_divides_kv_heads(layout: Layout, shape: ModelShape) -> str | None:
    """Each tensor-parallel rank holds whole key/value heads."""
    if shape.num_key_value_heads % layout.tp:
        return f"tp={layout.tp} does not divide num_key_value_heads={shape.num_key_value_heads}"
    return None


def zero_needs_dp(layout: Layout, shape: ModelShape) -> str | None:
    """ZeRO shards over dp*cp ranks; with only one such rank every stage would be the same as ZeRO-0."""
    if layout.zero_stage > 0 and layout.dp * layout.cp == 1:
        return f"zero_stage={layout.zero_stage} needs dp*cp > 1; dp=1, cp=1"
    return None


def enough_micro_batches(layout: Layout, shape: ModelShape) -> str | None:
    """A pipeline needs at least pp-1 micro-batches; with fewer it is never filled."""
    if layout.gas < layout.pp - 1:
        return f"gas={layout.gas} is less than pp-1={layout.pp - 1}"
    return None


def no_empty_stage(layout: Layout, shape: ModelShape) -> str | None:
    """Every pipeline stage holds at least one block."""
    cut = f"pp*virtual_stages={layout.num_stages}" if layout.virtual_stages > 1 else f"pp={layout.pp}"
    for stage in split_stages(shape, layout.num_stages):
        if stage.num_blocks == 0:
            return f"{cut} leaves stage {stage.index} empty ({shape.num_hidden_layers} layers)"
    return None


RULES: tuple[tuple[str, Rule], ...] = (
    ("tp_divides_heads", tp_divides_heads),
    ("tp_divides_kv_heads", tp_divides_kv_heads),
    ("zero_needs_dp", zero_needs_dp),
    ("enough_micro_batches", enough_micro_batches),
    ("no_empty_stage", no_empty_stage),
)
"""The name and the function of each rule, in the order in which they are tried."""


def first_broken(layout: Layout, shape: ModelShape) -> tuple[str, str] | None:
    """The name and the reason of the first rule that rejects `layout`; None when the layout is valid."""
    reasons = ((name, rule(layout, shape)) for name, rule in RULES)
    return next(((name, reason) for name, reason in reasons if reason), None)
