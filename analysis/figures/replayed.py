"""Draws what a replayed strategy lost in each cell against the GPU hours that it used."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY


def figure(document: Mapping[str, Any], name: str) -> Figure:
    """A figure with a point for each cell: share of its hours, and regret; a cell without a find is on top.

    Args:
        document: what `ultrabench.analysis.predict.replay.replay` gives.
    """
    drawn = Figure(figsize=(7, 5), layout="constrained")
    axes, cells = drawn.subplots(), document["cells"]
    worst = max([0.02, *(cell["regret"] for cell in cells if cell["regret"] is not None)])
    for model in dict.fromkeys(cell["model"] for cell in cells):
        own = [cell for cell in cells if cell["model"] == model]
        found = [100 * (1.2 * worst if cell["regret"] is None else cell["regret"]) for cell in own]
        axes.scatter(
            [100 * cell["gpu_hours_share"] for cell in own], found, s=25, alpha=0.7, label=str(model)
        )
        for cell, regret in zip(own, found, strict=True):
            axes.annotate(str(cell["nodes"]), (100 * cell["gpu_hours_share"], regret), fontsize=7)
    axes.axhline(2, color=GREY, linewidth=0.8)
    axes.set(xlabel="GPU hours (% of those of all layouts; number: nodes)", ylabel="regret (%; line: 2 %)")
    axes.legend(fontsize=8)
    share, batch = document["gpu_hours_share"], document["batch"]
    drawn.suptitle(
        f"{name}: {document['strategy']}, batch {batch}, {share:.1%} of the GPU hours", fontsize=11
    )
    return drawn
