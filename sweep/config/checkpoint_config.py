"""Reads the shape of a model from the config.json of a Hugging Face checkpoint."""

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
"""model_type -> the values that transformers uses for absent keys. Only models of these types can be trained.

Source: LlamaConfig and MistralConfig of transformers, which also give the values of DEFAULTS.
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
"""Keys that change the model, each with the value that ultrabench can train; a key may be absent or null.

rope_scaling is not listed: it changes numbers in the table of rotations, but neither sizes nor FLOPs.
"""


def read_checkpoint_config(given: str) -> ModelShape:
    """The shape of the model that is described by the file `given`, or by config.json in the folder `given`.

    The model's name is the last part of `_name_or_path`. Without that key it is the name of the folder
    of config.json, or the name of a file that is not called config.json.

    Raises:
        ConfigError: the file cannot be read, or describes a model that ultrabench does not train.
    """
    path = Path(given).expanduser().absolute()
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read model={given}: {why}; give the path of a config.json") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model={given} holds no sizes; it must be the config.json of a model")
    usual = path.parent.name if path.name == "config.json" else path.stem
    return shape_of(values, Path(str(values.get("_name_or_path") or "")).name or usual, given)


def shape_of(values: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape of the model in a config.json; keys that change neither its size nor its FLOPs are ignored.

    Raises:
        ConfigError: a key makes the model one that ultrabench does not train; the message names the key.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = f"the decoder of {' and '.join(MODEL_TYPES)} only, without biases, norms of q and k, experts"
        advice = "for its sizes alone write them to ./ultrabench/model/NAME.yaml"
        raise ConfigError(f"model={where}: model_type {kind!r}; ultrabench trains {known}: {advice}")
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
            found = f"model={where}: {key} is {json.dumps(given[key])}"
            wanted = "full_attention everywhere" if key == "layer_types" else json.dumps(value)
            raise ConfigError(f"{found}; ultrabench trains models whose {key} is {wanted}")
    return shape
