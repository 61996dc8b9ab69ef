"""Reads a layout from the WORD=VALUE arguments of `ultrabench kernel`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES, TEXT_AXES, Layout, default_schedule, default_virtual_stages
from ultrabench.model_shape import ModelShape
from ultrabench.support import refusal
from ultrabench.sweep.rules import first_broken

TEXTS = TEXT_AXES | {"model", "hardware", "precision", "recompute"}
"""Words whose value is a text; the value of any other word is a whole number."""


def read_words(words: Sequence[str], options: Collection[str], example: str) -> dict[str, Any]:
    """Word -> value of all arguments; a word is an axis of a layout or one of `options`.

    Raises:
        ConfigError: an argument is not WORD=VALUE, its word is unknown, or its value is no whole number.
    """
    known = (*AXES, *options)
    values: dict[str, Any] = {}
    for word in words:
        key, eq, value = word.partition("=")
        if not eq:
            raise ConfigError(f"{word!r} is no WORD=VALUE; write for example {example}")
        if key not in known:
            raise ConfigError(unknown_name("word", key, known))
        try:
            values[key] = value if key in TEXTS else int(value)
        except ValueError:
            raise ConfigError(f"{key}={value!r} is no whole number") from None
    return values


def layout_of(values: Mapping[str, Any]) -> Layout:
    """The layout that the axes among `values` give; its schedule and virtual stages have the usual defaults."""
    axes = {name: values[name] for name in AXES if name in values}
    schedule = axes.setdefault("pp_schedule", default_schedule(axes.get("pp", 1), axes.get("gas", 1)))
    return Layout(**{"virtual_stages": default_virtual_stages(schedule)} | axes)


def require_possible(kernel: KernelConfig, layout: Layout, shape: ModelShape, seq_len: int) -> None:
    """Raises when `kernel` cannot run `layout`.

    Raises:
        ConfigError: the kernel cannot run the layout; the message says why.
    """
    broken = first_broken(layout, shape)
    if reason := broken[1] if broken else refusal(kernel, layout, shape, seq_len):
        raise ConfigError(f"{layout.label()} cannot run: {reason}; choose another layout")
