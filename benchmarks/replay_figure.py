"""Draws what a replayed strategy lost in each cell against the GPU hours that it used."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import panel_grid, series_looks

_GOOD_REGRET_PERCENT = 2
"""Regret up to which a layout counts as good; the figure has a line there."""


def figure(document: Mapping[str, Any], name: str) -> Figure:
    """A figure with a point for each cell: its share of GPU hours and its regret;
    cells without a working layout are on top.

    The regret is how much slower the layout that the strategy chose is than the best one.

    Args:
        document: what `replay.replay` gives.
        name: name of the sweep or file.
    """
    cells, hours_percent = document["cells"], 100 * document["gpu_hours_share"]
    regrets = [cell["regret"] for cell in cells if cell["regret"] is not None]
    worst_regret = max([_GOOD_REGRET_PERCENT / 100, *regrets])
    models = [*dict.fromkeys(cell["model"] for cell in cells)]
    look_by_model = series_looks(models, is_ordered=False, linestyle="")
    strategy_text = f"{document['strategy']}, batch {document['batch']}"
    title = f"{name}: {strategy_text}, {hours_percent:.1f} % of the GPU hours"
    notes = (
        f"Numbers: GPUs of the cell. Line: regret of {_GOOD_REGRET_PERCENT} %. Hollow: "
        "the strategy found no working layout."
    )
    figure, panels = panel_grid([name], title=title, notes=notes, legend=look_by_model.values(), height=3.6)
    axes = panels[name]
    for cell in cells:
        has_layout = cell["regret"] is not None
        point = 100 * cell["gpu_hours_share"], 100 * (cell["regret"] if has_layout else 1.2 * worst_regret)
        fill = "full" if has_layout else "none"
        axes.plot(*point, alpha=0.7, fillstyle=fill, **look_by_model[cell["model"]])
        axes.annotate(str(cell["gpus"]), point, (4, 3), textcoords="offset points", fontsize=7)
    axes.axhline(_GOOD_REGRET_PERCENT, color=GREY, linewidth=0.8)
    axes.describe("", "GPU hours of the strategy (% of the hours of all layouts)", "regret (%)")
    return figure
