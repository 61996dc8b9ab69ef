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

from ultrabench.analysis.figures.runs import final, known, may_be_best, measured, notes
from ultrabench.analysis.figures.style import Looks, Panel, looks, panel_grid
from ultrabench.errors import counted
from ultrabench.layout import AXES, DEGREES, TITLES

_FOLLOWERS = dict.fromkeys(("nodes", *DEGREES), "dp and gas") | {"dp": "nodes and gas"}
"""Axis -> the arguments that change with it where all else is equal; none change with an axis that regroups ranks."""
_Y_TITLES = {"tokens_per_s_per_gpu": "tokens/s/GPU", "memory_gib": "peak memory (GiB)"}
"""Column of a panel -> its name."""
_EFFICIENCY_COLUMNS = ["efficiency", "efficiency_low", "efficiency_high"]
"""Columns of the efficiency of the best runs and of the ends of its interval, in percent."""
_EFFICIENCY_NOTE = (
    "Efficiency: tokens/s/GPU relative to the best layout on the fewest nodes (thin lines: to the same layout on the fewest "
    "nodes). Bars: 95 % interval from the steps and repeats of both runs, where recorded."
)
_THIN_LOOK: dict[str, Any] = {"color": "#8a8a8a", "linewidth": 0.5, "alpha": 0.45}


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The runs that may be the best of their cells, and the note.

    They have three columns besides those of `may_be_best`. `line` is the number of nodes, but 0 for the axis
    nodes, and 1/2 more over tp for runs without sequence parallelism; `best` marks the run that is the first in its cell of a line and value of the axis; runs with an equal number in `equal`
    differ only in the axis and what follows from it. Over nodes they have the columns of _EFFICIENCY and
    `efficiency_equal`, the efficiency against the run with an equal number in `equal`.
    """
    all_runs = measured(final(table))
    runs, excluded_text = known(may_be_best(all_runs), axis, axis, "choose another --axis")
    runs = runs.astype({axis: int}).assign(line=0 if axis == "nodes" else runs["nodes"])
    if axis == "tp":
        runs["line"] += 0.5 * (runs["sequence_parallel"] == "off")
    runs = runs.sort_values("standing", kind="stable")
    runs["best"] = ~runs.duplicated(["panel", "line", axis])
    differing_names = {axis, *_FOLLOWERS.get(axis, "").split(" and ")}
    equal_columns = [name for name in ("nodes", *AXES) if name not in differing_names]
    # pp=1 counts as 1f1b with one stage on each rank, whether the row names them or not.
    usual_columns = {"pp_schedule": runs["pp_schedule"].replace("none", "1f1b")}
    usual_columns["virtual_stages"] = runs["virtual_stages"].fillna(1)
    runs["equal"] = runs.assign(**usual_columns).groupby(["panel", *equal_columns], dropna=False).ngroup()
    if axis == "nodes":
        runs = _with_efficiency(runs)
    return runs.sort_index(), excluded_text + notes(table, all_runs)


def _with_efficiency(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their efficiencies in percent; null where none on the fewest nodes has the same layout.

    The interval of a ratio follows from those of its two rates, which were measured independently.
    """
    speed, low, high = columns = ["tokens_per_s_per_gpu", "rate_low", "rate_high"]
    runs[low] = runs[low].clip(lower=1e-6 * runs[speed])
    is_smallest = runs["nodes"] == runs.groupby("panel")["nodes"].transform("min")
    base_by_panel = runs[is_smallest & runs["best"]].set_index("panel")[columns]
    base = base_by_panel.reindex(runs["panel"]).set_axis(runs.index)
    ratio = (100 * runs[speed] / base[speed]).where(runs["best"])
    log_down = np.hypot(np.log(runs[speed] / runs[low]), np.log(base[high] / base[speed]))
    log_up = np.hypot(np.log(runs[high] / runs[speed]), np.log(base[speed] / base[low]))
    equal_speed = runs["equal"].map(runs[is_smallest].groupby("equal")[speed].max())
    other_ratios = ratio.mask(is_smallest)  # the base is compared with itself: no interval
    values = ratio, other_ratios * np.exp(-log_down), other_ratios * np.exp(log_up)
    efficiencies = dict(zip(_EFFICIENCY_COLUMNS, values, strict=True))
    return runs.assign(**efficiencies, efficiency_equal=100 * runs[speed] / equal_speed)


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """The panels of each model: throughput, over nodes the efficiency, and the memory of the same runs."""
    names, lines = list(points["panel"].unique()), sorted(points["line"].unique())
    dependent_text = f" and in {_FOLLOWERS[axis]}, which follow from {axis}" if axis in _FOLLOWERS else ""
    caption = f"Thin lines: runs that differ only in {axis}{dependent_text}."
    if not any(points.groupby(key)[axis].nunique().max() > 1 for key in ("equal", ["panel", "line"])):
        caption = f"No line has two values of {axis}, so no line is drawn; choose another --axis."
    caption += f" Reserved memory: {points['memory_of'].iloc[0]}.\n{notes}"
    heading, columns = f"Throughput and memory over {axis}, best and all else equal: {title}", [*_Y_TITLES]
    if axis == "nodes":
        scalings = " and ".join(sorted(points["scaling"].fillna("strong").unique())).capitalize()
        heading = f"{scalings} scaling, best and all else equal: {title}"
        caption = f"{_EFFICIENCY_NOTE} {caption}"
        columns.insert(1, _EFFICIENCY_COLUMNS[0])
    styles = looks(lines, ordered=True, name=_line_name, markersize=4.5, linewidth=1.4)
    legend = [*styles.values(), {"label": "all else equal", "color": _THIN_LOOK["color"], "linewidth": 0.7}]
    panel_keys, num_columns = product(names, columns), len(columns)
    figure, panels = panel_grid(panel_keys, title=heading, notes=caption, legend=legend, ncols=num_columns)
    values = sorted(map(int, points[axis].unique()))
    points = points.assign(across=points[axis].map(values.index))
    for (name, column), axes in panels.items():
        panel_runs = points[points["panel"] == name]
        _draw(axes, panel_runs, column, styles)
        axes.categories(values)
        y_title = _Y_TITLES.get(column) or _efficiency_title(panel_runs)
        axes.describe(name, _x_title(panel_runs, axis), y_title)
    return figure


def _line_name(line: float) -> str:
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


def _draw(axes: Panel, panel_runs: pd.DataFrame, column: str, styles: Looks) -> None:
    """Draws the lines of a panel, each from the smallest value of the axis to the largest."""
    thin_column, low_column, high_column = f"{column}_equal", f"{column}_low", f"{column}_high"
    fastest_first = panel_runs.sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    panel_runs = fastest_first.sort_values("across", kind="stable")
    if thin_column not in panel_runs:
        panel_runs = panel_runs.assign(**{thin_column: panel_runs[column]})
    recorded = panel_runs.dropna(subset=thin_column)
    rows = recorded.drop_duplicates(["equal", "across"]).sort_values("equal", kind="stable")
    line_starts = np.flatnonzero(rows["equal"].diff()[1:]) + 1
    lines = np.split(rows[["across", thin_column]].to_numpy(), line_starts)
    thin_lines = LineCollection([line for line in lines if len(line) > 1], **_THIN_LOOK)
    axes.add_collection(thin_lines, autolim=False)
    for line, runs in panel_runs[panel_runs["best"]].dropna(subset=column).groupby("line"):
        axes.plot(runs["across"], runs[column], **styles[line])
        if low_column in runs:
            axes.vlines(runs["across"], runs[low_column], runs[high_column], color=styles[line]["color"])
    highest = panel_runs.filter([column, thin_column, high_column]).max().max()
    axes.set_ylim(0, 1.06 * highest if len(recorded) else 1)
    if not len(recorded):
        axes.remark("not recorded")
