"""The kinds of figures of `ultrabench plot`; each is drawn by the module of `plots` that has its name, with _ for -."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ultrabench.errors import MAX_NAMES, ConfigError, counted, nearest_name, require_known
from ultrabench.layout import DEGREES, DIVIDES, TEXT_AXES, USUAL

if TYPE_CHECKING:  # every --help imports this module, so that it loads no pandas
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of figure shows, and over which axes it can be drawn."""

    summary: str
    """What the figure shows, for `ultrabench plot --list`."""
    axes: tuple[str, ...] = ()
    """Values of --axis, the default first; empty for a figure without a choice of axis."""
    default_column: str = ""
    """The column of the y axis when --by is not given; empty for a figure without a choice of column."""
    takes_any_axis: bool = False
    """Whether the x axis can be any axis that varied in the results; its name follows that of the
    kind in the command."""
    shows_layout: bool = False
    """Whether the figure shows a layout, given as NAME=VALUE; results are then optional, or not allowed."""


_RATE_COLUMN = "tokens_per_s_per_gpu"
KINDS = {
    "comm": Kind("bandwidth of collectives over nodes, from sweep=comm"),
    "scatter": Kind("MFU and throughput of every measured run over nodes"),
    "scaling": Kind("best throughput and its memory over nodes or a degree", ("nodes", *DEGREES, *DIVIDES)),
    "effect": Kind("speedup by each value of an axis, all else equal: effect AXIS", takes_any_axis=True),
    "largest-batch": Kind("largest micro-batch that fits over tp, pp and recompute, predicted and measured"),
    "pareto": Kind("throughput, energy or cost against peak memory, with the Pareto front", (), _RATE_COLUMN),
    "predicted": Kind("predicted against measured step time and memory of each run"),
    "checkpoint": Kind("time and bandwidth of checkpoints over nodes, from measure.checkpoint=true"),
    "failures": Kind(
        "how runs ended, over nodes or a degree",
        ("nodes", *(name for name in (*DEGREES, *USUAL) if name not in TEXT_AXES)),
    ),
    "nodes": Kind("rates of each node over time, slow and failing nodes first"),
    "bubble": Kind("bubble of pipeline schedules over micro-batches, and the measured cost of pipelines"),
    "schedule": Kind("timeline of a pipeline schedule: pp=4 gas=8 pp_schedule=1f1b", shows_layout=True),
    "memory": Kind(
        "predicted memory of a layout by part: model=llama3-8b tp=8",
        (*DEGREES[1:], DEGREES[0], *USUAL, "seq_len", "stage"),
        shows_layout=True,
    ),
}


def prepare_figure(
    kind: str,
    table: "pa.Table | None",
    *,
    title: str,
    axis: str | None = None,
    by: str | None = None,
    layout: Mapping[str, Any] | None = None,
) -> tuple["pd.DataFrame", Callable[[], "Figure"]]:
    """The points of a figure of results, and the function that draws them.

    Args:
        kind: a name in KINDS.
        table: a result table with all columns of the schema; None for a layout without results.
        title: name of the sweep or file.
        axis: one of the kind's axes, None for its default; for a kind over any axis, one that varied in the table.
        by: the column of the y axis, for a kind with a choice of column; None for its default.
        layout: for a kind that shows a layout, its values, such as {"pp": 4, "gas": 8}.

    Raises:
        ConfigError: no such kind, axis or column, or the table has nothing to draw.
    """
    require_known("figure", KINDS, kind)
    traits = KINDS[kind]
    if layout and not traits.shows_layout:
        raise ConfigError(f"layout: the figure {kind} shows results, not a layout; filter the rows instead")
    if axis is not None and not traits.axes and not traits.takes_any_axis:
        raise ConfigError(f"--axis {axis}: the figure {kind} takes no axis; remove --axis")
    if by is not None and not traits.default_column:
        raise ConfigError(f"--by {by}: the figure {kind} takes no column; remove --by")
    if axis is not None and not traits.takes_any_axis:
        require_known(f"axis of the figure {kind}", traits.axes, axis)
    study_by_kind = {"effect": "effects", "nodes": "nodes", "predicted": "predictions"}
    plot_path = (
        f"studies.{study_by_kind[kind]}.figure"
        if kind in study_by_kind
        else f"figures.plots.{kind.replace('-', '_')}"
    )
    plot_module = import_module(f"ultrabench.analysis.{plot_path}")
    options: dict[str, Any] = {}
    if traits.axes or traits.takes_any_axis:
        options["axis"] = axis or next(iter(traits.axes), None)
    if traits.default_column:
        options["column"] = by or traits.default_column
    points, notes = plot_module.points(*((layout or {},) if traits.shows_layout else ()), table, **options)
    return points, lambda: plot_module.figure(points, title=title, notes=notes, **options)


def runs_drawn(points: "pd.DataFrame") -> str | None:
    """How many runs or repeats a figure of these points shows; None for a figure of formulas, layouts or links."""
    for noun in ("run", "repeat"):
        if f"{noun}s" in points:
            return counted(int(points[f"{noun}s"].sum()), noun)
    return counted(len(points), "run") if "run_id" in points else None


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
