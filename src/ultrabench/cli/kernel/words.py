"""Reads a layout from the WORD=VALUE arguments of `ultrabench kernel`."""

from collections.abc import Collection, Mapping, Sequence

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout, default_schedule, default_virtual_stages
from ultrabench.model_shape import ModelShape
from ultrabench.support import refusal
from ultrabench.sweep.rules import first_broken


def read_words(words: Sequence[str], known: Collection[str], example: str) -> dict[str, str]:
    """Word -> value of all arguments.

    Raises:
        ConfigError: an argument is not WORD=VALUE, or its word is not `known`.
    """
    values: dict[str, str] = {}
    for word in words:
        key, eq, value = word.partition("=")
        if not eq:
            raise ConfigError(f"{word!r} is no WORD=VALUE; write for example {example}")
        if key not in known:
            raise ConfigError(unknown_name("word", key, known))
        values[key] = value
    return values


def whole(key: str, value: str) -> int:
    """The value of word `key` as a whole number.

    Raises:
        ConfigError: the value is no whole number.
    """
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r} is no whole number") from None


def layout_of(numbers: Mapping[str, int], schedule: str | None) -> Layout:
    """The layout of these degrees; without a schedule or number of virtual stages, it has the usual ones."""
    schedule = schedule or default_schedule(numbers.get("pp", 1), numbers.get("gas", 1))
    stages = {"virtual_stages": default_virtual_stages(schedule)}
    return Layout(**(stages | dict(numbers)), pp_schedule=schedule)


def require_possible(kernel: KernelConfig, layout: Layout, shape: ModelShape, seq_len: int) -> None:
    """Raises when `kernel` cannot run `layout`.

    Raises:
        ConfigError: the kernel cannot run the layout; the message says why.
    """
    broken = first_broken(layout, shape)
    reason = broken[1] if broken else refusal(kernel, layout, shape, seq_len)
    if reason:
        raise ConfigError(f"{layout.label()} cannot run: {reason}; choose another layout")
