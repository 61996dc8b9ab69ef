"""A framework that trains the layout of a run from a configuration file, which ultrabench writes but does not start."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from ultrabench.errors import ConfigError, require_known
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES
from ultrabench.model_shape import ModelShape
from ultrabench.record import field_types, from_dict
from ultrabench.run import Workload
from ultrabench.sweep.config.files import settings_tree

ALL_SIZES_WORD = "model"
"""The word of `elsewhere` for all sizes of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The program that `sweep show --as` names, with the file that it reads."""

    kernel: KernelConfig
    """Its command; for a framework with a file, the settings in this file."""
    file: str | None = None
    """Name of the file, whose suffix says its form: .json, .yaml, or one setting a line. None: only a command."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Word of a layout, a model or a batch, or MODEL -> why the file does not say it."""

    def __post_init__(self) -> None:
        words = (*AXES, *field_types(ModelShape), *field_types(Workload), ALL_SIZES_WORD)
        require_known("word of elsewhere", words, *self.elsewhere)


def framework_from(values: Mapping[str, Any]) -> Framework:
    """The framework that a file of configs/framework/ describes; its `settings` are the words of a command.

    Raises:
        ConfigError: a key is unknown, or a value cannot be used.
    """
    if not values.get("settings"):
        raise ConfigError("settings is empty; list KEY=VALUE texts, such as settings: ['tp={tp}']")
    file_fields = {key: values[key] for key in ("file", "elsewhere") if key in values}
    kernel = {key: value for key, value in values.items() if key not in (*file_fields, "settings")}
    kernel |= {"kind": "command", "command": values["settings"]}
    return from_dict(Framework, {"file": "settings.txt", **file_fields, "kernel": kernel}, where="framework")


def text_of(settings: Sequence[str], file: str) -> str:
    """The content of a file with settings KEY.KEY=VALUE: JSON or YAML by its suffix, or else one setting a line."""
    if file.endswith(".json"):
        return json.dumps(settings_tree(settings), indent=2)
    if file.endswith(".yaml"):
        return yaml.safe_dump(settings_tree(settings), sort_keys=False).rstrip()
    return "\n".join(settings)
