"""Says how the columns of another program's table become ours: a YAML file, read into one record."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from ultrabench.allowed import one_of, require_allowed
from ultrabench.analysis.results.imported.number_texts import COMMA, POINT
from ultrabench.analysis.results.imported.scopes import SCOPE_TEXTS, SCOPED_COLUMNS
from ultrabench.analysis.results.imported.units import (
    UNITS,
    header_unit,
    names_scope_of,
    require_unit_of,
    require_whole_step,
    units_of,
)
from ultrabench.analysis.results.schema import BOOL, FLOAT, FLOATS, INT, SCHEMA, TEXT, TEXTS, TIME
from ultrabench.errors import ConfigError, require_known
from ultrabench.record import from_dict, value_from
from ultrabench.sweep.config.files import files, read_yaml

_COMPARISON_BY_SIGN: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_TABLE_TYPES = (TEXT, INT, FLOAT, BOOL, FLOATS, TEXTS, TIME)
TYPE_BY_COLUMN = {column.name: column.type for column in SCHEMA if column.type in _TABLE_TYPES}
"""Column of results that a table can give -> its type. A list is a JSON array in the table, a time is in ISO 8601."""
Decimal = Annotated[str, one_of(POINT, COMMA)]
"""The sign before the decimals of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a value of one of our columns comes from."""

    column: str
    """The column of the table."""
    unit: Annotated[str, one_of(*UNITS)] | None = None
    """The unit of the table; None means the one that header or cells name, else ours."""
    per: Annotated[str, one_of(*SCOPE_TEXTS)] | None = None
    """Scope of a rate in the table, such as node; None means that of our column, which is one GPU or all GPUs."""
    certain: bool = False
    """Whether the column holds this quantity, whatever its numbers look like."""
    decimal: Decimal | None = None
    """The sign of decimals; None means that of the map."""
    beside: str | None = None
    """Another column, whose text follows that of `column` and a space before `pattern` is searched: for values that
    depend on both."""
    pattern: str | None = None
    """A regular expression with one group; the value is the text of the group, or null where it is not found."""
    values: dict[str, Any] = field(default_factory=dict)
    """Text in the table -> our value or null; other texts are refused. Where it is empty, all texts are kept."""

    def __post_init__(self) -> None:
        require_allowed(self)
        try:
            groups = 1 if self.pattern is None else re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"pattern={self.pattern!r} is not a regular expression: {error}") from None
        if self.beside and self.pattern is None:
            raise ConfigError(f"beside={self.beside!r} needs a pattern, which is searched in both texts")
        if groups != 1:
            todo = "use exactly one, as in '^([^_]+)_'"
            raise ConfigError(f"pattern={self.pattern!r} has {groups} groups", todo)

    def unit_of(self, our_column: str) -> str | None:
        """The unit of the source of a column of ours: that of the map, else the one that the header names.

        Raises:
            ConfigError: the header names another quantity than that of the column.
        """
        if our_column == "step_time_s" and not self.certain:
            require_whole_step(self.column)
        named_unit = (
            header_unit(our_column, self.column, self.per is not None) if units_of(our_column) else None
        )
        return self.unit or named_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtRule:
    """The conditions under which a row is in doubt for one reason."""

    when: tuple[str, ...]
    """Conditions that all have to hold."""
    code: str | None = None
    """Code of the doubt, such as other_batch; None means the reason itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMap:
    """The map from the columns of a table to the columns of results, which are called ours here."""

    columns: dict[str, tuple[Source, ...]]
    """Our column -> its sources; the first one that has a value counts."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Our column -> its value where the sources have none."""
    models: dict[str, str] = field(default_factory=dict)
    """Name of a model in the table -> name for model=NAME, whose sizes fill those that a row lacks."""
    doubts: dict[str, DoubtRule] = field(default_factory=dict)
    """Reason to doubt a row -> when and with which code; it becomes part of the column `suspect`."""
    decimal: Decimal | None = None
    """The sign of decimals in all columns; None means that each column shows its own."""
    options: tuple[str, ...] = ()
    """Columns of the table by which rows of one layout are different candidates."""
    ignore: tuple[str, ...] = ()
    """Columns of the table in which repeats of one candidate may differ."""

    def __post_init__(self) -> None:
        require_known("column of results", TYPE_BY_COLUMN, *self.columns, *self.constants)
        if contradictory := {*self.options} & {*self.ignore}:
            raise ConfigError(f"{min(contradictory)} is in `options` and in `ignore`; keep it in one of them")
        python_types: dict[Any, type] = {TEXT: str, INT: int, FLOAT: float, BOOL: bool}
        column_sources = ((name, source) for name, sources in self.columns.items() for source in sources)
        mapped_values = ((name, value) for name, source in column_sources for value in source.values.values())
        for name, value in (*mapped_values, *self.constants.items()):
            if value is not None:
                value_from(python_types.get(TYPE_BY_COLUMN[name], object), value, name)
        for name, sources in self.columns.items():
            for source in sources:
                if source.unit is not None:
                    require_unit_of(name, source.unit)
            scopes = {source.per for source in sources}
            if scopes - {None} and name not in SCOPED_COLUMNS:
                raise ConfigError(
                    f"columns.{name} has no `per`; only rates of GPUs have: {', '.join(SCOPED_COLUMNS)}"
                )
            if len(scopes) > 1:
                raise ConfigError(f"the sources of columns.{name} have different `per`; give all the same")
        compared_columns = [condition(text)[0] for rule in self.doubts.values() for text in rule.when]
        require_known("column of results", {*TYPE_BY_COLUMN, "tokens_per_step"}, *compared_columns)

    def scope_by_column(self) -> dict[str, str]:
        """Our column -> of how many GPUs its rates in the table are, where the map says it."""
        return {
            name: source.per for name, sources in self.columns.items() for source in sources[:1] if source.per
        }

    def columns_with_scope(self) -> set[str]:
        """The columns of ours for which the map or the header says of how many GPUs the rates are."""
        return {
            name
            for name, sources in self.columns.items()
            for source in sources[:1]
            if source.per or names_scope_of(name, source.column)
        }

    def unit_of(self, our_column: str) -> str | None:
        """The unit of the first source of a column of ours; None if neither the map nor the header names one."""
        first_source, *_ = [*self.columns.get(our_column, ()), None]
        return first_source.unit_of(our_column) if first_source else None

    def certain_columns(self) -> set[str]:
        """The columns of ours that hold what the map says, whatever their numbers look like."""
        return {name for name, sources in self.columns.items() if any(s.certain for s in sources)}


def read_map(path: Path) -> TableMap:
    """The map in a YAML file.

    Raises:
        ConfigError: the file cannot be read, or a key or value of it cannot be used; the message names the file.
    """
    map_fields = read_yaml(path)
    try:
        if not isinstance(map_fields, dict) or not isinstance(map_fields.get("columns"), dict):
            raise ConfigError("`columns` is missing; it maps columns of ultrabench to columns of the table")
        columns = {name: _source_records(sources) for name, sources in map_fields["columns"].items()}
        doubts = map_fields.get("doubts") or {}
        if not isinstance(doubts, dict):
            raise ConfigError("`doubts` must map reasons to conditions")
        doubts = {reason: _rule_record(rule) for reason, rule in doubts.items()}
        names = {key: _as_list(map_fields[key]) for key in ("options", "ignore") if map_fields.get(key)}
        return from_dict(TableMap, {**map_fields, **names, "columns": columns, "doubts": doubts}, where="")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; see docs/guide/results.md") from error


def built_in(name: str) -> Path:
    """The path of the map of a format that ultrabench knows.

    Raises:
        ConfigError: there is no such format.
    """
    formats = files("import")
    require_known("format to import", formats, name)
    return formats[name]


def _source_records(sources: Any) -> list[Any]:
    return [{"column": source} if isinstance(source, str) else source for source in _as_list(sources)]


def _rule_record(rule: Any) -> dict[str, Any]:
    rule_fields = rule if isinstance(rule, dict) else {"when": rule}
    if "when" in rule_fields:
        rule_fields = {**rule_fields, "when": [str(text) for text in _as_list(rule_fields["when"])]}
    return rule_fields


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def condition(text: str) -> tuple[str, Callable[[pd.DataFrame], pd.Series]]:
    """The column that a condition such as `gpus > 8` compares, and for which rows the condition holds.

    It does not hold for null. Columns of numbers are compared as numbers.

    Raises:
        ConfigError: the text is no comparison, or compares a number with a word.
    """
    words = text.split()
    if len(words) != 3 or words[1] not in _COMPARISON_BY_SIGN:
        todo = f"write COLUMN OPERATOR VALUE, with an operator of {' '.join(_COMPARISON_BY_SIGN)}"
        raise ConfigError(f"condition {text!r}", todo)
    column, comparison, value = words[0], _COMPARISON_BY_SIGN[words[1]], words[2].lower()
    if TYPE_BY_COLUMN.get(column, INT) not in (INT, FLOAT):
        return (
            column,
            lambda rows: rows[column].notna() & comparison(rows[column].astype(str).str.lower(), value),
        )
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"condition {text!r}; {column} holds numbers: compare it with a number") from None
    return column, lambda rows: rows[column].notna() & comparison(rows[column], number)
