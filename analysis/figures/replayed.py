"""Draws what a replayed strategy lost in each cell against the GPU hours that it used."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import looks, panel_grid

_NEAR = 2
"""Regret in percent below which a find counts as good."""


def figure(document: Mapping[str, Any], name: str) -> Figure:
    """A figure with a point for each cell: share of its hours, and regret; a cell without a find is on top.

    Args:
        document: what `ultrabench.analysis.predict.replay.replay` gives.
    """
    cells, share = document["cells"], document["gpu_hours_share"]
    worst = max([_NEAR / 100, *(cell["regret"] for cell in cells if cell["regret"] is not None)])
    styles = looks([*dict.fromkeys(cell["model"] for cell in cells)], ordered=False, linestyle="")
    title = f"{name}: {document['strategy']}, batch {document['batch']}, {100 * share:.1f} % of the GPU hours"
    notes = f"Numbers: nodes of the cell. Line: regret of {_NEAR} %. Hollow: the strategy found no working layout."
    whole, panels = panel_grid([name], title=title, notes=notes, keys=styles.values(), height=3.6)
    axes = panels[name]
    for cell in cells:
        has_layout = cell["regret"] is not None
        point = 100 * cell["gpu_hours_share"], 100 * (cell["regret"] if has_layout else 1.2 * worst)
        axes.plot(*point, alpha=0.7, fillstyle="full" if has_layout else "none", **styles[cell["model"]])
        axes.annotate(str(cell["nodes"]), point, (4, 3), textcoords="offset points", fontsize=7)
    axes.axhline(_NEAR, color=GREY, linewidth=0.8)
    axes.describe("", "GPU hours of the strategy (% of the hours of all layouts)", "regret (%)")
    return whole
