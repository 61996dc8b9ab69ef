"""Reads the table in a text file, whatever its form: CSV with any usual separator, Markdown, JSON or JSON lines."""

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ultrabench.errors import ConfigError, UltrabenchError

_FORMS = "give a CSV file in UTF-8 (columns separated by comma, semicolon or tab), a Markdown table, JSON or JSON lines"
_DELIMITERS = (",", ";", "\t")
_REMEDY_BY_START = {
    b"PK\x03\x04": ("an Excel workbook or another zip archive", "save the sheet as CSV UTF-8"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "save the sheet as CSV UTF-8"),
    b"PAR1": ("a parquet file", "commands read those of ultrabench without import; write others as CSV"),
    b"\x1f\x8b": ("a compressed file", "unpack it first"),
}
"""First bytes of a file that holds no text -> what it is, and what to do."""
_SEPARATOR_ROW = re.compile(r"^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")
"""Pattern of the line between the header and the rows of a Markdown table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """The table in a file, as texts."""

    columns: dict[str, pd.Series]
    """Name of each column -> its texts without spaces around them; the index is the number of the row."""
    row_noun: str
    """What the index counts: the `line` of the file, or the `row` of the table."""


def read_table(path: Path, wanted_names: Collection[str]) -> TableFile:
    """The table in a file.

    Args:
        wanted_names: columns that are asked for; they decide which separator or which of several tables is meant.

    Raises:
        UltrabenchError: the file cannot be read.
        ConfigError: it holds no table, or several that could be meant.
    """
    text = _text_of(path)
    if text.lstrip().startswith("{") or _is_json_list(text):
        return _json_table(path, text, wanted_names)
    markdown_tables = _markdown_tables(path, text)
    if markdown_tables:
        return _markdown_table(path, markdown_tables, wanted_names)
    return _delimited_table(path, text, wanted_names)


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
        for start, (kind, remedy) in _REMEDY_BY_START.items():
            if content.startswith(start):
                raise ConfigError(f"{path} is {kind}", remedy)
        has_utf16_mark = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # Excel's "Unicode text"
        return content.decode("utf-16" if has_utf16_mark else "utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip()
        raise UltrabenchError(f"cannot read {path}: {reason}; {_FORMS}") from error


def _as_file(path: Path, frame: pd.DataFrame, row_noun: str) -> TableFile:
    """The table of a frame of texts.

    Raises:
        ConfigError: it has no rows, or several columns of one name.
    """
    if not len(frame):
        raise ConfigError(f"{path} has no rows below the header; there is nothing to import")
    names = pd.Series([str(name).strip() for name in frame.columns])
    if (is_repeated := names.duplicated() & (names != "")).any():
        fact = f"{path} has several columns {names[is_repeated].iloc[0]!r}"
        raise ConfigError(f"{fact}; keep one or rename them")
    columns = {name: frame.iloc[:, position].str.strip() for position, name in enumerate(names)}
    return TableFile(columns=columns, row_noun=row_noun)


# CSV


def _delimited_table(path: Path, text: str, wanted_names: Collection[str]) -> TableFile:
    has_separator_line = re.match(r"sep=(.)\r?\n", text)  # Excel writes and reads it
    header = next((line for line in text.splitlines() if line.strip()), "")
    if has_separator_line:
        delimiter = has_separator_line[1]
        text = text[has_separator_line.end() :]
    else:
        delimiter = max(_DELIMITERS, key=lambda sign: _header_score(header, sign, wanted_names))
    try:
        options: dict[str, Any] = {"dtype": str, "na_filter": False, "skip_blank_lines": False}
        raw_table = pd.read_csv(io.StringIO(text), sep=delimiter, header=None, **options).fillna("")
    except pd.errors.EmptyDataError:
        raw_table = pd.DataFrame()
    except ValueError as error:
        todo = f"{_FORMS}; put quotes around cells that contain the separator"
        raise UltrabenchError(f"cannot read {path}: {str(error).strip()}; {todo}") from error
    raw_table.index += 2 if has_separator_line else 1
    raw_table = raw_table[(raw_table != "").any(axis=1)] if len(raw_table) else raw_table
    header_names = [] if raw_table.empty else raw_table.iloc[0].tolist()
    return _as_file(path, raw_table[1:].set_axis(header_names, axis=1), "line")


def _header_score(header: str, delimiter: str, wanted_names: Collection[str]) -> tuple[int, int]:
    """How well a separator fits the first line: the number of wanted columns in it, then that of all columns."""
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    return len({*names} & {*wanted_names}), len(names)


# Markdown


def _markdown_tables(path: Path, text: str) -> list[pd.DataFrame]:
    """The tables in a Markdown text; their index is the number of the line."""
    lines, tables = text.splitlines(), list[pd.DataFrame]()
    for number, line in enumerate(lines):
        is_separator = "-" in line and _SEPARATOR_ROW.match(line) is not None
        if not is_separator or not number or "|" not in lines[number - 1]:
            continue
        names = _markdown_cells(lines[number - 1])
        rows: dict[int, list[str]] = {}
        for row_number, row_line in enumerate(lines[number + 1 :], number + 2):
            if "|" not in row_line:
                break
            cells = _markdown_cells(row_line)
            rows[row_number] = [*cells, *[""] * (len(names) - len(cells))]
        widths = {len(cells) for cells in rows.values()} | {len(names)}
        if len(widths) > 1:
            wide_row = next(row for row, cells in rows.items() if len(cells) != len(names))
            fact = (
                f"line {wide_row} has {len(rows[wide_row])} cells, the header of its table has {len(names)}"
            )
            raise ConfigError(f"{fact}; write | inside a cell as \\|")
        index = pd.Index([*rows], dtype=int)
        tables.append(pd.DataFrame([*rows.values()], index, names, dtype=object))
    return tables


def _markdown_cells(line: str) -> list[str]:
    """The cells of a row, without the marks of bold, italic and code, links and footnotes."""
    body = re.sub(r"(?<!\\)\|$", "", line.strip().removeprefix("|"))
    return [_plain(cell) for cell in re.split(r"(?<!\\)\|", body)]


def _plain(cell: str) -> str:
    text = cell.strip().replace(r"\|", "|").replace("&nbsp;", " ")
    text = re.sub(r"<br\s*/?>", " ", text)
    text = re.sub(r"\[\^[^\]]*\]|</?(?:b|i|em|strong|code|sub|sup)>", "", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for mark in (r"\*\*\*", r"\*\*", r"__", r"~~", r"`", r"\*", "_"):
        text = re.sub(rf"^{mark}(.+){mark}$", r"\1", text.strip())
    return text.strip()


def _markdown_table(path: Path, tables: Sequence[pd.DataFrame], wanted_names: Collection[str]) -> TableFile:
    """The only table that has columns which are asked for."""
    scores = [len({*frame.columns} & {*wanted_names}) for frame in tables]
    best_tables = [frame for frame, score in zip(tables, scores, strict=True) if score == max(scores)]
    if len(best_tables) > 1:
        first_lines = ", ".join(str(frame.index[0] - 2) for frame in best_tables if len(frame))
        fact = f"{path} has {len(best_tables)} tables with such columns, at the lines {first_lines}"
        raise ConfigError(fact, "keep the one to import in a file of its own")
    return _as_file(path, best_tables[0], "line")


# JSON


def _is_json_list(text: str) -> bool:
    """Whether a text is a list in JSON; the header of a CSV file may begin with a bracket, too."""
    if not text.lstrip().startswith("["):
        return False
    try:
        json.loads(text)
    except ValueError:
        return re.match(r"\s*\[\s*\{", text) is not None
    return True


def _json_table(path: Path, text: str, wanted_names: Collection[str]) -> TableFile:
    try:
        document = json.loads(text)
    except ValueError as error:
        numbered_lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(numbered_lines) < 2:
            raise ConfigError(f"cannot read {path}: {error}; {_FORMS}") from error
        return _as_file(path, _frame_of_records(path, _json_lines(path, numbered_lines)), "line")
    records = _records(document, wanted_names)
    if records is None:
        rule = "write a list of objects, an object of lists, or one object a line"
        raise ConfigError(f"{path} is JSON but no table", rule)
    return _as_file(path, _frame_of_records(path, enumerate(records, 1)), "row")


def _json_lines(path: Path, numbered_lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    for number, line in numbered_lines:
        try:
            yield number, json.loads(line)
        except ValueError as error:
            fact = f"cannot read {path}: line {number} is not JSON ({error})"
            raise ConfigError(f"{fact}; remove it, or write one object a line") from error


def _records(document: Any, wanted_names: Collection[str]) -> Sequence[Any] | None:
    """The rows of a JSON document in one of the usual forms; None if it has none of them."""
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        return None
    columns, rows = document.get("columns"), document.get("data", document.get("rows"))
    if isinstance(columns, list) and isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        return [dict(zip(map(str, columns), row, strict=False)) for row in rows]
    tables = [value for value in document.values() if _is_list_of_objects(value)]
    if len(tables) == 1:
        (records,) = tables
        return list(records)
    values = [*document.values()]
    if values and all(isinstance(value, list) for value in values) and len({*map(len, values)}) == 1:
        return [dict(zip(document, row, strict=True)) for row in zip(*values, strict=True)]
    if values and all(isinstance(value, dict) for value in values):
        if {*document} & {*wanted_names}:  # column -> row -> value, as pandas writes it
            row_names = dict.fromkeys(name for column in values for name in column)
            return [{name: column.get(row) for name, column in document.items()} for row in row_names]
        return values
    return [document]


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) for part in value)


def _frame_of_records(path: Path, numbered_records: Iterable[tuple[int, Any]]) -> pd.DataFrame:
    """The texts of the objects, in which a value of an object in an object has a name such as config.tp."""
    texts_by_row: dict[int, dict[str, str]] = {}
    for number, record in numbered_records:
        if not isinstance(record, Mapping):
            fact = f"{path}, row {number}: {json.dumps(record)[:40]} is not an object"
            raise ConfigError(f"{fact}; write each row as an object with a value for each column")
        texts_by_row[number] = dict(_flat_texts(record))
    frame = pd.DataFrame.from_dict(texts_by_row, orient="index", dtype=object)
    return frame.fillna("").astype(object)


def _flat_texts(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _flat_texts(value, f"{prefix}{name}.")
        elif value is None:
            yield f"{prefix}{name}", ""
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
