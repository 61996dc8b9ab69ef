"""Words of a command that describe the layers of a model and the stages of a pipeline, with one value for each run."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.feed_forward_type import Experts, FeedForward
from ultrabench.layer_type import BLOCK_TYPES, LayerType
from ultrabench.layout import Layout
from ultrabench.model_shape import REPLACED_BY_TYPES, SIZES_OF_TYPES, ModelShape
from ultrabench.record import field_types, values_of
from ultrabench.stages import split_stages

MIXED = "mixed"
"""The value of a word of layers that differ in it, so that no single value describes them."""
HYBRID_SYMBOLS = {
    "state_space": "M", "linear": "G", "grouped_query": "*", "latent": "+", "feed_forward": "-", "experts": "E",
}  # fmt: skip
"""Kind of block -> its letter in `hybrid_pattern`, as in hybrid_override_pattern of a config.json of Nemotron."""


class ModelWord(NamedTuple):
    """A word that is computed from a model."""

    value: Callable[[ModelShape], Any]
    fields: tuple[str, ...]
    """The fields of a model, or of its types of layers, that the word describes."""


def common_value(values: Iterable[Any]) -> Any:
    """The value that all of these are; MIXED if they differ, None if there are none."""
    different_values = {repr(value): value for value in values}
    if len(different_values) > 1:
        return MIXED
    return next(iter(different_values.values()), None)


def _blocks(shape: ModelShape, *block_types: type) -> list[Any]:
    """The blocks of these types in the types of layers of a model."""
    blocks = (getattr(kind, name) for kind in shape.kinds for name in BLOCK_TYPES)
    return [block for block in blocks if isinstance(block, block_types)]


def _expert_weights(experts: Experts) -> str:
    if experts.norm_topk_prob and experts.num_experts_per_tok == 1:
        return "1"
    return f"{experts.scoring_func}/sum" if experts.norm_topk_prob else experts.scoring_func


def _activation(block: FeedForward | Experts) -> str:
    gated, limited = " gated" * block.gated, " limited" * bool(getattr(block, "swiglu_limit", 0.0))
    return f"{block.hidden_act}{gated}{limited}"


def _linear_biases(kind: LayerType) -> str:
    """Which products of a layer have biases: none, qkv, all, or the names of those that do, joined by `+`."""
    has_bias: dict[str, bool] = {}
    for name in BLOCK_TYPES:
        block = getattr(kind, name)
        if isinstance(block, GroupedQuery):
            has_bias |= {"qkv": block.attention_bias, "output": block.output_bias}
        elif isinstance(block, Latent):
            has_bias |= {"latent": block.attention_bias}
        elif isinstance(block, FeedForward):
            has_bias |= {"feed_forward": block.mlp_bias}
        elif isinstance(block, Experts):
            has_bias |= {"experts": block.expert_bias, "router": block.router_bias}
    biased_names = [name for name, is_set in has_bias.items() if is_set]
    return "all" if len(biased_names) == len(has_bias) > 0 else "+".join(biased_names) or "none"


def _windowed_layers(shape: ModelShape) -> str:
    """A 1 for each layer with a window and a 0 for each other one, such as `[1,0]`; `none` if there are no windows."""
    windowed = [bool(kind.grouped_query and kind.grouped_query.sliding_window) for kind in shape.kinds]
    layers = [int(windowed[number]) for number in shape.kind_numbers]
    return f"[{','.join(map(str, layers))}]" if any(layers) else "none"


def _attention_kinds(shape: ModelShape) -> str:
    """The kinds of attention of a model, joined by `+`."""
    kinds = (
        name
        for name in BLOCK_TYPES
        for kind in shape.kinds
        if getattr(kind, name) is kind.attention is not None
    )
    return "+".join(dict.fromkeys(kinds)) or "none"


def _windows(shape: ModelShape) -> Any:
    blocks = _blocks(shape, GroupedQuery)
    return common_value(block.sliding_window for block in blocks if block.sliding_window)


def _rope_factor(shape: ModelShape) -> float | str:
    """Factor of rotations scaled as those of Llama 3.1; 1 without such scaling, `other` where its numbers differ."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.rope_type != "llama3":
        return 1.0
    numbers = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    return scaling.factor if numbers == (1.0, 4.0, 8192) else "other"


def _hybrid_letters(shape: ModelShape) -> str:
    """The letter of each layer if each has one block, as in models that mix state spaces and attention; else empty."""
    if any(kind.num_blocks > 1 for kind in shape.kinds):
        return ""
    letters = [
        next(letter for name, letter in HYBRID_SYMBOLS.items() if getattr(kind, name) is not None)
        for kind in shape.kinds
    ]
    return "".join(letters[number] for number in shape.kind_numbers)


MODEL_WORDS: dict[str, ModelWord] = {
    "sparse_layers": ModelWord(
        lambda shape: shape.sparse_layers, ("first_k_dense_replace", "decoder_sparse_step")
    ),
    "shared_expert_intermediate_size": ModelWord(
        lambda shape: common_value(b.shared_expert_intermediate_size for b in _blocks(shape, Experts)) or 0,
        ("n_shared_experts",),
    ),
    "expert_weights": ModelWord(
        lambda shape: common_value(map(_expert_weights, _blocks(shape, Experts))) or shape.expert_weights,
        ("scoring_func", "norm_topk_prob"),
    ),
    "attention_kinds": ModelWord(_attention_kinds, ("layer_types", "layer_order")),
    "windowed_layers": ModelWord(_windowed_layers, ()),
    "window": ModelWord(_windows, ("sliding_window",)),
    "activation": ModelWord(
        lambda shape: common_value(map(_activation, _blocks(shape, FeedForward, Experts))),
        ("hidden_act", "gated", "swiglu_limit"),
    ),
    "linear_biases": ModelWord(
        lambda shape: common_value(map(_linear_biases, shape.kinds)),
        ("attention_bias", "output_bias", "mlp_bias", "expert_bias", "router_bias"),
    ),
    "hybrid_pattern": ModelWord(_hybrid_letters, ()),
    "rope_factor": ModelWord(_rope_factor, ("rope_scaling",)),
    "norms": ModelWord(lambda shape: common_value(kind.norms for kind in shape.kinds), ()),
}
"""Word of a command -> how it follows from the model."""


def _field_value(shape: ModelShape, name: str) -> Any:
    """The value of a field of types of layers in those layers of a model that have it; None if none has it."""
    blocks = (block for block in _blocks(shape, *BLOCK_TYPES.values()) if hasattr(block, name))
    return common_value(getattr(block, name) for block in blocks)


TYPE_FIELDS = tuple(
    dict.fromkeys(name for block_type in BLOCK_TYPES.values() for name in field_types(block_type))
)
"""The fields of all kinds of blocks, each of which is a word of a command."""


@lru_cache(maxsize=256)  # a plan asks for each candidate
def model_words(shape: ModelShape) -> Mapping[str, Any]:
    """Word of a command -> its value for a model: its fields, those of its types of layers, and MODEL_WORDS.

    A field of a type of layer that the model has, too, counts as the model says it unless it has types of layers.
    """
    plain_values = (str, int, float, type(None))
    words = {name: value for name, value in values_of(shape).items() if isinstance(value, plain_values)}
    for name in TYPE_FIELDS:
        is_of_types = shape.layer_types and name in (*REPLACED_BY_TYPES, *SIZES_OF_TYPES)
        if name in words and not is_of_types:
            continue
        value = _field_value(shape, name)
        words[name] = words[name] if value is None and name in words else value
    if shape.layer_types:
        norm = words["qk_norm"]
        is_plain = norm in (None, False, "none", "head", "all")
        words["qk_norm"] = norm in ("head", "all") if is_plain else norm
        words["qk_norm_across_heads"] = norm == "all"
    return MappingProxyType(words | {name: word.value(shape) for name, word in MODEL_WORDS.items()})


PIPELINE_DIVISION, PIPELINE_LAYOUT, GAS_MODULO_PP = "pipeline_division", "pipeline_layout", "gas_modulo_pp"
UNEVEN, LISTED = "uneven", "listed"
"""Values of PIPELINE_DIVISION: unequal stages with pp_layout=auto, and stages with another pp_layout."""
FIELDS_BY_WORD = {name: word.fields for name, word in MODEL_WORDS.items()} | {
    PIPELINE_DIVISION: ("pp_layout",),
    PIPELINE_LAYOUT: ("pp_layout",),
}
"""Word of a command that is computed -> the names of the axes and sizes that it says."""
WORDS_OF_MODELS = (*TYPE_FIELDS, *FIELDS_BY_WORD, GAS_MODULO_PP)
"""Words of a command that follow from the types of layers, and computed ones."""


def pipeline_words(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    """Words of a command for the stages of a pipeline.

    pipeline_division is `none` without a pipeline. With pp_layout=auto it is `stages` or `virtual` where each stage has
    equally many layers, one or several stages on each rank, and else `uneven`. With other values it is `listed`, and
    pipeline_layout has the stages: E for the embedding, t for a layer, m for a module that predicts one more token, L
    for the loss, and | between stages. The pattern of a hybrid model has its stages itself.
    """
    remainder = layout.gas % layout.pp if layout.virtual_stages > 1 else 0
    division, stage_texts, pattern = "none", "", model_words(shape)["hybrid_pattern"]
    if layout.pp > 1:
        equal_division = "virtual" if layout.virtual_stages > 1 else "stages"
        auto_division = UNEVEN if shape.num_hidden_layers % layout.num_stages else equal_division
        division = auto_division if layout.pp_layout == "auto" else LISTED
        pp_layout = "even" if layout.pp_layout == "auto" else layout.pp_layout
        counts = [s.num_layers for s in split_stages(shape, layout.num_stages, pp_layout=pp_layout)]
        stage_texts = (
            "E" + "|".join("t" * count for count in counts) + "m" * shape.num_nextn_predict_layers + "L"
        )
        if pattern:
            ends = [sum(counts[: index + 1]) for index in range(len(counts))]
            pattern = "|".join(pattern[end - count : end] for end, count in zip(ends, counts, strict=True))
            division = "none"
    return {
        PIPELINE_DIVISION: division,
        PIPELINE_LAYOUT: stage_texts,
        GAS_MODULO_PP: remainder,
        "hybrid_pattern": pattern,
    }
