"""Turns frozen dataclasses into JSON values and back, and hashes their content."""

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from ultrabench.errors import ConfigError, require_known

T = TypeVar("T")

_KINDS = {int: "whole number", float: "number", bool: "truth value, true or false", str: "text"}


# These results are cached, because finding the types of a class takes longer than reading a record.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
_origin: Callable[[Any], Any] = functools.cache(typing.get_origin)
_args: Callable[[Any], tuple[Any, ...]] = functools.cache(typing.get_args)


@functools.cache
def _required(cls: Any) -> dict[str, bool]:
    """Field name -> whether it has no default."""
    missing = dataclasses.MISSING
    return {f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(cls)}


def values_of(record: Any) -> dict[str, Any]:
    """Field name -> value of a record; `asdict`, which also copies each value, takes several times as long."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def to_dict(record: Any) -> dict[str, Any]:
    """The record as JSON values; nested records become objects, and tuples become lists."""
    out: dict[str, Any] = json.loads(json.dumps(record, default=values_of))
    return out


def from_dict(
    cls: type[T], values: Mapping[str, Any], *, where: str | None = None, skip_unknown: bool = False
) -> T:
    """The record of type `cls` that `values` describe.

    Args:
        cls: a dataclass whose fields are JSON scalars, tuples, dicts or other records.
        values: field name -> JSON value; fields with defaults may be left out.
        where: what the error message calls the record, `cls.__name__` when None; empty for the whole.
        skip_unknown: ignore unknown fields, because a later version may have written `values`.

    Raises:
        ConfigError: a field is unknown, is missing, or has the wrong type.
    """
    name = cls.__name__ if where is None else where
    inside = f"{name}." if name else ""
    hints = _hints(cls)
    required = _required(cls)  # type: ignore[arg-type]
    if skip_unknown:
        values = {key: value for key, value in values.items() if key in required}
    require_known(f"field of {name}", required, *values)
    if missing := [key for key, needed in required.items() if needed and key not in values]:
        raise ConfigError(f"{name} lacks {', '.join(missing)}: give every field without a default".strip())
    return cls(**{k: value_from(hints[k], v, f"{inside}{k}", skip_unknown) for k, v in values.items()})


def value_from(hint: Any, value: Any, where: str, skip_unknown: bool = False) -> Any:
    """The JSON `value` turned into the type that `hint` asks for.

    Raises:
        ConfigError: the value has another type; `where` names it in the message.
    """
    if hint is Any or type(value) is hint:
        return value
    origin, args = _origin(hint), _args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return value_from(next(a for a in args if a is not type(None)), value, where, skip_unknown)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_dict(hint, value, where=where, skip_unknown=skip_unknown)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(value_from(args[0], v, where, skip_unknown) for v in value)
    if hasattr(hint, "_fields") and isinstance(value, list | tuple) and len(value) == len(hint._fields):
        return hint._make(map(value_from, _hints(hint).values(), value, hint._fields))
    if origin is dict and isinstance(value, Mapping):
        return {str(k): value_from(args[1], v, f"{where}.{k}", skip_unknown) for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if origin is tuple:
        raise ConfigError(f"{where}={value!r} is no list; write [A,B]")
    kind = _KINDS.get(hint, f"value of type {getattr(hint, '__name__', hint)}")
    unit = " of bytes, such as 80000000000" if where.endswith("_bytes") else ""
    raise ConfigError(f"{where}={value!r} is no {kind}{unit}")


def canonical_json(value: Any) -> str:
    """The only JSON text of `value`, a record or JSON: its keys are sorted, and it has no spaces and no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=values_of)


def content_id(value: Any) -> str:
    """First 16 hex digits of the sha256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
