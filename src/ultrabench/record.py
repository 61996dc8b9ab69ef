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
def _required(cls: Any) -> frozenset[str]:
    """The fields without a default."""
    return frozenset(_fields(cls).keys() - _defaults(cls).keys())


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Field name -> its default, for the fields that have one."""
    missing, known = dataclasses.MISSING, dataclasses.fields(cls)
    made = {f.name: f.default_factory() for f in known if f.default_factory is not missing}
    return made | {f.name: f.default for f in known if f.default is not missing}


@functools.cache
def _as_given(hint: Any) -> frozenset[type]:
    """The types of JSON values that the type `hint` takes as they are; empty where a value has to be looked into."""
    if _origin(hint) in (typing.Union, types.UnionType):
        return frozenset[type]().union(*map(_as_given, _args(hint)))
    return frozenset({hint} if hint in (*_KINDS, type(None)) else ())


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, frozenset[type]]]:
    """Field name -> its type, and the types of JSON values that it takes as they are."""
    hints = {field.name: _hints(cls)[field.name] for field in dataclasses.fields(cls)}
    return {name: (hint, _as_given(hint)) for name, hint in hints.items()}


def lacking(cls: Any, values: Mapping[str, Any]) -> list[str]:
    """The fields without a default of the dataclass `cls` that are not in `values`."""
    required = _required(cls)
    if required <= values.keys():
        return []
    return [key for key in _fields(cls) if key in required - values.keys()]


def values_of(record: Any) -> dict[str, Any]:
    """Field name -> value of a record; `asdict`, which also copies each value, takes several times as long."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def non_default_values(record: Any) -> dict[str, Any]:
    """Field name -> value of a record, without the fields that have their default."""
    defaults: dict[str, Any] = _defaults(record.__class__)
    return {k: v for k, v in values_of(record).items() if k not in defaults or v != defaults[k]}


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
    known = _fields(cls)  # type: ignore[arg-type]
    if not isinstance(values, (dict, Mapping)):  # dict by itself, because asking an abstract class is slow
        raise ConfigError(f"{name} is {values!r:.40}: give its fields, {', '.join(known)}")
    if not skip_unknown and values.keys() - known.keys():
        require_known(f"field of {name}", known, *values)
    if missing := lacking(cls, values):
        raise ConfigError(f"{name} lacks {', '.join(missing)}: give every field without a default".strip())
    given = {}
    for key, value in values.items():
        if key in known:
            hint, as_given = known[key]
            plain = type(value) in as_given
            given[key] = value if plain else value_from(hint, value, f"{inside}{key}", skip_unknown)
    return cls(**given)


def value_from(hint: Any, value: Any, where: str, skip_unknown: bool = False) -> Any:
    """The JSON `value` turned into the type that `hint` asks for.

    Raises:
        ConfigError: the value has another type; `where` names it in the message.
    """
    if hint is Any or type(value) is hint:
        return value
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    origin, args = _origin(hint), _args(hint)
    if origin is dict and isinstance(value, (dict, Mapping)):
        if args[1] is Any:
            return {str(key): item for key, item in value.items()}
        return {str(k): value_from(args[1], v, f"{where}.{k}", skip_unknown) for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return value_from(next(a for a in args if a is not type(None)), value, where, skip_unknown)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_dict(hint, value, where=where, skip_unknown=skip_unknown)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        plain = _as_given(args[0])
        return tuple(v if type(v) in plain else value_from(args[0], v, where, skip_unknown) for v in value)
    if hasattr(hint, "_fields") and isinstance(value, list | tuple) and len(value) == len(hint._fields):
        return hint._make(map(value_from, _hints(hint).values(), value, hint._fields))
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if origin is tuple:
        raise ConfigError(f"{where}={value!r} is no list; write [A,B]")
    kind = _KINDS.get(hint, f"value of type {getattr(hint, '__name__', hint)}")
    advice = "; write it in digits" if hint is int else ""
    if where.endswith("_bytes"):
        advice = " of bytes, such as 80000000000"
    elif origin is dict:
        given = f"{where}={value!r} is no value: it holds several settings"
        raise ConfigError(f"{given}; give {where}.NAME=VALUE")
    elif isinstance(value, list):
        advice = "; give one value instead of a list"
    elif hint is str:
        advice = f"""; write it in two kinds of quotes: '"{str(value).lower()}"'"""
    raise ConfigError(f"{where}={value!r} is no {kind}{advice}")


def canonical_json(value: Any) -> str:
    """The only JSON text of `value`, a record or JSON: its keys are sorted, and it has no spaces and no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=values_of)


def content_id(value: Any) -> str:
    """First 16 hex digits of the sha256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
