"""Says which rows of a table are repeats of one candidate, and which differ in an option beside the layout."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from ultrabench.analysis.results.imported.derived import typed_table
from ultrabench.analysis.results.options import variant_in
from ultrabench.analysis.results.schema import SIZES
from ultrabench.layout import AXES
from ultrabench.record import canonical_json, content_id
from ultrabench.variant import OPTION

_IDENTITY_COLUMNS = [
    "model", *SIZES, "routing", *AXES, "nodes", "gpus", "gbs", "seq_len", "precision", "compile", "kernel",
    "kernel_version", "hardware",
]  # fmt: skip
"""Columns whose values are hashed to the run_id of an imported row, together with its options."""
_SETTING_COLUMNS = (
    "attention", "env", "variables", "gpu_name", "cluster", "kernel_digest", "torch_version", "cuda_version",
    "nccl_version",
    "driver_version", "git_commit", "source",
)  # fmt: skip
"""Columns of results with further settings; they are options if rows of one candidate differ in them."""
_NUMBER = re.compile(r"^[~<>\u2248]?\s*[+-]?[\d.,]*\d[\d.,]*(?:[eE][+-]?\d+)?\s*[A-Za-z%/\u00b5]{0,12}$")
_TIME = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b\d{1,2}:\d{2}|^(?:\d+\s*(?:days?|[dhms])\s*)+$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which candidate each row measured."""

    run_ids: list[str]
    variants: list[str | None]
    """The options of each row as JSON; None where it has none."""
    notes: list[str]
    """Sentences about columns in which rows of one candidate differ."""


def identify(
    frame: pd.DataFrame, named_options: Mapping[str, pd.Series], unused_texts: Mapping[str, pd.Series]
) -> Identity:
    """The candidates of completed rows.

    A text column that no map mentions is an option if rows that are equal in all else differ in it. Numbers, times and
    columns that are unique in each row are not: they are measurements and names.

    Args:
        named_options: columns that the map names as options -> their texts.
        unused_texts: columns that the map does not mention -> their texts.
    """
    values_by_option = dict(named_options)
    base_numbers = _numbered(frame, values_by_option)
    notes, other_names = list[str](), list[str]()
    if base_numbers.duplicated().any():
        settings = {name: frame[name].fillna("").astype(str) for name in _SETTING_COLUMNS}
        has_id_of_table = frame["run_id"].notna()
        new_names = list[str]()
        for name, texts in {**unused_texts, **settings}.items():
            if name in values_by_option or not _differs(texts, base_numbers, ~has_id_of_table):
                continue
            if _may_be_option(texts):
                values_by_option[name] = texts
                new_names.append(name)
            elif texts.nunique() < len(texts) or not _is_measurement(texts):
                other_names.append(name)
        if new_names:
            todo = f"to count these rows as repeats, write ignore: [{', '.join(new_names)}]"
            notes.append(
                f"options: rows of one layout differ in {', '.join(new_names)}, so they compete; {todo}"
            )
        if other_names:
            todo = (
                "name those that are settings in options: [...] of the map, and the others in ignore: [...]"
            )
            notes.append(f"repeats of one candidate differ in {', '.join(other_names)}; {todo}")
    variants = _variants(frame, values_by_option)
    return Identity(run_ids=_run_ids(frame, variants), variants=variants, notes=notes)


def _numbered(frame: pd.DataFrame, values_by_option: Mapping[str, pd.Series]) -> pd.Series:
    """For each row a number that rows of one candidate share."""
    keys = frame[_IDENTITY_COLUMNS].assign(variant=frame["variant"])
    options = {f"{OPTION}.{name}": texts for name, texts in values_by_option.items()}
    keys = keys.assign(**options)
    return keys.groupby([*keys], sort=False, dropna=False).ngroup()


def _differs(texts: pd.Series, numbers: pd.Series, may_count: pd.Series) -> bool:
    """Whether rows of one candidate differ in a column; an empty cell is unknown and no difference."""
    counted_texts = texts[may_count & (texts != "")]
    if counted_texts.nunique() < 2:
        return False
    return bool((counted_texts.groupby(numbers).nunique() > 1).any())


def _may_be_option(texts: pd.Series) -> bool:
    nonempty = texts[texts != ""]
    return nonempty.nunique() < len(texts) and not _is_measurement(nonempty)


def _is_measurement(texts: pd.Series) -> bool:
    """Whether a column holds numbers or times."""
    distinct_texts = [text for text in texts.unique() if text != ""]
    return all(map(_NUMBER.match, distinct_texts)) or all(map(_TIME.search, distinct_texts))


def _variants(frame: pd.DataFrame, values_by_option: Mapping[str, pd.Series]) -> list[str | None]:
    variant_texts = [text if isinstance(text, str) else None for text in frame["variant"]]
    options_of_rows = [dict(variant_in(text)) for text in variant_texts]
    for name, texts in values_by_option.items():
        for options, text in zip(options_of_rows, texts.reindex(frame.index), strict=True):
            if isinstance(text, str) and text:
                options[f"{OPTION}.{name}"] = text
    return [canonical_json(options) if options else None for options in options_of_rows]


def _run_ids(frame: pd.DataFrame, variants: Iterable[str | None]) -> list[str]:
    """The run_id of each row: the one that the table gives, else a hash of its identity."""
    keys = frame[_IDENTITY_COLUMNS].assign(variant=[text or "" for text in variants])
    numbers = keys.groupby([*keys], sort=False, dropna=False).ngroup()
    is_first = ~numbers.duplicated().to_numpy()
    contents = typed_table(frame[is_first], _IDENTITY_COLUMNS).to_pylist()
    options_of_rows = [json.loads(text) if text else {} for text in keys.loc[is_first, "variant"]]
    id_by_number = [
        content_id(content | {"variant": options} if options else content)
        for content, options in zip(contents, options_of_rows, strict=True)
    ]
    ids_of_table = frame["run_id"].tolist()
    return [
        id_of_table if isinstance(id_of_table, str) else id_by_number[number]
        for id_of_table, number in zip(ids_of_table, numbers, strict=True)
    ]
