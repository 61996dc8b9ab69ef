"""Makes a SweepConfig from a composed configuration, and a ModelShape from the config.json of a checkpoint."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError, require_known, unknown_name
from ultrabench.hardware import Hardware
from ultrabench.layout import AXES, TEXT_AXES, Layout
from ultrabench.model_shape import ModelShape, RopeScaling
from ultrabench.record import from_dict, to_dict, value_from
from ultrabench.run import Workload
from ultrabench.store.kernel_secrets import redacted
from ultrabench.sweep.config.compose import compose_tree, files, read_yaml, search_path
from ultrabench.sweep.config.sweep_config import TEXTS, Axes, LauncherConfig, SweepConfig, moved

UNCHANGED = ("results_dir", "models", "retry", "repeats", "profile")
"""Keys of a composed configuration whose values are taken as they are."""
KEYS = frozenset(
    {*UNCHANGED, "hardware", "cluster", "kernel", "measure", "launcher", "sweep", "name", "names"}
)
"""Keys of a composed configuration."""
WORKLOAD = ("seq_len", "gbs", "seed")
"""Keys of `sweep` that have one value; the others list the values of an axis."""
CLUSTER_KEYS = frozenset({"name", "cpus", "python", "setup", "sbatch", *TEXTS})
"""Keys that the file of a cluster may have; configs/launcher/slurm.yaml uses them."""


def _axes(sweep: dict[str, Any]) -> Axes:
    """The axes of a sweep; an axis that the sweep does not name has its neutral value only."""
    given: dict[str, Any] = {name: _as_list(values) for name, values in sweep.items() if values is not None}
    require_known("field of sweep", ("nodes", *AXES[1:], "models", *WORKLOAD), *given)
    for name, values in given.items():
        kind = tuple[str, ...] if name in TEXT_AXES else tuple[int, ...]
        # Values of dp_shard are words and numbers, which Axes checks.
        given[name] = tuple(values) if name == "dp_shard" else value_from(kind, values, f"sweep.{name}")
    if "nodes" not in given:
        raise ConfigError("sweep lacks nodes: give a list such as sweep.nodes=[1,2]")
    usual: dict[str, Any] = {f.name: (f.default,) for f in fields(Layout) if f.name not in ("dp", "gas")}
    layout = usual | {"pp_schedule": ("auto",), "virtual_stages": (2,), "dp_shard": ("all",)} | given
    return Axes(nodes=layout.pop("nodes"), layout=layout)


def load_config(overrides: Sequence[str] = ()) -> SweepConfig:
    """The sweep that Hydra `overrides` describe; `model=NAME` means `sweep.models=[NAME]`.

    Raises:
        ConfigError: a name, a value or a file cannot be used; the message is one line.
    """
    tree = compose_tree([_model_list(o) for o in overrides])
    sweep = tree.get("sweep")
    names = _as_list(sweep.pop("models", [])) if isinstance(sweep, dict) else []
    if not names:
        raise ConfigError("sweep.models is empty; name at least one (see ultrabench configs model)")
    tree["models"] = [to_dict(load_model(str(name))) for name in names]
    try:
        return config_from_tree(tree)
    except ConfigError as error:
        raise ConfigError(f"{_place(str(error), tree['names'], overrides)}{error}") from error


def _place(message: str, names: Mapping[str, str], overrides: Sequence[str]) -> str:
    """The prefix `FILE: ` for a message about a file of the user; empty for a message about an override."""
    for group in ("hardware", "kernel", "cluster", "launcher", "measure", "retry", "sweep"):
        path = files(group).get(names.get(group, ""))
        given = any(o.lstrip("+~").startswith(f"{group}.") for o in overrides)
        if path is None or given or not re.search(rf"\b{group}\b", message):
            continue
        if path.parent.parent != search_path()[-1] and str(path) not in message:
            return f"{path}: "
    return ""


def config_from_tree(tree: dict[str, Any]) -> SweepConfig:
    """The sweep that a composed configuration describes; `SweepConfig.resolved` is such a tree.

    Raises:
        ConfigError: a value cannot be used.
    """
    if strangers := sorted(set(tree) - KEYS):
        raise ConfigError(unknown_name("override", strangers[0], KEYS - {"names", "models"}))
    tree = tree | {"cluster": tree.get("cluster") or {}}
    for group in ("sweep", "hardware", "kernel", "launcher", "measure", "retry", "cluster"):
        if not isinstance(given := tree.get(group), dict):
            advice = f"in a sweep file another {group} is chosen under defaults: '- override /{group}: NAME'"
            raise ConfigError(f"{group}: {given!r} holds no settings; {advice}")
    names, cluster = tree["names"], tree["cluster"]
    if strangers := sorted(set(cluster) - CLUSTER_KEYS, key=str):
        unknown = unknown_name(f"key of cluster={names['cluster']}", strangers[0], CLUSTER_KEYS)
        raise moved(str(strangers[0])) or ConfigError(unknown)
    if error := next(filter(None, (moved(f"kernel.{key}") for key in tree["kernel"])), None):
        raise error
    secrets: dict[str, str] = {}
    if isinstance(env := tree["kernel"].get("env"), dict):
        shown, secrets = redacted(env)
        tree = tree | {"kernel": tree["kernel"] | {"env": shown}}
    hardware = read_hardware({"name": names["hardware"], **tree["hardware"]})
    kernel = _filled({"name": names["kernel"], **tree["kernel"]}, {"precision": hardware.precision})
    if kernel.get("compile") == "auto":
        kernel["compile"] = hardware.device == "cuda"
    elif not isinstance(given := kernel.get("compile", False), bool):
        raise ConfigError(f"kernel.compile={given!r}; must be auto, true or false")
    ours = kernel.get("kind", "embedded") == "embedded"
    seconds = {key: getattr(hardware, key) if ours else 0.0 for key in ("warmup_s", "min_s")}
    workload = {k: v for k, v in tree["sweep"].items() if k in WORKLOAD}
    values = {
        **{key: tree[key] for key in UNCHANGED if key in tree},
        "name": str(tree.get("name") or f"{names['sweep']}-{names['hardware']}"),
        "cluster": str(cluster.get("name") or names.get("cluster", "local")),
        "hardware": hardware,
        "kernel": {k: v for k, v in kernel.items() if v is not None},
        "measure": _filled(tree["measure"], seconds),
        "launcher": _launcher(tree["launcher"], cluster),
        "workload": from_dict(Workload, workload, where="sweep"),
        "axes": _axes({k: v for k, v in tree["sweep"].items() if k not in WORKLOAD}),
        "resolved": tree,
        "secrets": secrets,
    }
    return from_dict(SweepConfig, values, where="")


def _filled(values: dict[str, Any], by_hardware: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with those of `by_hardware` for its keys that are null or absent."""
    return values | {key: value for key, value in by_hardware.items() if values.get(key) is None}


def read_hardware(values: Mapping[str, Any]) -> Hardware:
    """The hardware that a configuration or sweep.json describes.

    Values without a `source` name only a GPU; the rates of that GPU then come from the file that has them.

    Raises:
        ConfigError: a value cannot be used, or no file has rates of the GPU.
    """
    if "gpu" in values and "source" not in values:
        given = {path: read_yaml(path) for path in files("hardware").values()}
        rows = {path: row for path, row in given.items() if isinstance(row, dict)}
        rated = {path: row for path, row in rows.items() if {"gpu", "source"} <= row.keys()}
        same = [path for path, row in rated.items() if row["gpu"] == values["gpu"]]
        if not same:
            unknown = unknown_name("hardware.gpu", values["gpu"], {row["gpu"] for row in rated.values()})
            raise ConfigError(f"{unknown}: give its rates in the same file, with their source")
        if len(same) > 1:
            raise ConfigError(f"{same[1]}: {same[0]} has rates of gpu={values['gpu']}, too; rename one")
        values = rated[same[0]] | {k: v for k, v in values.items() if v is not None}
    return from_dict(Hardware, values, where="hardware")


def _launcher(values: dict[str, Any], cluster: dict[str, Any]) -> LauncherConfig:
    """The settings of the launcher; "" means null, and null means an empty list where a list is needed.

    The options of sbatch of the launcher are added to those of the cluster.
    """
    given = {k: None if v == "" else v for k, v in values.items()}
    for key, value in given.items():
        if value is not None and (error := moved(f"launcher.{key}")):
            raise error
        if key in TEXTS and type(value) is int:
            given[key] = str(value)  # an account may be 1234
    given |= {k: [] for k in ("python", "setup", "environment", "srun") if given.get(k, ()) is None}
    if isinstance(given.get("python"), str):
        given["python"] = [given["python"]]
    if "sbatch" in given:
        options = [cluster.get("sbatch") or {}, given["sbatch"] or {}]
        given["sbatch"] = next((o for o in options if not isinstance(o, dict)), None) or _flags(options)
    return from_dict(LauncherConfig, given, where="launcher")


def _flags(options: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Options of sbatch as texts; the last value of an option wins.

    Null and true mean an option without a value, and false means that the option is not given.
    """
    given = {str(k): "" if v is None or v is True else v for some in options for k, v in some.items()}
    return {k: str(v) for k, v in given.items() if v is not False}


def load_model(name: str) -> ModelShape:
    """The shape of the model that `name` means: a name on the search path, or the path of a config.json.

    Raises:
        ConfigError: there is no such model, or its file lacks a value.
    """
    if "/" in name or name.endswith(".json"):
        return read_checkpoint_config(name)
    known = files("model")
    require_known("model", known, name)
    values = read_yaml(known[name])
    if not isinstance(values, dict):
        raise ConfigError(f"{known[name]} is no model: it holds no mapping of sizes; see configs/model/")
    try:
        return _shape({"name": name, **values}, f"model {name}")
    except ConfigError as error:
        raise ConfigError(f"{known[name]}: {error}") from error


MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
}
"""model_type -> the values that transformers uses for absent keys. Only models of these types can be trained.

Source: LlamaConfig, MistralConfig and Qwen3Config of transformers, which also give the values of DEFAULTS.
"""
DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
PLAIN: dict[str, Any] = {
    "hidden_act": "silu", "rope_type": "llama3", "partial_rotary_factor": 1.0, "num_experts_per_tok": 0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm", "qk_norm"), False),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), 0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "num_nextn_predict_layers", "n_embd", "no_rope_layers"), 0),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "parallel_residual"), False),
}  # fmt: skip
"""Keys that change the model, each with the value that ultrabench can train; a key may be absent or null."""


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
    """The shape of the model in a config.json; keys that do not change the model are ignored.

    Raises:
        ConfigError: a key makes the model one that ultrabench does not train; the message names the key.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = f"the decoders of {', '.join(MODEL_TYPES)} only, without biases and experts"
        advice = "for its sizes alone write them to ./ultrabench/model/NAME.yaml"
        raise ConfigError(f"model={where}: model_type {kind!r}; ultrabench trains {known}: {advice}")
    rope = _rope(values)
    given = {**DEFAULTS, **MODEL_TYPES[kind], **values, **rope}
    given = {k: v for k, v in given.items() if v is not None}
    if given.get("use_sliding_window") is False:
        given.pop("sliding_window", None)
    _require_plain(given, where)
    keys = (*SIZES, *DEFAULTS, "num_key_value_heads", "head_dim", "sliding_window")
    sizes = {"num_key_value_heads": given.get("num_attention_heads"), "qk_norm": kind == "qwen3"}
    sizes |= {k: given[k] for k in keys if k in given}
    if "rope_type" in given:
        sizes["rope_scaling"] = {f.name: rope[f.name] for f in fields(RopeScaling) if f.name in rope}
    return _shape({"name": name, **sizes}, f"model={where}")


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotations in a config.json; newer ones call them rope_parameters."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {"rope_type": rope}
    kind = rope.get("rope_type") or rope.get("type")
    return {**rope, "rope_type": None if kind == "default" else kind}


def _require_plain(given: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for the first key that makes a model which ultrabench does not train."""
    layers = given.get("layer_types")
    full = ["full_attention"] * (len(layers) if isinstance(layers, list) else 1)
    for key, value in {**PLAIN, "layer_types": full}.items():
        if given.get(key, value) != value:
            found = f"model={where}: {key} is {json.dumps(given[key])}"
            wanted = "full_attention everywhere" if key == "layer_types" else json.dumps(value)
            raise ConfigError(f"{found}; ultrabench trains models whose {key} is {wanted}")


def _shape(values: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that `values` describe, without a head_dim that is the usual one, so that run_ids do not differ."""
    shape = from_dict(ModelShape, values, where=where)
    return replace(shape, head_dim=None) if shape.q_width == shape.hidden_size else shape


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _model_list(override: str) -> str:
    key, eq, value = override.partition("=")
    if key.lstrip("+") != "model" or not eq:
        return override
    if value.startswith("[") or not value:
        raise ConfigError(
            f"{override}: model takes one name; for several use sweep.models={value or '[A,B]'}"
        )
    return f"sweep.models=[{value}]" if '"' in value or "'" in value else f'sweep.models=["{value}"]'
