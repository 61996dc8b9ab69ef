"""Draws throughput and memory over one degree or the number of nodes: the best of each value, and all else equal."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ultrabench.analysis.figures.runs import final, known, may_be_best, measured, notes
from ultrabench.analysis.figures.style import (
    categories,
    label,
    legend,
    legend_entry,
    looks,
    panel_grid,
    remark,
)
from ultrabench.errors import counted
from ultrabench.layout import AXES

_FOLLOW = {"nodes": "dp and gas", "dp": "nodes and gas"}
"""Axis -> what follows from it where all else is equal; for other axes: dp and gas on equal nodes."""
_COLUMNS = {"tokens_per_s_per_gpu": "tokens/s/GPU", "memory_gib": "peak memory (GiB)"}
"""Column of a panel -> its name."""
_THIN: dict[str, Any] = {"color": "#8a8a8a", "linewidth": 0.5, "alpha": 0.45}


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The runs that may be the best of their cells, and the note.

    They have three columns besides those of `may_be_best`. `line` is the number of nodes, but 0 for the axis
    nodes; `best` marks the run that is the first in its cell of a line and value of the axis; runs with an equal number in `equal`
    differ only in the axis and what follows from it.
    """
    all_runs = measured(final(table))
    runs, left_out = known(may_be_best(all_runs), axis, axis, "choose another --axis")
    runs = runs.astype({axis: int}).assign(line=0 if axis == "nodes" else runs["nodes"])
    runs = runs.sort_values("standing", kind="stable")
    runs["best"] = ~runs.duplicated(["panel", "line", axis])
    differ = {axis, *_FOLLOW.get(axis, "dp and gas").split(" and ")}
    equal_columns = [name for name in ("nodes", *AXES) if name not in differ]
    # pp=1 is equal to 1f1b with one stage on each rank, whether the row tells the stages or not.
    usual = {"pp_schedule": runs["pp_schedule"].replace("none", "1f1b")}
    usual["virtual_stages"] = runs["virtual_stages"].fillna(1)
    runs["equal"] = runs.assign(**usual).groupby(["panel", *equal_columns], dropna=False).ngroup()
    return runs.sort_index(), left_out + notes(table, all_runs)


def figure(drawn: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """A pair of panels for each model: throughput, and the memory of the same runs."""
    names, lines = list(drawn["panel"].unique()), sorted(drawn["line"].unique())
    follows = _FOLLOW.get(axis, "dp and gas")
    about = f"Thin lines: runs that differ only in {axis}, and in {follows} as follows from it."
    if not any(drawn.groupby(by)[axis].nunique().max() > 1 for by in ("equal", ["panel", "line"])):
        about = f"No line has two values of {axis}, so that none is drawn; choose another --axis."
    about += f" Reserved memory: {drawn['memory_of'].iloc[0]}.\n{notes}"
    heading = f"Throughput and memory over {axis}, best and all else equal: {title}"
    whole, middle, panels = panel_grid(2 * len(names), title=heading, notes=about)
    styles = looks(lines, ordered=True, markersize=4.5, linewidth=1.4)
    pairs = ((name, column) for name in names for column in _COLUMNS)
    values = sorted(drawn[axis].unique())
    drawn = drawn.assign(across=drawn[axis].map(values.index))
    for axes, (name, column) in zip(panels, pairs, strict=True):
        _draw(axes, drawn[drawn["panel"] == name], column, styles)
        categories(axes, [int(value) for value in values])
        label(axes, name, axis, _COLUMNS[column])
    keys = [legend_entry(f"best on {counted(n, 'node')}" if n else "best layout", **styles[n]) for n in lines]
    legend(middle, [*keys, legend_entry("all else equal", color=_THIN["color"], linewidth=0.7)])
    return whole


def _draw(axes: Axes, panel_runs: pd.DataFrame, column: str, styles: dict[Any, dict[str, Any]]) -> None:
    """Draws the lines of a panel, each from the smallest value of the axis to the largest."""
    fastest = ["across", "tokens_per_s_per_gpu"]
    recorded = panel_runs.dropna(subset=column).sort_values(fastest, ascending=[True, False], kind="stable")
    alike = recorded.drop_duplicates(["equal", "across"]).sort_values("equal", kind="stable")
    ends = np.flatnonzero(alike["equal"].diff()[1:]) + 1
    lines = np.split(alike[["across", column]].to_numpy(), ends)
    axes.add_collection(LineCollection([line for line in lines if len(line) > 1], **_THIN), autolim=False)
    for line, best_runs in recorded[recorded["best"]].groupby("line"):
        axes.plot(best_runs["across"], best_runs[column], **styles[line])
    axes.set_ylim(0, 1.06 * recorded[column].max() if len(recorded) else 1)
    if not len(recorded):
        remark(axes, "not recorded")
