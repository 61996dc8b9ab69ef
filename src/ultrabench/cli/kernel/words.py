"""A layout from WORD=VALUE arguments, as the kernel's own commands take them."""

from collections.abc import Collection, Sequence

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.support import refusal
from ultrabench.sweep.rules import first_broken


def read_words(words: Sequence[str], known: Collection[str], example: str) -> dict[str, str]:
    """Word -> value.

    Raises:
        ConfigError: something else than WORD=VALUE, or a word that is not `known`.
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
    """The number that `value` is.

    Raises:
        ConfigError: it is none.
    """
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r} is no whole number") from None


def require_possible(kernel: KernelConfig, layout: Layout, shape: ModelShape, seq_len: int) -> None:
    """Returns when `kernel` can run `layout`.

    Raises:
        ConfigError: it cannot, and why.
    """
    broken = first_broken(layout, shape)
    reason = broken[1] if broken else refusal(kernel, layout, shape, seq_len)
    if reason:
        raise ConfigError(f"{layout.label()} cannot run: {reason}; choose another layout")
