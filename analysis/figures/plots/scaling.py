"""Draws throughput and memory over one degree or the number of nodes: the best of each value, and all else equal.

Over nodes it also draws the efficiency: the throughput against that on the smallest number of nodes.
"""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ultrabench.analysis.figures.runs import candidate_runs, final_rows, ok_runs, runs_note, runs_with_value
from ultrabench.analysis.figures.style import LookByValue, Panel, axis_title, panel_grid, series_looks
from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.errors import counted
from ultrabench.layout import AXES, DEGREES, TITLES

_FOLLOWERS = dict.fromkeys(("nodes", *DEGREES), "dp and gas") | {"dp": "nodes and gas"}
"""Axis -> the arguments that change with it where all else is equal; none change with an axis that regroups ranks."""
_Y_TITLES = {
    "tokens_per_s_per_gpu": axis_title("tokens_per_s_per_gpu"),
    "memory_gib": axis_title("peak_mem_reserved_bytes", "peak memory"),
}
"""Column of a panel -> its name."""
_EFFICIENCY_COLUMNS = ["efficiency", "efficiency_low", "efficiency_high"]
"""Columns of the efficiency of the best runs and of the ends of its interval, in percent."""
_EFFICIENCY_NOTE = (
    f"Efficiency: {column_of(RATE).heading} relative to the best layout on the fewest nodes (thin lines: to the same "
    "layout on the fewest nodes). Bars: 95 % interval from the steps and repeats of both runs, where recorded."
)
_THIN_LINE_LOOK: dict[str, Any] = {"color": "#8a8a8a", "linewidth": 0.5, "alpha": 0.45}


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The runs that may be the best of their cells, and the note.

    They have three columns besides those of `candidate_runs`. `line` is the key of the line of a run: its number of
    nodes, or 0 over nodes; over tp, it is 1/2 more for runs without sequence parallelism. `is_best` marks the best run
    of each line and value of the axis. Runs with an equal number in `equal_group` differ only in the axis and what
    follows from it. Over nodes they also have the columns of _EFFICIENCY_COLUMNS and `efficiency_equal`, the
    efficiency relative to the run of the same `equal_group` on the fewest nodes.
    """
    all_runs = ok_runs(final_rows(table))
    runs, excluded_text = runs_with_value(candidate_runs(all_runs), axis, axis, "choose another --axis")
    runs = runs.astype({axis: int}).assign(line=0 if axis == "nodes" else runs["nodes"])
    if axis == "tp":
        runs["line"] += 0.5 * (runs["sequence_parallel"] == "off")
    runs = runs.sort_values("place_in_cell", kind="stable")
    runs["is_best"] = ~runs.duplicated(["panel", "line", axis])
    differing_names = {axis, *_FOLLOWERS.get(axis, "").split(" and ")}
    equal_columns = [name for name in ("nodes", *AXES) if name not in differing_names]
    # pp=1 counts as 1f1b with one stage on each rank, whether the row names them or not.
    usual_columns = {"pp_schedule": runs["pp_schedule"].replace("none", "1f1b")}
    usual_columns["virtual_stages"] = runs["virtual_stages"].fillna(1)
    equal_groups = runs.assign(**usual_columns).groupby(
        ["panel", "environment", *equal_columns], dropna=False
    )
    runs["equal_group"] = equal_groups.ngroup()
    if axis == "nodes":
        runs = _with_efficiency(runs)
    return runs.sort_index(), excluded_text + runs_note(table, all_runs)


def _with_efficiency(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their efficiencies in percent; null where none on the fewest nodes has the same layout.

    The interval of a ratio follows from those of its two rates, which were measured independently.
    """
    speed, low, high = rate_columns = ["tokens_per_s_per_gpu", "rate_low", "rate_high"]
    runs[high] = runs[high].clip(upper=10 * runs[speed])  # it may be infinite, which cannot be drawn
    is_on_fewest_nodes = runs["nodes"] == runs.groupby("panel")["nodes"].transform("min")
    base_by_panel = runs[is_on_fewest_nodes & runs["is_best"]].set_index("panel")[rate_columns]
    base_rates = base_by_panel.reindex(runs["panel"]).set_axis(runs.index)
    efficiency = (100 * runs[speed] / base_rates[speed]).where(runs["is_best"])
    log_width_low = np.hypot(np.log(runs[speed] / runs[low]), np.log(base_rates[high] / base_rates[speed]))
    log_width_high = np.hypot(np.log(runs[high] / runs[speed]), np.log(base_rates[speed] / base_rates[low]))
    equal_base_speed = runs["equal_group"].map(runs[is_on_fewest_nodes].groupby("equal_group")[speed].max())
    compared = efficiency.mask(is_on_fewest_nodes)  # the base is compared with itself: no interval
    interval_ends = compared * np.exp(-log_width_low), compared * np.exp(log_width_high)
    efficiencies = dict(zip(_EFFICIENCY_COLUMNS, (efficiency, *interval_ends), strict=True))
    return runs.assign(**efficiencies, efficiency_equal=100 * runs[speed] / equal_base_speed)


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """The panels of each model: throughput, over nodes the efficiency, and the memory of the same runs."""
    panel_names, line_keys = list(points["panel"].unique()), sorted(points["line"].unique())
    dependent_text = f" and in {_FOLLOWERS[axis]}, which follow from {axis}" if axis in _FOLLOWERS else ""
    caption = f"Thin lines: runs that differ only in {axis}{dependent_text}."
    if not any(points.groupby(key)[axis].nunique().max() > 1 for key in ("equal_group", ["panel", "line"])):
        caption = f"No line has two values of {axis}, so no line is drawn; choose another --axis."
    caption += f" Reserved memory: {points['memory_ranks'].iloc[0]}.\n{notes}"
    heading, columns = f"Throughput and memory over {axis}, best and all else equal: {title}", [*_Y_TITLES]
    if axis == "nodes":
        scalings = " and ".join(sorted(points["scaling"].fillna("strong").unique())).capitalize()
        heading = f"{scalings} scaling, best and all else equal: {title}"
        caption = f"{_EFFICIENCY_NOTE} {caption}"
        columns.insert(1, _EFFICIENCY_COLUMNS[0])
    sizes = {"markersize": 4.5, "linewidth": 1.4}
    look_by_line = series_looks(line_keys, is_ordered=True, label_of=_line_label, **sizes)
    thin_look = {"label": "all else equal", "color": _THIN_LINE_LOOK["color"], "linewidth": 0.7}
    legend, panel_keys = [*look_by_line.values(), thin_look], product(panel_names, columns)
    options: dict[str, Any] = {"legend": legend, "max_columns": len(columns)}
    figure, panels = panel_grid(panel_keys, title=heading, notes=caption, **options)
    axis_values = sorted(map(int, points[axis].unique()))
    points = points.assign(x=points[axis].map(axis_values.index))
    for (panel_name, column), axes in panels.items():
        panel_runs = points[points["panel"] == panel_name]
        _draw_lines(axes, panel_runs, column, look_by_line)
        axes.set_categories(axis_values)
        y_title = _Y_TITLES.get(column) or _efficiency_title(panel_runs)
        axes.describe(panel_name, _x_title(panel_runs, axis), y_title)
    return figure


def _line_label(line: float) -> str:
    text = f"best on {counted(int(line), 'node')}" if line >= 1 else "best layout"
    return f"{text}, TP without SP" if line % 1 else text


def _x_title(panel_runs: pd.DataFrame, axis: str) -> str:
    """The name of the axis; that of nodes says how the batch follows from them."""
    if axis != "nodes":
        return TITLES[axis]
    scaling = panel_runs["scaling"].fillna("strong").iloc[0]
    return f"nodes ({scaling}: {panel_runs['batch'].fillna('unknown gbs').iloc[0]})"


def _efficiency_title(panel_runs: pd.DataFrame) -> str:
    return f"efficiency (% of {counted(int(panel_runs['nodes'].min()), 'node')})"


def _draw_lines(axes: Panel, panel_runs: pd.DataFrame, column: str, look_by_line: LookByValue) -> None:
    """Draws the lines of a panel, each from the smallest value of the axis to the largest."""
    equal_column, low, high = f"{column}_equal", f"{column}_low", f"{column}_high"
    fastest_first = panel_runs.sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    panel_runs = fastest_first.sort_values("x", kind="stable")
    if equal_column not in panel_runs:
        panel_runs = panel_runs.assign(**{equal_column: panel_runs[column]})
    recorded_runs = panel_runs.dropna(subset=equal_column)
    distinct_points = recorded_runs.drop_duplicates(["equal_group", "x"])
    distinct_points = distinct_points.sort_values("equal_group", kind="stable")
    path_starts = np.flatnonzero(distinct_points["equal_group"].diff()[1:]) + 1
    paths = np.split(distinct_points[["x", equal_column]].to_numpy(), path_starts)
    thin_lines = LineCollection([path for path in paths if len(path) > 1], **_THIN_LINE_LOOK)
    axes.add_collection(thin_lines, autolim=False)
    for line, best_runs in panel_runs[panel_runs["is_best"]].dropna(subset=column).groupby("line"):
        axes.plot(best_runs["x"], best_runs[column], **look_by_line[line])
        if low in best_runs:
            axes.vlines(best_runs["x"], best_runs[low], best_runs[high], color=look_by_line[line]["color"])
    max_value = panel_runs.filter([column, equal_column, high]).max().max()
    axes.set_ylim(0, 1.06 * max_value if len(recorded_runs) else 1)
    if not len(recorded_runs):
        axes.remark("not recorded")
