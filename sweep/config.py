"""From Hydra overrides to frozen values: the only module that knows Hydra."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ultrabench
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.hardware import Hardware
from ultrabench.kernel_choice import KernelChoice
from ultrabench.measure import Measure
from ultrabench.record import from_dict, to_dict
from ultrabench.run import Workload
from ultrabench.shape import ModelShape
from ultrabench.sweep.config_errors import explain

GROUPS = ("cluster", "hardware", "kernel", "launcher", "measure", "model", "sweep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values each word of a layout takes; candidates are their product."""

    nodes: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    zero_stage: tuple[int, ...]
    mbs: tuple[int, ...]
    gas: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("nodes", "tp", "pp", "cp", "zero_stage", "mbs", "gas"):
            values = getattr(self, name)
            least = 0 if name == "zero_stage" else 1
            bad = [v for v in values if v < least or (name == "zero_stage" and v > 3)]
            if not values or bad:
                rule = "each must be 0, 1, 2 or 3" if name == "zero_stage" else "each must be >= 1"
                raise ConfigError(
                    f"sweep.{name}={list(values)}; {rule}, and at least one is needed"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherChoice:
    """How allocations are submitted."""

    name: str
    pack: int | None = None
    """Runs of one allocation at most; None: as many as fit allocation_minutes."""
    allocation_minutes: float = 20.0
    """Predicted duration that one allocation is filled up to."""
    heartbeat_s: float = 5.0
    """How often the agents of one allocation show each other that they are alive."""


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
    repeats: int = 1
    resolved: dict[str, Any] = field(default_factory=dict)
    """The composed configuration as JSON, for the record."""


def search_path() -> list[Path]:
    """Folders that hold configuration, the strongest first.

    `./ultrabench`, then $ULTRABENCH_CONFIG_DIR (by default ~/.config/ultrabench), then the package.
    """
    user = os.environ.get("ULTRABENCH_CONFIG_DIR", "~/.config/ultrabench")
    folders = [Path.cwd() / "ultrabench", Path(user).expanduser()]
    package = Path(ultrabench.__file__).parent / "configs"
    return [f for f in folders if _is_config_folder(f)] + [package.resolve()]


def _is_config_folder(folder: Path) -> bool:
    return any(next((folder / group).glob("*.yaml"), None) for group in GROUPS)


def known_names(group: str) -> list[str]:
    """What can be named in a group such as `hardware`."""
    return sorted({p.stem for folder in search_path() for p in (folder / group).glob("*.yaml")})


def load_config(overrides: Sequence[str] = ()) -> SweepConfig:
    """The sweep that Hydra `overrides` describe; `model=NAME` means `sweep.models=[NAME]`.

    Raises:
        ConfigError: anything that cannot be used, in one line.
    """
    tree = _compose([_model_list(o) for o in overrides])
    names = _as_list(tree["sweep"].pop("models"))
    tree["models"] = [to_dict(load_model(str(name))) for name in names]
    return config_from_tree(tree)


def config_from_tree(tree: dict[str, Any]) -> SweepConfig:
    """The sweep that a composed configuration describes; `SweepConfig.resolved` is such a tree.

    Raises:
        ConfigError: a value that cannot be used.
    """
    names = tree["names"]
    sweep = dict(tree["sweep"])
    models = tuple(from_dict(ModelShape, m, where=f"model {m['name']}") for m in tree["models"])
    _distinct(models)
    workload = {k: sweep.pop(k) for k in ("seq_len", "gbs", "seed") if k in sweep}
    axes = {name: _as_list(values) for name, values in sweep.items()}
    kernel = {"name": names["kernel"], **tree["kernel"]}
    if not isinstance(tree["repeats"], int) or tree["repeats"] < 1:
        raise ConfigError(f"repeats={tree['repeats']}; must be a whole number >= 1")
    config = SweepConfig(
        name=str(tree["name"] or f"{names['sweep']}-{names['hardware']}"),
        results_dir=str(tree["results_dir"]),
        cluster=tree["cluster"]["name"],
        hardware=from_dict(
            Hardware, {"name": names["hardware"], **tree["hardware"]}, where="hardware"
        ),
        kernel=from_dict(KernelChoice, kernel, where="kernel"),
        launcher=from_dict(LauncherChoice, tree["launcher"], where="launcher"),
        measure=from_dict(Measure, tree["measure"], where="measure"),
        models=models,
        workload=from_dict(Workload, workload, where="sweep"),
        axes=from_dict(Axes, axes, where="sweep"),
        repeats=tree["repeats"],
        resolved=tree,
    )
    if "/" in config.name or config.name.startswith("."):
        raise ConfigError(
            f"name={config.name!r}; a sweep's name is a folder's: no '/', no leading '.'"
        )
    return config


def load_model(name: str) -> ModelShape:
    """The model of that name on the search path.

    Raises:
        ConfigError: there is none, or it lacks something.
    """
    for folder in search_path():
        path = folder / "model" / f"{name}.yaml"
        if path.is_file():
            try:
                values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
            except (OmegaConfBaseException, ValueError) as error:
                raise ConfigError(f"{path} is no model: {str(error).splitlines()[0]}") from error
            if not isinstance(values, dict):
                raise ConfigError(f"{path} is no model: it holds no mapping of sizes")
            return from_dict(ModelShape, {"name": name, **values}, where=f"model {name}")  # type: ignore[dict-item]
    raise ConfigError(unknown_name("model", name, known_names("model")))


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _model_list(override: str) -> str:
    key, eq, value = override.partition("=")
    if key.lstrip("+") != "model" or not eq:
        return override
    if value.startswith("["):
        raise ConfigError(f"{override}: model takes one name; for several use sweep.models={value}")
    return f"sweep.models=[{value}]"


def _distinct(models: tuple[ModelShape, ...]) -> None:
    seen: dict[tuple[Any, ...], str] = {}
    for m in models:
        key = (m.hidden_size, m.num_hidden_layers, m.num_attention_heads, m.num_key_value_heads,
               m.intermediate_size, m.vocab_size, m.tie_word_embeddings, m.rope_theta, m.rms_norm_eps)  # fmt: skip
        if key in seen:
            raise ConfigError(
                f"sweep.models: {seen[key]} and {m.name} are the same model; name it once"
            )
        seen[key] = m.name


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed tree as plain values, with the chosen option of each group under `names`."""
    folders = search_path()
    others = ",".join(f"'file://{f}'" for f in folders[1:])
    extra = [f"hydra.searchpath=[{others}]"] if others else []
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3"):
            composed = compose("config", overrides=[*overrides, *extra], return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            composed.pop("hydra")
            tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error, overrides, known_names, GROUPS)) from error
    assert isinstance(tree, dict)
    values: dict[str, Any] = {str(k): v for k, v in tree.items()}
    values["names"] = {str(k): v for k, v in choices.items() if k in GROUPS}
    return values


def describe(group: str) -> dict[str, str]:
    """Names of a group with the first comment line of their files; the strongest folder wins."""
    found: dict[str, str] = {}
    for folder in search_path():
        for path in sorted((folder / group).glob("*.yaml")):
            comments = [
                line.lstrip("# ").strip()
                for line in path.read_text().splitlines()
                if line.startswith("#") and "@package" not in line
            ]
            found.setdefault(path.stem, comments[0] if comments else "")
    return dict(sorted(found.items()))
