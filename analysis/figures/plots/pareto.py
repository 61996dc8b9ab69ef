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

_LINES, _LINE_WIDTH = 15, 50
"""Lines of text that fit beside a panel, and characters of a line."""
_ACROSS, _CLOSE = "memory_gib", 0.05
"""What is across, and how far apart two named runs are, as a part of the largest values of the front."""
_UP = {"tokens_per_s_per_gpu": "tokens/s/GPU"}
"""Column that may be up -> its name, if it has another one."""
_FRONT: dict[str, Any] = {"label": "Pareto front", "color": "black", "linewidth": 0.9}
_LIMIT: dict[str, Any] = {"label": "GPU memory", "color": GREY, "linestyle": "--", "linewidth": 1}
_NAME: dict[str, Any] = {
    "fontsize": 6.5, "va": "center", "zorder": 0,
    "arrowprops": {"arrowstyle": "-", "color": GREY, "linewidth": 0.4, "relpos": (0, 0.5)},
}  # fmt: skip
"""Look of the name of a run and of the line to it."""


def points(table: pa.Table, by: str) -> tuple[pd.DataFrame, str]:
    """The runs that may win and whose memory and value of `by` are known, and the note.

    The column `limit_gib` is the memory of a GPU for the runs of a plan. The column `front` marks those that no run of the panel beats in both; of `by` the larger value is better, or
    the smaller one where rankings say so.

    Raises:
        ConfigError: `by` is no numeric column, or no run has both.
    """
    require_number(table, by)
    todo = "to report it from your program, see docs/start/your-program.md"
    all_runs = measured(final(table, more=(by,)))
    runs, left_out = known(may_be_best(all_runs), _ACROSS, "peak memory", todo)
    runs, without = known(runs, by, by, "choose another --by from docs/reference/columns.md")
    runs = runs.sort_values([_ACROSS, by], ascending=[True, by in LOWER_IS_BETTER], kind="stable")
    values = -runs[by] if by in LOWER_IS_BETTER else runs[by]
    best = values.groupby(runs["panel"]).cummax()
    before = best.groupby(runs["panel"]).shift(fill_value=-math.inf)
    planned_on = runs["hardware"].unique() if is_predicted(table) else ()
    limits = {name: load_hardware(name).mem_bytes / GIB for name in planned_on}
    runs = runs.assign(front=values > before, limit_gib=runs["hardware"].map(limits).astype(float))
    return runs.sort_index(), left_out + without + notes(table, all_runs)


def figure(drawn: pd.DataFrame, *, title: str, notes: str, by: str) -> Figure:
    """A panel for each model, with the names of the layouts of its front beside it, as high as they lie."""
    names, nodes = list(drawn["panel"].unique()), sorted(drawn["nodes"].unique())
    by_memory = drawn[drawn["front"]].sort_values(_ACROSS, kind="stable")
    fronts = {name: by_memory[by_memory["panel"] == name] for name in names}
    named_runs = {name: _named(front, by) for name, front in fronts.items()}
    unnamed = sum(map(len, fronts.values())) - sum(map(len, named_runs.values()))
    is_lower_better, up = by in LOWER_IS_BETTER, _UP.get(by, by)
    about = f"Pareto front: no other run has as little memory and {'lower' if is_lower_better else 'higher'} {up}."
    about += " Colour: number of nodes; to draw only one: nodes=N."
    if unnamed:
        count = counted(unnamed, "run")
        about += f"\nUnlabelled: {count} of the front, too close to others or too many to label."
    heading = f"{'Throughput' if by in _UP else by} against memory, with the Pareto front of {counted(len(drawn), 'run')}: {title}"
    about += f"\n{notes}"
    styles = looks(nodes, ordered=True, name=lambda n: counted(n, "node"), linestyle="", markersize=3.5)
    keys = [*styles.values(), _FRONT, *([_LIMIT] if drawn["limit_gib"].notna().any() else [])]
    whole, panels = panel_grid(names, title=heading, notes=about, keys=keys, columns=1, height=2.6)
    for name, axes in panels.items():
        for n, node_runs in drawn[drawn["panel"] == name].groupby("nodes"):
            axes.plot(node_runs[_ACROSS], node_runs[by], alpha=0.7, **styles[n])
        axes.plot(*fronts[name][[_ACROSS, by]].T.to_numpy(), zorder=1, **_FRONT)
        axes.set(xlim=(0, 1.05 * axes.dataLim.x1), ylim=(0, 1.06 * axes.dataLim.y1))
        limits = drawn["limit_gib"][drawn["panel"] == name].dropna()
        if len(limits):
            axes.axvline(limits.iloc[0], **_LIMIT)
            axes.set_xlim(0, 1.05 * max(axes.dataLim.x1, limits.iloc[0]))
        _name(axes, named_runs[name], by)
        across = f"peak reserved memory, {drawn['memory_of'].iloc[0]} (GiB)"
        axes.describe(name, across, f"{up} (lower is better)" if is_lower_better else up)
    return whole


def _named(front: pd.DataFrame, by: str) -> pd.DataFrame:
    """The runs of a front that are named, with the column `text`; of two that are close, the one that is better in `by`."""
    far: list[Any] = []
    scales = front[[_ACROSS, by]]
    for point in (scales / scales.max()).iloc[::-1].itertuples():
        if all(abs(point[1] - other[1]) + abs(point[2] - other[2]) > _CLOSE for other in far):
            far.append(point)
    front = front.loc[[point[0] for point in reversed(far)]]
    wrapped = []
    for run in front[["nodes", *AXES]].convert_dtypes().to_dict("records"):
        layout = {str(name): run[name] for name in AXES if pd.notna(run[name])}
        name = f"{counted(run['nodes'], 'node')}: {' '.join(layout_words(layout))}"
        wrapped.append(textwrap.wrap(name, _LINE_WIDTH))
    room = min(len(front), _LINES // max(map(len, wrapped)))
    row_numbers = [round(n * (len(front) - 1) / max(1, room - 1)) for n in range(room)]
    return front.assign(text=["\n".join(lines) for lines in wrapped]).iloc[row_numbers]


def _name(axes: Panel, named_runs: pd.DataFrame, by: str) -> None:
    """Writes the names beside the panel, each as high as its run where there is room, with a line to it."""
    step = max(text.count("\n") + 1 for text in named_runs["text"]) / _LINES
    height, end = 1 + step / 2, axes.get_ylim()[1]
    highest_first = named_runs.sort_values(by, ascending=False, kind="stable").to_dict("records")
    for position, run in enumerate(highest_first, start=1):
        lowest = (len(highest_first) - position + 0.5) * step
        height = max(lowest, min(run[by] / end, height - step))
        point = run[_ACROSS], run[by]
        axes.annotate(run["text"], point, (1.06, height), textcoords="axes fraction", **_NAME)
