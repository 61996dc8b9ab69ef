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

_FOLLOW = dict.fromkeys(("nodes", *DEGREES), "dp and gas") | {"dp": "nodes and gas"}
"""Axis -> what follows from it where all else is equal; nothing follows from an axis that regroups ranks."""
_COLUMNS = {"tokens_per_s_per_gpu": "tokens/s/GPU", "memory_gib": "peak memory (GiB)"}
"""Column of a panel -> its name."""
_EFFICIENCY = ["efficiency", "efficiency_low", "efficiency_high"]
"""Columns of the efficiency of the best runs and of the ends of its interval, in percent."""
_EFFICIENCY_NOTE = (
    "Efficiency: tokens/s/GPU relative to the best layout on the fewest nodes (thin lines: to the same layout on the fewest "
    "nodes). Bars: 95 % interval from the steps and repeats of both runs, where recorded."
)
_THIN: dict[str, Any] = {"color": "#8a8a8a", "linewidth": 0.5, "alpha": 0.45}


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The runs that may be the best of their cells, and the note.

    They have three columns besides those of `may_be_best`. `line` is the number of nodes, but 0 for the axis
    nodes, and 1/2 more over tp for runs without sequence parallelism; `best` marks the run that is the first in its cell of a line and value of the axis; runs with an equal number in `equal`
    differ only in the axis and what follows from it. Over nodes they have the columns of _EFFICIENCY and
    `efficiency_equal`, the efficiency against the run with an equal number in `equal`.
    """
    all_runs = measured(final(table))
    runs, left_out = known(may_be_best(all_runs), axis, axis, "choose another --axis")
    runs = runs.astype({axis: int}).assign(line=0 if axis == "nodes" else runs["nodes"])
    if axis == "tp":
        runs["line"] += 0.5 * (runs["sequence_parallel"] == "off")
    runs = runs.sort_values("standing", kind="stable")
    runs["best"] = ~runs.duplicated(["panel", "line", axis])
    differ = {axis, *_FOLLOW.get(axis, "").split(" and ")}
    equal_columns = [name for name in ("nodes", *AXES) if name not in differ]
    # pp=1 is equal to 1f1b with one stage on each rank, whether the row tells the stages or not.
    usual = {"pp_schedule": runs["pp_schedule"].replace("none", "1f1b")}
    usual["virtual_stages"] = runs["virtual_stages"].fillna(1)
    runs["equal"] = runs.assign(**usual).groupby(["panel", *equal_columns], dropna=False).ngroup()
    if axis == "nodes":
        runs = _with_efficiency(runs)
    return runs.sort_index(), left_out + notes(table, all_runs)


def _with_efficiency(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their efficiencies in percent; null where no run on the smallest number of nodes is alike.

    The interval of a ratio follows from those of its two rates, which were measured independently.
    """
    speed, low, high = columns = ["tokens_per_s_per_gpu", "rate_low", "rate_high"]
    runs[low] = runs[low].clip(lower=1e-6 * runs[speed])
    at_smallest = runs["nodes"] == runs.groupby("panel")["nodes"].transform("min")
    of_panel = runs[at_smallest & runs["best"]].set_index("panel")[columns]
    base = of_panel.reindex(runs["panel"]).set_axis(runs.index)
    ratio = (100 * runs[speed] / base[speed]).where(runs["best"])
    down = np.hypot(np.log(runs[speed] / runs[low]), np.log(base[high] / base[speed]))
    up = np.hypot(np.log(runs[high] / runs[speed]), np.log(base[speed] / base[low]))
    equal = runs["equal"].map(runs[at_smallest].groupby("equal")[speed].max())
    others = ratio.mask(at_smallest)  # a run is exactly as fast as itself
    ends = dict(zip(_EFFICIENCY, (ratio, others * np.exp(-down), others * np.exp(up)), strict=True))
    return runs.assign(**ends, efficiency_equal=100 * runs[speed] / equal)


def figure(drawn: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """The panels of each model: throughput, over nodes the efficiency, and the memory of the same runs."""
    names, lines = list(drawn["panel"].unique()), sorted(drawn["line"].unique())
    follows = f" and in {_FOLLOW[axis]}, which follow from {axis}" if axis in _FOLLOW else ""
    about = f"Thin lines: runs that differ only in {axis}{follows}."
    if not any(drawn.groupby(by)[axis].nunique().max() > 1 for by in ("equal", ["panel", "line"])):
        about = f"No line has two values of {axis}, so no line is drawn; choose another --axis."
    about += f" Reserved memory: {drawn['memory_of'].iloc[0]}.\n{notes}"
    heading, columns = f"Throughput and memory over {axis}, best and all else equal: {title}", [*_COLUMNS]
    if axis == "nodes":
        kinds = " and ".join(sorted(drawn["scaling"].fillna("strong").unique())).capitalize()
        heading = f"{kinds} scaling, best and all else equal: {title}"
        about = f"{_EFFICIENCY_NOTE} {about}"
        columns.insert(1, _EFFICIENCY[0])
    styles = looks(lines, ordered=True, name=_line_name, markersize=4.5, linewidth=1.4)
    keys = [*styles.values(), {"label": "all else equal", "color": _THIN["color"], "linewidth": 0.7}]
    of_panels, number = product(names, columns), len(columns)
    whole, panels = panel_grid(of_panels, title=heading, notes=about, keys=keys, columns=number)
    values = sorted(map(int, drawn[axis].unique()))
    drawn = drawn.assign(across=drawn[axis].map(values.index))
    for (name, column), axes in panels.items():
        panel_runs = drawn[drawn["panel"] == name]
        _draw(axes, panel_runs, column, styles)
        axes.categories(values)
        axes.describe(name, _across(panel_runs, axis), _COLUMNS.get(column) or _against(panel_runs))
    return whole


def _line_name(line: float) -> str:
    best = f"best on {counted(int(line), 'node')}" if line >= 1 else "best layout"
    return f"{best}, TP without SP" if line % 1 else best


def _across(panel_runs: pd.DataFrame, axis: str) -> str:
    """The name of the axis; that of nodes says how the batch follows from them."""
    if axis != "nodes":
        return TITLES[axis]
    scaling = panel_runs["scaling"].fillna("strong").iloc[0]
    return f"nodes ({scaling}: {panel_runs['batch'].fillna('unknown gbs').iloc[0]})"


def _against(panel_runs: pd.DataFrame) -> str:
    return f"efficiency (% of {counted(int(panel_runs['nodes'].min()), 'node')})"


def _draw(axes: Panel, panel_runs: pd.DataFrame, column: str, styles: Looks) -> None:
    """Draws the lines of a panel, each from the smallest value of the axis to the largest."""
    thin, low, high = f"{column}_equal", f"{column}_low", f"{column}_high"
    fastest_first = panel_runs.sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    panel_runs = fastest_first.sort_values("across", kind="stable")
    if thin not in panel_runs:
        panel_runs = panel_runs.assign(**{thin: panel_runs[column]})
    recorded = panel_runs.dropna(subset=thin)
    alike = recorded.drop_duplicates(["equal", "across"]).sort_values("equal", kind="stable")
    ends = np.flatnonzero(alike["equal"].diff()[1:]) + 1
    lines = np.split(alike[["across", thin]].to_numpy(), ends)
    axes.add_collection(LineCollection([line for line in lines if len(line) > 1], **_THIN), autolim=False)
    for line, best_runs in panel_runs[panel_runs["best"]].dropna(subset=column).groupby("line"):
        axes.plot(best_runs["across"], best_runs[column], **styles[line])
        if low in best_runs:
            axes.vlines(best_runs["across"], best_runs[low], best_runs[high], color=styles[line]["color"])
    axes.set_ylim(0, 1.06 * panel_runs.filter([column, thin, high]).max().max() if len(recorded) else 1)
    if not len(recorded):
        axes.remark("not recorded")
