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

_LOOKS: dict[str | None, dict[str, Any]] = {
    "slower": {"marker": "^", "color": "#d55e00", "markersize": 7, "label": f"slower, p <= {ALPHA:g} corrected"},
    "faster": {"marker": "v", "color": "#0173b2", "markersize": 7, "label": f"faster, p <= {ALPHA:g} corrected"},
    None: {"marker": "o", "color": "#949494", "markersize": 3.5, "label": "no significant difference"},
}  # fmt: skip
"""Finding -> marker; layouts without one have small grey points."""
_WON: dict[str, Any] = {
    "marker": "s", "markerfacecolor": "none", "color": "black", "markersize": 11,
    "label": "best of its cell in only one of A and B",
}  # fmt: skip
"""Frame around the layouts that won a cell in A or in B, where these differ."""
_NAMED = 6
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
    keys = [look | {"linestyle": ""} for look in (*_LOOKS.values(), _WON)]
    note = "\n".join(_notes(comparison))
    whole, panels = panel_grid(models, title=heading, notes=note, keys=keys, sharey=True)
    winners = comparison.winners.to_dict("records")
    won = {(w["model"], w["nodes"], w[side]) for w in winners for side in ("best_a", "best_b")}
    a, b = (name if len(name) <= 14 else f"{name[:12]}.." for name in comparison.names)
    for model, axes in panels.items():
        axes.axhspan(1 / (1 + comparison.threshold), 1 + comparison.threshold, color="#efefef", zorder=0)
        axes.axhline(1, color=GREY, linewidth=0.8)
        _draw(axes, rows[rows["model"] == model].reset_index(drop=True), won)
        axes.describe(model, "layouts, sorted by ratio", f"step time of {b} / {a}")
        axes.log_scale("y", rows["ratio"].min(), rows["ratio"].max(), "{x:g} x")
    return whole


def _draw(axes: Panel, ratios: pd.DataFrame, won: Set[tuple[object, ...]]) -> None:
    """Draws the ratios of one model with their findings, frames around winners, and the name of the largest."""
    for finding, look in _LOOKS.items():
        shown = ratios[ratios["finding"].isna() if finding is None else ratios["finding"] == finding]
        axes.plot(shown.index + 1, shown["ratio"], linestyle="", markeredgewidth=0, **look)
    framed = [cell in won for cell in zip(ratios["model"], ratios["nodes"], ratios["layout"], strict=True)]
    if any(framed):  # without a point it would have no size in the layout
        axes.plot(ratios.index[framed] + 1, ratios["ratio"][framed], linestyle="", clip_on=False, **_WON)
    last, number = ratios.iloc[-1], len(ratios)
    # It is above all others, which are not larger.
    side, place, away = ("right", "bottom", (4, 8)) if number > 1 else ("left", "center", (9, 0))
    small: dict[str, Any] = {"fontsize": 6, "color": GREY, "ha": side, "va": place}
    axes.annotate(last["layout"], (number, last["ratio"]), away, textcoords="offset points", **small)
    axes.margins(y=0.15)
    step = max(1, round(number / 10))
    axes.set_xticks(sorted({1, number, *range(step, number - step // 2, step)}))
    axes.set_xlim(0.2, number + 1)


def _notes(comparison: Comparison) -> Iterator[str]:
    """The lines under the figure: what was left out, and which cells another layout wins."""
    changes = [f"{name} {a} -> {b}" for name, (a, b) in comparison.differing.items() if name in MAY_DIFFER]
    unchanged = "No known change of hardware, kernel or precision."
    changed = f"From A to B: {', '.join(changes)}." if changes else unchanged
    yield f"A: {comparison.names[0]}. B: {comparison.names[1]}. {changed}"
    yield " ".join(comparison.notes)
    yield "Grey band: differences within the threshold. Above 1 x, B is slower."
    winners = comparison.winners.to_dict("records")
    if winners:
        yield "Cells with a different best layout in B:"
    for cell in winners[:_NAMED]:
        yield f"{cell['model']} on {counted(cell['nodes'], 'node')}: {cell['best_a']} -> {cell['best_b']}"
    if len(winners) > _NAMED:
        yield f"and {len(winners) - _NAMED:,} more"
