"""Makes a ModelShape from the config.json of a checkpoint."""

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError, ShapeError, misspelled_name
from ultrabench.layer_type import BLOCK_TYPES
from ultrabench.model_shape import RENAMED, SIZES_OF_TYPES, ModelShape, RopeScaling, described_by_fields
from ultrabench.record import field_types, from_dict, value_from
from ultrabench.sweep.config.families.keys import abbreviated
from ultrabench.sweep.config.families.readers import READERS, TEXT_TYPES, fields_of
from ultrabench.sweep.config.model_types import (
    CLASSES,
    DEFAULTS,
    EXPERT_SIZES,
    FIXED_VALUES,
    GATED_TYPES,
    LABEL_KEYS,
    MODEL_TYPES,
    OTHER_TYPES,
    PREDICTION_KEYS,
    ROPE_KEYS,
    SAME_SIZE_KEYS,
    TEXT_VALUES,
    TRAINED_ROPE_TYPES,
    TRAINED_VALUES,
    is_harmless,
)

_LATENT_ATTENTION_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim")
"""Keys of multi-head latent attention, whose sizes are those of a layer type."""
_TEXT_CLASSES = ("ForCausalLM", "ForConditionalGeneration")
"""Ends of the names in `architectures` that mean a model with a head for the next token,
of types with readers of their own."""
SIZES_ADVICE = "to benchmark its sizes only, write them to ./ultrabench/model/NAME.yaml and give model=NAME"
"""What a user can do with a model that ultrabench does not train, but whose sizes are those of a ModelShape."""
OTHER_MODEL_ADVICE = "choose another model, since ultrabench knows no sizes that stand for this one"
"""What a user can do with a model that ultrabench neither trains nor can describe by sizes."""
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
    """The shape of the model in a config.json: the file `location`, in the folder `location`,
    or of that name on the hub.

    The model's name is the last part of `_name_or_path`. Without that key it is the name of the folder
    of config.json, the name of a file that is not called config.json, or the last part of the name on the hub.

    Raises:
        ConfigError: the file cannot be read, or describes a model that ultrabench does not train.
    """
    values, default_name = _read_values(location)
    return shape_of(values, Path(str(values.get("_name_or_path") or "")).name or default_name, location)


def modules_left_out(location: str) -> int:
    """Number of modules for multi-token prediction in a config.json, which its shape leaves out.

    Raises:
        ConfigError: the file cannot be read.
    """
    values, _ = _read_values(location)
    text_values = values.get("text_config")
    values = values | text_values if isinstance(text_values, dict) else values
    numbers = [values.get(key) for key in PREDICTION_KEYS if values.get("use_mtp", True)]
    return next((number for number in numbers if isinstance(number, int) and number > 0), 0)


def _read_values(location: str) -> tuple[dict[str, Any], str]:
    """The values of a config.json, and the name of its model if the values have none.

    Raises:
        ConfigError: the file cannot be read.
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
    return values, Path(location).name if is_on_hub else default_name


def shape_of(values: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape of the model in a config.json.

    Raises:
        ConfigError: a key makes the model one that ultrabench does not train, or may do so because it is unknown; the
            message names the key.
    """
    model_type, text_values = values.get("model_type"), values.get("text_config")
    if isinstance(text_values, dict):  # beside it are keys of the parts for images and sound
        names = ("architectures", "tie_word_embeddings")
        values = {name: values[name] for name in names if name in values} | text_values
        model_type = text_values.get("model_type") or TEXT_TYPES.get(str(model_type), model_type)
    if isinstance(model_type, str) and model_type in READERS:
        return _shape_of_types(values, model_type, name, where)
    if str(model_type) in TEXT_TYPES:
        raise ConfigError(
            f"model={where} lacks text_config, which {model_type} models have; give the whole file"
        )
    file_keys = [*values]
    values = {**values, **_rope_settings(values)}
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise _unsupported_type(model_type, values, where)
    defaults, fixed_values = {**DEFAULTS, **MODEL_TYPES[model_type]}, FIXED_VALUES.get(model_type, {})
    _require_known_class(values, model_type, where)
    for key, trained_value in _untrained_settings(values, {*defaults, *fixed_values}).items():
        rule = f"ultrabench trains {model_type} models only with {key} {trained_value}"
        remedy = _remedy(values, model_type, {key})
        raise ConfigError(f"model={where}: {key} is {abbreviated(values[key])}; {rule}", remedy)
    _require_sizes(values, defaults, where)
    _require_known_keys(values, file_keys, model_type, where)
    key_by_field = {
        field: key for key, field in RENAMED.items() if field in defaults and values.get(key) is not None
    }
    values |= {RENAMED[key]: value for key, value in values.items() if key in RENAMED and value is not None}
    settings = {key: values.get(key, value) for key, value in defaults.items()}
    if settings.get("num_experts"):
        settings.setdefault("moe_intermediate_size", settings["intermediate_size"])
    rope_scaling = {key: values[key] for key in field_types(RopeScaling) if values.get(key) is not None}
    derived_values = {
        "num_key_value_heads": settings["num_key_value_heads"] or settings["num_attention_heads"],
        "sliding_window": _sliding_window(settings),
        "rope_scaling": rope_scaling if values["rope_type"] else None,
    }
    sizes = settings | fixed_values | derived_values
    # Training is that of the next token alone, as with transformers.
    shape_fields = field_types(ModelShape).keys() - {"num_nextn_predict_layers"}
    field_values = {
        key: sizes[key]
        for key in field_types(ModelShape)
        if key in shape_fields and sizes.get(key) is not None
    }
    for field, value in field_values.items():  # so that a refusal of this value has the name of the file
        value_from(field_types(ModelShape)[field], value, f"model={where}: {key_by_field.get(field, field)}")
    try:
        return shape_from({"name": name, **field_values}, f"model={where}")
    except ShapeError as error:
        key_by_renamed_field = {field: key_by_field.get(field, field) for field in RENAMED.values()}
        raise ShapeError(f"model={where}", error.rule, key_by_renamed_field) from error


def _shape_of_types(values: Mapping[str, Any], model_type: str, name: str, where: str) -> ModelShape:
    """The shape of a model whose model_type has a reader of its own.

    Raises:
        ConfigError: a key makes the model one that ultrabench cannot describe, or may do so because it is unknown.
    """
    classes = values.get("architectures") or []
    for class_name in classes if isinstance(classes, list) else [classes]:
        if not str(class_name).endswith(_TEXT_CLASSES):
            fact = f"model={where}: architectures has {abbreviated(class_name)}"
            rule = (
                f"ultrabench knows {model_type} models only as those with a name that ends in "
                f"{' or '.join(_TEXT_CLASSES)}"
            )
            raise ConfigError(f"{fact}; {rule}", OTHER_MODEL_ADVICE)
    return shape_from({"name": name, **fields_of(dict(values), model_type, where)}, f"model={where}")


def _unsupported_type(model_type: object, values: Mapping[str, Any], where: str) -> ConfigError:
    """The error for a model_type that ultrabench does not train."""
    untrained_keys = _untrained_settings(values)
    fact_texts = [f"{key} is {abbreviated(values[key])}" for key in untrained_keys]
    similar_type = None
    if not fact_texts and str(model_type) not in OTHER_TYPES:
        similar_type = misspelled_name(str(model_type), (*MODEL_TYPES, *READERS))
    facts_text = f" ({', '.join(fact_texts)})" if fact_texts else ""
    hint = f" did you mean {similar_type}?" if similar_type else ""
    fact = f"model={where}: unsupported model_type {model_type!r}{facts_text};{hint}"
    return ConfigError(
        f"{fact} ultrabench knows {', '.join((*MODEL_TYPES, *READERS))}",
        _remedy(values, str(model_type), untrained_keys),
    )


def _remedy(values: Mapping[str, Any], model_type: str, untrained_keys: Collection[str]) -> str:
    """What a user can do with a model that ultrabench does not train, as far as its sizes are those of a ModelShape.

    Args:
        untrained_keys: the keys for which it is not trained.
    """
    if any(values.get(key) for key in _LATENT_ATTENTION_KEYS):
        return (
            "choose another model, or write its sizes as layer_types to ./ultrabench/model/NAME.yaml "
            "and give model=NAME"
        )
    has_known_sizes = model_type in MODEL_TYPES or model_type in GATED_TYPES
    return (
        SIZES_ADVICE if has_known_sizes and SAME_SIZE_KEYS.issuperset(untrained_keys) else OTHER_MODEL_ADVICE
    )


def _require_known_class(values: Mapping[str, Any], model_type: str, where: str) -> None:
    """Raises ConfigError if the class of a model is not known for its type, or may be one of its own code."""
    classes = values.get("architectures") or []
    names = classes if isinstance(classes, list) else [classes]
    known_text = " or ".join(CLASSES[model_type])
    for name in names:
        if name not in CLASSES[model_type]:
            fact = f"model={where}: architectures has {abbreviated(name)}"
            raise ConfigError(
                f"{fact}; ultrabench trains {model_type} models only as {known_text}", OTHER_MODEL_ADVICE
            )
    if values.get("auto_map") and not names:
        fact = f"model={where}: auto_map is {abbreviated(values['auto_map'])}, so the model may have code of its own"
        rule = f"and architectures does not say that it is {known_text}"
        raise ConfigError(f"{fact}, {rule}", "add architectures if it is, else choose another model")
    label_keys = [
        key
        for key, usual in LABEL_KEYS.items()
        if json.dumps(values.get(key)) not in ("null", json.dumps(usual))
    ]
    if label_keys and not names:
        fact = (
            f"model={where}: {label_keys[0]} is {abbreviated(values[label_keys[0]])}, "
            "as in models that classify or reward"
        )
        rule = f"and architectures does not say that it is {known_text}"
        raise ConfigError(f"{fact}, {rule}", "add architectures if it is, else choose another model")


def _require_known_keys(
    values: Mapping[str, Any], file_keys: Iterable[str], model_type: str, where: str
) -> None:
    """Raises ConfigError for a key of which it is not known what it does to models of this type.

    Args:
        file_keys: the keys of the file itself; `values` has those of its rotations as well.
    """
    read_keys = {*DEFAULTS, *MODEL_TYPES[model_type]}
    known_keys = {
        *read_keys,
        *TRAINED_VALUES,
        *(key for key, field in RENAMED.items() if field in read_keys),
        "layer_types",
    }
    text_values = TEXT_VALUES.get(model_type, {})
    for key in file_keys:
        if (
            values[key] is None
            or key in known_keys
            or is_harmless(key)
            or values[key] in text_values.get(key, ())
        ):
            continue
        fact = f"model={where}: {key} is {abbreviated(values[key])}"
        if key in text_values:
            rule = f"ultrabench trains {model_type} models only with {key} {' or '.join(text_values[key])}"
        else:
            rule = f"ultrabench knows no such key of {model_type} models, so it may change the model"
        intended_key = misspelled_name(key, known_keys)
        remedy = f"did you mean {intended_key}?" if intended_key else "remove the key if it changes nothing"
        raise ConfigError(f"{fact}; {rule}", remedy)
    rope_values = values.get("rope_parameters") or values.get("rope_scaling") or {}
    known_rope_keys = {*ROPE_KEYS, *field_types(RopeScaling)}
    for key in rope_values if isinstance(rope_values, dict) else ():
        if key not in known_rope_keys and rope_values[key] is not None:
            fact = f"model={where}: rope_scaling has {key} {abbreviated(rope_values[key])}"
            raise ConfigError(
                f"{fact}; ultrabench knows no such key of rotations", "remove it if it changes nothing"
            )


def _require_sizes(values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a size of experts that models of this type have and the file lacks."""
    for size_name in (size_name for size_name in EXPERT_SIZES if size_name in defaults):
        keys = [size_name, *(key for key, field in RENAMED.items() if field == size_name)]
        if size_name == "n_shared_experts" and size_name in values:  # null: there are none
            continue
        if all(values.get(key) is None for key in keys):
            unread_keys = values.keys() - {*EXPERT_SIZES, *RENAMED, *defaults}
            misspelled = next((key for key in unread_keys if misspelled_name(key, keys)), None)
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
        trained_text_by_key["rope_type"] = " or ".join(map(json.dumps, (*TRAINED_ROPE_TYPES, "default")))
    if values.get("rope_type") in TRAINED_ROPE_TYPES:
        trained_text_by_key.pop("rope_type", None)
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
    """The shape that `values` describe, in its usual spelling, so that run_ids do not differ.

    A head_dim that is the usual one is left out, and so are layer_types whose layers other fields can describe.
    """
    shape = described_by_fields(from_dict(ModelShape, with_usual_sizes(values), where=where))
    return replace(shape, head_dim=None) if shape.q_width == shape.hidden_size else shape


def with_usual_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model, with the sizes that its layer_types leave out and that the model gives."""
    layer_types = values.get("layer_types")
    if not isinstance(layer_types, list | tuple):
        return dict(values)
    usual_sizes = {name: values[name] for name in SIZES_OF_TYPES if values.get(name) is not None}
    block_fields = {name: field_types(block) for name, block in BLOCK_TYPES.items()}

    def completed(name: str, block: Any) -> Any:
        if name not in block_fields or not isinstance(block, Mapping):
            return block
        sizes = {key: size for key, size in usual_sizes.items() if key in block_fields[name]} | dict(block)
        num_heads, hidden_size = sizes.get("num_attention_heads"), values.get("hidden_size")
        if (
            name == "grouped_query"
            and isinstance(num_heads, int)
            and isinstance(hidden_size, int)
            and num_heads
        ):
            sizes.setdefault("head_dim", hidden_size // num_heads)
        return sizes

    completed_types = [
        {name: completed(name, block) for name, block in layer_type.items()}
        if isinstance(layer_type, Mapping)
        else layer_type
        for layer_type in layer_types
    ]
    return {**values, "layer_types": completed_types}
