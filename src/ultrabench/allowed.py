"""Which values a field of a record may have: written in the type of the field, and checked when a record is made.

For example `confirm: Annotated[int, between(1, 100)]`. In `attempts: dict[str, Annotated[int, between(0, 100)]]`
the rule holds for each value, and in `pack: Count | None` for a value that is not None.
"""

import functools
import math
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from ultrabench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed values of a field."""

    text: str
    """The end of a message that begins with `must be`."""
    holds: Callable[[Any], object]
    """Whether a value is allowed, as a true or false value."""


def at_least(least: float) -> Allowed:
    """All finite numbers from `least` on."""
    finite = " and finite" if isinstance(least, float) else ""
    return Allowed(f">= {least:g}{finite}", lambda value: least <= value < math.inf)


def above(limit: float) -> Allowed:
    """All finite numbers above `limit`."""
    return Allowed(f"> {limit:g} and finite", lambda value: limit < value < math.inf)


def between(least: float, most: float, unit: str = "") -> Allowed:
    """All numbers from `least` to `most`, both included.

    Args:
        unit: what the message says after the numbers, such as `bytes per second, such as 4.5e11`.
    """
    ends = f"{_short(least)} to {_short(most)}"
    return Allowed(f"{ends} {unit}".rstrip(), lambda value: least <= value <= most)


def _short(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else re.sub(r"e\+0*", "e", f"{number:g}")


def one_of(*values: int | str) -> Allowed:
    """Only the given values."""
    *others, last = map(str, values)
    return Allowed(f"{', '.join(others)} or {last}", lambda value: value in values)


NonNegative = Annotated[float, at_least(0.0)]
Count = Annotated[int, at_least(1)]
Positive = Annotated[float, above(0)]
Line = Annotated[str, Allowed("one line", lambda value: not re.search(r"[\n\r\0]", value))]
"""A text without a line break, which would add a line to a script."""


@functools.cache
def allowed_of(kind: type) -> dict[str, Allowed]:
    """Name -> allowed values of each field of a dataclass whose type tells them."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: allowed for name, hint in hints.items() for allowed in _inside(hint)}


def _inside(hint: Any) -> list[Allowed]:
    if isinstance(hint, Allowed):
        return [hint]
    return [allowed for part in typing.get_args(hint) for allowed in _inside(part)]


def require_allowed(record: Any, where: str = "") -> None:
    """Raises for the first field with a value that is not allowed; None is always allowed.

    Args:
        where: text before the name of the field in the message, such as `measure.`.

    Raises:
        ConfigError: names the field, its value and the allowed values.
    """
    for name, allowed in allowed_of(record.__class__).items():
        _require(where + name, getattr(record, name), allowed)


def _require(field: str, value: Any, allowed: Allowed) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _require(f"{field}.{key}", item, allowed)
    elif isinstance(value, tuple):
        for item in value:
            _require(field, item, allowed)
    elif value is not None and not allowed.holds(value):
        raise ConfigError(f"{field}={value!r}; must be {allowed.text}")


_SAFE_NAME = re.compile(r"\w[\w.+=@:,-]{0,200}")
"""Names of allocations, runs, hosts, jobs and journals; none of them can leave a folder or be taken for an option."""


def require_safe_names(names: Iterable[str]) -> None:
    """Raises if a name that was read from a file of somebody else may not become a part of a path or a command.

    Raises:
        ConfigError: the message quotes the name.
    """
    for name in names:
        if not _SAFE_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a name that ultrabench writes")
