"""Draws how runs ended: bars of their statuses over the number of nodes or another axis, a panel for each model."""

from collections.abc import Iterable
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ultrabench.analysis.figures.runs import final_rows, noun_of, runs_with_value
from ultrabench.analysis.figures.style import panel_grid
from ultrabench.analysis.results.cells import notes
from ultrabench.errors import counted
from ultrabench.layout import TITLES
from ultrabench.result import PENDING, STATUSES, Status

_TRAITS_BY_STATUS: dict[str, tuple[str, str, str]] = {
    Status.OK: STATUSES[Status.OK][:3],
    "suspect": ("ok but suspect", "#8fd6be", "///"),
    **{status: traits[:3] for status, traits in STATUSES.items() if status != Status.OK},
    PENDING: ("pending or running", "#ffffff", ""),
}
"""Status of a run, and suspect for an ok run with a suspect number -> its name, colour and hatch,
in the order in which bars stack them."""
_MIN_LABEL_SHARE = 0.09
"""Smallest height of a part of a bar that has its number, as a share of the highest bar."""


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The number of runs by panel, value of the axis and status, and the note.

    It is in the last column: `runs`, or `repeats` where a run has several, which all count; suspect stands for an ok
    run with a suspect number.
    """
    rows = final_rows(table)
    is_suspect = (rows["status"] == Status.OK) & rows["suspect"].notna()
    rows["shown_status"] = rows["status"].fillna(PENDING).mask(is_suspect, "suspect")
    noun = noun_of(rows)
    runs, excluded_text = runs_with_value(rows, axis, axis, "choose another --axis", noun)
    status_groups = runs.astype({axis: int}).groupby(["panel", axis, "shown_status"], sort=False)
    return status_groups.agg(**{f"{noun}s": ("run_id", "size")}).reset_index(), excluded_text + notes(table)


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """The bars of the numbers of runs in `points`, with the number in each part that is high enough."""
    panel_groups, axis_values = points.groupby("panel", sort=False), sorted(map(int, points[axis].unique()))
    nouns = str(points.columns[-1])
    heading = f"How {counted(int(points[nouns].sum()), nouns.removesuffix('s'))} ended, over {axis}: {title}"
    legend = [Patch(**_bar_look(status)) for status in _in_stacking_order(points["shown_status"])]
    figure, panels = panel_grid(points["panel"].unique(), title=heading, notes=notes, legend=legend)
    for panel_name, panel_runs in panel_groups:
        axes = panels[panel_name]
        run_counts = panel_runs.pivot(index="shown_status", columns=axis, values=nouns)
        _draw_bars(axes, run_counts.reindex(columns=axis_values).fillna(0).astype(int))
        axes.describe(str(panel_name), TITLES.get(axis, axis), nouns)
        axes.set_categories(axis_values)
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _in_stacking_order(statuses: Iterable[str]) -> list[str]:
    """The distinct statuses in the order in which bars stack them."""
    return sorted({*statuses}, key=lambda status: [*_TRAITS_BY_STATUS, status].index(status))


def _bar_look(status: str) -> dict[str, Any]:
    """The options of the bars of a status."""
    label, colour, hatch = _TRAITS_BY_STATUS.get(status, (status, "#bbbbbb", ""))  # of a later version
    return {"label": label, "facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def _draw_bars(axes: Axes, run_counts: pd.DataFrame) -> None:
    """Draws a bar for each column of `run_counts`, whose rows are statuses, with the numbers of its larger parts."""
    min_labelled_count, bottoms = _MIN_LABEL_SHARE * run_counts.sum().max(), 0 * run_counts.sum()
    label_box = {"facecolor": "white", "linewidth": 0, "pad": 0.6}
    for status in _in_stacking_order(run_counts.index):
        status_counts = run_counts.loc[status]
        bars = axes.bar(range(len(status_counts)), status_counts, 0.78, bottoms, **_bar_look(status))
        labels = [f"{count:,}" if count >= min_labelled_count else "" for count in status_counts]
        axes.bar_label(bars, labels, label_type="center", fontsize=7, bbox=label_box)
        bottoms = bottoms + status_counts
