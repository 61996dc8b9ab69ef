"""Draws how runs ended: bars of their statuses over the number of nodes or another axis, a panel for each model."""

import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ultrabench.analysis.cells import notes
from ultrabench.analysis.figures.runs import final, known
from ultrabench.analysis.figures.style import STATUSES, categories, label, legend, panel_grid
from ultrabench.errors import counted

_SMALLEST = 0.09
"""Smallest share of a panel's height in which the number of a bar is written."""


def points(table: pa.Table, axis: str) -> tuple[pd.DataFrame, str]:
    """The note, and the number of runs by panel, value of the axis and status.

    Each repeat of a run counts; suspect stands for an ok run in doubt.
    """
    frame = final(table)
    frame["end"] = (
        frame["status"]
        .fillna("pending")
        .mask((frame["status"] == "ok") & frame["suspect"].notna(), "suspect")
    )
    frame = frame[frame["end"].isin(STATUSES)]
    runs, left_out = known(frame, axis, axis, "choose another --axis")
    by = runs.astype({axis: int}).groupby(["panel", axis, "end"], sort=False)
    return by.agg(runs=("run_id", "size")).reset_index(), left_out + notes(table)


def figure(drawn: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """The bars of the numbers of runs in `drawn`, with the number in each part that is high enough."""
    names, values = list(drawn["panel"].unique()), sorted(drawn[axis].unique())
    heading = f"How {counted(int(drawn['runs'].sum()), 'run')} ended, over {axis}: {title}"
    whole, middle, panels = panel_grid(len(names), title=heading, notes=notes)
    for axes, name in zip(panels, names, strict=True):
        held = drawn[drawn["panel"] == name].pivot(index="end", columns=axis, values="runs")
        _bars(axes, held.reindex(columns=values).fillna(0).astype(int))
        label(axes, name, axis, "runs")
        categories(axes, [int(value) for value in values])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    shown = [look for end, look in STATUSES.items() if end in set(drawn["end"])]
    patches = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="black", linewidth=0.5, label=look.name)
        for look in shown
    ]
    legend(middle, patches)
    return whole


def _bars(axes: Axes, held: pd.DataFrame) -> None:
    """Draws a bar for each column of `held`, whose rows are statuses."""
    highest = held.sum().max()
    below = 0 * held.sum()
    for end, look in STATUSES.items():
        if end not in held.index:
            continue
        runs = held.loc[end]
        axes.bar(
            range(len(runs)),
            runs,
            0.78,
            bottom=below,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="black",
            linewidth=0.5,
        )
        for at, number in enumerate(runs):
            if number >= _SMALLEST * highest:
                box = {"facecolor": "white", "linewidth": 0, "pad": 0.6}
                axes.text(
                    at,
                    below.iloc[at] + number / 2,
                    f"{number:,}",
                    fontsize=7,
                    ha="center",
                    va="center",
                    bbox=box,
                )
        below = below + runs
