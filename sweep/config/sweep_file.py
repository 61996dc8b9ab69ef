"""Writes the file of a sweep that runs a few chosen layouts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ultrabench.errors import ConfigError
from ultrabench.layout import AXES, BATCH, DEGREES, FOLLOWING, NEUTRAL, Layout
from ultrabench.store.kernel_secrets import REDACTED
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.config.compose import as_hydra_list, parts_of
from ultrabench.sweep.config.files import CONFIG_GROUPS, file_of_user, files, read_text, user_file
from ultrabench.sweep.config.launcher_config import CLUSTER_LAUNCHER
from ultrabench.sweep.config.listed_layouts import CELL_TYPES
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import planned_cells
from ultrabench.variant import CELL_OPTIONS

FILE_NAME = r"(?!(?i:null|true|false|nan|inf)\Z)[A-Za-z][A-Za-z0-9_.-]{0,60}(?<!\.yaml)"
FILE_NAME_RULE = "a name starts with a letter and has only letters, digits, '_', '.' and '-', without .yaml"
_ALWAYS_WRITTEN = (*DEGREES[1:], BATCH[0])
"""Axes that every entry names, also with their neutral value."""
_CHOSEN_GROUPS = CONFIG_GROUPS[1:-1]
"""The groups of which the file chooses an option: all but sweep and model."""


def require_writable_name(name: str, *, force: bool) -> Path:
    """The path of ./ultrabench/sweep/NAME.yaml.

    Raises:
        ConfigError: the name cannot be used, is that of a sweep of the package, or there is such a file without
            `force`.
    """
    if not re.fullmatch(FILE_NAME, name):
        raise ConfigError(f"--write {name}: {FILE_NAME_RULE}", "choose another name")
    path, known_path = user_file("sweep", name), files("sweep").get(name)
    if known_path and file_of_user("sweep", name) is None:
        raise ConfigError(f"--write {name}: sweep={name} is part of ultrabench", "choose another name")
    if known_path and not force:
        raise ConfigError(f"--write {name}: {known_path} exists", "choose another name, or add --force")
    return path


def write_sweep_file(
    path: Path, config: SweepConfig, overrides: Sequence[str], runs: Sequence[Candidate] | None, heading: str
) -> None:
    """Writes a sweep that runs the layouts of `runs`, each in its cell, with the settings of `config`.

    Args:
        overrides: what `config` was composed of.
        runs: the runs whose layouts it lists; None for all axes of `config`.
        heading: the comment about the file.

    Raises:
        OSError: the file cannot be written.
    """
    content = f"# @package _global_\n# {heading}\n" + _yaml(_content(config, overrides, runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.partial")
    partial_path.write_text(content)
    partial_path.replace(path)


def _content(
    config: SweepConfig, overrides: Sequence[str], runs: Sequence[Candidate] | None
) -> dict[str, Any]:
    """The settings of the file."""
    tree, parts = config.resolved, parts_of(overrides)
    cells = [cell for _, cell in planned_cells(config)] if runs is None else [run.cell for run in runs]
    names = dict(tree["names"])
    if config.hardware.has_gpus and "launcher" not in parts:
        names["launcher"] = CLUSTER_LAUNCHER
    settings: dict[str, Any] = {
        "defaults": [{f"override /{g}": names[g]} for g in _CHOSEN_GROUPS if g in names]
    }
    for key in (*_keys_of_file(tree["names"]["sweep"]), *parts):
        _copy_setting(key, tree, settings)
    if profile_name := parts.get("profile"):
        settings["profile"] = profile_name
    precisions = [p for p in config.options.values["precision"] if any(c.precision == p for c in cells)]
    settings.setdefault("kernel", {})["precision"] = precisions if len(precisions) > 1 else precisions[0]
    if runs is None:
        sweep = {k: v for k, v in tree["sweep"].items() if v is not None}
        return settings | {"sweep": sweep | {"models": [*_model_names(config, parts, cells)]}}
    axes = {"nodes", "layouts", "models", *AXES}
    sweep = {k: v for k, v in tree["sweep"].items() if k not in axes and v is not None}
    sweep |= {"models": [*_model_names(config, parts, cells)], "nodes": sorted({c.nodes for c in cells})}
    for option in CELL_OPTIONS[:2]:
        values = sorted({getattr(cell, option) for cell in cells})
        sweep[option] = values if len(values) > 1 else values[0]
    # All of these layouts run, with the batches that they were chosen for.
    sweep |= {"strategy": "exhaustive", "scaling": "strong", "max_runs": None, "layouts": entries_of(runs)}
    return settings | {"sweep": sweep}


def _keys_of_file(sweep_name: str) -> list[str]:
    """The dotted keys of other groups that the file of a sweep sets."""
    path = files("sweep").get(sweep_name)
    content = yaml.safe_load(read_text(path)) if path else {}
    values = content if isinstance(content, dict) else {}
    grouped = {group: values[group] for group in _CHOSEN_GROUPS if isinstance(values.get(group), dict)}
    keys = [f"{group}.{key}" for group, settings in grouped.items() for key in settings]
    return [*keys, *(key for key in ("repeats", "trace", "max_p_oom") if key in values)]


def _copy_setting(key: str, tree: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Copies the value of a dotted key, unless it chooses an option, is one of `sweep`, or is a secret."""
    first, *rest = key.split(".")
    if first in ("sweep", "model", "profile", "name") or (first in CONFIG_GROUPS and not rest):
        return
    value: Any = tree
    for part in (first, *rest):
        if not isinstance(value, Mapping) or part not in value:
            return
        value = value[part]
    if value == REDACTED:
        return
    for part in (first, *rest)[:-1]:
        settings = settings.setdefault(part, {})
    settings[(first, *rest)[-1]] = value


def _model_names(config: SweepConfig, parts: Mapping[str, str], cells: Iterable[CellKey]) -> Iterable[str]:
    """What a sweep calls the models of the cells: their names, or the paths that the overrides give."""
    value = parts.get("sweep.models", parts.get("model"))
    listed = [] if value is None else as_hydra_list(value)[1:-1].split(",")
    given_names = [text.strip("'\"") for text in listed] if len(listed) == len(config.models) else []
    model_names = {cell.model for cell in cells}
    for index, shape in enumerate(config.models):
        if shape.name in model_names:
            yield given_names[index] if given_names else shape.name


def entries_of(runs: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The entries of sweep.layouts; they name what differs between the cells."""
    cells = [run.cell for run in runs]
    keys = [key for key in CELL_TYPES if len({getattr(cell, key) for cell in cells}) > 1]
    entries = list[dict[str, Any]]()
    for run in runs:
        entry = {key: getattr(run.cell, key) for key in keys} | _axis_values(run.layout)
        if entry not in entries:  # runs may differ in other options, which the sweep varies, too
            entries.append(entry)
    return entries


def _axis_values(layout: Layout) -> dict[str, Any]:
    """Axis -> its value as a sweep lists it; neutral values of most axes are left out."""
    values = {axis: getattr(layout, axis) for axis in AXES if axis not in FOLLOWING}
    if layout.pp_schedule != "interleaved":  # a sweep derives it
        del values["virtual_stages"]
    return {axis: v for axis, v in values.items() if axis in _ALWAYS_WRITTEN or v != NEUTRAL[axis]}


def _yaml(settings: Mapping[str, Any]) -> str:
    """The settings as YAML, each layout on a line."""
    return yaml.safe_dump(dict(settings), sort_keys=False, default_flow_style=None, width=10_000)
