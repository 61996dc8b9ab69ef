"""Rows that the arguments `[SWEEP or FILE.parquet] [COLUMN=VALUE]...` of a command select."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrabench.errors import MAX_NAMES, ConfigError, nearest_name, require_known, require_once

if TYPE_CHECKING:  # every --help imports this module, so that it loads no pyarrow
    import pyarrow as pa

    from ultrabench.analysis.results.rows import Warn


def open_rows(
    arguments: Sequence[str] | None, results_dir: Path, warn: "Warn"
) -> "tuple[str, str, pa.Table]":
    """What `open_results` returns for the sweep or file among the words, with the rows that COLUMN=VALUE selects."""
    from ultrabench.analysis.results.collect import open_results

    source, value_by_column = source_and_values(arguments or [])
    name, path_prefix, result_table = open_results(source, results_dir, warn)
    return name, path_prefix, rows_where(result_table, value_by_column)


def source_and_values(arguments: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The sweep or file among the words, None for the newest, and the values of columns.

    Raises:
        ConfigError: two words are no COLUMN=VALUE, or have the same column.
    """
    require_once(arguments)
    sources = [argument for argument in arguments if "=" not in argument or os.path.exists(argument)]
    if len(sources) > 1:
        raise ConfigError(f"{' '.join(sources)}: give one sweep or file; write other words as COLUMN=VALUE")
    value_by_column = dict(argument.split("=", 1) for argument in arguments if argument not in sources)
    return (sources[0] if sources else None), value_by_column


def _number(value: Any) -> float | None:
    """The number that a text gives; None for other texts."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def rows_where(table: "pa.Table", value_by_column: Mapping[str, Any]) -> "pa.Table":
    """The rows of a result table whose columns have these values, such as model=8B and nodes=4.

    Raises:
        ConfigError: there is no such column, or no row has the value.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for column_name, value in value_by_column.items():
        require_known("column", table.column_names, column_name)
        column_values = table[column_name]
        # Numbers are sorted as numbers, not as texts; null comes last.
        is_numeric = pa.types.is_integer(column_values.type) or pa.types.is_floating(column_values.type)
        ordered_values = column_values.combine_chunks().sort() if is_numeric else column_values
        distinct_values = pc.unique(ordered_values).to_pylist()
        value_texts = [*map(str, distinct_values)]
        if is_numeric and (number := _number(value)) in distinct_values:  # 1e3 and 1000 are one number
            value = distinct_values[distinct_values.index(number)]
        if str(value) not in value_texts:
            nearest_value = None if is_numeric else nearest_name(str(value), value_texts)
            hint = f"did you mean {nearest_value}? " if nearest_value else ""
            more_text = f" and {len(value_texts) - MAX_NAMES:,} more" if len(value_texts) > MAX_NAMES else ""
            values_text = f"values of {column_name}: {', '.join(value_texts[:MAX_NAMES])}{more_text}"
            raise ConfigError(f"no rows have {column_name}={value}", f"{hint}{values_text}")
        table = table.filter(pc.equal(pc.fill_null(column_values.cast("string"), "None"), str(value)))
    return table
