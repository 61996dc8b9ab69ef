"""Draws what a replayed strategy lost in each cell against the GPU hours that it used."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import looks, panel_grid

_GOOD_REGRET = 2
"""Regret in percent up to which a layout counts as good, where the figure has a line."""


def figure(document: Mapping[str, Any], name: str) -> Figure:
    """A figure with a point for each cell: the share of its hours and the regret; cells without a working layout are on top.

    Args:
        document: what `ultrabench.analysis.predict.replay.replay` gives.
    """
    cells, hours_share = document["cells"], document["gpu_hours_share"]
    regrets = [cell["regret"] for cell in cells if cell["regret"] is not None]
    worst_regret = max([_GOOD_REGRET / 100, *regrets])
    styles = looks([*dict.fromkeys(cell["model"] for cell in cells)], ordered=False, linestyle="")
    title = f"{name}: {document['strategy']}, batch {document['batch']}, {100 * hours_share:.1f} % of the GPU hours"
    notes = f"Numbers: nodes of the cell. Line: regret of {_GOOD_REGRET} %. Hollow: the strategy found no working layout."
    figure, panels = panel_grid([name], title=title, notes=notes, legend=styles.values(), height=3.6)
    axes = panels[name]
    for cell in cells:
        has_layout = cell["regret"] is not None
        point = 100 * cell["gpu_hours_share"], 100 * (cell["regret"] if has_layout else 1.2 * worst_regret)
        axes.plot(*point, alpha=0.7, fillstyle="full" if has_layout else "none", **styles[cell["model"]])
        axes.annotate(str(cell["nodes"]), point, (4, 3), textcoords="offset points", fontsize=7)
    axes.axhline(_GOOD_REGRET, color=GREY, linewidth=0.8)
    axes.describe("", "GPU hours of the strategy (% of the hours of all layouts)", "regret (%)")
    return figure
