"""Makes result rows of the rows of a CSV file: as many as it has, in its order."""

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ultrabench.analysis.importing.derived import completed
from ultrabench.analysis.importing.table_map import KINDS, UNITS, Source, TableMap, condition
from ultrabench.analysis.rows import Row, doubt_columns
from ultrabench.analysis.schema import BOOL, INT, SCHEMA, TEXT
from ultrabench.errors import ConfigError, UltrabenchError, require_known, unknown_name
from ultrabench.result import Doubt, Status

_NO_VALUE = frozenset({"", "nan", "null", "na", "n/a", "-"})
"""Texts, in lower case, that mean that a value is unknown; in columns of numbers `none` does so, too."""
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of a table in our columns, and the counts that `ultrabench import` prints."""

    table: pa.Table
    doubts: dict[str, Counter[str]]
    """Code of a doubt -> status -> rows; a row may have several doubts."""
    unused: tuple[str, ...]
    """Columns of the file that the map does not use."""


def import_csv(path: Path, table_map: TableMap) -> Imported:
    """The rows of a CSV file in our columns.

    Raises:
        ConfigError: the file cannot be read, or a value of it cannot be used; the message names row and column.
    """
    header, lines = _read(path)
    used = [source.column for sources in table_map.columns.values() for source in sources]
    if not {*used} & {*header}:
        has = f"{path} has none of the {len({*used})} columns that this format or map reads, such as {used[0]!r}"
        raise ConfigError(f"{has}; its columns: {', '.join(header[:10])}")
    require_known(f"column of {path}", header, *used)
    rows, doubts, repeats = list[Row](), defaultdict[str, Counter[str]](Counter), Counter[str]()
    conditions = {
        Doubt(doubt.code or reason, reason): [condition(text) for text in doubt.when]
        for reason, doubt in table_map.doubts.items()
    }
    for number, texts in enumerate(lines, start=2):
        try:
            row, row_doubts = completed(_converted(texts, table_map), table_map.models)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if "suspect" in row:
            row_doubts.insert(0, Doubt("source", row["suspect"]))
        row_doubts += [
            doubt for doubt, all_of in conditions.items() if all(holds(row) for _, holds in all_of)
        ]
        row |= doubt_columns(row_doubts)
        row |= {"sweep": row.get("sweep") or path.stem, "source": row.get("source") or path.name}
        row["repeat"] = repeats[row["run_id"]]
        repeats[row["run_id"]] += 1
        for doubt in row_doubts:
            doubts[doubt.code][row["status"]] += 1
        rows.append(row)
    unused = tuple(name for name in header if name not in used)
    try:
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
    except (pa.ArrowException, OverflowError) as error:
        large = f"{path} holds a number that is too large: {error}"
        raise ConfigError(f"{large}; correct it or its unit") from error
    return Imported(table=table, doubts=dict(sorted(doubts.items())), unused=unused)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns of a CSV file, and its rows as texts."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            header, lines = list(reader.fieldnames or ()), list(reader)
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise UltrabenchError(f"cannot read {path}: {why}; give a CSV file") from error
    if longer := next((n for n, row in enumerate(lines, start=2) if None in row), None):
        raise ConfigError(
            f"{path}, line {longer} has more fields than the {len(header)} columns of line 1; fix the line"
        )
    if not lines:
        raise ConfigError(f"{path} has no rows below the header; there is nothing to import")
    return header, lines


def _converted(texts: Mapping[str, str], table_map: TableMap) -> Row:
    """Our columns that the table or a constant gives; unknown ones are absent."""
    row: Row = {}
    for name in {**table_map.columns, **table_map.constants}:
        values = (_value(name, source, texts[source.column]) for source in table_map.columns.get(name, ()))
        value = next((value for value in values if value is not None), table_map.constants.get(name))
        if value is not None:
            row[name] = value
    if row.setdefault("status", "ok") not in {*Status}:
        raise ConfigError(f"{unknown_name('status', row['status'], Status)}: map it in columns.status.values")
    return row


def _value(name: str, source: Source, text: str) -> Any:
    """The value of our column `name` that the text of a table means; None where there is none."""
    text = text.strip()
    if source.pattern is not None:
        match = re.search(source.pattern, text)
        text = match[1] or "" if match else ""
    meanings = {key.lower(): value for key, value in source.values.items()}
    if text.lower() in meanings:
        return meanings[text.lower()]
    kind = KINDS[name]
    if text.lower() in _NO_VALUE or (text.lower() == "none" and kind != TEXT):
        return None
    if meanings:
        raise ConfigError(unknown_name(f"value of {source.column}", text, source.values))
    if kind == TEXT:
        return text
    if kind == BOOL:
        require_known(f"truth value of {source.column}", _TRUTH, text.lower())
        return _TRUTH[text.lower()]
    return _number(source, text, whole=kind == INT)


def _number(source: Source, text: str, whole: bool) -> float | int:
    try:
        number = float(text.replace(",", "")) * UNITS.get(source.unit or "", 1.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (whole and source.unit is None and not number.is_integer()):
        raise ConfigError(
            f"{source.column}={text!r} is not {'an integer' if whole else 'a number'}; correct it or leave it empty"
        )
    return round(number) if whole else number
