"""Makes a ModelShape from the config.json of a checkpoint."""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.model_shape import ModelShape, RopeScaling
from ultrabench.record import field_types, from_dict

MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
}
"""model_type -> the values that transformers uses for absent keys. Only models of these types can be trained.

Source: LlamaConfig, MistralConfig and Qwen3Config of transformers, which also give the values of DEFAULTS.
"""
SIZES_ALONE = "for its sizes alone write them to ./ultrabench/model/NAME.yaml and give model=NAME"
"""What a user can do with a model that ultrabench does not train."""
DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
PLAIN: dict[str, Any] = {
    "hidden_act": "silu", "rope_type": "llama3", "partial_rotary_factor": 1.0, "num_experts_per_tok": 0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm", "qk_norm"), False),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), 0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "num_nextn_predict_layers", "n_embd", "no_rope_layers"), 0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), 0),
    "quantization_config": {},
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "parallel_residual"), False),
}  # fmt: skip
"""Keys that change the model, each with the value that ultrabench can train; a key may be absent or null."""
_GIVE_ANOTHER = "give the path of a config.json, or a name (see ultrabench configs model)"
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
    fact = f"model={name} is neither a path nor in the cache of Hugging Face ({folder})"
    raise ConfigError(fact, f"run: hf download {name} config.json, or {_GIVE_ANOTHER}")


def read_checkpoint_config(place: str) -> ModelShape:
    """The shape of the model in a config.json: the file `place`, in the folder `place`, or of that name on the hub.

    The model's name is the last part of `_name_or_path`. Without that key it is the name of the folder
    of config.json, the name of a file that is not called config.json, or the last part of the name on the hub.

    Raises:
        ConfigError: the file cannot be read, or describes a model that ultrabench does not train.
    """
    path = Path(place).expanduser().absolute()
    path = path / "config.json" if path.is_dir() else path
    is_on_hub = not path.exists() and _HUB_NAME.fullmatch(place) is not None
    path = _cached_config(place) if is_on_hub else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read model={place}: {path}: {why}; {_GIVE_ANOTHER}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model={place} holds no sizes; it must be the config.json of a model")
    usual = path.parent.name if path.name == "config.json" else path.stem
    usual = Path(place).name if is_on_hub else usual
    return shape_of(values, Path(str(values.get("_name_or_path") or "")).name or usual, place)


def shape_of(values: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape of the model in a config.json; keys that do not change the model are ignored.

    Raises:
        ConfigError: a key makes the model one that ultrabench does not train; the message names the key.
    """
    kind, rope = values.get("model_type"), _rope(values)
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        trained = f"the decoders of {', '.join(MODEL_TYPES)} only, without biases and experts"
        changed = ", ".join(f"{key} is {json.dumps(values[key])}" for key in _changed(values))
        model_type = f"model_type {kind!r}{f' ({changed})' if changed else ''}"
        raise ConfigError(f"model={where}: {model_type}; ultrabench trains {trained}: {SIZES_ALONE}")
    settings = {**DEFAULTS, **MODEL_TYPES[kind], **values, **rope}
    settings = {key: value for key, value in settings.items() if value is not None}
    if settings.get("use_sliding_window") is False:
        settings.pop("sliding_window", None)
    for key, trained_value in _changed(settings).items():
        fact = f"model={where}: {key} is {json.dumps(settings[key])}"
        raise ConfigError(f"{fact}; ultrabench trains models whose {key} is {trained_value}: {SIZES_ALONE}")
    sizes = {key: settings[key] for key in field_types(ModelShape) if key in settings}
    scaling = {key: rope[key] for key in field_types(RopeScaling) if key in rope}
    not_sizes = {
        "name": name,
        "qk_norm": kind == "qwen3",
        "rope_scaling": scaling if "rope_type" in settings else None,
    }
    return shape_from(
        {**sizes, **not_sizes}
        | {"num_key_value_heads": sizes.get("num_key_value_heads", sizes.get("num_attention_heads"))},
        f"model={where}",
    )


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotations in a config.json; newer ones call them rope_parameters."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {"rope_type": rope}
    kind = rope.get("rope_type") or rope.get("type")
    return {**rope, "rope_type": None if kind == "default" else kind}


def _changed(values: Mapping[str, Any]) -> dict[str, str]:
    """Key that makes a model which ultrabench does not train -> the value that it trains, as a text."""
    changed = {k: json.dumps(plain) for k, plain in PLAIN.items() if values.get(k) not in (None, plain)}
    layers = values.get("layer_types")
    if layers is not None and (
        not isinstance(layers, list) or any(kind != "full_attention" for kind in layers)
    ):
        changed["layer_types"] = "full_attention everywhere"
    return changed


def shape_from(values: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that `values` describe, without a head_dim that is the usual one, so that run_ids do not differ."""
    shape = from_dict(ModelShape, values, where=where)
    return replace(shape, head_dim=None) if shape.q_width == shape.hidden_size else shape
