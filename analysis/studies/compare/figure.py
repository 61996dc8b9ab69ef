"""Draws how step times of B differ from those of A: a point for each layout, sorted, with a panel for each model."""

from collections.abc import Iterator, Set
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import Panel, panel_grid
from ultrabench.analysis.results.cells import MAY_DIFFER
from ultrabench.analysis.results.significance import ALPHA
from ultrabench.analysis.studies.compare.compare import Comparison
from ultrabench.errors import ConfigError, counted

_LOOK_BY_FINDING: dict[str | None, dict[str, Any]] = {
    "slower": {"marker": "^", "color": "#d55e00", "markersize": 7, "label": f"slower, p <= {ALPHA:g} corrected"},
    "faster": {"marker": "v", "color": "#0173b2", "markersize": 7, "label": f"faster, p <= {ALPHA:g} corrected"},
    None: {"marker": "o", "color": "#949494", "markersize": 3.5, "label": "no significant difference"},
}  # fmt: skip
"""Finding about a layout -> the look of its marker; None stands for no finding."""
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
    compared_layouts = comparison.rows[comparison.rows["ratio"].notna()]
    if not len(compared_layouts):
        todo = "to see how their runs ended, compare without -o"
        raise ConfigError("no layout has a step time in both A and B", todo)
    models = list(compared_layouts.sort_values(["num_params", "model"])["model"].unique())
    heading = f"Step times of {comparison.title}: {counted(len(compared_layouts), 'layout')}"
    legend = [look | {"linestyle": ""} for look in (*_LOOK_BY_FINDING.values(), _FRAME_LOOK)]
    note = "\n".join(_note_lines(comparison))
    figure, panels = panel_grid(models, title=heading, notes=note, legend=legend, sharey=True)
    changed_cells = comparison.winners.to_dict("records")
    best_layouts = ((cell, cell[column]) for cell in changed_cells for column in ("best_a", "best_b"))
    winner_keys = {(cell["model"], cell["nodes"], layout) for cell, layout in best_layouts}
    short_a, short_b = (name if len(name) <= 14 else f"{name[:12]}.." for name in comparison.names)
    for model, axes in panels.items():
        axes.axhspan(1 / (1 + comparison.threshold), 1 + comparison.threshold, color="#efefef", zorder=0)
        axes.axhline(1, color=GREY, linewidth=0.8)
        is_of_model = compared_layouts["model"] == model
        _draw_ratios(axes, compared_layouts[is_of_model].reset_index(drop=True), winner_keys)
        axes.describe(model, "layouts, sorted by ratio", f"step time of {short_b} / {short_a}")
        axes.log_scale("y", compared_layouts["ratio"].min(), compared_layouts["ratio"].max(), "{x:g} x")
    return figure


def _draw_ratios(axes: Panel, layouts: pd.DataFrame, winner_keys: Set[tuple[object, ...]]) -> None:
    """Draws the ratios of the layouts of one model, frames around winners, and the name of the largest ratio.

    Args:
        layouts: the layouts, sorted by their ratio.
        winner_keys: model, nodes and layout of those that are the best of a cell in only one of A and B.
    """
    findings, ratios = layouts["finding"], layouts["ratio"]
    for finding, look in _LOOK_BY_FINDING.items():
        marked_ratios = ratios[findings.isna() if finding is None else findings == finding]
        axes.plot(marked_ratios.index + 1, marked_ratios, linestyle="", markeredgewidth=0, **look)
    layout_keys = zip(layouts["model"], layouts["nodes"], layouts["layout"], strict=True)
    is_winner = [key in winner_keys for key in layout_keys]
    if any(is_winner):  # an empty plot has no extent, which matplotlib's layout of the figure needs
        framed_ratios = ratios[is_winner]
        axes.plot(framed_ratios.index + 1, framed_ratios, linestyle="", clip_on=False, **_FRAME_LOOK)
    slowest_layout, num_layouts = layouts.iloc[-1], len(layouts)
    # The largest ratio has its name above itself, where no other point can be.
    halign, valign, offset_pt = ("right", "bottom", (4, 8)) if num_layouts > 1 else ("left", "center", (9, 0))
    font: dict[str, Any] = {"fontsize": 6, "color": GREY, "ha": halign, "va": valign}
    slowest_point = num_layouts, slowest_layout["ratio"]
    axes.annotate(slowest_layout["layout"], slowest_point, offset_pt, textcoords="offset points", **font)
    axes.margins(y=0.15)
    tick_step = max(1, round(num_layouts / 10))
    axes.set_xticks(sorted({1, num_layouts, *range(tick_step, num_layouts - tick_step // 2, tick_step)}))
    axes.set_xlim(0.2, num_layouts + 1)


def _note_lines(comparison: Comparison) -> Iterator[str]:
    """The lines under the figure: which runs are left out, and which cells have another best layout in B."""
    changed_facts = [(name, values) for name, values in comparison.differing.items() if name in MAY_DIFFER]
    change_texts = [f"{name} {value_a} -> {value_b}" for name, (value_a, value_b) in changed_facts]
    no_change_text = "No known change of hardware, kernel or precision."
    changes_text = f"From A to B: {', '.join(change_texts)}." if change_texts else no_change_text
    yield f"A: {comparison.names[0]}. B: {comparison.names[1]}. {changes_text}"
    yield " ".join(comparison.notes)
    yield "Grey band: differences within the threshold. Above 1 x, B is slower."
    changed_cells = comparison.winners.to_dict("records")
    if changed_cells:
        yield "Cells with a different best layout in B:"
    for cell in changed_cells[:_MAX_NAMED_CELLS]:
        yield f"{cell['model']} on {counted(cell['nodes'], 'node')}: {cell['best_a']} -> {cell['best_b']}"
    if len(changed_cells) > _MAX_NAMED_CELLS:
        yield f"and {len(changed_cells) - _MAX_NAMED_CELLS:,} more"
