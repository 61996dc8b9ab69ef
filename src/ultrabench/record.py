"""Turns frozen dataclasses into JSON values and back, and hashes their content."""

import dataclasses
import functools
import hashlib
import json
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from ultrabench.errors import MAX_NAMES, SETTING, ConfigError, most_similar, require_known
from ultrabench.quantity import parsed_number, quantity_of

T = TypeVar("T")
CHOICES_KEY = "names"
"""Key in the `extra` of a rule whose values are a few texts -> these texts."""
_is_record: Callable[[Any], bool] = dataclasses.is_dataclass


# These results are cached, because finding the types of a class takes longer than reading a record.
@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Field name -> its type with its rules."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Field name -> its default, for the fields that have one."""
    missing, fields = dataclasses.MISSING, dataclasses.fields(cls)
    defaults = {f.name: f.default_factory() for f in fields if f.default_factory is not missing}
    return defaults | {f.name: f.default for f in fields if f.default is not missing}


def missing_fields(cls: Any, values: Mapping[str, Any]) -> list[str]:
    """The fields without a default of the dataclass `cls` that are not in `values`."""
    defaults = _defaults(cls)
    return [name for name in field_types(cls) if name not in values and name not in defaults]


def _lack_text(missing_keys: Sequence[str]) -> str:
    """Which keys a record lacks, and what to do."""
    if len(missing_keys) == 1:
        return f"lacks the key {missing_keys[0]}; give it a value"
    if len(missing_keys) <= MAX_NAMES:
        return f"lacks the keys {', '.join(missing_keys)}; give each of them a value"
    names = f"{', '.join(missing_keys[:MAX_NAMES])} and {len(missing_keys) - MAX_NAMES} more"
    return f"lacks the keys {names}; start from a copy of a complete file"


def values_of(record: Any) -> dict[str, Any]:
    """Field name -> value of a record; `asdict`, which also copies each value, takes several times as long."""
    names, values_by_name = _getter(record.__class__)
    return dict(zip(names, values_by_name(record), strict=True))


# A plan asks for the values of five records for each candidate: 4.5 us with a look at the fields of a class, 1.5 us
# without.
@functools.cache
def _getter(cls: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The names of the fields of a record type, and what gets their values."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    if len(names) < 2:  # attrgetter gives a single value as it is
        return names, lambda record: tuple(getattr(record, name) for name in names)
    return names, operator.attrgetter(*names)


def non_default_values(record: Any) -> dict[str, Any]:
    """Field name -> value of a record, without the fields that have their default."""
    defaults: dict[str, Any] = _defaults(record.__class__)
    return {k: v for k, v in values_of(record).items() if k not in defaults or v != defaults[k]}


def to_dict(record: Any) -> dict[str, Any]:
    """The record as JSON values; nested records become objects, and tuples become lists."""
    json_value: dict[str, Any] = json.loads(json.dumps(record, default=values_of))
    return json_value


def from_dict(
    cls: type[T], values: Mapping[str, Any], *, where: str | None = None, skip_unknown: bool = False
) -> T:
    """The record of type `cls` that `values` describe.

    Args:
        cls: a dataclass whose fields are JSON scalars, tuples, dicts or other records.
        values: field name -> JSON value; fields with defaults may be left out.
        where: what the error message calls the record, `cls.__name__` when None; empty for the whole document.
        skip_unknown: ignore unknown fields, because a later version may have written `values`.

    Raises:
        ConfigError: a field is unknown, is missing, or has a value that its type does not allow.
    """
    record: T = value_from(cls, values, cls.__name__ if where is None else where, skip_unknown)
    return record


def value_from(hint: Any, value: Any, where: str, skip_unknown: bool = False) -> Any:
    """The JSON `value` as a value of the type hint `hint`.

    Raises:
        ConfigError: the value has another type, or a rule of the type forbids it; `where` names it in the message.
    """
    try:
        try:
            converted_value = msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return _value_by_parts(hint, value, where, skip_unknown)
    except ConfigError as error:  # the record itself raises it without its place in the document
        error.setting = error.setting or where
        raise
    if not skip_unknown and _holds_record(hint):
        _require_known_fields(converted_value, value, where)
    return converted_value


def _require_known_fields(record: Any, values: Any, where: str) -> None:
    """Raises ConfigError for one of the values of a record that is no field; msgspec ignores it."""
    if isinstance(record, tuple):
        for part, value in zip(record, values, strict=True):
            _require_known_fields(part, value, where)
    elif isinstance(record, dict):
        for key, part in record.items():
            _require_known_fields(part, values[key], f"{where}.{key}")
    elif _is_record(record) and isinstance(values, Mapping):
        fields = field_types(record.__class__)
        if not values.keys() <= fields.keys():
            require_known(f"field of {where}", fields, *values, setting=where)
        for key in _fields_with_records(record.__class__) & values.keys():
            _require_known_fields(getattr(record, key), values[key], _dotted(where, key))


@functools.cache
def _fields_with_records(cls: Any) -> frozenset[str]:
    """The fields that hold a record, or a list or a dict of records."""
    return frozenset(name for name, hint in field_types(cls).items() if _holds_record(hint))


def _holds_record(hint: Any) -> bool:
    return _is_record(hint) or any(map(_holds_record, typing.get_args(hint)))


def _value_by_parts(hint: Any, value: Any, where: str, skip_unknown: bool) -> Any:
    """Converts part by part a value that msgspec refuses as a whole, such as 2.0 for an integer or {1: a} for texts.

    Raises:
        ConfigError: names the first part that cannot be used.
    """
    cls, rule = _class_and_rule(hint)
    type_origin, type_args = typing.get_origin(cls), typing.get_args(cls)
    if _is_record(cls) and isinstance(value, Mapping):
        hints = field_types(cls)
        if not skip_unknown:
            require_known(f"field of {where}", hints, *value, setting=where)
        if missing_keys := missing_fields(cls, value):
            raise ConfigError(f"{where} {_lack_text(missing_keys)}".strip(), setting=where)
        value_by_field = {name: field_value for name, field_value in value.items() if name in hints}
        return cls(
            **{n: value_from(hints[n], v, _dotted(where, n), skip_unknown) for n, v in value_by_field.items()}
        )
    if type_origin is dict and isinstance(value, Mapping):
        return {str(k): value_from(type_args[1], v, f"{where}.{k}", skip_unknown) for k, v in value.items()}
    if type_origin is tuple and isinstance(value, (list, tuple)) and value:
        return tuple(value_from(type_args[0], element, where, skip_unknown) for element in value)
    if isinstance(value, float) and ((cls is int and value.is_integer()) or cls is float is not type(value)):
        return value_from(hint, cls(value), where)  # 2.0 for an integer, or a float of numpy
    if isinstance(value, str) and cls in (int, float) and (number := parsed_number(value, where)) is not None:
        return value_from(hint, number, where)  # 80GB for bytes, or 1e3 in a file
    choices = _choices(hint) if isinstance(value, str) else ()
    similar_choice = most_similar(value.lower(), choices) if choices else None
    suggestion_text = f"; did you mean {similar_choice}?" if similar_choice else ""
    raise ConfigError(_refusal_text(cls, rule, value, where) + suggestion_text, setting=where)


def _dotted(where: str, name: str) -> str:
    """The dotted name of the field `name` of the record at `where`, which is empty for the whole document."""
    return f"{where}.{name}" if where else name


def _class_and_rule(hint: Any) -> tuple[Any, str]:
    """The type of a hint without its rules and without None, and what its rule allows, as a text."""
    if rules := getattr(hint, "__metadata__", ()):
        return _class_and_rule(hint.__origin__)[0], str(rules[-1].description)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        return _class_and_rule(members[0]) if len(members) == 1 else (hint, "")
    return hint, ""


def _choices(hint: Any) -> tuple[str, ...]:
    """The texts among which a value of this type is chosen; empty for types without such a list."""
    own_choices = ((rule.extra or {}).get(CHOICES_KEY, ()) for rule in getattr(hint, "__metadata__", ()))
    return (*chain.from_iterable(own_choices), *chain.from_iterable(map(_choices, typing.get_args(hint))))


_EXPECTED = {
    int: "an integer", float: "a number", bool: "a boolean; write true or false",
    str: "a text; write it with two kinds of quotes: '\"{}\"'",
}  # fmt: skip
"""Type -> what a message says was expected instead of a value of another type, and what to do."""


def _refusal_text(cls: Any, rule: str, value: Any, where: str) -> str:
    """One line that says why a value cannot be used, with SETTING in place of `where`."""
    value_text = reprlib.repr(value) if isinstance(value, int) else repr(value)  # it shortens long integers
    given_text, type_origin = f"{SETTING}={value_text}", typing.get_origin(cls)
    if rule and (cls not in _EXPECTED or type(value) is cls or (cls, type(value)) == (float, int)):
        return f"{given_text}; must be {rule}"
    if type_origin is dict:
        return f"{given_text} is not a mapping; give {SETTING}.NAME=VALUE"
    if type_origin is tuple:
        return f"{given_text} is not a list; write [A,B]"
    if cls in (int, float) and not isinstance(value, list) and (quantity := quantity_of(where)):
        return f"{given_text} is not a number of {quantity.noun}, such as {quantity.example}"
    expected_text = _EXPECTED.get(cls) or f"a {getattr(cls, '__name__', cls)}"
    if isinstance(value, list) and cls in _EXPECTED:
        return f"{given_text} is not {expected_text.partition(';')[0]}; give one value instead of a list"
    return f"{given_text} is not {expected_text.format(str(value).lower())}"


def canonical_json(value: Any) -> str:
    """The only JSON text of `value`, a record or JSON: its keys are sorted, and it has no spaces and no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=values_of)


def raw_json(value: Any) -> msgspec.Raw:
    """The JSON text of `value`, a record or JSON, which is decoded where it is needed."""
    return msgspec.Raw(canonical_json(value).encode())


def content_id(value: Any) -> str:
    """First 16 hex digits of the sha256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
