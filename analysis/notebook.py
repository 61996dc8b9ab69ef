"""The functions for notebooks, which `import ultrabench` offers: `read`, `best` and `plot` on pandas DataFrames.

A DataFrame may have been filtered and sorted, and may lack columns; a column that it lacks counts as unknown.
"""

import warnings
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures import heatmap
from ultrabench.analysis.figures.kinds import KINDS, prepare_figure
from ultrabench.analysis.figures.picture import figure_style
from ultrabench.analysis.results.cells import Cell, notes
from ultrabench.analysis.results.collect import conform_to_schema, open_results
from ultrabench.analysis.results.ranking import DEFAULT_RANK_BY, rank
from ultrabench.analysis.results.schema import SCHEMA
from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import AXES

_NEEDED = ("run_id", "model", "nodes", "status", "is_final")
"""Columns without which rows cannot be told apart or counted."""


def read(source: str | Path | None = None, *, results_dir: str | Path = "results") -> pd.DataFrame:
    """The result rows of a sweep or a parquet file, with the columns of docs/reference/columns.md.

    Whole numbers stay whole where some are unknown: their columns have the type Int64.

    Args:
        source: name or folder of a sweep, or path of a parquet file; None means the newest in `results_dir`.

    Raises:
        UltrabenchError: there is no such sweep or file, or it cannot be read.
    """
    name, _, table = open_results(None if source is None else str(source), Path(results_dir), warnings.warn)
    rows = _frame(table)
    rows.attrs["name"] = name
    return rows


def best(
    rows: pd.DataFrame, *, rank_by: str = DEFAULT_RANK_BY, include_suspects: bool = False
) -> pd.DataFrame:
    """The best run of each cell as one row, or why the cell has none; the columns are those of `heatmap --json`.

    Args:
        rows: result rows, such as those of `read`.
        rank_by: the column that is compared, one whose higher or lower values are better.
        include_suspects: whether suspect runs may win.

    Raises:
        ConfigError: a column is missing that is needed, or runs cannot be ranked by `rank_by`.
    """
    cells = rank(table_of(rows), rank_by=rank_by, include_suspects=include_suspects)
    documents = [cell.to_json() for cell in cells]
    names = [field.name for field in fields(Cell) if field.name != "layout"] + [*AXES]
    return _frame(pa.table({name: [cell[name] for cell in documents] for name in names}))


def plot(kind: str, rows: pd.DataFrame | None = None, *, title: str | None = None, **options: Any) -> Figure:
    """A figure of result rows, which can be shown or saved with its `savefig`.

    Args:
        kind: `heatmap`, or a kind of `ultrabench plot --list`.
        rows: result rows, such as those of `read`; a figure of a layout needs none.
        title: what the rows are; None for the name of the sweep or file that `read` was given.
        options: `axis` of a kind that has several; `by`, the column that is up in pareto; `layout` of a figure of a
            layout, such as {"pp": 4}; `rank_by` and `include_suspects` of the heatmap.

    Raises:
        ConfigError: no such kind or axis, or the rows have nothing to draw.
    """
    require_known("figure", ("heatmap", *KINDS), kind)
    if rows is None and not (kind in KINDS and KINDS[kind].shows_layout):
        raise ConfigError(f"the figure {kind} needs result rows; pass those of ultrabench.read()")
    table = None if rows is None else table_of(rows)
    name = title or ("" if rows is None else str(rows.attrs.get("name", "results")))
    if kind != "heatmap" or table is None:
        _, draw = prepare_figure(kind, table, title=name, **options)
    else:
        note = notes(table, bool(options.get("include_suspects")))
        draw = partial(heatmap.figure, rank(table, **options), title=name, notes=note)
    with figure_style():
        return draw()


def table_of(rows: pd.DataFrame) -> pa.Table:
    """The result table of a DataFrame: all columns of the schema, then its other columns.

    Raises:
        ConfigError: a needed column is missing, a column is there twice, or its values have another type.
    """
    if missing_columns := [name for name in _NEEDED if name not in rows]:
        rule = f"ranking and figures need {', '.join(_NEEDED)}; keep these columns"
        raise ConfigError(f"the DataFrame lacks {', '.join(missing_columns)}; {rule}")
    if doubles := sorted({*rows.columns[rows.columns.duplicated()]}):
        raise ConfigError(f"the DataFrame has {', '.join(doubles)} twice; rename or drop one of the columns")
    arrays = {}
    for name in map(str, rows.columns):
        arrow_type = SCHEMA.field(name).type if name in SCHEMA.names else None
        try:
            arrays[name] = pa.array(rows[name], type=arrow_type, from_pandas=True)
        except pa.ArrowException as error:
            needs_text = f"needs values of type {arrow_type}" if arrow_type else "cannot be read; drop it"
            raise ConfigError(f"column {name} of the DataFrame {needs_text}: {error}") from error
    return conform_to_schema(pa.table(arrays), "the DataFrame")


def _frame(table: pa.Table) -> pd.DataFrame:
    """A DataFrame in which columns of whole numbers stay whole also where values are unknown."""
    frame: pd.DataFrame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame
