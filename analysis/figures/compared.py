"""Draws how step times of B differ from those of A: a point for each layout, sorted, with a panel for each model."""

from collections.abc import Iterator, Set
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ultrabench.analysis.cells import MAY_DIFFER
from ultrabench.analysis.compare import Comparison
from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import Panel, panel_grid
from ultrabench.analysis.significance import ALPHA
from ultrabench.errors import ConfigError, counted

_LOOK_BY_FINDING: dict[str | None, dict[str, Any]] = {
    "slower": {"marker": "^", "color": "#d55e00", "markersize": 7, "label": f"slower, p <= {ALPHA:g} corrected"},
    "faster": {"marker": "v", "color": "#0173b2", "markersize": 7, "label": f"faster, p <= {ALPHA:g} corrected"},
    None: {"marker": "o", "color": "#949494", "markersize": 3.5, "label": "no significant difference"},
}  # fmt: skip
"""Finding -> marker; layouts without one have small grey points."""
_FRAME_LOOK: dict[str, Any] = {
    "marker": "s", "markerfacecolor": "none", "color": "black", "markersize": 11,
    "label": "best of its cell in only one of A and B",
}  # fmt: skip
"""Frame around the layouts that won a cell in A or in B, where these differ."""
_MAX_NAMED_CELLS = 6
"""Number of cells with another winner that the notes name."""


def figure(comparison: Comparison) -> Figure:
    """The ratios of step times B / A of all layouts that were measured in both.

    Raises:
        ConfigError: no layout was measured in both.
    """
    rows = comparison.rows[comparison.rows["ratio"].notna()]
    if not len(rows):
        todo = "to see how their runs ended, compare without -o"
        raise ConfigError("no layout has a step time in both A and B", todo)
    models = list(rows.sort_values(["num_params", "model"])["model"].unique())
    heading = f"Step times of {comparison.title}: {counted(len(rows), 'layout')}"
    legend = [look | {"linestyle": ""} for look in (*_LOOK_BY_FINDING.values(), _FRAME_LOOK)]
    note = "\n".join(_notes(comparison))
    figure, panels = panel_grid(models, title=heading, notes=note, legend=legend, sharey=True)
    cells = comparison.winners.to_dict("records")
    winners = {(cell["model"], cell["nodes"], cell[side]) for cell in cells for side in ("best_a", "best_b")}
    name_a, name_b = (name if len(name) <= 14 else f"{name[:12]}.." for name in comparison.names)
    for model, axes in panels.items():
        axes.axhspan(1 / (1 + comparison.threshold), 1 + comparison.threshold, color="#efefef", zorder=0)
        axes.axhline(1, color=GREY, linewidth=0.8)
        _draw(axes, rows[rows["model"] == model].reset_index(drop=True), winners)
        axes.describe(model, "layouts, sorted by ratio", f"step time of {name_b} / {name_a}")
        axes.log_scale("y", rows["ratio"].min(), rows["ratio"].max(), "{x:g} x")
    return figure


def _draw(axes: Panel, ratios: pd.DataFrame, winners: Set[tuple[object, ...]]) -> None:
    """Draws the ratios of one model with their findings, frames around winners, and the name of the largest."""
    for finding, look in _LOOK_BY_FINDING.items():
        points = ratios[ratios["finding"].isna() if finding is None else ratios["finding"] == finding]
        axes.plot(points.index + 1, points["ratio"], linestyle="", markeredgewidth=0, **look)
    keys = zip(ratios["model"], ratios["nodes"], ratios["layout"], strict=True)
    is_best = [key in winners for key in keys]
    if any(is_best):  # an empty plot has no extent, which matplotlib's layout of the figure needs
        framed = ratios[is_best]
        axes.plot(framed.index + 1, framed["ratio"], linestyle="", clip_on=False, **_FRAME_LOOK)
    slowest, num_layouts = ratios.iloc[-1], len(ratios)
    # The largest ratio has its name above itself, where no other point can be.
    halign, valign, offset = ("right", "bottom", (4, 8)) if num_layouts > 1 else ("left", "center", (9, 0))
    font: dict[str, Any] = {"fontsize": 6, "color": GREY, "ha": halign, "va": valign}
    point = num_layouts, slowest["ratio"]
    axes.annotate(slowest["layout"], point, offset, textcoords="offset points", **font)
    axes.margins(y=0.15)
    tick_step = max(1, round(num_layouts / 10))
    axes.set_xticks(sorted({1, num_layouts, *range(tick_step, num_layouts - tick_step // 2, tick_step)}))
    axes.set_xlim(0.2, num_layouts + 1)


def _notes(comparison: Comparison) -> Iterator[str]:
    """The lines under the figure: which runs are left out, and which cells have another best layout in B."""
    changes = [f"{name} {a} -> {b}" for name, (a, b) in comparison.differing.items() if name in MAY_DIFFER]
    unchanged = "No known change of hardware, kernel or precision."
    changes_text = f"From A to B: {', '.join(changes)}." if changes else unchanged
    yield f"A: {comparison.names[0]}. B: {comparison.names[1]}. {changes_text}"
    yield " ".join(comparison.notes)
    yield "Grey band: differences within the threshold. Above 1 x, B is slower."
    cells = comparison.winners.to_dict("records")
    if cells:
        yield "Cells with a different best layout in B:"
    for cell in cells[:_MAX_NAMED_CELLS]:
        yield f"{cell['model']} on {counted(cell['nodes'], 'node')}: {cell['best_a']} -> {cell['best_b']}"
    if len(cells) > _MAX_NAMED_CELLS:
        yield f"and {len(cells) - _MAX_NAMED_CELLS:,} more"
