"""Reads a layout from the NAME=VALUE arguments of `ultrabench kernel`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import AXES, TEXT_AXES, Layout, default_schedule, default_virtual_stages
from ultrabench.run import RunSpec
from ultrabench.sweep.grid import broken_rules, refusal

TEXTS = TEXT_AXES | {"attention", "model", "hardware", "precision"}
"""Arguments whose value is a text; the value of any other is a whole number."""


def read_arguments(arguments: Sequence[str], options: Collection[str], example: str) -> dict[str, Any]:
    """Name -> value of all arguments; a name is an axis of a layout or one of `options`.

    Raises:
        ConfigError: an argument is not NAME=VALUE, its name is unknown, or its value is no whole number.
    """
    known = (*AXES, *options)
    values: dict[str, Any] = {}
    for argument in arguments:
        name, eq, value = argument.partition("=")
        if not eq:
            raise ConfigError(f"{argument!r} is no NAME=VALUE; write for example {example}")
        require_known("argument", known, name)
        try:
            values[name] = value if name in TEXTS else int(value)
        except ValueError:
            raise ConfigError(f"{name}={value!r} is no whole number") from None
    return values


def layout_of(values: Mapping[str, Any]) -> Layout:
    """The layout that the axes among `values` give; schedule and stages have the usual defaults."""
    axes = {name: values[name] for name in AXES if name in values}
    schedule = axes.setdefault("pp_schedule", default_schedule(axes.get("pp", 1), axes.get("gas", 1)))
    return Layout(**{"virtual_stages": default_virtual_stages(schedule)} | axes)


def require_possible(spec: RunSpec, device: str) -> None:
    """Raises when the kernel of a run cannot run its layout on a device, cuda or cpu.

    Raises:
        ConfigError: the kernel cannot run the layout; the message says why.
    """
    _, broken = next(broken_rules(spec.layout, spec.shape), (None, None))
    if reason := broken or refusal(spec.kernel, spec.layout, spec.shape, spec.workload.seq_len, device):
        raise ConfigError(f"{spec.layout.label()} cannot run: {reason}; choose another layout")
