"""The knobs of result rows: everything that a sweep can vary between its runs, one column for each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ultrabench.analysis.results.numbers import with_unit
from ultrabench.analysis.results.options import VARIANT, variant_in
from ultrabench.layout import AXES, NEUTRAL, USUAL, default_schedule, default_virtual_stages, details_of
from ultrabench.variant import CELL_OPTIONS, KERNEL_OPTIONS, UNSET, one_line

BESIDE_LAYOUT = (*CELL_OPTIONS, *KERNEL_OPTIONS)
"""Columns of the results that are knobs, too."""
COLUMNS = (*AXES, *BESIDE_LAYOUT, "attention_listed", VARIANT)
"""Columns that `knobs` reads."""


def knobs(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The values of all knobs, one row for each result row, one column for each knob.

    A value is None where it is unknown, or where the knob has no choice because of another one, such as
    `pp_schedule` without a pipeline. The schedule of fewer micro-batches than stages, `afab`, counts as `1f1b`.

    Args:
        rows: result rows with the columns of the schema, and with or without `variant`.
    """
    variants = [variant_in(row.get(VARIANT)) for row in rows]
    option_names = sorted({name for variant in variants for name in variant})
    knob_values = [
        {**_layout_knobs(row), **{name: set_value(variant.get(name)) for name in option_names}}
        for row, variant in zip(rows, variants, strict=True)
    ]
    return pd.DataFrame(knob_values, columns=[*AXES, *BESIDE_LAYOUT, *option_names], dtype=object)


def is_of_variant(name: str) -> bool:
    """Whether a knob is one of the column `variant`."""
    return name not in AXES and name not in BESIDE_LAYOUT


def in_order(name: str, values: Iterable[Any]) -> list[Any]:
    """The distinct values of a knob: unset, usual words in their order, numbers by size, other words by name."""
    words = [value for value in USUAL.get(name, ()) if isinstance(value, str)]

    def sort_key(value: Any) -> tuple[int, float, str]:
        if isinstance(value, str):
            return (1, words.index(value), "") if value in words else (2 * (value != UNSET), 0, value)
        return 1, value, ""

    return sorted({*values} - {None}, key=sort_key)


def value_text(name: str, value: Any) -> str:
    """The value of a knob as people read it, such as `8`, `all ranks` or `unset`."""
    return one_line(with_unit(name, value) or UNSET)


def _layout_knobs(row: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a row that are not of its variant."""
    values = {name: row.get(name) for name in (*AXES, *BESIDE_LAYOUT)}
    values["attention"] = row.get("attention_listed") or values["attention"]
    pp, gas = values["pp"], values["gas"]
    if pp and gas and values["pp_schedule"] == default_schedule(pp, gas):
        values["pp_schedule"] = default_schedule(
            pp, pp
        )  # few micro-batches make afab of it, the same order of work
    schedule = values["pp_schedule"]
    if schedule and default_virtual_stages(schedule) == 1:
        values["virtual_stages"] = None
    if schedule == "zbv":
        values["compile"] = None  # layers are never compiled with zbv, whatever was chosen
    for name in NEUTRAL:
        if values[name] == NEUTRAL[name]:
            values |= dict.fromkeys(details_of(name))
    return values


def set_value(value: Any) -> Any:
    """The value of a knob of the variant; a list or an object becomes its JSON text."""
    if value is None:
        return UNSET
    return value if isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)
