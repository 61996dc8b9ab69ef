"""Makes a SweepConfig from a composed configuration, and a ModelShape from the config.json of a checkpoint."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError, require_known, unknown_name
from ultrabench.hardware import Hardware
from ultrabench.layout import AXES, TEXT_AXES, Layout
from ultrabench.model_shape import ModelShape, RopeScaling
from ultrabench.record import T, from_dict, lacking, to_dict, value_from
from ultrabench.run import Workload
from ultrabench.store.kernel_secrets import redacted
from ultrabench.sweep.config.compose import (
    FOLDERS,
    as_list,
    compose_tree,
    files,
    in_defaults,
    of_sweep_file,
    read_yaml,
    search_path,
    unknown_option,
    unknown_override,
    usable,
)
from ultrabench.sweep.config.sweep_config import TEXTS, Axes, LauncherConfig, SweepConfig, moved
from ultrabench.sweep.predict.profile import Profile

UNCHANGED = ("results_dir", "models", "retry", "repeats", "trace", "max_p_oom")
"""Keys of a composed configuration whose values are taken as they are."""
KEYS = frozenset(
    {*UNCHANGED, "hardware", "cluster", "kernel", "measure", "launcher", "sweep", "name", "names", "profile"}
)
"""Keys of a composed configuration."""
WORKLOAD = ("seq_len", "gbs", "seed")
"""Keys of `sweep` that say what one step trains on."""
SEARCH = ("strategy", "batch")
"""Keys of `sweep` that say which of its layouts are run."""
CLUSTER_KEYS = frozenset({"name", "cpus", "python", "setup", "sbatch", *TEXTS})
"""Keys that the file of a cluster may have; configs/launcher/slurm.yaml uses them."""


def _axes(sweep: dict[str, Any]) -> Axes:
    """The axes of a sweep; an axis that the sweep does not name has its neutral value only."""
    given: dict[str, Any] = {name: _as_list(values) for name, values in sweep.items() if values is not None}
    if error := next(filter(None, (moved(f"sweep.{name}") for name in given)), None):
        raise error
    require_known("field of sweep", ("nodes", *AXES[1:], "models", *WORKLOAD, *SEARCH), *given)
    for name, values in given.items():
        if name == "gas" and "auto" in values:
            advice = "for whatever makes the batch write sweep.gas=null"
            raise ConfigError(f"sweep.gas=auto is no number; {advice}")
        # Values of dp_shard are words and numbers, which Axes checks, as it checks words.
        words = tuple(map(str, values)) if name in TEXT_AXES else tuple(values)
        checked = name in TEXT_AXES or name == "dp_shard"
        given[name] = words if checked else value_from(tuple[int, ...], values, f"sweep.{name}")
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
    named = [o for o in overrides if re.match(r"\+*(sweep\.models|model)=", o)]
    if len(named) > 1:
        rule = "model=NAME means sweep.models=[NAME]; give only one of them, such as sweep.models=[tiny,mini]"
        raise ConfigError(f"{' '.join(named)}: {rule}")
    tree = compose_tree([_model_list(o) for o in overrides])
    sweep = tree.get("sweep")
    names = _as_list(sweep.pop("models", None) or []) if isinstance(sweep, dict) else []
    tree["models"] = [to_dict(load_model(str(name))) for name in names]
    if isinstance(tree.get("profile"), bool):
        rule = "a profile is a file of constants that predict"
        raise ConfigError(f"profile={str(tree['profile']).lower()}; {rule}: to trace runs, write trace=true")
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
    found = re.search(r"'(\w+)'", message)
    return of_sweep_file(names.get("sweep", ""), found[1], overrides) if found else ""


def config_from_tree(tree: dict[str, Any]) -> SweepConfig:
    """The sweep that a composed configuration describes; `SweepConfig.resolved` is such a tree.

    Raises:
        ConfigError: a value cannot be used.
    """
    if strangers := sorted(set(tree) - KEYS):
        raise ConfigError(unknown_override(strangers[0], tree[strangers[0]]))
    tree = tree | {"cluster": tree.get("cluster") or {}}
    for group in ("sweep", "hardware", "kernel", "launcher", "measure", "retry", "cluster"):
        if not isinstance(given := tree.get(group), dict):
            raise ConfigError(f"{group}: {given!r} holds no settings; {in_defaults(group)}")
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
    settings = {key: value for key, value in tree["kernel"].items() if key != "profile"}
    kernel = _filled({"name": names["kernel"], **settings}, {"precision": hardware.precision})
    profile = profile_of(tree, hardware.device)
    if kernel.get("compile") == "auto":
        kernel["compile"] = hardware.device == "cuda"
    elif not isinstance(given := kernel.get("compile", False), bool):
        raise ConfigError(f"kernel.compile={given!r}; must be auto, true or false")
    kind = kernel.get("kind", "embedded")
    needed = {"preflight": kind != "command" or hardware.device == "cuda"}
    seconds = {key: getattr(hardware, key) if kind == "embedded" else 0.0 for key in ("warmup_s", "min_s")}
    workload = {k: v for k, v in tree["sweep"].items() if k in WORKLOAD}
    values = {
        **{key: tree[key] for key in UNCHANGED if key in tree},
        "profile": profile,
        "name": str(tree.get("name") or f"{names['sweep']}-{names['hardware']}"),
        "cluster": str(cluster.get("name") or names.get("cluster", "local")),
        "hardware": hardware,
        "kernel": {k: v for k, v in kernel.items() if v is not None},
        "measure": _filled(tree["measure"], seconds),
        "launcher": _launcher(_filled(tree["launcher"], needed), cluster),
        **{k: v for k, v in tree["sweep"].items() if k in SEARCH and v is not None},
        "axes": _axes({k: v for k, v in tree["sweep"].items() if k not in (*WORKLOAD, *SEARCH)}),
        "workload": from_dict(Workload, workload, where="sweep"),
        "resolved": tree | {"hardware": to_dict(hardware), "profile": to_dict(profile)},
        "secrets": secrets,
    }
    return from_dict(SweepConfig, values, where="")


def profile_of(tree: Mapping[str, Any], device: str) -> Profile:
    """The profile of a composed configuration: the one that it names or holds, else that of its kernel.

    That of a kernel is NAME-cpu on CPUs, if there is such a file. A configuration that was written down holds the
    whole profile, so that a sweep goes on as it began; one of another version, with other constants, is read again.
    """
    given = tree.get("profile")
    if isinstance(given, dict):
        with contextlib.suppress(ConfigError):
            return from_dict(Profile, given, where="profile", skip_unknown=True)
        given = given.get("name")
    if given is None:
        given = usual_profile(str(tree["kernel"].get("profile") or "ultrabench"), device)
    return load_profile(str(given))


def usual_profile(name: str, device: str) -> str:
    """The name of the profile `name` for a torch device type: NAME-cpu on CPUs, if there is such a file."""
    return f"{name}-{device}" if f"{name}-{device}" in files("profiles") else name


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
        rated = {path: row for path, row in usable("hardware").items() if {"gpu", "source"} <= row.keys()}
        same = [path for path, row in rated.items() if row["gpu"] == values["gpu"]]
        if not same:
            unknown = unknown_name("hardware.gpu", values["gpu"], {row["gpu"] for row in rated.values()})
            needed = ", ".join(lacking(Hardware, values))
            raise ConfigError(f"{unknown}; for a GPU that no other file has, add to its file: {needed}")
        if len(same) > 1:
            raise ConfigError(f"{same[1]}: {same[0]} has rates of gpu={values['gpu']}, too; rename one")
        values = rated[same[0]] | {k: v for k, v in values.items() if v is not None}
    return from_dict(Hardware, values, where="hardware")


def _load(group: str, name: str, read: Callable[[Mapping[str, Any]], T], advice: str = "") -> T:
    """What `read` makes of the settings in the file of this name, with the name.

    Args:
        advice: what a user can do who has no such file.

    Raises:
        ConfigError: there is no such file, or it holds no settings, or one that cannot be used.
    """
    path = files(FOLDERS[group]).get(name)
    if path is None:
        raise ConfigError(unknown_option(group, name) + advice)
    if not isinstance(values := read_yaml(path), dict):
        raise ConfigError(f"{path} holds no settings; write them as in configs/{path.parent.name}/")
    try:
        return read({"name": name, **values})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_hardware(name: str) -> Hardware:
    """The hardware of that name on the search path.

    Raises:
        ConfigError: there is no such hardware, or a value of its file cannot be used.
    """
    return _load("hardware", name, read_hardware, "; give its rates in ./ultrabench/hardware/NAME.yaml")


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
    """The shape of a model: `name` is on the search path, or is the path of a config.json or its folder.

    Raises:
        ConfigError: there is no such model, or its file lacks a value.
    """
    if "/" in name or name.endswith(".json") or (name not in files("model") and Path(name).is_dir()):
        return read_checkpoint_config(name)
    return _load("model", name, lambda values: _shape(values, f"model {name}"))


def load_profile(name: str) -> Profile:
    """The profile of that name on the search path.

    Raises:
        ConfigError: there is no such profile, or a constant is missing or cannot be used.
    """
    advice = "; `ultrabench predict calibrate` fits one to runs of yours"
    return _load("profile", name, lambda values: from_dict(Profile, values, where="profile"), advice)


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
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
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
        advice = "give the path of a config.json, or a name (see ultrabench configs model)"
        raise ConfigError(f"cannot read model={given}: {path}: {why}; {advice}") from error
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
        changed = ", ".join(f"{key} is {json.dumps(values[key])}" for key in _changed(values))
        what = f"model_type {kind!r}{f' ({changed})' if changed else ''}"
        raise ConfigError(f"model={where}: {what}; ultrabench trains {known}: {SIZES_ALONE}")
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


def _changed(values: Mapping[str, Any]) -> list[str]:
    """The keys of PLAIN with values that ultrabench cannot train."""
    return [key for key, value in PLAIN.items() if values.get(key) is not None and values[key] != value]


def _require_plain(given: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for the first key that makes a model which ultrabench does not train."""
    layers = given.get("layer_types")
    full = ["full_attention"] * (len(layers) if isinstance(layers, list) else 1)
    for key, value in {**PLAIN, "layer_types": full}.items():
        if given.get(key, value) != value:
            found = f"model={where}: {key} is {json.dumps(given[key])}"
            wanted = "full_attention everywhere" if key == "layer_types" else json.dumps(value)
            raise ConfigError(f"{found}; ultrabench trains models whose {key} is {wanted}: {SIZES_ALONE}")


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
    if not value:
        advice = "name a model, such as model=8B (see ultrabench configs model)"
        raise ConfigError(f"{override} has no value; {advice}")
    if value.startswith("[") or ("," in value and "/" not in value and not {'"', "'"} & {*value}):
        raise ConfigError(f"{override}: model takes one name; for several use sweep.models={as_list(value)}")
    return f"sweep.models=[{value}]" if '"' in value or "'" in value else f'sweep.models=["{value}"]'
