"""What only some models have: whether the embedded kernel trains it, and by which word a command tells it."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.kernel_config import KernelConfig
from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape


class Feature(NamedTuple):
    """Something that some models have."""

    name: str
    word: str
    """The word by which a command tells it to a program of its own."""
    is_trained: bool = False
    """Whether the embedded kernel trains it."""


_OF_LAYERS: dict[Feature, Callable[[LayerType], object]] = {
    Feature("latent attention", "kv_lora_rank", is_trained=True): lambda t: t.latent,
    Feature("the index of sparse attention", "index"): lambda t: t.latent and t.latent.index,
    Feature("linear attention", "linear_num_key_heads"): lambda t: t.linear,
    Feature("state space layers", "mamba_num_heads"): lambda t: t.state_space,
    Feature("layers without attention", "hybrid_pattern"): lambda t: t.attention is None,
    Feature("layers without a feed-forward block", "hybrid_pattern"): lambda t: t.ffn is None,
    Feature("attention within chunks", "attention_chunk_size"): (
        lambda t: t.grouped_query and t.grouped_query.attention_chunk_size
    ),
    Feature("attention sinks", "sinks"): lambda t: t.grouped_query and t.grouped_query.sinks,
    Feature("gated attention", "output_gate"): (
        lambda t: t.grouped_query and t.grouped_query.output_gate != "none"
    ),
    Feature("attention without rotation", "partial_rotary_factor"): (
        lambda t: t.grouped_query and not t.grouped_query.rotary_width
    ),
    Feature("soft caps of attention", "attn_logit_softcapping"): (
        lambda t: t.grouped_query and t.grouped_query.attn_logit_softcapping
    ),
    Feature("a scale of attention", "attention_multiplier"): (
        lambda t: t.grouped_query and t.grouped_query.attention_multiplier
    ),
    Feature("a bias of the output projection", "linear_biases"): (
        lambda t: t.grouped_query and t.grouped_query.output_bias
    ),
    Feature("norms of q and k without weights", "qk_norm"): (
        lambda t: t.grouped_query and t.grouped_query.qk_norm == "l2"
    ),
    Feature("norms after blocks", "norms"): lambda t: t.norms != "before",
    Feature("feed-forward blocks without a gate", "activation", is_trained=True): (
        lambda t: t.feed_forward and not t.feed_forward.gated
    ),
    Feature("feed-forward blocks with biases", "linear_biases"): (
        lambda t: t.feed_forward and t.feed_forward.mlp_bias
    ),
    Feature("activations other than silu", "activation", is_trained=True): (
        lambda t: (t.feed_forward or t.experts) and _activation(t) != "silu"
    ),
    Feature("experts without a gate", "activation", is_trained=True): lambda t: (
        t.experts and not t.experts.gated
    ),
    Feature("experts with biases", "linear_biases"): (
        lambda t: t.experts and (t.experts.expert_bias or t.experts.router_bias)
    ),
    Feature("experts of a latent width", "moe_latent_size"): lambda t: (
        t.experts and t.experts.moe_latent_size
    ),
    Feature("groups of experts", "n_group", is_trained=True): lambda t: t.experts and t.experts.n_group > 1,
    Feature("a gate of the shared expert", "shared_expert_gate"): (
        lambda t: t.experts and t.experts.shared_expert_gate
    ),
    Feature("bounds of activations", "activation"): lambda t: t.experts and t.experts.swiglu_limit,
}
"""Feature of a type of layer -> whether the type has it."""
_OF_MODELS: dict[Feature, Callable[[ModelShape], object]] = {
    Feature("multi-token prediction", "num_nextn_predict_layers", is_trained=True): lambda shape: (
        shape.num_nextn_predict_layers
    ),
    Feature("embedding_multiplier", "embedding_multiplier"): lambda shape: shape.embedding_multiplier != 1,
    Feature("residual_multiplier", "residual_multiplier"): lambda shape: shape.residual_multiplier != 1,
    Feature("logits_scaling", "logits_scaling"): lambda shape: shape.logits_scaling != 1,
    Feature("soft caps of logits", "final_logit_softcapping"): lambda shape: shape.final_logit_softcapping,
    Feature("rotations of its rope_type", "rope_type"): lambda shape: shape.rope_type != "default",
    Feature("yarn rotations", "rope_type", is_trained=True): (
        lambda shape: shape.rope_scaling and shape.rope_scaling.rope_type == "yarn"
    ),
    Feature("layers with different attention", "attention_kinds"): (
        lambda shape: len({*map(_heads, shape.kinds)}) > 1
    ),
    Feature("layers of these types", "attention_kinds", is_trained=True): lambda shape: shape.layer_types,
}
"""Feature of a whole model -> whether the model has it. The last one is of layers that differ in what a field alone
cannot say, such as sizes."""


def _activation(layer_type: LayerType) -> str | None:
    block = layer_type.feed_forward or layer_type.experts
    return block.hidden_act if block else None


def _heads(layer_type: LayerType) -> object:
    """What layers that the embedded kernel trains have in common: their attention but for rotations and windows."""
    attention = layer_type.attention
    if not isinstance(attention, GroupedQuery | Latent):
        return attention
    if isinstance(attention, Latent):
        return replace(attention, rope_theta=1.0)
    return replace(attention, rope_theta=1.0, partial_rotary_factor=1.0, sliding_window=None)


@lru_cache(maxsize=256)  # a plan asks for those of a few models for each of its candidates
def special_features(shape: ModelShape) -> tuple[Feature, ...]:
    """The features of a model that not every program trains."""
    of_layers = (feature for feature, has in _OF_LAYERS.items() if any(map(has, shape.kinds)))
    return *of_layers, *(feature for feature, has in _OF_MODELS.items() if has(shape))


def untrained_reason(shape: ModelShape) -> str | None:
    """Why the embedded kernel does not train a model, with all the features that it lacks; None if it trains it."""
    names = [feature.name for feature in special_features(shape) if not feature.is_trained]
    if not names:
        return None
    *first_names, last_name = names
    names_text = f"{', '.join(first_names)} and {last_name}" if first_names else last_name
    reason = f"the embedded kernel does not train {names_text}, which {shape.name} has"
    return f"{reason}: use another kernel, such as kernel=megatron or kernel=command, or another model"


def axes_advice(kernel: KernelConfig, shape: ModelShape) -> str:
    """What to change where no layout can run; empty where no layout could, since the reason is the model."""
    is_untrained = kernel.trains_itself and untrained_reason(shape) is not None
    return "" if is_untrained else "; change the axes or the model"
