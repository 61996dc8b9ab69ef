"""A sweep as frozen values, from a composed configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.hardware import Hardware
from ultrabench.kernel_choice import KernelChoice
from ultrabench.kernel_env import redacted
from ultrabench.layout import PP_SCHEDULES
from ultrabench.measure import Measure
from ultrabench.record import from_dict, to_dict
from ultrabench.run import Workload
from ultrabench.shape import ModelShape
from ultrabench.sweep.compose import compose_tree, known_names, read_yaml, search_path
from ultrabench.sweep.launcher_choice import TEXTS, LauncherChoice
from ultrabench.sweep.retry_policy import RetryPolicy

KEYS = frozenset({"hardware", "cluster", "kernel", "launcher", "measure", "retry", "sweep", "name",
                  "results_dir", "repeats", "profile", "names", "models"})  # fmt: skip
"""Of a composed tree."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@, -]{0,99}")
"""Of a sweep: it names a folder and Slurm jobs, and stands in commands to be copied."""
SCHEDULES = ("auto", *PP_SCHEDULES[1:])
CLUSTER_KEYS = frozenset({"name", "cpus", "python", "setup", *TEXTS})
"""Of a cluster: what configs/launcher/slurm.yaml takes from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values each word of a layout takes; candidates are their product."""

    nodes: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    zero_stage: tuple[int, ...]
    mbs: tuple[int, ...]
    gas: tuple[int, ...] | None = None
    """None: whatever makes the batch, gbs / (dp * mbs); a list keeps only these values."""
    pp_schedule: tuple[str, ...] = ("auto",)
    """auto: 1f1b, or afab where gas < pp."""
    virtual_stages: tuple[int, ...] = (2,)
    """Stages on each rank under the schedule interleaved."""

    def __post_init__(self) -> None:
        for name in self.pp_schedule:
            if name not in SCHEDULES:
                raise ConfigError(unknown_name("schedule in sweep.pp_schedule", name, SCHEDULES))
        few = [v for v in self.virtual_stages if v < 2]
        if few or not self.virtual_stages or not self.pp_schedule:
            raise ConfigError(
                f"sweep.pp_schedule={list(self.pp_schedule)}, sweep.virtual_stages={list(self.virtual_stages)}; "
                "at least one schedule is needed, and virtual stages >= 2"
            )
        for name in ("nodes", "tp", "pp", "cp", "zero_stage", "mbs", "gas"):
            values = getattr(self, name)
            if values is None:
                continue
            least = 0 if name == "zero_stage" else 1
            bad = [v for v in values if v < least or (name == "zero_stage" and v > 3)]
            if not values or bad:
                rule = "each must be 0, 1, 2 or 3" if name == "zero_stage" else "each must be >= 1"
                raise ConfigError(f"sweep.{name}={list(values)}; {rule}, and at least one is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """A whole sweep, resolved."""

    name: str
    results_dir: str
    cluster: str
    hardware: Hardware
    kernel: KernelChoice
    launcher: LauncherChoice
    measure: Measure
    models: tuple[ModelShape, ...]
    workload: Workload
    axes: Axes
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    repeats: int = 1
    profile: bool = False
    """Each run looks inside itself after its measured steps."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """The composed configuration as JSON, for the record; secrets are redacted."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Values of kernel.env that are given and must be written nowhere but in the file for them."""


def load_config(overrides: Sequence[str] = ()) -> SweepConfig:
    """The sweep that Hydra `overrides` describe; `model=NAME` means `sweep.models=[NAME]`.

    Raises:
        ConfigError: anything that cannot be used, in one line.
    """
    tree = compose_tree([_model_list(o) for o in overrides])
    names = _as_list(tree["sweep"].pop("models"))
    if not names:
        raise ConfigError("sweep.models is empty; name at least one (see ultrabench configs model)")
    tree["models"] = [to_dict(load_model(str(name))) for name in names]
    config = config_from_tree(tree)
    if not NAME.fullmatch(config.name):
        raise ConfigError(
            f"name={config.name!r}; a sweep's name begins with a letter, a digit or '_', goes on with these, spaces and "
            "any of .+=@,- and has at most 100 characters: choose another with name=NAME"
        )
    return config


def config_from_tree(tree: dict[str, Any]) -> SweepConfig:
    """The sweep that a composed configuration describes; `SweepConfig.resolved` is such a tree.

    Raises:
        ConfigError: a value that cannot be used.
    """
    strangers = sorted(set(tree) - KEYS)
    if strangers:
        raise ConfigError(unknown_name("override", strangers[0], KEYS - {"names", "models"}))
    names, cluster = tree["names"], tree["cluster"] or {}
    strangers = sorted(set(cluster) - CLUSTER_KEYS, key=str)
    if strangers:
        raise ConfigError(unknown_name(f"key of cluster={names['cluster']}", strangers[0], CLUSTER_KEYS))
    sweep = dict(tree["sweep"])
    models = tuple(from_dict(ModelShape, m, where=f"model {m['name']}") for m in tree["models"])
    _distinct(models)
    workload = {k: sweep.pop(k) for k in ("seq_len", "gbs", "seed") if k in sweep}
    axes = {name: _as_list(values) for name, values in sweep.items() if values is not None}
    tree, given = _without_secrets(tree)
    kernel = {"name": names["kernel"]} | {k: v for k, v in tree["kernel"].items() if v is not None}
    if type(tree["repeats"]) is not int or tree["repeats"] < 1:
        raise ConfigError(f"repeats={tree['repeats']}; must be a whole number >= 1")
    if not isinstance(tree["results_dir"], str) or not tree["results_dir"]:
        raise ConfigError(f"results_dir={tree['results_dir']!r}; must be a folder")
    config = SweepConfig(
        name=str(tree["name"] or f"{names['sweep']}-{names['hardware']}"),
        results_dir=tree["results_dir"],
        cluster=str(cluster.get("name") or names["cluster"]),
        hardware=from_dict(Hardware, {"name": names["hardware"], **tree["hardware"]}, where="hardware"),
        kernel=from_dict(KernelChoice, kernel, where="kernel"),
        launcher=_launcher(tree["launcher"]),
        measure=from_dict(Measure, tree["measure"], where="measure"),
        models=models,
        workload=from_dict(Workload, workload, where="sweep"),
        axes=from_dict(Axes, axes, where="sweep"),
        retry=from_dict(RetryPolicy, tree.get("retry") or {}, where="retry"),
        repeats=tree["repeats"],
        profile=tree.get("profile", False),
        resolved=tree,
        secrets=given,
    )
    if type(config.profile) is not bool:
        raise ConfigError(f"profile={config.profile!r}; must be true or false")
    if config.profile and config.kernel.kind != "embedded":
        raise ConfigError(
            f"profile=true with kernel={config.kernel.name}; only ultrabench's own kernel looks inside itself: use "
            "what the program has for that"
        )
    return config


def _without_secrets(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with the secrets of kernel.env redacted, and their values."""
    env = tree["kernel"].get("env")
    if not isinstance(env, dict):
        return tree, {}
    shown, given = redacted(env)
    return tree | {"kernel": tree["kernel"] | {"env": shown}}, given


def _launcher(values: dict[str, Any]) -> LauncherChoice:
    """The launcher's values; null and "" stand for the default, but for what null turns off."""
    given = {k: v for k, v in values.items() if v not in (None, "") or k in ("nice", "window")}
    given |= {k: str(given[k]) for k in TEXTS if type(given.get(k)) is int}  # an account may be 1234
    if isinstance(given.get("python"), str):
        given["python"] = [given["python"]]
    if isinstance(given.get("sbatch"), dict):
        flags = {k: "" if v is None or v is True else v for k, v in given["sbatch"].items()}
        given["sbatch"] = {str(k): str(v) for k, v in flags.items() if v is not False}
    return from_dict(LauncherChoice, given, where="launcher")


def load_model(name: str) -> ModelShape:
    """The model of that name on the search path.

    Raises:
        ConfigError: there is none, or it lacks something.
    """
    if name not in known_names("model"):
        raise ConfigError(unknown_name("model", name, known_names("model")))
    paths = [folder / "model" / f"{name}.yaml" for folder in search_path()]
    path = next(path for path in paths if path.is_file())
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no model: it holds no mapping of sizes; see configs/model/")
    sizes = {str(key): value for key, value in values.items()}
    return from_dict(ModelShape, {"name": name, **sizes}, where=f"model {name}")


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
    return f"sweep.models=[{value}]"


def _distinct(models: tuple[ModelShape, ...]) -> None:
    seen: dict[tuple[Any, ...], str] = {}
    for m in models:
        key = (m.hidden_size, m.num_hidden_layers, m.num_attention_heads, m.num_key_value_heads,
               m.intermediate_size, m.vocab_size, m.tie_word_embeddings, m.rope_theta, m.rms_norm_eps)  # fmt: skip
        if key in seen:
            raise ConfigError(f"sweep.models: {seen[key]} and {m.name} are the same model; name it once")
        seen[key] = m.name
