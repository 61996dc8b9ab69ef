"""What of a model the embedded kernel does not train, and what programs that come with ultrabench have no word for."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape

_OF_LAYERS: dict[str, Callable[[LayerType], object]] = {
    "latent attention": lambda t: t.latent,
    "the index of sparse attention": lambda t: t.latent and t.latent.index,
    "linear attention": lambda t: t.linear,
    "state space layers": lambda t: t.state_space,
    "layers without attention": lambda t: t.attention is None,
    "layers without a feed-forward block": lambda t: t.ffn is None,
    "attention within chunks": lambda t: t.grouped_query and t.grouped_query.attention_chunk_size,
    "attention sinks": lambda t: t.grouped_query and t.grouped_query.sinks,
    "gated attention": lambda t: t.grouped_query and t.grouped_query.output_gate != "none",
    "attention without rotation": lambda t: t.grouped_query and not t.grouped_query.rotary_width,
    "soft caps of attention": lambda t: t.grouped_query and t.grouped_query.attn_logit_softcapping,
    "a scale of attention": lambda t: t.grouped_query and t.grouped_query.attention_multiplier,
    "a bias of the output projection": lambda t: t.grouped_query and t.grouped_query.output_bias,
    "norms of q and k without weights": lambda t: t.grouped_query and t.grouped_query.qk_norm == "l2",
    "norms after blocks": lambda t: t.norms != "before",
    "feed-forward blocks without a gate": lambda t: t.feed_forward and not t.feed_forward.gated,
    "feed-forward blocks with biases": lambda t: t.feed_forward and t.feed_forward.mlp_bias,
    "activations other than silu": lambda t: (t.feed_forward or t.experts) and _activation(t) != "silu",
    "experts without a gate": lambda t: t.experts and not t.experts.gated,
    "experts with biases": lambda t: t.experts and (t.experts.expert_bias or t.experts.router_bias),
    "experts of a latent width": lambda t: t.experts and t.experts.moe_latent_size,
    "groups of experts": lambda t: t.experts and t.experts.n_group > 1,
    "a gate of the shared expert": lambda t: t.experts and t.experts.shared_expert_gate,
    "bounds of activations": lambda t: t.experts and t.experts.swiglu_limit,
}
"""What of a type of layer not every program trains -> whether the type has it."""
_OF_MODELS: dict[str, Callable[[ModelShape], object]] = {
    "multi-token prediction": lambda shape: shape.num_nextn_predict_layers,
    "embedding_multiplier": lambda shape: shape.embedding_multiplier != 1,
    "residual_multiplier": lambda shape: shape.residual_multiplier != 1,
    "logits_scaling": lambda shape: shape.logits_scaling != 1,
    "soft caps of logits": lambda shape: shape.final_logit_softcapping,
    "rotations of its rope_type": lambda shape: shape.rope_type != "default",
    "yarn rotations": lambda shape: shape.rope_scaling and shape.rope_scaling.rope_type == "yarn",
    "layers with different attention": lambda shape: len({*map(_heads, shape.kinds)}) > 1,
    "layers of these types": lambda shape: shape.layer_types,
}
"""What of a whole model not every program trains -> whether the model has it. The last one is of layers that differ in
what the commands of other programs take from one field, such as sizes."""
TRAINED = frozenset({
    "feed-forward blocks without a gate", "activations other than silu", "experts without a gate", "groups of experts",
    "latent attention", "yarn rotations", "layers of these types", "multi-token prediction",
})  # fmt: skip
"""Those of both tables that the embedded kernel trains."""


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
def special_features(shape: ModelShape) -> tuple[str, ...]:
    """The names of the features of a model that not every program trains."""
    of_layers = (name for name, has in _OF_LAYERS.items() if any(map(has, shape.kinds)))
    return *of_layers, *(name for name, has in _OF_MODELS.items() if has(shape))


def untrained_features(shape: ModelShape) -> Iterator[str]:
    """A reason for each feature of a model that the embedded kernel does not train."""
    for name in special_features(shape):
        if name in TRAINED:
            continue
        yield f"the embedded kernel does not train {name}, which {shape.name} has: use kernel=command or another model"
