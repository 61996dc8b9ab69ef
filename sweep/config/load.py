"""Makes a SweepConfig from a composed configuration, and single records from files of a configuration."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta

from ultrabench.allowed import Count
from ultrabench.batch_system import NO_CLUSTER
from ultrabench.errors import SETTING, ConfigError, require_known, unknown_name
from ultrabench.hardware import DEVICE_KINDS, Hardware
from ultrabench.kernel_config import EMBEDDED, KERNEL_KINDS, KernelConfig
from ultrabench.layout import (
    AUTO,
    AXES,
    FOLLOWING,
    NEUTRAL,
    SWEEP_VALUES,
    TEXT_AXES,
    TYPES_IN_SWEEP,
    axis_texts,
)
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.process_text import require_process_texts, require_variables
from ultrabench.record import T, field_types, from_dict, missing_fields, to_dict, value_from
from ultrabench.run import Workload
from ultrabench.store.kernel_secrets import redact_env
from ultrabench.sweep.config.checkpoint import read_checkpoint_config, shape_from, with_field_names
from ultrabench.sweep.config.compose import (
    compose_tree,
    in_defaults,
    moved_advice,
    parts_of,
    unknown_override,
)
from ultrabench.sweep.config.files import (
    CONFIG_GROUPS,
    FOLDER_BY_NAME,
    file_of_user,
    files,
    read_text,
    read_yaml,
    unknown_option,
    usable,
)
from ultrabench.sweep.config.framework import Framework, framework_from
from ultrabench.sweep.config.knobs import with_flag_texts, with_texts
from ultrabench.sweep.config.launcher_config import CLUSTER_KEYS, read_launcher
from ultrabench.sweep.config.listed_layouts import read_layouts, values_of_layouts
from ultrabench.sweep.config.options import SWEEP_KEYS, read_list, read_options, values_in
from ultrabench.sweep.config.sweep_config import Axes, RetryPolicy, SweepConfig
from ultrabench.sweep.predict.profile import Profile
from ultrabench.variant import KERNEL_OPTIONS

UNCHANGED_KEYS = ("results_dir", "models", "repeats", "trace", "max_p_oom")
"""Keys of a composed configuration whose values are taken as they are."""
TREE_KEYS = frozenset({*CONFIG_GROUPS[:-1], *UNCHANGED_KEYS, "name", "names", "profile"})
"""Keys of a composed configuration."""
WORKLOAD_TYPES = field_types(Workload)
"""Key of `sweep` that says what one step trains on -> its type."""
SELECTION_KEYS = ("strategy", "batch", "max_runs", "scaling")
"""Keys of `sweep` that say which of its layouts are run, and what gbs is on more nodes."""
_NON_AXIS_KEYS = frozenset({*WORKLOAD_TYPES, *SELECTION_KEYS, *SWEEP_KEYS, "layouts"})
"""Keys of `sweep` that are no axes of layouts."""
_CompileSetting = Annotated[bool | Literal["auto"], Meta(description="auto, true or false")]
"""The values that a configuration may give kernel.compile."""

_OWN_PATHS = ("name", "results_dir")
"""Settings that name the folder of a sweep, which may be no UTF-8."""


def load_config(
    overrides: Sequence[str] = (), typed_names: Mapping[str, str] = MappingProxyType({})
) -> SweepConfig:
    """The sweep that Hydra `overrides` describe; `model=NAME` means `sweep.models=[NAME]`.

    Args:
        typed_names: dotted name of a setting -> the short one that was typed, which messages have in its place.

    Raises:
        ConfigError: a name, a value or a file cannot be used; the message is one line.
    """
    model_overrides = [o for o in overrides if re.match(r"\+*(sweep\.models|model)=", o)]
    if len(model_overrides) > 1:
        rule = "model=NAME means sweep.models=[NAME]; give only one of them, such as sweep.models=[tiny,mini]"
        raise ConfigError(f"{' '.join(model_overrides)}: {rule}")
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        require_process_texts({key: value}, own_paths=_OWN_PATHS)
    options = parts_of(overrides)
    try:
        tree = compose_tree(overrides)
        options = tree["names"]
        _require_different_values(tree)
        model_names = tree["sweep"].pop("models", None) if isinstance(tree.get("sweep"), dict) else None
        tree["models"] = [to_dict(load_model(str(name))) for name in values_in(model_names or [])]
        return config_from_tree(tree)
    except ConfigError as error:
        file_prefix = _file_of(error.setting, options, overrides) if error.setting else ""
        name = typed_names.get(error.setting or "", error.setting)
        raise ConfigError(f"{file_prefix}{error.template}", setting=name) from error


def _require_different_values(tree: Mapping[str, Any]) -> None:
    """Raises ConfigError if an axis, a batch or an option of the kernel lists a value twice.

    A stored sweep may have such a list, and is still read.
    """
    listed_keys = {"sweep": ("nodes", *AXES, *WORKLOAD_TYPES), "kernel": ("precision", *KERNEL_OPTIONS)}
    for group, keys in listed_keys.items():
        settings = tree.get(group)
        if not isinstance(settings, dict):
            continue
        for key in keys:
            listed = values_in(settings.get(key))
            values = axis_texts(key, listed) if key in TEXT_AXES else [*map(str, listed)]
            if repeated := next((value for value in values if values.count(value) > 1), None):
                fact = f"{SETTING}=[{','.join(values)}] lists {repeated} twice"
                raise ConfigError(fact, "leave one out", setting=f"{group}.{key}")


def _file_of(setting: str, options: Mapping[str, str], overrides: Sequence[str]) -> str:
    """The prefix `FILE: ` for a message about a setting in a file of the user; empty where an override gives it."""
    group, last_part = setting.partition(".")[0], setting.rpartition(".")[2]
    group_path, sweep_path = (file_of_user(g, options.get(g, "")) for g in (group, "sweep"))
    if group_path and not any(key.startswith(f"{group}.") for key in parts_of(overrides)):
        return f"{group_path}: "
    if sweep_path is None or any(last_part in o for o in overrides):
        return ""
    return f"{sweep_path}: " if re.search(rf"\b{re.escape(last_part)}\b", read_text(sweep_path)) else ""


def config_from_tree(tree: dict[str, Any]) -> SweepConfig:
    """The sweep that a composed configuration describes; `SweepConfig.resolved` is such a tree.

    Raises:
        ConfigError: a value cannot be used.
    """
    tree = tree | {"cluster": tree.get("cluster") or {}}
    _require_settings(tree)
    require_process_texts(tree, own_paths=_OWN_PATHS)
    for group in ("kernel", "sweep"):
        if isinstance(variables := tree[group].get("env"), dict):
            require_variables(variables, f"{group}.env")
    names, cluster, sweep = tree["names"], tree["cluster"], tree["sweep"]
    kernel, secrets = with_texts(tree["kernel"]), dict[str, str]()
    tree = tree | {"kernel": kernel}
    if isinstance(kernel.get("env"), dict):
        kernel["env"], secrets = redact_env(kernel["env"])
        tree = tree | {"kernel": kernel}
    _require_texts(kernel.get("files"))
    hardware = read_hardware({"name": names["hardware"], **tree["hardware"]})
    if tree["measure"].get("partial_steps") is False:  # what YAML makes of off
        tree = tree | {"measure": tree["measure"] | {"partial_steps": "off"}}
    if tree["measure"].get("max_foreign_load") == "auto":
        tree = tree | {
            "measure": tree["measure"] | {"max_foreign_load": DEVICE_KINDS[hardware.device].max_foreign_load}
        }
    kernel_options = _kernel_options(kernel, hardware)
    first_values = {option: values[0] for option, values in kernel_options.items()}
    settings = {k: value for k, value in kernel.items() if k != "profile" and value is not None}
    kernel_values = {"name": names["kernel"]} | settings | first_values
    kernel_config = from_dict(KernelConfig, kernel_values, where="kernel")
    workload_types = {key: key_type for key, key_type in WORKLOAD_TYPES.items() if key in sweep}
    workload = {key: read_list(sweep[key], kind, f"sweep.{key}")[0] for key, kind in workload_types.items()}
    profile = profile_of(tree, hardware.device)
    trains_itself, types = kernel_config.trains_itself, field_types(SweepConfig)
    default_seconds = {k: getattr(hardware, k) if trains_itself else 0.0 for k in ("warmup_s", "min_s")}
    selection_keys = [key for key in SELECTION_KEYS if sweep.get(key) is not None]
    launcher_defaults = {
        "preflight": kernel_config.forks or hardware.has_gpus,
        "control": kernel_config.trains and hardware.shares_host,
    }
    values = {
        **{key: tree[key] for key in UNCHANGED_KEYS if key in tree},
        **{k: value_from(types[k], sweep[k], f"sweep.{k}") for k in selection_keys},
        "name": str(tree.get("name") or f"{names['sweep']}-{names['hardware']}"),
        "cluster": str(cluster.get("name") or names.get("cluster", NO_CLUSTER)),
        "price_per_gpu_hour": cluster.get("price_per_gpu_hour"),
        "hardware": hardware,
        "kernel": kernel_config,
        "measure": from_dict(Measure, _with_defaults(tree["measure"], default_seconds), where="measure"),
        "launcher": read_launcher(_with_defaults(tree["launcher"], launcher_defaults), cluster),
        "retry": from_dict(RetryPolicy, tree["retry"], where="retry"),
        "axes": _axes(
            {key: value for key, value in sweep.items() if key not in _NON_AXIS_KEYS}, sweep.get("layouts")
        ),
        "workload": from_dict(Workload, workload, where="sweep"),
        "options": read_options(sweep, kernel_options, kernel_config, hardware),
        "profile": profile,
        "resolved": tree | {"hardware": to_dict(hardware), "profile": to_dict(profile)},
        "secrets": secrets,
    }
    return from_dict(SweepConfig, values, where="")


def _require_settings(tree: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that no composed configuration has, or for a group that holds no settings."""
    for key in sorted(tree.keys() - TREE_KEYS):
        raise ConfigError(unknown_override(key, tree[key]), setting=key)
    for group in CONFIG_GROUPS[:-1]:
        if not isinstance(settings := tree.get(group), dict):
            raise ConfigError(f"{group}: {settings!r} holds no settings; {in_defaults(group)}", setting=group)
        for key, value in settings.items():
            if value is not None and (advice := moved_advice(f"{group}.{key}")):
                raise ConfigError(advice, setting=f"{group}.{key}")
    what = f"key of cluster={tree['names'].get('cluster')}"
    require_known(what, CLUSTER_KEYS, *sorted(tree["cluster"], key=str), setting="cluster")


def _require_texts(files: Any) -> None:
    """Raises ConfigError unless kernel.files maps names to texts; settings of YAML are no text."""
    if not isinstance(files, dict | None):
        problem = f"kernel.files={files!r} does not map names to texts"
        raise ConfigError(problem, "write '{NAME: \"TEXT\"}'", setting="kernel.files")
    for name, text in (files or {}).items():
        if not isinstance(text, str):
            setting = f"kernel.files.{name}"
            remedy = "write the text of the file in quotes, or below the name and a '|'"
            raise ConfigError(f"{setting}={text!r} is not a text", remedy, setting=setting)


def _with_defaults(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with those of `defaults` for its keys that are null or absent."""
    return values | {key: value for key, value in defaults.items() if values.get(key) is None}


def _kernel_options(values: Mapping[str, Any], hardware: Hardware) -> dict[str, tuple[Any, ...]]:
    """Precision, compile and attention -> their values; the usual ones are those of the hardware and of KernelConfig.

    compile=auto means true on GPUs.
    """
    type_by_option = field_types(KernelConfig) | {"compile": _CompileSetting}
    meaning_by_option: dict[str, dict[Any, Any]] = {
        "precision": {None: hardware.precision}, "attention": {None: AUTO},
        "compile": {None: False, AUTO: hardware.has_gpus},
    }  # fmt: skip
    kernel_kind = KERNEL_KINDS.get(str(values.get("kind", EMBEDDED)))
    takes_lists, options = kernel_kind is None or kernel_kind.trains_itself, {}
    for option, meaning in meaning_by_option.items():
        setting = f"kernel.{option}"
        listed_values = dict.fromkeys(read_list(values.get(option), type_by_option[option] | None, setting))
        if len(listed_values) > 1 and option != "precision" and not takes_lists:
            remedy = "list the values under sweep.flags, sweep.words or sweep.env"
            problem = f"{SETTING} lists several values, which only ultrabench's own kernel supports"
            raise ConfigError(problem, remedy, setting=setting)
        options[option] = tuple(dict.fromkeys(meaning.get(value, value) for value in listed_values))
    return options


def _axes(sweep: dict[str, Any], layouts: Any) -> Axes:
    """The axes of a sweep; an axis that the sweep does not name has its neutral value only.

    Args:
        layouts: the value of `sweep.layouts`; None if the sweep lists values of axes.
    """
    values_by_axis = {name: values_in(values) for name, values in sweep.items() if values is not None}
    require_known(
        "field of sweep", ("nodes", *AXES[1:], "models", *_NON_AXIS_KEYS), *values_by_axis, setting="sweep"
    )
    if "nodes" not in values_by_axis:
        raise ConfigError("sweep lacks nodes; give a list, such as sweep.nodes=[1,2]", setting="sweep")
    if AUTO in values_by_axis.get("gas", ()):
        advice = "write sweep.gas=null to derive gas from the batch"
        raise ConfigError("sweep.gas=auto is not an integer", advice)
    for name in TEXT_AXES & values_by_axis.keys():
        values_by_axis[name] = axis_texts(name, values_by_axis[name])
    types = {"nodes": Count, **TYPES_IN_SWEEP}
    axes = {name: read_list(values, types[name], f"sweep.{name}") for name, values in values_by_axis.items()}
    neutral_values = ((name, (value,)) for name, value in NEUTRAL.items() if name not in FOLLOWING)
    usual_values: dict[str, Any] = dict(neutral_values)
    usual_values |= {name: (in_sweep.default,) for name, in_sweep in SWEEP_VALUES.items()}
    if layouts is not None:
        listed = read_layouts(layouts, [name for name in AXES if name in axes])
        return Axes(nodes=axes["nodes"], layout=values_of_layouts(listed), listed=listed)
    return Axes(nodes=axes.pop("nodes"), layout=usual_values | axes)


def profile_of(tree: Mapping[str, Any], device: str) -> Profile:
    """The profile of a composed configuration: the one that it names or holds, else that of its kernel.

    That of a kernel is NAME-cpu on CPUs, if there is such a file. A configuration that was written down holds the
    whole profile, so that a sweep goes on as it began; one of another version, with other constants, is read again.
    """
    profile = tree.get("profile")
    if isinstance(profile, bool):
        rule = "a profile is a file of prediction constants"
        raise ConfigError(f"profile={str(profile).lower()}; {rule}; to trace runs, write trace=true")
    if isinstance(profile, dict):
        with contextlib.suppress(ConfigError):
            return from_dict(Profile, profile, where="profile", skip_unknown=True)
        profile = profile.get("name")
    if profile is None:
        profile = usual_profile(str(tree["kernel"].get("profile") or "ultrabench"), device)
    return load_profile(str(profile))


def usual_profile(name: str, device: str) -> str:
    """The name of the profile `name` for a torch device type: NAME-cpu on CPUs, if there is such a file."""
    return f"{name}-{device}" if f"{name}-{device}" in files("profiles") else name


def read_hardware(values: Mapping[str, Any]) -> Hardware:
    """The hardware that a configuration or sweep.json describes.

    Values without a `source` name only a GPU; the rates of that GPU then come from the file that has them.

    Raises:
        ConfigError: a value cannot be used, or no file has rates of the GPU.
    """
    if "gpu" in values and "source" not in values:
        files_of_hardware = usable("hardware").items()
        rated_files = {path: rates for path, rates in files_of_hardware if {"gpu", "source"} <= rates.keys()}
        paths = [path for path, rates in rated_files.items() if rates["gpu"] == values["gpu"]]
        if not paths:
            known_gpus = {rates["gpu"] for rates in rated_files.values()}
            unknown_text = unknown_name("hardware.gpu", values["gpu"], known_gpus)
            advice = f"for a new GPU, add to its file: {', '.join(missing_fields(Hardware, values))}"
            raise ConfigError(unknown_text, advice, setting="hardware.gpu")
        if len(paths) > 1:
            problem = f"{paths[1]}: {paths[0]} also has rates of gpu={values['gpu']}"
            raise ConfigError(problem, "rename one of them")
        values = rated_files[paths[0]] | {k: v for k, v in values.items() if v is not None}
    return from_dict(Hardware, values, where="hardware")


def _load_named(group: str, name: str, make_record: Callable[[Mapping[str, Any]], T], advice: str = "") -> T:
    """What `make_record` makes of the settings in the file of this name, with the name.

    Args:
        advice: what a user can do who has no such file.

    Raises:
        ConfigError: there is no such file, or it holds no settings, or one that cannot be used.
    """
    path = files(FOLDER_BY_NAME[group]).get(name)
    if path is None:
        raise ConfigError(unknown_option(group, name) + advice)
    if not isinstance(values := read_yaml(path), dict):
        raise ConfigError(f"{path} holds no settings; write them as in configs/{path.parent.name}/")
    try:
        return make_record({"name": name, **values})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_hardware(name: str) -> Hardware:
    """The hardware of that name on the search path.

    Raises:
        ConfigError: there is no such hardware, or a value of its file cannot be used.
    """
    advice = "; for other hardware, write its rates to ./ultrabench/hardware/NAME.yaml"
    return _load_named("hardware", name, read_hardware, advice)


def is_checkpoint(name: str) -> bool:
    """Whether a model is that of a config.json, by the path or the name on the hub of which it is asked for."""
    return "/" in name or name.endswith(".json") or (name not in files("model") and Path(name).is_dir())


def load_model(name: str) -> ModelShape:
    """The shape of a model.

    Args:
        name: a name on the search path, the path of a config.json or its folder, or the name of a model on the
            Hugging Face hub whose config.json is in the cache.

    Raises:
        ConfigError: there is no such model, or its file lacks a value.
    """
    if is_checkpoint(name):
        return read_checkpoint_config(name)
    where = f"model {name}"
    return _load_named("model", name, lambda values: shape_from(with_field_names(values, where), where))


def load_profile(name: str) -> Profile:
    """The profile of that name on the search path.

    A profile with `base: NAME` has the settings of that profile, but for those that it gives itself. In `time` and
    `memory` these are single constants, elsewhere whole settings.

    Raises:
        ConfigError: there is no such profile, or a constant is missing or cannot be used.
    """
    advice = "; `ultrabench predict calibrate` fits a profile to your runs"
    return _load_named(
        "profile",
        name,
        lambda values: from_dict(Profile, _with_base(values, (name,)), where="profile"),
        advice,
    )


def _with_base(values: Mapping[str, Any], users: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a profile's file with those of its `base`, on which the profiles `users` build."""
    own_values = with_flag_texts({key: value for key, value in values.items() if key != "base"})
    if "base" not in values:
        return own_values
    base_name = str(values["base"])
    require_known("profile in base:", [*files("profiles")], base_name)
    if base_name in users:
        raise ConfigError(
            f"base={base_name}: the profiles {', '.join(users)} build on each other; leave one base out"
        )
    base_values = _with_base(read_yaml(files("profiles")[base_name]), (*users, base_name))
    merged = {
        name: base_values[name] | own_values[name]
        for name in ("time", "memory")
        if isinstance(base_values.get(name), dict) and isinstance(own_values.get(name), dict)
    }
    return base_values | own_values | merged


def kernel_settings(name: str) -> dict[str, Any]:
    """The settings in the file of a kernel, and in those that it builds on.

    Raises:
        ConfigError: there is no such kernel, or its file cannot be used.
    """
    if (path := files("kernel").get(name)) is None:
        raise ConfigError(unknown_option("kernel", name))
    settings = read_yaml(path)
    if isinstance(settings, dict) and "defaults" not in settings:
        return settings
    composed: dict[str, Any] = compose_tree([f"kernel={name}"])["kernel"]
    return composed


def load_framework(name: str) -> Framework:
    """The framework of that name on the search path.

    Raises:
        ConfigError: there is no such framework, or a value of its file cannot be used.
    """
    return _load_named("framework", name, framework_from)
