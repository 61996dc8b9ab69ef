"""Draws throughput, or another column, against peak memory: runs that no other run beats in both are the front, and are named."""

import math
import textwrap
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.cells import layout_words
from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.runs import final, known, may_be_best, measured, notes
from ultrabench.analysis.figures.style import Panel, looks, panel_grid
from ultrabench.analysis.planned import is_predicted
from ultrabench.analysis.ranking import LOWER_IS_BETTER, require_number
from ultrabench.errors import counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES
from ultrabench.sweep.config.load import load_hardware

_MAX_LINES, _LINE_WIDTH = 15, 50
"""Numbers of lines of text that fit beside a panel, and of characters in a line."""
_X_COLUMN, _MIN_DISTANCE = "memory_gib", 0.05
"""Column of the x axis, and the smallest distance of two named runs, relative to the largest values of the front."""
_Y_TITLES = {"tokens_per_s_per_gpu": "tokens/s/GPU"}
"""Column of the y axis -> its title, where that is not the name of the column."""
_FRONT_LOOK: dict[str, Any] = {"label": "Pareto front", "color": "black", "linewidth": 0.9}
_LIMIT_LOOK: dict[str, Any] = {"label": "GPU memory", "color": GREY, "linestyle": "--", "linewidth": 1}
_NAME_LOOK: dict[str, Any] = {
    "fontsize": 6.5, "va": "center", "zorder": 0,
    "arrowprops": {"arrowstyle": "-", "color": GREY, "linewidth": 0.4, "relpos": (0, 0.5)},
}  # fmt: skip
"""Look of the name of a run and of the line to it."""


def points(table: pa.Table, column: str) -> tuple[pd.DataFrame, str]:
    """The runs that may win and whose memory and value of `column` are known, and the note.

    The column `limit_gib` is the memory of a GPU for the runs of a plan. The column `front` marks those that no run of the panel beats in both: of `column`, the larger value is better, or
    the smaller one where rankings say so.

    Raises:
        ConfigError: `column` is not numeric, or no run has both values.
    """
    require_number(table, column)
    todo = "to report it from your program, see docs/start/your-program.md"
    all_runs = measured(final(table, more_columns=(column,)))
    runs, excluded_text = known(may_be_best(all_runs), _X_COLUMN, "peak memory", todo)
    runs, column_text = known(runs, column, column, "choose another --by from docs/reference/columns.md")
    runs = runs.sort_values([_X_COLUMN, column], ascending=[True, column in LOWER_IS_BETTER], kind="stable")
    scores = -runs[column] if column in LOWER_IS_BETTER else runs[column]
    best_scores = scores.groupby(runs["panel"]).cummax()
    best_before = best_scores.groupby(runs["panel"]).shift(fill_value=-math.inf)
    planned_hardware = runs["hardware"].unique() if is_predicted(table) else ()
    limits_gib = {name: load_hardware(name).mem_bytes / GIB for name in planned_hardware}
    runs = runs.assign(front=scores > best_before, limit_gib=runs["hardware"].map(limits_gib).astype(float))
    return runs.sort_index(), excluded_text + column_text + notes(table, all_runs)


def figure(points: pd.DataFrame, *, title: str, notes: str, column: str) -> Figure:
    """A panel for each model, with the names of the layouts of its front beside it, as high as they lie."""
    names, node_counts = list(points["panel"].unique()), sorted(points["nodes"].unique())
    by_memory = points[points["front"]].sort_values(_X_COLUMN, kind="stable")
    fronts = {name: by_memory[by_memory["panel"] == name] for name in names}
    named_runs = {name: _named(front, column) for name, front in fronts.items()}
    num_unnamed = sum(map(len, fronts.values())) - sum(map(len, named_runs.values()))
    is_lower_better, y_title = column in LOWER_IS_BETTER, _Y_TITLES.get(column, column)
    caption = f"Pareto front: no other run has as little memory and {'lower' if is_lower_better else 'higher'} {y_title}."
    caption += " Colour: number of nodes; to draw only one: nodes=N."
    if num_unnamed:
        unnamed_text = counted(num_unnamed, "run")
        caption += f"\nUnlabelled: {unnamed_text} of the front, too close to others or too many to label."
    heading = f"{'Throughput' if column in _Y_TITLES else column} against memory, with the Pareto front of {counted(len(points), 'run')}: {title}"
    caption += f"\n{notes}"
    styles = looks(node_counts, ordered=True, name=lambda n: counted(n, "node"), linestyle="", markersize=3.5)
    legend = [*styles.values(), _FRONT_LOOK, *([_LIMIT_LOOK] if points["limit_gib"].notna().any() else [])]
    figure, panels = panel_grid(names, title=heading, notes=caption, legend=legend, ncols=1, height=2.6)
    for name, axes in panels.items():
        for n, node_runs in points[points["panel"] == name].groupby("nodes"):
            axes.plot(node_runs[_X_COLUMN], node_runs[column], alpha=0.7, **styles[n])
        axes.plot(*fronts[name][[_X_COLUMN, column]].T.to_numpy(), zorder=1, **_FRONT_LOOK)
        axes.set(xlim=(0, 1.05 * axes.dataLim.x1), ylim=(0, 1.06 * axes.dataLim.y1))
        limits = points["limit_gib"][points["panel"] == name].dropna()
        if len(limits):
            axes.axvline(limits.iloc[0], **_LIMIT_LOOK)
            axes.set_xlim(0, 1.05 * max(axes.dataLim.x1, limits.iloc[0]))
        _name(axes, named_runs[name], column)
        x_title = f"peak reserved memory, {points['memory_of'].iloc[0]} (GiB)"
        axes.describe(name, x_title, f"{y_title} (lower is better)" if is_lower_better else y_title)
    return figure


def _named(front: pd.DataFrame, column: str) -> pd.DataFrame:
    """The runs of a front that are named, with the column `text`; of two that are close, the one that is better in `column`."""
    kept_points: list[Any] = []
    coordinates = front[[_X_COLUMN, column]]
    for point in (coordinates / coordinates.max()).iloc[::-1].itertuples():
        if all(abs(point[1] - other[1]) + abs(point[2] - other[2]) > _MIN_DISTANCE for other in kept_points):
            kept_points.append(point)
    front = front.loc[[point[0] for point in reversed(kept_points)]]
    wrapped_names = []
    for run in front[["nodes", *AXES]].convert_dtypes().to_dict("records"):
        layout = {str(name): run[name] for name in AXES if pd.notna(run[name])}
        name = f"{counted(run['nodes'], 'node')}: {' '.join(layout_words(layout))}"
        wrapped_names.append(textwrap.wrap(name, _LINE_WIDTH))
    num_labels = min(len(front), _MAX_LINES // max(map(len, wrapped_names)))
    row_numbers = [round(n * (len(front) - 1) / max(1, num_labels - 1)) for n in range(num_labels)]
    return front.assign(text=["\n".join(lines) for lines in wrapped_names]).iloc[row_numbers]


def _name(axes: Panel, named_runs: pd.DataFrame, column: str) -> None:
    """Writes the names beside the panel, each as high as its run where there is room, with a line to it."""
    label_height = max(text.count("\n") + 1 for text in named_runs["text"]) / _MAX_LINES
    height, y_end = 1 + label_height / 2, axes.get_ylim()[1]
    highest_first = named_runs.sort_values(column, ascending=False, kind="stable").to_dict("records")
    for position, run in enumerate(highest_first, start=1):
        lowest = (len(highest_first) - position + 0.5) * label_height
        height = max(lowest, min(run[column] / y_end, height - label_height))
        point = run[_X_COLUMN], run[column]
        axes.annotate(run["text"], point, (1.06, height), textcoords="axes fraction", **_NAME_LOOK)
