"""Which values a field of a record may have: written in the type of the field, and checked when a record is made.

For example `confirm: Annotated[int, between(1, 100)]`. In `attempts: dict[str, Annotated[int, between(0, 100)]]`
the rule holds for each value, and in `pack: Count | None` for a value that is not None. The rules are those of
msgspec; their `description` is the end of a message that begins with `must be`.
"""

import functools
import re
import sys
from collections.abc import Iterable
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct, ValidationError, convert, defstruct

from ultrabench.errors import ConfigError
from ultrabench.record import CHOICES_KEY, field_types, value_from


def at_least(least: float) -> Meta:
    """All finite numbers from `least` on."""
    if isinstance(least, int):
        return Meta(ge=least, description=f">= {least}")
    return Meta(ge=least, le=sys.float_info.max, description=f">= {least:g} and finite")


def above(limit: float) -> Meta:
    """All finite numbers above `limit`."""
    return Meta(gt=limit, le=sys.float_info.max, description=f"> {limit:g} and finite")


def between(smallest: float, largest: float, unit: str = "") -> Meta:
    """All numbers from `smallest` to `largest`, both included.

    Args:
        unit: what the message says after the numbers, such as `bytes per second, such as 4.5e11`.
    """
    description = f"{_number_text(smallest)} to {_number_text(largest)} {unit}".rstrip()
    return Meta(ge=smallest, le=largest, description=description)


def _number_text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else re.sub(r"e\+0*", "e", f"{number:g}")


def matching(pattern: str, description: str, extra: dict[str, Any] | None = None) -> Meta:
    """All texts that match the regular expression `pattern` as a whole;
    the message says `must be` and `description`.
    """
    return Meta(pattern=rf"\A(?:{pattern})\Z", description=description, extra=extra)


def one_of(*texts: str) -> Meta:
    """Only the given texts."""
    *first_texts, last_text = texts
    description = f"{', '.join(first_texts)} or {last_text}" if first_texts else last_text
    return matching("|".join(map(re.escape, texts)), description, {CHOICES_KEY: texts})


NonNegative = Annotated[float, at_least(0.0)]
Count = Annotated[int, at_least(1)]
Size = Annotated[int, between(1, 2**30)]
"""A number of tokens, sequences, heads or channels; larger ones are typing errors and would overflow byte counts."""
Positive = Annotated[float, above(0)]
Line = Annotated[str, matching(r"[^\n\r\0]*", "one line")]
"""A text without a line break, since that would add a line to a script."""


def require_allowed(record: Any, where: str = "") -> None:
    """Raises for the first field with a value that is not allowed.

    Args:
        where: text before the name of the field in the message, such as `measure.`.

    Raises:
        ConfigError: names the field, its value and the allowed values.
    """
    struct = _struct_of_ruled_fields(record.__class__)
    try:
        convert(record, struct, from_attributes=True)
    except ValidationError:
        for name in struct.__struct_fields__:
            value_from(field_types(record.__class__)[name], getattr(record, name), where + name)


@functools.cache
def _struct_of_ruled_fields(cls: type) -> type[Struct]:
    """A struct type with those fields of the record type `cls` whose types have rules;
    msgspec checks it in one call.
    """
    return defstruct(cls.__name__, [(n, hint) for n, hint in field_types(cls).items() if _has_rule(hint)])


def _has_rule(hint: Any) -> bool:
    return hasattr(hint, "__metadata__") or any(map(_has_rule, get_args(hint)))


_SAFE_NAME = re.compile(r"\w[\w.+=@:,-]{0,200}")
"""Names of allocations, runs, hosts, jobs and journals; none of them can leave a folder or be taken for an option."""


def require_safe_names(names: Iterable[str | None]) -> None:
    """Raises if a name that was read from a file of somebody else may not become a part of a path or a command.

    None is no name, and raises nothing.

    Raises:
        ConfigError: the message quotes the name.
    """
    for name in names:
        if name is not None and not _SAFE_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a name that ultrabench writes")
