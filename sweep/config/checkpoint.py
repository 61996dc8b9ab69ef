"""Makes a ModelShape from the config.json of a checkpoint."""

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError, ShapeError, nearest_name
from ultrabench.model_shape import RENAMED, ModelShape, RopeScaling
from ultrabench.record import field_types, from_dict, value_from

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")),
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": None,
    "head_dim": None, "sliding_window": None, "use_sliding_window": None,
}  # fmt: skip
"""The keys that models of all types read -> the usual value of an absent key; None if there is none."""
_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096}
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28, **_WINDOW_DEFAULTS},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, **_WINDOW_DEFAULTS},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": None, "num_experts_per_tok": None},
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts": None, "num_experts_per_tok": None, "norm_topk_prob": False},
    "qwen3_moe": {
        "num_key_value_heads": 4, **_WINDOW_DEFAULTS, "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None,
        "decoder_sparse_step": 1, "norm_topk_prob": False,
    },
    "glm4_moe": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "qk_norm": False,
        "partial_rotary_factor": 0.5, "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None,
        "n_shared_experts": None, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    "dots1": {
        "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62, "num_experts": None,
        "num_experts_per_tok": None, "moe_intermediate_size": None, "n_shared_experts": None,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
}  # fmt: skip
"""model_type -> the keys that models of this type read beside DEFAULTS, with their values where a key is absent.

Sizes of experts have no such value: a file without them is more likely incomplete than meant for the usual model.

Only models of these types can be trained. The layers for multi-token prediction (num_nextn_predict_layers) are
read and left out, as transformers leaves them out in training.
Source: LlamaConfig, MistralConfig and so on of transformers, which also give the values of DEFAULTS.
"""
FIXED_VALUES: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "olmoe": {"qk_norm": True, "qk_norm_across_heads": True},
    "qwen3_moe": {"qk_norm": True},
    "glm4_moe": {"scoring_func": "sigmoid"},
    "dots1": {"scoring_func": "sigmoid", "qk_norm": True},
}
"""model_type -> what is the same in all models of this type, whatever their keys say.

Source: Qwen2Attention, Glm4MoeTopkRouter and so on of transformers.
"""
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
"""The sizes that a file of a model_type which reads them must have."""
_LATENT_ATTENTION_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim")
"""Keys of multi-head latent attention, whose sizes no ModelShape can have."""
_MAX_VALUE_CHARS = 60
"""Number of characters of a value in a message."""
_MIN_TYPO_SIMILARITY = 0.9
"""Similarity of difflib from which a key is a typing error of another one: num_local_expert, not num_hidden_layers."""
_UNSTATED_FEATURES = {"gpt_oss": "its attention has sinks"}
"""model_type -> what no key says of a model that ultrabench does not train."""
SIZES_ADVICE = "to benchmark its sizes only, write them to ./ultrabench/model/NAME.yaml and give model=NAME"
"""What a user can do with a model that ultrabench does not train."""
TRAINED_VALUES: dict[str, Any] = {
    "hidden_act": "silu", "rope_type": "llama3", "partial_rotary_factor": 1.0, "num_experts_per_tok": 0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm", "qk_norm"), False),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), 0),
    **dict.fromkeys(("shared_expert_intermediate_size", "router_jitter_noise"), 0), "mlp_only_layers": [],
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_freq"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "n_embd", "no_rope_layers")), "num_nextn_predict_layers": 0,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv")),
    "quantization_config": {},
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "parallel_residual"), False),
}  # fmt: skip
"""Keys that change the model, each with the value that ultrabench can train; a key may be absent or null, and 0 for null.

MODEL_TYPES names the types whose models may have other values of some of these keys.
"""
_MODEL_ADVICE = "give the path of a config.json, or a name (see ultrabench configs model)"
"""What a user can do whose model was not found."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)")
"""A model on the Hugging Face hub, such as meta-llama/Llama-3.1-8B."""


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps what it has downloaded.

    Source: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _cached_config(name: str) -> Path:
    """The config.json of the revision `main` of a model on the hub, from the cache; nothing is downloaded.

    Raises:
        ConfigError: it is not in the cache.
    """
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError, ValueError):
        path = folder / "snapshots" / (folder / "refs/main").read_text().strip() / "config.json"
        if path.is_file():
            return path
    problem = f"model={name} is neither a path nor in the Hugging Face cache ({folder})"
    raise ConfigError(problem, f"run: hf download {name} config.json, or {_MODEL_ADVICE}")


def read_checkpoint_config(location: str) -> ModelShape:
    """The shape of the model in a config.json: the file `location`, in the folder `location`, or of that name on the hub.

    The model's name is the last part of `_name_or_path`. Without that key it is the name of the folder
    of config.json, the name of a file that is not called config.json, or the last part of the name on the hub.

    Raises:
        ConfigError: the file cannot be read, or describes a model that ultrabench does not train.
    """
    path = Path(location).expanduser().absolute()
    path = path / "config.json" if path.is_dir() else path
    is_on_hub = not path.exists() and _HUB_NAME.fullmatch(location) is not None
    path = _cached_config(location) if is_on_hub else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        path_text = f"{path}: " if str(path) != location else ""
        raise ConfigError(f"cannot read model={location}: {path_text}{reason}; {_MODEL_ADVICE}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model={location} holds no sizes; give the config.json of a model")
    default_name = path.parent.name if path.name == "config.json" else path.stem
    default_name = Path(location).name if is_on_hub else default_name
    return shape_of(values, Path(str(values.get("_name_or_path") or "")).name or default_name, location)


def shape_of(values: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape of the model in a config.json; keys that do not change the model are ignored.

    Raises:
        ConfigError: a key makes the model one that ultrabench does not train; the message names the key.
    """
    model_type, values = values.get("model_type"), {**values, **_rope_settings(values)}
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        fact_texts = [f"{key} is {_abbreviated(values[key])}" for key in _untrained_settings(values)]
        fact_texts += filter(None, [_UNSTATED_FEATURES.get(str(model_type))])
        facts_text, similar_type = f" ({', '.join(fact_texts)})", nearest_name(str(model_type), MODEL_TYPES)
        hint = f" did you mean {similar_type}?" if similar_type and not fact_texts else ""
        unsupported = f"unsupported model_type {model_type!r}{facts_text if fact_texts else ''};{hint}"
        rule = f"ultrabench trains {', '.join(MODEL_TYPES)}"
        raise ConfigError(f"model={where}: {unsupported} {rule}", _remedy(values))
    defaults, fixed_values = {**DEFAULTS, **MODEL_TYPES[model_type]}, FIXED_VALUES.get(model_type, {})
    for key, trained_value in _untrained_settings(values, {*defaults, *fixed_values}).items():
        rule = f"ultrabench trains {model_type} models only with {key} {trained_value}"
        raise ConfigError(f"model={where}: {key} is {_abbreviated(values[key])}; {rule}", _remedy(values))
    _require_sizes(values, defaults, where)
    key_by_field = {
        field: key for key, field in RENAMED.items() if field in defaults and values.get(key) is not None
    }
    values |= {RENAMED[key]: value for key, value in values.items() if key in RENAMED and value is not None}
    settings = {key: values.get(key, value) for key, value in defaults.items()}
    if settings.get("num_experts"):
        settings.setdefault("moe_intermediate_size", settings["intermediate_size"])
    rope_scaling = {key: values[key] for key in field_types(RopeScaling) if key in values}
    derived_values = {
        "num_key_value_heads": settings["num_key_value_heads"] or settings["num_attention_heads"],
        "sliding_window": _sliding_window(settings),
        "rope_scaling": rope_scaling if values["rope_type"] else None,
    }
    sizes = settings | fixed_values | derived_values
    field_values = {key: sizes[key] for key in field_types(ModelShape) if sizes.get(key) is not None}
    for field, value in field_values.items():  # so that a refusal of this value has the name of the file
        value_from(field_types(ModelShape)[field], value, f"model={where}: {key_by_field.get(field, field)}")
    try:
        return shape_from({"name": name, **field_values}, f"model={where}")
    except ShapeError as error:
        shown_keys = {field: key_by_field.get(field, field) for field in RENAMED.values()}
        raise ShapeError(f"model={where}", error.rule, shown_keys) from error


def _abbreviated(value: Any) -> str:
    """A value as JSON has it; of a long one its beginning."""
    text = json.dumps(value)
    start = text[:_MAX_VALUE_CHARS].rpartition(" ")[0]
    return text if len(text) <= _MAX_VALUE_CHARS else f"{start} ..."


def _remedy(values: Mapping[str, Any]) -> str:
    """What a user can do with a model that ultrabench does not train, as far as its sizes are those of a ModelShape."""
    if any(values.get(key) for key in _LATENT_ATTENTION_KEYS):
        return "choose another model, since ultrabench has no sizes for multi-head latent attention"
    return SIZES_ADVICE


def _require_sizes(values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a size of experts that models of this type have and the file lacks."""
    for size_name in (size_name for size_name in EXPERT_SIZES if size_name in defaults):
        keys = [size_name, *(key for key, field in RENAMED.items() if field == size_name)]
        if size_name == "n_shared_experts" and size_name in values:  # null: there are none
            continue
        if all(values.get(key) is None for key in keys):
            unread_keys = values.keys() - {*EXPERT_SIZES, *RENAMED, *defaults}
            similar_keys = (nearest_name(key, unread_keys, _MIN_TYPO_SIMILARITY) for key in keys)
            misspelled = next(filter(None, similar_keys), None)
            hint = f"is {misspelled} a misspelling?" if misspelled else "add it"
            raise ConfigError(f"model={where} lacks {' or '.join(keys)} (a size of its experts); {hint}")


def _sliding_window(settings: Mapping[str, Any]) -> Any:
    """The sliding window of a model; None if no layer has one."""
    first_layer, num_layers = settings.get("max_window_layers"), settings["num_hidden_layers"]
    is_unused = isinstance(first_layer, int) and isinstance(num_layers, int) and first_layer >= num_layers
    return None if settings["use_sliding_window"] is False or is_unused else settings["sliding_window"]


def _rope_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotations in a config.json; newer ones call them rope_parameters."""
    rope_values = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_values = rope_values if isinstance(rope_values, dict) else {"rope_type": rope_values}
    rope_type = rope_values.get("rope_type") or rope_values.get("type")
    return {**rope_values, "rope_type": None if rope_type == "default" else rope_type}


def _untrained_settings(values: Mapping[str, Any], read_keys: Collection[str] = ()) -> dict[str, str]:
    """Key that makes a model which ultrabench does not train -> the value that it trains, as a text.

    Args:
        read_keys: the keys that a shape is made from, by the names of its fields; they may have any value.
    """
    read_fields = {key for key in TRAINED_VALUES if RENAMED.get(key, key) in read_keys}
    trained_values = {key: value for key, value in TRAINED_VALUES.items() if key not in read_fields}
    trained_text_by_key = {
        key: json.dumps(value)
        for key, value in trained_values.items()
        if values.get(key) not in (None, value) and (values[key] or value is not None)
    }
    if "rope_type" in trained_text_by_key:
        trained_text_by_key["rope_type"] += ' or "default"'
    layers = values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        trained_text_by_key["layer_types"] = '"full_attention" in all layers'
    return trained_text_by_key


def with_field_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a model in YAML, with the names of the fields of a ModelShape for the keys of RENAMED.

    Raises:
        ConfigError: a size is given under two names.
    """
    for key, field in RENAMED.items():
        if key in values and (same_meaning := [k for k in values if k != key and RENAMED.get(k, k) == field]):
            fact = f"{where}: {key} and {same_meaning[0]} mean the same"
            raise ConfigError(fact, "give only one of them", setting=where)
    return {RENAMED.get(key, key): value for key, value in values.items()}


def shape_from(values: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that `values` describe, without a head_dim that is the usual one, so that run_ids do not differ."""
    shape = from_dict(ModelShape, values, where=where)
    return replace(shape, head_dim=None) if shape.q_width == shape.hidden_size else shape
