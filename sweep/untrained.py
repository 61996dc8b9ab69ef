"""What of a model the embedded kernel does not train."""

from collections.abc import Callable, Iterator

from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape

_OF_LAYERS: dict[str, Callable[[LayerType], object]] = {
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
"""What the embedded kernel does not train of a type of layer -> whether the type has it."""
_OF_MODELS: dict[str, Callable[[ModelShape], object]] = {
    "multi-token prediction": lambda shape: shape.num_nextn_predict_layers,
    "embedding_multiplier": lambda shape: shape.embedding_multiplier != 1,
    "residual_multiplier": lambda shape: shape.residual_multiplier != 1,
    "logits_scaling": lambda shape: shape.logits_scaling != 1,
    "soft caps of logits": lambda shape: shape.final_logit_softcapping,
    "rotations of its rope_type": lambda shape: shape.rope_type != "default",
    "layers with different attention": lambda shape: len({kind.attention for kind in shape.kinds}) > 1,
    "windows of attention in layer_types": lambda shape: (
        shape.layer_types and any(map(_has_window, shape.kinds))
    ),
}
"""What the embedded kernel does not train of a whole model -> whether the model has it."""


def _has_window(layer_type: LayerType) -> bool:
    attention = layer_type.grouped_query
    return bool(attention and attention.sliding_window)


def _activation(layer_type: LayerType) -> str | None:
    block = layer_type.feed_forward or layer_type.experts
    return block.hidden_act if block else None


def untrained_names(shape: ModelShape) -> Iterator[str]:
    """The names of the features of a model that the embedded kernel does not train."""
    if shape.layer_types:
        yield from (name for name, has in _OF_LAYERS.items() if any(map(has, shape.kinds)))
    yield from (name for name, has in _OF_MODELS.items() if has(shape))


def untold_names(shape: ModelShape) -> Iterator[str]:
    """The names of the features of a model that programs which come with ultrabench have no words for.

    They are those that the embedded kernel does not train, and what only layer_types can say.
    """
    if any(kind.latent for kind in shape.kinds):
        yield "latent attention"
    yield from untrained_names(shape)
    if shape.layer_types:
        yield "layers of these types"


def untrained_features(shape: ModelShape) -> Iterator[str]:
    """A reason for each feature of a model that the embedded kernel does not train."""
    for name in untrained_names(shape):
        yield f"the embedded kernel does not train {name}, which {shape.name} has: use kernel=command or another model"
