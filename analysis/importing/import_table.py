"""Makes result rows of the rows of a CSV file: as many as it has, in its order."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis.importing.derived import Doubts, typed_table, with_derived_columns
from ultrabench.analysis.importing.table_map import TYPE_BY_COLUMN, UNIT_FACTORS, Source, TableMap, condition
from ultrabench.analysis.schema import BOOL, INT, SCHEMA, SIZES, TEXT
from ultrabench.errors import ConfigError, UltrabenchError, require_known, unknown_name
from ultrabench.layout import AXES
from ultrabench.record import content_id
from ultrabench.result import Status

_EMPTY_TEXTS = frozenset({"", "nan", "null", "na", "n/a", "-"})
"""Texts, in lower case, that mean that a value is unknown; in columns of numbers `none` means so, too."""
_FILE_RULE = "give a CSV file in UTF-8 with commas between its columns"
_TRUTH_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_THOUSANDS_GROUPS = r"^[+-]?\d{1,3}(,\d{3})+(?=\.\d+$|$)"
"""Pattern of the digits of a number with commas between thousands; a number with other commas is refused."""
_IDENTITY_COLUMNS = [
    "model", *SIZES, "routing", *AXES, "nodes", "gpus", "gbs", "seq_len", "precision", "compile", "kernel", "kernel_version", "hardware",
]  # fmt: skip
"""Columns whose values are hashed to the run_id of an imported row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of a table in our columns, and the counts that `ultrabench import` prints."""

    table: pa.Table
    doubt_counts: dict[str, Counter[str]]
    """Code of a doubt -> status -> number of rows with both; a row may have several doubts."""
    unused_columns: tuple[str, ...]
    """Columns of the file that the map does not use."""


def import_csv(path: Path, table_map: TableMap) -> Imported:
    """The rows of a CSV file in our columns.

    Raises:
        ConfigError: the file cannot be read, or a value of it cannot be used; the message names row and column.
    """
    texts_by_column = _texts_by_column(path)
    source_columns = [source.column for sources in table_map.columns.values() for source in sources]
    if not {*source_columns} & {*texts_by_column}:
        fact = f"{path} has none of the {len({*source_columns})} columns that this format or map reads, such as {source_columns[0]!r}"
        raise ConfigError(f"{fact}; its columns: {', '.join([*texts_by_column][:10])}")
    require_known(f"column of {path}", texts_by_column, *source_columns)
    try:
        frame, doubts = with_derived_columns(_our_columns(texts_by_column, table_map), table_map.models)
        table, doubt_counts = _with_doubts(frame, doubts, table_map, path)
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error
    except pa.ArrowException as error:
        fact = f"{path} holds a number that is too large: {', '.join(map(str, error.args))}"
        raise ConfigError(f"{fact}; correct it or its unit") from error
    unused_columns = tuple(name for name in texts_by_column if name not in source_columns)
    return Imported(table=table, doubt_counts=doubt_counts, unused_columns=unused_columns)


def _texts_by_column(path: Path) -> dict[str, pd.Series]:
    """Name of each column of a CSV file -> its texts; their index is the number of the line."""
    try:
        raw_table = pd.read_csv(path, header=None, dtype=str, na_filter=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        raw_table = pd.DataFrame()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip()
        raise UltrabenchError(f"cannot read {path}: {reason}; {_FILE_RULE}") from error
    if len(raw_table) < 2:
        raise ConfigError(f"{path} has no rows below the header; there is nothing to import")
    names = raw_table.iloc[0]
    if len(names) == 1 and re.search("[;\t]", names[0]):
        raise ConfigError(f"cannot read {path}: {names[0]!r} is its only column; {_FILE_RULE}")
    if (is_repeated := names.duplicated() & (names != "")).any():
        raise ConfigError(
            f"{path} has several columns {names[is_repeated].iloc[0]!r}; keep one or rename them"
        )
    raw_table.index += 1
    return {str(name): raw_table[position][1:] for position, name in names.items()}


def _our_columns(texts_by_column: Mapping[str, pd.Series], table_map: TableMap) -> pd.DataFrame:
    """The columns of results for which the table has values or the map a constant; the index is the number of the line."""
    line_numbers = next(iter(texts_by_column.values())).index
    frame = pd.DataFrame(index=line_numbers)
    constants = {"status": "ok"} | table_map.constants
    for our_column in {**table_map.columns, **constants}:
        column_values = pd.Series(None, line_numbers, object)
        for source in table_map.columns.get(our_column, ()):
            column_values = column_values.where(
                column_values.notna(), _column_values(our_column, source, texts_by_column[source.column])
            )
        frame[our_column] = column_values.where(column_values.notna(), constants.get(our_column))
    for line_no, status in frame["status"][~frame["status"].isin([*Status])].items():
        fact = unknown_name("status", status, Status)
        raise ConfigError(f"line {line_no}: {fact}: map it in columns.status.values")
    return frame


def _column_values(our_column: str, source: Source, texts: pd.Series) -> pd.Series:
    """The values of a column of results that the texts of its source mean; null where there is none."""
    texts = texts.str.strip()
    if source.pattern is not None:
        texts = texts.str.extract(source.pattern, expand=False).fillna("")
    csv_column, column_type, lower_texts = source.column, TYPE_BY_COLUMN[our_column], texts.str.lower()
    is_empty = lower_texts.isin(_EMPTY_TEXTS if column_type == TEXT else _EMPTY_TEXTS | {"none"})
    if source.values or column_type == BOOL:
        value_by_text = {key.lower(): value for key, value in (source.values or _TRUTH_WORDS).items()}
        for line_no, text in texts[~is_empty & ~lower_texts.isin(value_by_text)].items():
            subject = f"{'' if source.values else 'truth '}value of {csv_column}"
            raise ConfigError(f"line {line_no}: {unknown_name(subject, text, source.values or _TRUTH_WORDS)}")
        return lower_texts.map(value_by_text).astype(object)
    if column_type == TEXT:
        return texts.where(~is_empty, None).astype(object)
    unit_factor = UNIT_FACTORS.get(source.unit or "", 1.0)
    ungrouped_texts = texts.str.replace(
        _THOUSANDS_GROUPS, lambda match: match[0].replace(",", ""), regex=True
    )
    numbers = pd.to_numeric(ungrouped_texts, errors="coerce") * unit_factor
    is_too_large = (numbers.abs() >= 2**63) & (column_type == INT)
    is_allowed = (column_type != INT) | (source.unit is not None) | (numbers % 1 == 0)
    for line_no, text in texts[~is_empty & ~(np.isfinite(numbers) & is_allowed & ~is_too_large)].items():
        rule = f"is not {'an integer' if column_type == INT else 'a number'}; correct it or leave it empty"
        rule = "is too large; correct it or its unit" if is_too_large[line_no] else rule
        raise ConfigError(f"line {line_no}: {csv_column}={text!r} {rule}")
    return numbers.round() if column_type == INT else numbers


def _with_doubts(
    frame: pd.DataFrame, doubts: Doubts, table_map: TableMap, path: Path
) -> tuple[pa.Table, dict[str, Counter[str]]]:
    """The result table of completed rows, with their doubts and identity, and the counts of `Imported.doubt_counts`."""
    doubts = [("source", frame["suspect"]), *doubts]
    for sentence, rule in table_map.doubts.items():
        doubted_rows = frame
        for condition_text in rule.when:
            doubted_rows = doubted_rows[condition(condition_text)[1](doubted_rows)]
        doubts.append((rule.code or sentence, pd.Series(sentence, doubted_rows.index)))
    frames = [pd.DataFrame({"code": code, "sentence": sentences.dropna()}) for code, sentences in doubts]
    doubt_frame = pd.concat(frames)
    doubts_by_line = doubt_frame.groupby(level=0)
    joined_sentences = {n: "; ".join(sentences) for n, sentences in doubts_by_line["sentence"]}
    frame["suspect"] = pd.Series(joined_sentences, dtype=object)
    frame["suspect_codes"] = pd.Series({n: [*codes] for n, codes in doubts_by_line["code"]}, dtype=object)
    frame["run_id"] = [content_id(row) for row in typed_table(frame, _IDENTITY_COLUMNS).to_pylist()]
    frame["repeat"] = frame.groupby("run_id").cumcount()
    frame["sweep"], frame["source"] = frame["sweep"].fillna(path.stem), frame["source"].fillna(path.name)
    statuses_by_code = frame["status"].loc[doubt_frame.index].groupby(doubt_frame["code"].array)
    counts_by_code = {str(code): Counter(statuses) for code, statuses in statuses_by_code}
    return typed_table(frame, SCHEMA.names), counts_by_code
