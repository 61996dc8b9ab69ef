"""Makes a SweepConfig from a composed configuration."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.hardware import Hardware
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES, TEXT_AXES, Layout
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict, to_dict, value_from
from ultrabench.run import Workload
from ultrabench.store.kernel_secrets import redacted
from ultrabench.sweep.config.checkpoint_config import is_path, read_checkpoint_config
from ultrabench.sweep.config.compose import compose_tree, files, known_names, read_yaml, search_path
from ultrabench.sweep.config.launcher_config import TEXTS, LauncherConfig, moved_to_sbatch
from ultrabench.sweep.config.retry_policy import RetryPolicy
from ultrabench.sweep.config.sweep_config import Axes, SweepConfig

KEYS = frozenset({"hardware", "cluster", "kernel", "launcher", "measure", "retry", "sweep", "name",
                  "results_dir", "repeats", "profile", "names", "models"})  # fmt: skip
"""Keys of a composed configuration."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@, -]{0,99}")
"""Names that a sweep may have. A name is also used for folders, Slurm jobs and commands that users copy."""
CLUSTER_KEYS = frozenset({"name", "cpus", "python", "setup", "sbatch", *TEXTS})
"""Keys that the file of a cluster may have; configs/launcher/slurm.yaml uses them."""


def _axes(sweep: dict[str, Any]) -> Axes:
    """The axes of a sweep; an axis that the sweep does not name has its neutral value only."""
    known = ("nodes", *AXES[1:])
    given = {name: _as_list(values) for name, values in sweep.items() if values is not None}
    for name, values in given.items():
        if name not in known:
            raise ConfigError(
                unknown_name("field of sweep", name, (*known, "models", "seq_len", "gbs", "seed"))
            )
        kind = tuple[str, ...] if name in TEXT_AXES else tuple[int, ...]
        given[name] = value_from(kind, values, f"sweep.{name}")
    if "nodes" not in given:
        raise ConfigError("sweep lacks nodes: give a list such as sweep.nodes=[1,2]")
    usual: dict[str, Any] = {f.name: (f.default,) for f in fields(Layout) if f.name not in ("dp", "gas")}
    layout = usual | {"pp_schedule": ("auto",), "virtual_stages": (2,)} | given
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
        config = config_from_tree(tree)
    except ConfigError as error:
        raise ConfigError(f"{_place(str(error), tree['names'], overrides)}{error}") from error
    if not NAME.fullmatch(config.name):
        raise ConfigError(
            f"name={config.name!r}; a sweep's name begins with a letter, a digit or '_', goes on with these, spaces and "
            "any of .+=@,- and has at most 100 characters: choose another with name=NAME"
        )
    return config


def _place(message: str, names: Mapping[str, str], overrides: Sequence[str]) -> str:
    """The prefix `FILE: ` for a message about a file of the user; empty for a message about an override."""
    for group in ("hardware", "kernel", "cluster", "launcher", "measure", "retry", "sweep"):
        path = files(group).get(names.get(group, ""))
        given = any(o.lstrip("+~").startswith(f"{group}.") for o in overrides)
        told = re.search(rf"\b{group}\b", message.replace(f"configs/{group}", ""))
        if group == "hardware":
            told = told or re.match(r"unknown gpu\b", message)
        if (
            path
            and told
            and not given
            and path.parent.parent != search_path()[-1]
            and str(path) not in message
        ):
            return f"{path}: "
    return ""


def config_from_tree(tree: dict[str, Any]) -> SweepConfig:
    """The sweep that a composed configuration describes; `SweepConfig.resolved` is such a tree.

    Raises:
        ConfigError: a value cannot be used.
    """
    strangers = sorted(set(tree) - KEYS)
    if strangers:
        raise ConfigError(unknown_name("override", strangers[0], KEYS - {"names", "models"}))
    for group in ("sweep", "hardware", "kernel", "launcher", "measure", "retry"):
        _require_mapping(group, tree[group])
    _require_mapping("cluster", tree.get("cluster") or {})
    names, cluster = tree["names"], tree["cluster"] or {}
    strangers = sorted(set(cluster) - CLUSTER_KEYS, key=str)
    if strangers:
        raise moved_to_sbatch(str(strangers[0])) or ConfigError(
            unknown_name(f"key of cluster={names['cluster']}", strangers[0], CLUSTER_KEYS)
        )
    sweep = dict(tree["sweep"])
    models = tuple(from_dict(ModelShape, m, where=f"model {m['name']}") for m in tree["models"])
    _distinct(models)
    workload = {k: sweep.pop(k) for k in ("seq_len", "gbs", "seed") if k in sweep}
    tree, given = _without_secrets(tree)
    hardware = read_hardware({"name": names["hardware"], **tree["hardware"]})
    kernel = {"name": names["kernel"], "precision": hardware.precision} | {
        k: v for k, v in tree["kernel"].items() if v is not None
    }
    _require_values(tree)
    config = SweepConfig(
        name=str(tree["name"] or f"{names['sweep']}-{names['hardware']}"),
        results_dir=tree["results_dir"],
        cluster=str(cluster.get("name") or names["cluster"]),
        hardware=hardware,
        kernel=from_dict(KernelConfig, kernel, where="kernel"),
        launcher=_launcher(tree["launcher"], cluster),
        measure=from_dict(Measure, tree["measure"], where="measure"),
        models=models,
        workload=from_dict(Workload, workload, where="sweep"),
        axes=_axes(sweep),
        retry=from_dict(RetryPolicy, tree["retry"], where="retry"),
        repeats=tree["repeats"],
        profile=tree.get("profile", False),
        resolved=tree,
        secrets=given,
    )
    if config.profile and config.kernel.kind != "embedded":
        raise ConfigError(
            f"profile=true with kernel={config.kernel.name}; only ultrabench's own kernel looks inside itself: use "
            "what the program has for that"
        )
    return config


def _require_values(tree: dict[str, Any]) -> None:
    """Raises ConfigError when repeats, results_dir or profile cannot be used."""
    if type(tree["repeats"]) is not int or tree["repeats"] < 1:
        raise ConfigError(f"repeats={tree['repeats']}; must be a whole number >= 1")
    if not isinstance(tree["results_dir"], str) or not tree["results_dir"]:
        raise ConfigError(f"results_dir={tree['results_dir']!r}; must be a folder")
    if type(tree.get("profile", False)) is not bool:
        raise ConfigError(f"profile={tree['profile']!r}; must be true or false")


def read_hardware(values: Mapping[str, Any]) -> Hardware:
    """The hardware that a configuration or sweep.json describes.

    Values without a `source` name only a GPU; the rates of that GPU then come from the file that has them.

    Raises:
        ConfigError: a value cannot be used, or no file has rates of the GPU.
    """
    if "gpu" in values and "source" not in values:
        gpus: dict[str, dict[str, Any]] = {}
        for path in files("hardware").values():
            row = read_yaml(path)
            if isinstance(row, dict) and {"gpu", "source"} <= row.keys():
                if row["gpu"] in gpus and row["gpu"] == values["gpu"]:
                    raise ConfigError(
                        f"{path}: another file has rates of gpu={row['gpu']}, too; give it another name"
                    )
                gpus[row["gpu"]] = row
        if values["gpu"] not in gpus:
            told = unknown_name("gpu", values["gpu"], gpus)
            raise ConfigError(
                f"{told}: give its rates in the same file, with their source (see configs/hardware/)"
            )
        values = gpus[values["gpu"]] | {k: v for k, v in values.items() if v is not None}
    return from_dict(Hardware, values, where="hardware")


def _require_mapping(group: str, value: Any) -> None:
    """Raises ConfigError when the value of a group is not a mapping of settings."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{group}: {value!r} holds no settings; in a sweep file another {group} is chosen under defaults: "
            f"'- override /{group}: NAME'"
        )


def _without_secrets(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with the secrets of kernel.env redacted, and the values of those secrets."""
    env = tree["kernel"].get("env")
    if not isinstance(env, dict):
        return tree, {}
    shown, given = redacted(env)
    return tree | {"kernel": tree["kernel"] | {"env": shown}}, given


def _launcher(values: dict[str, Any], cluster: dict[str, Any]) -> LauncherConfig:
    """The settings of the launcher; "" means null, and null means an empty list where a list is needed.

    The options of sbatch of the launcher are added to those of the cluster.
    """
    given = {k: None if v == "" else v for k, v in values.items()}
    for key in given:
        if given[key] is not None and (error := moved_to_sbatch(f"launcher.{key}")):
            raise error
    given |= {k: [] for k in ("python", "setup", "environment", "srun") if given.get(k, ()) is None}
    given |= {k: str(given[k]) for k in TEXTS if type(given.get(k)) is int}  # an account may be 1234
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
    given = {str(k): "" if v is None or v is True else v for told in options for k, v in told.items()}
    return {k: str(v) for k, v in given.items() if v is not False}


def load_model(name: str) -> ModelShape:
    """The shape of the model that `name` means: a name on the search path, or the path of a config.json.

    Raises:
        ConfigError: there is no such model, or its file lacks a value.
    """
    if is_path(name):
        return read_checkpoint_config(name)
    if name not in known_names("model"):
        raise ConfigError(unknown_name("model", name, known_names("model")))
    path = files("model")[name]
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no model: it holds no mapping of sizes; see configs/model/")
    sizes = {str(key): value for key, value in values.items()}
    try:
        return from_dict(ModelShape, {"name": name, **sizes}, where=f"model {name}")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


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


def _distinct(models: tuple[ModelShape, ...]) -> None:
    seen: dict[tuple[Any, ...], str] = {}
    for m in models:
        key = (m.hidden_size, m.num_hidden_layers, m.num_attention_heads, m.num_key_value_heads,
               m.intermediate_size, m.vocab_size, m.tie_word_embeddings, m.rope_theta, m.rms_norm_eps)  # fmt: skip
        if key in seen:
            raise ConfigError(f"sweep.models: {seen[key]} and {m.name} are the same model; name it once")
        if m.name in seen.values():
            raise ConfigError(f"sweep.models: two models are called {m.name}; give one of them another name")
        seen[key] = m.name
