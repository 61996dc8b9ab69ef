"""Makes result rows of the rows of a CSV file: as many as it has, in its order."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis.importing.derived import Doubts, completed, typed
from ultrabench.analysis.importing.table_map import KINDS, UNITS, Source, TableMap, condition
from ultrabench.analysis.schema import BOOL, INT, SCHEMA, SIZES, TEXT
from ultrabench.errors import ConfigError, UltrabenchError, require_known, unknown_name
from ultrabench.layout import AXES
from ultrabench.record import content_id
from ultrabench.result import Status

_EMPTY_TEXTS = frozenset({"", "nan", "null", "na", "n/a", "-"})
"""Texts, in lower case, that mean that a value is unknown; in columns of numbers `none` does so, too."""
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_IDENTITY_COLUMNS = [
    "model", *SIZES, "routing", *AXES, "nodes", "gpus", "gbs", "seq_len", "precision", "compile", "kernel", "kernel_version", "hardware",
]  # fmt: skip
"""Columns whose values are hashed to the run_id of an imported row."""


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
    texts = _read(path)
    columns = [source.column for sources in table_map.columns.values() for source in sources]
    if not {*columns} & {*texts}:
        fact = f"{path} has none of the {len({*columns})} columns that this format or map reads, such as {columns[0]!r}"
        raise ConfigError(f"{fact}; its columns: {', '.join([*texts][:10])}")
    require_known(f"column of {path}", texts, *columns)
    try:
        frame, doubts = completed(_converted(texts, table_map), table_map.models)
        table, counts = _with_doubts(frame, doubts, table_map, path)
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error
    except pa.ArrowException as error:
        fact = f"{path} holds a number that is too large: {error}"
        raise ConfigError(f"{fact}; correct it or its unit") from error
    return Imported(table=table, doubts=counts, unused=tuple(name for name in texts if name not in columns))


def _read(path: Path) -> dict[str, pd.Series]:
    """Name -> texts of each column of a CSV file; their index is the number of the line."""
    try:
        cells = pd.read_csv(path, header=None, dtype=str, na_filter=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        cells = pd.DataFrame()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip()
        raise UltrabenchError(f"cannot read {path}: {reason}; give a CSV file") from error
    if len(cells) < 2:
        raise ConfigError(f"{path} has no rows below the header; there is nothing to import")
    cells.index += 1
    return {str(name): cells[column][1:] for column, name in cells.iloc[0].items()}


def _converted(texts: Mapping[str, pd.Series], table_map: TableMap) -> pd.DataFrame:
    """Our columns that the table or a constant gives."""
    line_numbers = next(iter(texts.values())).index
    frame = pd.DataFrame(index=line_numbers)
    constants = {"status": "ok"} | table_map.constants
    for name in {**table_map.columns, **constants}:
        values = pd.Series(None, line_numbers, object)
        for source in table_map.columns.get(name, ()):
            values = values.where(values.notna(), _values(name, source, texts[source.column]))
        frame[name] = values.where(values.notna(), constants.get(name))
    for line, status in frame["status"][~frame["status"].isin([*Status])].items():
        fact = unknown_name("status", status, Status)
        raise ConfigError(f"line {line}: {fact}: map it in columns.status.values")
    return frame


def _values(name: str, source: Source, texts: pd.Series) -> pd.Series:
    """The values of our column `name` that texts of a table mean; null where there is none."""
    texts = texts.str.strip()
    if source.pattern is not None:
        texts = texts.str.extract(source.pattern, expand=False).fillna("")
    column, kind, lower_texts = source.column, KINDS[name], texts.str.lower()
    is_empty = lower_texts.isin(_EMPTY_TEXTS if kind == TEXT else _EMPTY_TEXTS | {"none"})
    if source.values or kind == BOOL:
        value_by_text = {key.lower(): value for key, value in (source.values or _TRUTHS).items()}
        for line, text in texts[~is_empty & ~lower_texts.isin(value_by_text)].items():
            kind_of_value = f"{'' if source.values else 'truth '}value of {column}"
            raise ConfigError(f"line {line}: {unknown_name(kind_of_value, text, source.values or _TRUTHS)}")
        return lower_texts.map(value_by_text).astype(object)
    if kind == TEXT:
        return texts.where(~is_empty, None).astype(object)
    numbers = pd.to_numeric(texts.str.replace(",", ""), errors="coerce") * UNITS.get(source.unit or "", 1.0)
    is_allowed = (kind != INT) | (source.unit is not None) | (numbers % 1 == 0)
    for line, text in texts[~is_empty & ~(np.isfinite(numbers) & is_allowed)].items():
        rule = f"is not {'an integer' if kind == INT else 'a number'}; correct it or leave it empty"
        raise ConfigError(f"line {line}: {column}={text!r} {rule}")
    return numbers.round() if kind == INT else numbers


def _with_doubts(
    frame: pd.DataFrame, doubts: Doubts, table_map: TableMap, path: Path
) -> tuple[pa.Table, dict[str, Counter[str]]]:
    """The result table of completed rows, with their doubts and identity, and the counts of `Imported.doubts`."""
    doubts = [("source", frame["suspect"]), *doubts]
    for sentence, rule in table_map.doubts.items():
        rows = frame
        for text in rule.when:
            rows = rows[condition(text)[1](rows)]
        doubts.append((rule.code or sentence, pd.Series(sentence, rows.index)))
    tables = [pd.DataFrame({"code": code, "sentence": series.dropna()}) for code, series in doubts]
    doubt_rows = pd.concat(tables)
    by_line = doubt_rows.groupby(level=0)
    frame["suspect"] = pd.Series(
        {line: "; ".join(sentences) for line, sentences in by_line["sentence"]}, dtype=object
    )
    frame["suspect_codes"] = pd.Series({line: [*codes] for line, codes in by_line["code"]}, dtype=object)
    frame["run_id"] = [content_id(row) for row in typed(frame, _IDENTITY_COLUMNS).to_pylist()]
    frame["repeat"] = frame.groupby("run_id").cumcount()
    frame["sweep"], frame["source"] = frame["sweep"].fillna(path.stem), frame["source"].fillna(path.name)
    by_code = frame["status"].loc[doubt_rows.index].groupby(doubt_rows["code"].array)
    counts = {str(code): Counter(statuses) for code, statuses in by_code}
    return typed(frame, SCHEMA.names), counts
