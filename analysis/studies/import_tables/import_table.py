"""Makes result rows of the rows of a table: as many as it has, in its order."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis.results.columns import GROUPS, unit_of
from ultrabench.analysis.results.imported import number_texts
from ultrabench.analysis.results.imported.derived import Doubts, typed_table, with_derived_columns
from ultrabench.analysis.results.imported.given_rates import COMPARED_COLUMNS
from ultrabench.analysis.results.imported.number_texts import COMMA, POINT
from ultrabench.analysis.results.imported.table_map import TYPE_BY_COLUMN, Source, TableMap, condition
from ultrabench.analysis.results.imported.units import COUNT, TOKENS, UNITS, units_of
from ultrabench.analysis.results.options import VARIANT, variant_in
from ultrabench.analysis.results.schema import BOOL, FLOAT, FLOATS, INT, SCHEMA, TEXT, TEXTS, TIME
from ultrabench.analysis.studies.import_tables.identity import identify
from ultrabench.analysis.studies.import_tables.table_file import TableFile, read_table
from ultrabench.attention_type import FLOPS_FORMULAS
from ultrabench.errors import ConfigError, counted, require_known, unknown_name
from ultrabench.layout import TEXT_AXES
from ultrabench.record import canonical_json
from ultrabench.result import NOT_TRIED, PENDING, Status
from ultrabench.sweep.config.files import files

_EMPTY_TEXTS = frozenset({
    "", "nan", "null", "na", "n/a", "n.a.", "#n/a", "#na", "-", "--", "---", "\u2013", "\u2014",
})  # fmt: skip
"""Texts, in lower case, that mean that a value is unknown; in columns of numbers `none` means so, too."""
_TRUTH_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_OTHER_STATUS_WORDS = dict.fromkeys(("out of memory", "cuda out of memory", "cuda oom"), Status.OOM.value)
"""Words for a status that are not its name."""
_OTHER_PRECISION_WORDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""Words for a precision that are not its name."""
_LOWER_CASE_COLUMNS = frozenset({"precision", "scaling", *TEXT_AXES})
"""Columns of results whose values are words in lower case."""
_OUTCOMES = frozenset(column.name for column in GROUPS["Outcome"])
_DEFAULTS = {"status": Status.OK.value}
"""Column of results -> its value in rows for which neither the table nor the map has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of a table in our columns, and the counts that `ultrabench import` prints."""

    table: pa.Table
    doubt_counts: dict[str, Counter[str]]
    """Code of a doubt -> status -> number of rows with both; a row may have several doubts."""
    doubt_examples: dict[str, str]
    """Code of a doubt -> its first row and the sentence about it."""
    unused_columns: tuple[str, ...]
    """Columns of the file that the map does not use."""
    notes: tuple[str, ...]
    """Sentences about what was assumed: defaults, units of headers, decimal commas, options."""


def import_table(path: Path, table_map: TableMap) -> Imported:
    """The rows of a table in our columns.

    Raises:
        ConfigError: the file cannot be read, or a value of it cannot be used; the message names row and column.
    """
    sources = [source for sources in table_map.columns.values() for source in sources]
    source_columns = [name for source in sources for name in (source.column, source.beside) if name]
    table_file = read_table(path, source_columns)
    names = table_file.columns
    if not {*source_columns} & {*names}:
        fact = (
            f"{path} has none of the {len({*source_columns})} columns that this format or map reads, "
            f"such as {source_columns[0]!r}"
        )
        raise ConfigError(f"{fact}; its columns: {', '.join([*names][:10])}")
    require_known(f"column of {path}", names, *source_columns, *table_map.options)
    try:
        reader = _Reader(table_file, table_map)
        rows = reader.our_columns()
        derived = with_derived_columns(rows, table_map, reader.half_digits)
        frame = derived.frame
        used_columns = {*source_columns, *table_map.options}
        unused_columns = tuple(name for name in names if name not in used_columns)
        named_options = {name: names[name] for name in table_map.options} | reader.variant_texts
        unused_texts = {name: names[name] for name in unused_columns if name and name not in table_map.ignore}
        identity = identify(frame, named_options, unused_texts)
        frame["run_id"], frame["variant"] = identity.run_ids, identity.variants
        _number_repeats(frame, rows)
        frame["sweep"], frame["source"] = frame["sweep"].fillna(path.stem), frame["source"].fillna(path.name)
        doubt_frame = _add_doubts(frame, rows, derived.doubts, table_map)
        table = typed_table(frame, SCHEMA.names)
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error
    except pa.ArrowException as error:
        fact = f"{path} holds a number that is too large: {', '.join(map(str, error.args))}"
        raise ConfigError(f"{fact}; correct it or its unit") from error
    return Imported(
        table=table,
        doubt_counts=_doubt_counts(doubt_frame, frame["status"]),
        doubt_examples={
            str(code): f"{table_file.row_noun} {row}: {sentence}"
            for row, code, sentence in doubt_frame.sort_index(kind="stable")
            .drop_duplicates("code")
            .itertuples()
        },
        unused_columns=unused_columns,
        notes=(*reader.notes, *derived.notes, *identity.notes),
    )


class _Reader:
    """Reads the values of one table by one map."""

    def __init__(self, table_file: TableFile, table_map: TableMap) -> None:
        self._table_file, self._map = table_file, table_map
        self._texts_by_column = table_file.columns
        self._index = next(iter(table_file.columns.values())).index
        self._unit_by_source: dict[tuple[str, str], str | None] = {}
        self.notes: list[str] = []
        self.half_digits: dict[str, pd.Series] = {}
        """Column of COMPARED_COLUMNS -> half a unit of the last digit of each of its numbers."""
        self.variant_texts: dict[str, pd.Series] = {}
        """Column of the table that the map reads as variant -> its texts, if they are no JSON objects."""
        self._decimal_by_source = self._decimals()
        self._failed_status = pd.Series(None, self._index, object)

    def our_columns(self) -> pd.DataFrame:
        """The columns of results for which the table has values or the map a constant;
        the index is the number of the row.
        """
        frame = pd.DataFrame(index=self._index)
        constants = _DEFAULTS | self._map.constants
        self._failed_status = self._statuses()
        for our_column in {**self._map.columns, **constants}:
            if our_column != "status":
                values = self._with_default(our_column, self._values(our_column), constants)
                frame[our_column] = self._with_our_names(our_column, values)
        statuses = self._failed_status  # cells of numbers may have added some
        is_pending = statuses == PENDING
        frame["status"] = self._with_default("status", statuses, constants).where(~is_pending, None)
        for row, status in frame["status"][~frame["status"].isin([*Status]) & ~is_pending].items():
            fact = unknown_name("status", status, Status)
            raise ConfigError(f"{self._row_text(row)}: {fact}: map it in columns.status.values")
        self._divide_tokens(frame)
        return frame

    def _values(self, our_column: str) -> pd.Series:
        """The values of a column of results: of each row those of its first source that has one; options of
        `variant` are those of all its sources, of which earlier ones count.
        """
        values = pd.Series(None, self._index, object)
        for source in self._map.columns.get(our_column, ()):
            new_values, halves = self._column_values(our_column, source)
            if halves is not None:
                known_halves = self.half_digits.get(our_column, pd.Series(np.nan, self._index))
                self.half_digits[our_column] = known_halves.where(values.notna(), halves)
            if our_column == VARIANT:
                values = pd.Series(map(_merged_options, values, new_values), self._index, object)
            else:
                values = values.where(values.notna(), new_values)
        return values

    def _with_default(self, our_column: str, values: pd.Series, constants: Mapping[str, Any]) -> pd.Series:
        """The values, and where there is none the constant of the map or the default, which a note names."""
        constant = constants.get(our_column)
        num_empty = int(values.isna().sum())
        if constant is not None and our_column in self._map.columns and num_empty:
            rows_text = counted(num_empty, "row")
            self.notes.append(
                f"{our_column} is empty in {rows_text}, which get the default {our_column}={constant}"
            )
        return values.where(values.notna(), constant)

    def _with_our_names(self, our_column: str, values: pd.Series) -> pd.Series:
        """The values of a column, with the names that ultrabench knows in ultrabench's spelling,
        whatever their case.
        """
        names_by_column: dict[str, Iterable[str]] = {
            "hardware": files("hardware"),
            "kernel": files("kernel"),
            "model": self._map.models or files("model"),
            "flops_formula": FLOPS_FORMULAS,
        }
        if our_column not in {*names_by_column, *_LOWER_CASE_COLUMNS}:
            return values
        names = [*names_by_column.get(our_column, ())]
        num_by_text = Counter(map(str.lower, names))
        name_by_text = {name.lower(): name for name in names if num_by_text[name.lower()] == 1}
        name_by_text |= _OTHER_PRECISION_WORDS if our_column == "precision" else {}
        new_by_value = {}
        for value in values.dropna().unique():
            text = str(value).strip().lower().removeprefix("torch.")
            unknown_text = text if our_column in _LOWER_CASE_COLUMNS else value
            new_by_value[value] = value if value in names else name_by_text.get(text, unknown_text)
        return values.map(new_by_value).astype(object).where(values.notna(), None)

    def _row_text(self, row: Any) -> str:
        return f"{self._table_file.row_noun} {row}"

    def _texts(self, source: Source) -> tuple[pd.Series, pd.Series]:
        """The texts of a source, and for each whether the pattern of the source does not match it."""
        texts = self._texts_by_column[source.column]
        if source.pattern is None:
            return texts, pd.Series(False, self._index)
        if source.beside:
            texts = texts + " " + self._texts_by_column[source.beside]
        is_match = texts.map(re.compile(source.pattern).search).notna()
        is_unmatched = ~is_match & ~texts.str.lower().isin(_EMPTY_TEXTS)
        return texts.str.extract(source.pattern, expand=False).fillna("").str.strip(), is_unmatched

    # statuses

    def _statuses(self) -> pd.Series:
        """The statuses that the table gives, PENDING where the map says null."""
        statuses = pd.Series(None, self._index, object)
        unmatched_texts = pd.Series(None, self._index, object)
        for source in self._map.columns.get("status", ()):
            texts, is_unmatched = self._texts(source)
            raw_texts = self._texts_by_column[source.column]
            unmatched_texts = unmatched_texts.where(~is_unmatched, source.column + "=" + raw_texts.map(repr))
            value_by_text = {text: self._status_of(source, text, texts) for text in texts.unique()}
            statuses = statuses.where(statuses.notna(), texts.map(value_by_text))
        for row, text in unmatched_texts[statuses.isna() & unmatched_texts.notna()].items():
            rule = "does not match the pattern of columns.status"
            todo = "let it match, or end the pattern with |$ if other texts mean the default"
            raise ConfigError(f"{self._row_text(row)}: {text} {rule}; {todo}")
        return statuses

    def _status_of(self, source: Source, text: str, texts: pd.Series) -> str | None:
        if text.lower() in _EMPTY_TEXTS and text.lower() not in map(str.lower, source.values):
            return None
        if source.values:
            value_by_text = {key.lower(): value for key, value in source.values.items()}
            if text.lower() in value_by_text:
                return value_by_text[text.lower()] or PENDING
            fact = unknown_name(f"value of {source.column}", text, source.values)
            raise ConfigError(
                f"{self._row_text(texts.index[texts == text][0])}: {fact}: map it in columns.status.values"
            )
        return _status_word(text) or text

    # numbers

    def _decimals(self) -> dict[tuple[str, str], str]:
        """(column of results, column of the table) -> the sign of decimals in the table's column.

        Raises:
            ConfigError: a column may be read with either sign.
        """
        reading_by_source: dict[tuple[str, str], str | None] = {}
        int_by_source: dict[tuple[str, str], bool] = {}
        for our_column, source in self._number_sources():
            texts, _ = self._texts(source)
            distinct_texts = [text for text in texts.unique() if re.search(r"\d", text)]
            key, declared = (our_column, source.column), source.decimal or self._map.decimal
            int_by_source[key] = is_int = self._needs_integers(our_column, source)
            reading_by_source[key] = declared or number_texts.decimal_reading(distinct_texts, is_int=is_int)
        has_commas = COMMA in reading_by_source.values()
        decimal_by_source = {}
        for (our_column, name), reading in reading_by_source.items():
            if reading == "points":  # where other columns have decimal commas, it may stand between thousands
                comma_reading = COMMA if int_by_source[our_column, name] else "both"
                reading = comma_reading if has_commas else POINT
            if reading == "both":
                self._refuse_ambiguous(name)
            decimal_by_source[our_column, name] = reading or POINT
        comma_columns = sorted({name for (_, name), sign in decimal_by_source.items() if sign == COMMA})
        if comma_columns and self._map.decimal is None:
            self.notes.append(f"decimal commas: {', '.join(comma_columns)}")
        return decimal_by_source

    def _number_sources(self) -> Iterator[tuple[str, Source]]:
        for our_column, sources in self._map.columns.items():
            if TYPE_BY_COLUMN[our_column] in (INT, FLOAT):
                yield from ((our_column, source) for source in sources if not source.values)

    def _refuse_ambiguous(self, name: str) -> None:
        texts = self._texts_by_column[name]
        row, text = next((row, text) for row, text in texts.items() if re.search(r"\d[.,]\d", text))
        readings = [f"{number_texts.in_words(text, sign)} (decimal: '{sign}')" for sign in (COMMA, POINT)]
        fact = f"{self._row_text(row)}: {name}={text!r} may be {' or '.join(readings)}"
        raise ConfigError(f"{fact}; write one of them into the map")

    def _needs_integers(self, our_column: str, source: Source) -> bool:
        """Whether the cells of a source must be integers, since no unit makes integers of fractions."""
        unit = self._unit(our_column, source)
        return TYPE_BY_COLUMN[our_column] == INT and (unit is None or UNITS[unit][1] == 1)

    def _unit(self, our_column: str, source: Source) -> str | None:
        """The unit of a source; a note says where its header names it."""
        key = our_column, source.column
        if key not in self._unit_by_source:
            self._unit_by_source[key] = unit = source.unit_of(our_column)
            if source.unit is None and unit not in (None, unit_of(our_column)):
                self.notes.append(f"{our_column}: {source.column!r} is read in {unit}, as its header says")
        return self._unit_by_source[key]

    def _numbers(
        self, our_column: str, source: Source, texts: pd.Series
    ) -> tuple[pd.Series, pd.Series | None]:
        """The numbers of a source, and half a unit of their last digits if the column is compared with others."""
        name, is_int = source.column, TYPE_BY_COLUMN[our_column] == INT
        unit, decimal = self._unit(our_column, source), self._decimal_by_source[our_column, source.column]
        is_empty = texts.str.lower().isin(_EMPTY_TEXTS | {"none"})
        column, fault_by_text = number_texts.read_numbers(
            texts, is_empty, our_column=our_column, unit=unit, decimal=decimal
        )
        if fault_by_text and our_column in _OUTCOMES:
            is_empty |= self._take_statuses(texts, fault_by_text)
        numbers = column.values
        # Without a unit of its own a fraction such as 1.0 counts as an integer, but no part of a byte does.
        is_allowed = (not is_int) | (unit is not None) | (numbers % 1 == 0) | column.has_unit()
        is_too_large = (numbers.abs() >= 2**63) & is_int
        for row, text in texts[~is_empty & ~(np.isfinite(numbers) & is_allowed & ~is_too_large)].items():
            fault = fault_by_text.get(text, "is not a number" if not is_int else "is not an integer")
            if is_int and fault == "is not a number":
                fault = "is not an integer"
            todo = "correct it or leave it empty" if ";" not in fault else ""
            if is_too_large[row]:
                fault, todo = "is too large", "correct it or its unit"
            elif (
                is_int
                and unit is None
                and units_of(our_column)
                and np.isfinite(numbers[row])
                and unit_of(our_column) != COUNT
            ):
                todo = f"give its unit, one of {', '.join(units_of(our_column))}"
            elif our_column in _OUTCOMES and not np.isfinite(numbers[row]) and not re.search(r"\d", text):
                todo += (
                    f"; if it is a status, add columns.status: {{column: {name}, pattern: ..., values: ...}}"
                )
            raise ConfigError(
                f"{self._row_text(row)}: {name}={text!r} {fault}" + (f"; {todo}" if todo else "")
            )
        halves = column.half_digits() if our_column in COMPARED_COLUMNS else None
        return numbers.round() if is_int else numbers, halves

    def _take_statuses(self, texts: pd.Series, fault_by_text: Mapping[str, str]) -> pd.Series:
        """For which rows a word stands in place of a number, such as OOM; rows without a status get it."""
        words = texts.where(texts.isin([*fault_by_text])).dropna().map(_status_word)
        words = words[words.notna() & (words != Status.OK)]
        has_none = self._failed_status.reindex(words.index).isna()
        self._failed_status.update(words[has_none])
        has_failed = self._failed_status.notna() & (self._failed_status != Status.OK)
        has_letters_only = texts.isin([*fault_by_text]) & ~texts.str.contains(r"\d")
        return has_failed & has_letters_only

    # other values

    def _column_values(self, our_column: str, source: Source) -> tuple[pd.Series, pd.Series | None]:
        """The values of a column of results that the texts of its source mean,
        null where there is none; and half digits.
        """
        texts, _ = self._texts(source)
        column_type, lower_texts = TYPE_BY_COLUMN[our_column], texts.str.lower()
        is_empty = lower_texts.isin(_EMPTY_TEXTS if column_type == TEXT else _EMPTY_TEXTS | {"none"})
        if source.values or column_type == BOOL:
            words = source.values or _TRUTH_WORDS
            value_by_text = {key.lower(): value for key, value in words.items()}
            for row, text in texts[~is_empty & ~lower_texts.isin(value_by_text)].items():
                subject = f"{'' if source.values else 'truth '}value of {source.column}"
                raise ConfigError(f"{self._row_text(row)}: {unknown_name(subject, text, words)}")
            return lower_texts.map(value_by_text).astype(object), None
        if column_type in (FLOATS, TEXTS, TIME):
            values = texts.where(~is_empty, None)
            kind = "time in ISO 8601" if column_type == TIME else "JSON array"
            convert = _time_of if column_type == TIME else _list_of
            return self._converted(source.column, values, convert, kind), None
        if column_type == TEXT:
            values = texts.where(~is_empty, None).astype(object)
            if our_column == "variant":
                return self._variants(source.column, values), None
            return values, None
        return self._numbers(our_column, source, texts)

    def _converted(self, name: str, texts: pd.Series, convert: Callable[[str], Any], kind: str) -> pd.Series:
        values = []
        for row, text in texts.items():
            try:
                values.append(convert(text) if isinstance(text, str) else None)
            except (ValueError, TypeError):
                fact = f"{self._row_text(row)}: {name}={text!r} is not a {kind}"
                raise ConfigError(f"{fact}; correct it or leave it empty") from None
        return pd.Series(values, texts.index, object)

    def _variants(self, name: str, texts: pd.Series) -> pd.Series:
        """The JSON objects of a column; other texts become an option with the name of the column."""
        is_object = texts.map(lambda text: not isinstance(text, str) or bool(variant_in(text)))
        self.variant_texts[name] = texts.where(~is_object, None)
        return texts.where(is_object, None)

    def _divide_tokens(self, frame: pd.DataFrame) -> None:
        """Divides a global batch that the table gives in tokens by seq_len."""
        sources = self._map.columns.get("gbs", ())
        if not any(source.unit == TOKENS for source in sources):
            return
        seq_len = frame["seq_len"] if "seq_len" in frame else pd.Series(np.nan, frame.index)
        sequences = frame["gbs"].astype(float) / seq_len.astype(float)
        for row in frame.index[frame["gbs"].notna() & ~(sequences % 1 == 0)]:
            fact = f"{self._row_text(row)}: gbs={frame['gbs'][row]:,.0f} tokens with seq_len={seq_len[row]}"
            raise ConfigError(f"{fact} is no whole number of sequences; correct one of them or the unit")
        frame["gbs"] = sequences


def _status_word(text: str) -> str | None:
    """The status that a text names, whatever signs stand around it; None if it names none."""
    status_text = re.sub(r"[^a-z_ ]+", " ", text.lower()).strip()
    name = _OTHER_STATUS_WORDS.get(status_text, status_text.replace(" ", "_"))
    return name if name in {*Status} else None


def _list_of(text: str) -> list[Any]:
    value = json.loads(text)
    if not isinstance(value, list):
        raise TypeError
    return value


def _merged_options(options_text: Any, more_text: Any) -> Any:
    """The options of two JSON objects; those of the first count where both have one."""
    if not isinstance(options_text, str) or not isinstance(more_text, str):
        return options_text if isinstance(options_text, str) else more_text
    return canonical_json(variant_in(more_text) | variant_in(options_text))


def _time_of(text: str) -> pd.Timestamp:
    if not re.match(r"\d{4}-?\d\d", text):  # 05/02/2026 is a day in May or in February
        raise ValueError
    return pd.to_datetime(text, utc=True).floor("us")


def _number_repeats(frame: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Numbers the repeats of each run, unless the table does; a run that was not tried has none."""
    is_tried = ~frame["status"].isin(NOT_TRIED)
    frame["repeat"] = frame["repeat"].fillna(frame.groupby("run_id").cumcount().where(is_tried))
    if "attempt" not in rows or rows["attempt"].isna().all():
        frame["attempt"] = pd.Series(0.0, frame.index).where(is_tried)
    frame["is_final"] = frame["is_final"].where(frame["is_final"].notna(), True)


def _add_doubts(frame: pd.DataFrame, rows: pd.DataFrame, doubts: Doubts, table_map: TableMap) -> pd.DataFrame:
    """Writes the doubts about completed rows into `suspect` and `suspect_codes`.

    Returns the code and the sentence of each doubt; the index is the row.
    """
    codes_of_table = frame["suspect_codes"].where(frame["suspect"].notna())
    texts_of_table = zip(frame.index, frame["suspect"], codes_of_table, strict=True)
    doubts_of_table = [
        (row, code, sentence)
        for row, text, codes in texts_of_table
        if isinstance(text, str)
        for code, sentence in _coded_sentences(text, codes)
    ]
    table_doubt_frame = pd.DataFrame(
        {"code": [code for _, code, _ in doubts_of_table], "sentence": [text for *_, text in doubts_of_table]},
        index=[row for row, *_ in doubts_of_table], dtype=object,
    )  # fmt: skip
    for sentence, rule in table_map.doubts.items():
        doubted_rows = frame
        for condition_text in rule.when:
            doubted_rows = doubted_rows[condition(condition_text)[1](doubted_rows)]
        doubts.append((rule.code or sentence, pd.Series(sentence, doubted_rows.index)))
    frames = [
        pd.DataFrame({"code": code, "sentence": texts.dropna()}, dtype=object) for code, texts in doubts
    ]
    doubt_frame = pd.concat([table_doubt_frame, *frames])
    doubt_frame = doubt_frame[~doubt_frame.assign(row=doubt_frame.index).duplicated(["row", "sentence"])]
    doubts_by_row = doubt_frame.groupby(level=0)
    joined_sentences = {n: "; ".join(sentences) for n, sentences in doubts_by_row["sentence"]}
    frame["suspect"] = pd.Series(joined_sentences, dtype=object)
    frame["suspect_codes"] = pd.Series({n: [*codes] for n, codes in doubts_by_row["code"]}, dtype=object)
    return doubt_frame


def _doubt_counts(doubt_frame: pd.DataFrame, statuses: pd.Series) -> dict[str, Counter[str]]:
    """Code of a doubt -> status -> number of rows with both."""
    statuses_by_code = statuses.loc[doubt_frame.index].groupby(doubt_frame["code"].to_numpy())
    return {str(code): Counter(code_statuses.fillna(PENDING)) for code, code_statuses in statuses_by_code}


def _coded_sentences(text: str, codes: Any) -> list[tuple[str, str]]:
    """The sentences of `suspect` in the table, each with its code; one without codes has the code source."""
    sentences = text.split("; ")
    if isinstance(codes, list) and len(codes) == len(sentences):
        return [*zip(map(str, codes), sentences, strict=True)]
    if isinstance(codes, list) and codes:
        return [(str(codes[0]), text)]
    return [("source", text)]
