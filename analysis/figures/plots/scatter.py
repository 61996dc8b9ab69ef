"""Draws every measured run: MFU over the number of nodes, with the throughput as the size of its marker."""

import zlib
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.runs import final_rows, ok_runs, runs_note, runs_with_value
from ultrabench.analysis.figures.style import axis_title, drawn, panel_grid
from ultrabench.analysis.results.columns import column_of, unit_of
from ultrabench.analysis.results.numbers import count
from ultrabench.errors import counted
from ultrabench.hardware import peak_suffix

_MAX_AREA, _MIN_AREA = 90.0, 5.0
"""Areas of the largest and the smallest marker in square points; between them they are proportional to tokens/s."""
_MAX_X_OFFSET = 0.36
"""Largest horizontal distance of a run from the place of its number of nodes."""
_CROSS_LOOK: dict[str, Any] = {"color": "#8a8a8a", "marker": "x"}
_LEGEND = (
    {"label": f"area: {column_of('tokens_per_s').heading} of all GPUs, relative to the largest in the panel",
        "marker": "o", "color": "#3b528b", "linestyle": ""},
    {"label": "cannot win: suspect or stopped early", "linestyle": "", **_CROSS_LOOK},
)  # fmt: skip


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The measured runs, and the note.

    The column `height` is MFU in percent, or tokens/s/GPU where no run has an MFU, or where MFU follows from
    several formulas. `x_offset` is how far a point is drawn beside the place of its number of nodes, so that
    points do not cover each other.
    """
    runs = ok_runs(final_rows(table))
    note = runs_note(table, runs, has_crosses=True)
    has_mfu = runs["flops_formula"].nunique() <= 1 and runs["mfu"].notna().any()
    column = "mfu" if has_mfu else "tokens_per_s_per_gpu"
    runs = runs.assign(height=drawn(column, runs[column]), height_title=axis_title(column))
    runs, excluded_text = runs_with_value(runs, "height", runs["height_title"].iloc[0], "draw another figure")
    num_neighbours = runs.groupby(["panel", "nodes"])["run_id"].transform("size")
    random_offset = runs["run_id"].map(lambda run_id: zlib.crc32(run_id.encode()) / 2**32 - 0.5)
    runs["x_offset"] = 2 * _MAX_X_OFFSET * random_offset * (1 - 1 / num_neighbours)
    return runs.sort_values("tokens_per_s", ascending=False, kind="stable"), excluded_text + note


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each model; the markers of runs that cannot win are crosses without colour."""
    panel_names = points.sort_index()["panel"].unique()
    node_counts = sorted(map(int, points["nodes"].unique()))
    height_title, max_height = points["height_title"].iloc[0], points["height"].max()
    heading = f"{height_title.partition(' ')[0]} and throughput of {counted(len(points), 'run')} over nodes: {title}"
    figure, panels = panel_grid(panel_names, title=heading, notes=notes, legend=_LEGEND, sharey=True)
    for panel_name, axes in panels.items():
        panel_runs = points[points["panel"] == panel_name]
        max_tokens_per_s = panel_runs["tokens_per_s"].max()
        panel_runs = panel_runs.assign(
            x=panel_runs["nodes"].map(node_counts.index) + panel_runs["x_offset"],
            area=np.maximum(_MAX_AREA * panel_runs["tokens_per_s"] / max_tokens_per_s, _MIN_AREA),
        )
        candidates, other_runs = panel_runs[panel_runs["may_win"]], panel_runs[~panel_runs["may_win"]]
        axes.scatter("x", "height", "area", linewidth=0.7, data=other_runs, **_CROSS_LOOK)
        axes.scatter("x", "height", "area", "height", data=candidates, cmap="viridis", vmin=0, vmax=max_height,
                     alpha=0.85, edgecolor="black", linewidth=0.3)  # fmt: skip
        mfu_heading = column_of("mfu").heading
        y_title = height_title.replace(
            mfu_heading, f"{mfu_heading}{peak_suffix(panel_runs['precision'].iloc[0])}"
        )
        axes.describe(
            panel_name, f"nodes (largest marker: {count(max_tokens_per_s, unit_of('tokens_per_s'))})", y_title
        )
        axes.set_categories(node_counts)
        axes.set_ylim(0, 1.06 * max_height)
    colour_scale = ScalarMappable(Normalize(0, max_height), "viridis")
    options: dict[str, Any] = {"fraction": 0.03, "pad": 0.01, "format": "{x:,.10g}"}
    colour_bar = axes.figure.colorbar(colour_scale, ax=[*panels.values()], **options)
    colour_bar.outline.set_visible(False)
    colour_bar.set_label(height_title, fontsize=8.5, color=GREY)
    colour_bar.ax.tick_params(labelsize=8, color=GREY)
    return figure
