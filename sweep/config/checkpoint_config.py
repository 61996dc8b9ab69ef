"""The config.json of a Hugging Face checkpoint, read as the shape of a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict

MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
"""model_type -> what transformers takes where a key is absent; these types are the decoder that ultrabench trains.

From transformers' LlamaConfig and MistralConfig, whose tie_word_embeddings is false and rms_norm_eps 1e-6.
"""
DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
PLAIN: dict[str, Any] = {
    "hidden_act": "silu", "partial_rotary_factor": 1.0, "num_experts_per_tok": 0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm", "qk_norm"), False),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), 0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "num_nextn_predict_layers", "n_embd", "no_rope_layers"), 0),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "parallel_residual"), False),
}  # fmt: skip
"""Keys that change the model, with the value of the plain decoder; absent and null are plain, too.

rope_scaling is not among them: it changes numbers in the table of rotations, neither sizes nor work.
"""


def is_path(name: str) -> bool:
    """Whether `name` means a file or folder, and no model of configs/model/."""
    return "/" in name or name.endswith(".json")


def read_checkpoint_config(given: str) -> ModelShape:
    """The model of the config.json at the path `given`, or in the folder there.

    Its name is the last part of `_name_or_path`, else the name of its folder, or of the file if that has another name.

    Raises:
        ConfigError: it cannot be read, or is of a model that ultrabench does not train.
    """
    path = Path(given).expanduser().absolute()
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read model={given}: {why}; it must be the path of a config.json here"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"model={given} holds no sizes; it must be the config.json of a model")
    told = Path(str(values.get("_name_or_path") or "")).name
    name = told or (path.parent.name if path.name == "config.json" else path.stem)
    return shape_of(values, name, given)


def shape_of(values: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The model that a config.json describes; keys that change neither sizes nor work are left out.

    Raises:
        ConfigError: a key that changes the model to one that ultrabench does not train, named.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ConfigError(
            f"model={where}: model_type {kind!r}; ultrabench trains the decoder of {' and '.join(MODEL_TYPES)} only, "
            "without biases, norms of q and k, experts: for its sizes alone write them to ./ultrabench/model/NAME.yaml"
        )
    rope = values.get("rope_parameters")
    given = {**DEFAULTS, **MODEL_TYPES[kind], **(rope if isinstance(rope, dict) else {}), **values}
    given = {k: v for k, v in given.items() if v is not None}
    keys = [k for k in (*SIZES, *DEFAULTS, "num_key_value_heads") if k in given]
    sizes = {"num_key_value_heads": given.get("num_attention_heads")} | {k: given[k] for k in keys}
    shape = from_dict(ModelShape, {"name": name, **sizes}, where=f"model={where}")
    if given.get("use_sliding_window") is False:
        given.pop("sliding_window", None)
    layers = ["full_attention"] * shape.num_hidden_layers
    plain = {**PLAIN, "head_dim": shape.head_dim, "sliding_window": None, "layer_types": layers}
    for key, value in plain.items():
        if given.get(key, value) != value:
            told = "full_attention everywhere" if key == "layer_types" else json.dumps(value)
            raise ConfigError(
                f"model={where}: {key} is {json.dumps(given[key])}; ultrabench trains models whose {key} is {told}"
            )
    return shape
