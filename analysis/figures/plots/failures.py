"""Draws how runs ended: bars of their statuses over the number of nodes or another axis, a panel for each model."""

from collections.abc import Iterable
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ultrabench.analysis.cells import notes
from ultrabench.analysis.figures.runs import final, known
from ultrabench.analysis.figures.style import panel_grid
from ultrabench.errors import counted
from ultrabench.layout import TITLES
from ultrabench.result import PENDING, STATUSES, Status

_ENDS: dict[str, tuple[str, str, str]] = {
    Status.OK: STATUSES[Status.OK][:3],
    "suspect": ("ok but suspect", "#8fd6be", "///"),
    **{status: traits[:3] for status, traits in STATUSES.items() if status != Status.OK},
    PENDING: ("pending or running", "#ffffff", ""),
}
"""Status of a run, and suspect for an ok run with a suspect number -> its name, colour and hatch, in the order in which bars stack them."""
_MIN_LABEL_SHARE = 0.09
"""Smallest height of a part of a bar that has its number, as a share of the highest bar."""


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The number of runs by panel, value of the axis and status, and the note.

    Each repeat of a run counts; suspect stands for an ok run with a suspect number.
    """
    frame = final(table)
    is_suspect = (frame["status"] == "ok") & frame["suspect"].notna()
    frame["end"] = frame["status"].fillna(PENDING).mask(is_suspect, "suspect")
    runs, excluded_text = known(frame, axis, axis, "choose another --axis")
    groups = runs.astype({axis: int}).groupby(["panel", axis, "end"], sort=False)
    return groups.agg(runs=("run_id", "size")).reset_index(), excluded_text + notes(table)


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """The bars of the numbers of runs in `points`, with the number in each part that is high enough."""
    panel_groups, values = points.groupby("panel", sort=False), sorted(map(int, points[axis].unique()))
    heading = f"How {counted(int(points['runs'].sum()), 'run')} ended, over {axis}: {title}"
    legend = [Patch(**_look(end)) for end in _in_order(points["end"])]
    figure, panels = panel_grid(points["panel"].unique(), title=heading, notes=notes, legend=legend)
    for name, panel_runs in panel_groups:
        axes = panels[name]
        run_counts = panel_runs.pivot(index="end", columns=axis, values="runs").reindex(columns=values)
        _bars(axes, run_counts.fillna(0).astype(int))
        axes.describe(str(name), TITLES.get(axis, axis), "runs")
        axes.categories(values)
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _in_order(ends: Iterable[str]) -> list[str]:
    """The distinct ends in the order in which bars stack them."""
    return sorted({*ends}, key=lambda end: [*_ENDS, end].index(end))


def _look(end: str) -> dict[str, Any]:
    """The options of the bars of a status."""
    name, colour, hatch = _ENDS.get(end, (end, "#bbbbbb", ""))  # a later version may have more statuses
    return {"label": name, "facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def _bars(axes: Axes, run_counts: pd.DataFrame) -> None:
    """Draws a bar for each column of `run_counts`, whose rows are statuses, with the numbers of its larger parts."""
    smallest_labelled, bottom = _MIN_LABEL_SHARE * run_counts.sum().max(), 0 * run_counts.sum()
    box = {"facecolor": "white", "linewidth": 0, "pad": 0.6}
    for end in _in_order(run_counts.index):
        counts = run_counts.loc[end]
        bars = axes.bar(range(len(counts)), counts, 0.78, bottom, **_look(end))
        labels = [f"{count:,}" if count >= smallest_labelled else "" for count in counts]
        axes.bar_label(bars, labels, label_type="center", fontsize=7, bbox=box)
        bottom = bottom + counts
