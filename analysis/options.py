"""The options beside layouts that vary in a result table, such as variables and flags: their values and texts."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.variant import KERNEL_OPTIONS

VARIANT = "variant"
"""Column with the options of a run beside its layout as a JSON object; a table may lack it."""
COLUMNS = (VARIANT, "pp_schedule", *KERNEL_OPTIONS, "attention_listed")
"""Columns of a result table that this module reads."""


def variant_in(text: str | None) -> dict[str, Any]:
    """The options in the column `variant` of a row; empty for a text that is no JSON object."""
    if text is not None:
        with contextlib.suppress(ValueError):
            if isinstance(variant := json.loads(text), dict):
                return variant
    return {}


def varied_options(table: pa.Table) -> dict[str, list[Any]]:
    """Option -> its value in each row, for the options that vary in a table; None where it is unset or unknown.

    An option of the kernel varies if it does among layouts of one schedule, since layers are never compiled with zbv.
    """
    variants = [*map(variant_in, table["variant"].to_pylist())]
    option_names = sorted({name for variant in variants for name in variant})
    num_schedules = pc.count_distinct(table["pp_schedule"], mode="all").as_py()
    # A sweep calls a listed attention by one name, whatever the device makes of it.
    columns = {name: table[name] for name in KERNEL_OPTIONS}
    columns |= {"attention": pc.coalesce(table["attention_listed"], table["attention"])}
    values_by_option = {}
    for name, column in columns.items():
        rows = pa.table({"pp_schedule": table["pp_schedule"], name: column}).filter(pc.is_valid(column))
        if rows.group_by(["pp_schedule", name]).aggregate([]).num_rows > num_schedules:
            values_by_option[name] = column.to_pylist()
    return values_by_option | {name: [variant.get(name) for variant in variants] for name in option_names}


def in_rows(options: Mapping[str, list[Any]], row_numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Option -> value for each of the rows with these numbers."""
    return [{name: values[row_number] for name, values in options.items()} for row_number in row_numbers]
