"""Draws throughput, or another column, against peak memory: runs that no other run beats in both are the
front, and are named.
"""

import math
import textwrap
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.runs import candidate_runs, final_rows, ok_runs, runs_note, runs_with_value
from ultrabench.analysis.figures.style import Panel, axis_title, drawn, panel_grid, series_looks
from ultrabench.analysis.results.cells import layout_words
from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.planned import is_predicted
from ultrabench.analysis.results.ranking import DEFAULT_RANK_BY, is_lower_better, require_rankable
from ultrabench.errors import counted
from ultrabench.layout import AXES
from ultrabench.sweep.config.load import load_hardware

_MAX_NAME_LINES, _NAME_LINE_CHARS = 15, 50
"""Numbers of lines of text that fit beside a panel, and of characters in a line."""
_X_COLUMN, _MIN_NAME_DISTANCE = "memory_gib", 0.05
"""Column of the x axis, and the smallest distance of two named runs, relative to the largest values of the front."""
_FRONT_LOOK: dict[str, Any] = {"label": "Pareto front", "color": "black", "linewidth": 0.9}
_LIMIT_LOOK: dict[str, Any] = {"label": "GPU memory", "color": GREY, "linestyle": "--", "linewidth": 1}
_NAME_LOOK: dict[str, Any] = {
    "fontsize": 6.5, "va": "center", "zorder": 0,
    "arrowprops": {"arrowstyle": "-", "color": GREY, "linewidth": 0.4, "relpos": (0, 0.5)},
}  # fmt: skip
"""Look of the name of a run and of the line to it."""


def points(table: pa.Table, column: str) -> tuple[pd.DataFrame, str]:
    """The runs that may win and whose memory and value of `column` are known, and the note.

    The column `limit_gib` is the memory of a GPU for the runs of a plan. The column `is_on_front` marks the Pareto
    front: the runs that no run of the panel beats in both memory and `column`. The larger value of `column` is better,
    or the smaller one where rankings say so.

    Raises:
        ConfigError: runs cannot be ranked by `column`, or no run has both values.
    """
    require_rankable(table, column)
    todo = "to report it from your program, see docs/start/your-program.md"
    all_runs = ok_runs(final_rows(table, more_columns=(column,)))
    runs, no_memory_text = runs_with_value(candidate_runs(all_runs), _X_COLUMN, "peak memory", todo)
    todo = "choose another --by from docs/reference/columns.md"
    runs, no_value_text = runs_with_value(runs, column, column, todo)
    runs = runs.sort_values([_X_COLUMN, column], ascending=[True, is_lower_better(column)], kind="stable")
    scores = -runs[column] if is_lower_better(column) else runs[column]
    best_scores = scores.groupby(runs["panel"]).cummax()
    best_with_less_memory = best_scores.groupby(runs["panel"]).shift(fill_value=-math.inf)
    planned_hardware = runs["hardware"].unique() if is_predicted(table) else ()
    limits_gib = {
        name: drawn("peak_mem_reserved_bytes", load_hardware(name).mem_bytes) for name in planned_hardware
    }
    limit_gib = runs["hardware"].map(limits_gib).astype(float)
    runs = runs.assign(is_on_front=scores > best_with_less_memory, limit_gib=limit_gib)
    return runs.sort_index(), no_memory_text + no_value_text + runs_note(table, all_runs)


def figure(points: pd.DataFrame, *, title: str, notes: str, column: str) -> Figure:
    """A panel for each model, with the names of the layouts of its front beside it, as high as they lie."""
    points = points.assign(**{column: drawn(column, points[column])})
    panel_names, node_counts = list(points["panel"].unique()), sorted(points["nodes"].unique())
    front_runs = points[points["is_on_front"]].sort_values(_X_COLUMN, kind="stable")
    front_by_panel = {name: front_runs[front_runs["panel"] == name] for name in panel_names}
    named_by_panel = {name: _named_runs(front, column) for name, front in front_by_panel.items()}
    num_unnamed = len(front_runs) - sum(map(len, named_by_panel.values()))
    y_name, better = column_of(column).heading, column_of(column).better
    caption = f"Pareto front: no other run has as little memory and {better} {y_name}."
    caption += " Colour: number of nodes; to draw only one: nodes=N."
    if num_unnamed:
        caption += (
            f"\nUnlabelled: {counted(num_unnamed, 'run')} of the front, "
            "too close to others or too many to label."
        )
    heading = (
        f"{'Throughput' if column == DEFAULT_RANK_BY else y_name} against memory, "
        f"with the Pareto front of {counted(len(points), 'run')}: {title}"
    )
    dots: dict[str, Any] = {"linestyle": "", "markersize": 3.5}
    look_by_nodes = series_looks(node_counts, is_ordered=True, label_of=lambda n: counted(n, "node"), **dots)
    limit_looks = [_LIMIT_LOOK] if points["limit_gib"].notna().any() else []
    legend = [*look_by_nodes.values(), _FRONT_LOOK, *limit_looks]
    options: dict[str, Any] = {"legend": legend, "max_columns": 1, "height": 2.6}
    figure, panels = panel_grid(panel_names, title=heading, notes=f"{caption}\n{notes}", **options)
    for panel_name, axes in panels.items():
        for num_nodes, node_runs in points[points["panel"] == panel_name].groupby("nodes"):
            axes.plot(node_runs[_X_COLUMN], node_runs[column], alpha=0.7, **look_by_nodes[num_nodes])
        axes.plot(*front_by_panel[panel_name][[_X_COLUMN, column]].T.to_numpy(), zorder=1, **_FRONT_LOOK)
        axes.set(xlim=(0, 1.05 * axes.dataLim.x1), ylim=(0, 1.06 * axes.dataLim.y1))
        limits_gib = points["limit_gib"][points["panel"] == panel_name].dropna()
        if len(limits_gib):
            axes.axvline(limits_gib.iloc[0], **_LIMIT_LOOK)
            axes.set_xlim(0, 1.05 * max(axes.dataLim.x1, limits_gib.iloc[0]))
        _write_names(axes, named_by_panel[panel_name], column)
        memory_title = f"peak reserved memory, {points['memory_ranks'].iloc[0]}"
        x_title = axis_title("peak_mem_reserved_bytes", memory_title)
        y_title = axis_title(column)
        axes.describe(panel_name, x_title, f"{y_title} ({better.note})" if better.note else y_title)
    return figure


def _named_runs(front: pd.DataFrame, column: str) -> pd.DataFrame:
    """The runs of a front that are named, with the column `text`; of two close runs only the one that is
    better in `column`.
    """
    named_points: list[tuple[Any, float, float]] = []
    coordinates = front[[_X_COLUMN, column]]
    for index, x, y in (coordinates / coordinates.max()).iloc[::-1].itertuples():
        distances = (abs(x - named_x) + abs(y - named_y) for _, named_x, named_y in named_points)
        if all(distance > _MIN_NAME_DISTANCE for distance in distances):
            named_points.append((index, x, y))
    front = front.loc[[index for index, _, _ in reversed(named_points)]]
    run_names = []
    for run, options in zip(
        front[["nodes", *AXES]].convert_dtypes().to_dict("records"), front["options"], strict=True
    ):
        layout = {str(axis): run[axis] for axis in AXES if pd.notna(run[axis])} | {"options": options}
        run_name = f"{counted(run['nodes'], 'node')}: {' '.join(layout_words(layout))}"
        run_names.append(textwrap.fill(run_name, _NAME_LINE_CHARS))
    max_lines = max(name.count("\n") + 1 for name in run_names)
    num_named = min(len(front), _MAX_NAME_LINES // max_lines)
    positions = [round(n * (len(front) - 1) / max(1, num_named - 1)) for n in range(num_named)]
    return front.assign(text=run_names).iloc[positions]


def _write_names(axes: Panel, named_runs: pd.DataFrame, column: str) -> None:
    """Writes the names beside the panel, each as high as its run where there is room, with a line to it.

    Heights are shares of the height of the panel.
    """
    name_height = max(text.count("\n") + 1 for text in named_runs["text"]) / _MAX_NAME_LINES
    y, y_end = 1 + name_height / 2, axes.get_ylim()[1]
    highest_first = named_runs.sort_values(column, ascending=False, kind="stable").to_dict("records")
    for position, run in enumerate(highest_first, start=1):
        min_y = (len(highest_first) - position + 0.5) * name_height
        y = max(min_y, min(run[column] / y_end, y - name_height))
        run_point = run[_X_COLUMN], run[column]
        axes.annotate(run["text"], run_point, (1.06, y), textcoords="axes fraction", **_NAME_LOOK)
