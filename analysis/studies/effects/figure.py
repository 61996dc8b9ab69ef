"""Draws what each value of a knob is worth, all else equal: the ratio with its interval, and the single pairs."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import DARK, GREY
from ultrabench.analysis.figures.runs import final_rows
from ultrabench.analysis.figures.style import COLOURS, panel_grid
from ultrabench.analysis.results.cells import made_with
from ultrabench.analysis.results.knobs import in_order, value_text
from ultrabench.analysis.studies.effects.effects import CONFIDENCE, competing, effects, pairs, require_pairs
from ultrabench.errors import counted
from ultrabench.layout import TITLES
from ultrabench.sweep.running.early_stopping import FEWEST_PAIRS

_PAIR_LOOK: dict[str, Any] = {
    "color": COLOURS[0], "marker": "o", "markersize": 3, "linestyle": "", "markeredgewidth": 0, "alpha": 0.3,
}  # fmt: skip
_MEAN_LOOK: dict[str, Any] = {"color": DARK, "marker": "o", "markersize": 5, "linewidth": 1.4}
_BASELINE_LOOK: dict[str, Any] = {
    "color": DARK, "marker": "s", "markersize": 5, "linestyle": "", "markerfacecolor": "white",
}  # fmt: skip
_MAX_X_OFFSET = 0.16
"""Largest distance of the point of a pair from the middle of its value, where values are 1 apart."""


def points(table: pa.Table, axis: str | None) -> tuple[pd.DataFrame, str]:
    """One row for each pair of runs that differ only in the axis, and the note.

    The columns are `value`, `against` (the baseline), `pair_ratio`, of the value `ratio`, `low`, `high` and
    `pairs`, and `models`, the names of the models of all pairs in one text.

    Raises:
        ConfigError: the axis is unknown or did not vary, or no two runs differ only in it.
    """
    final_rows(table)  # raises ConfigError where the table has no runs
    competing_runs = competing(table)
    axis = competing_runs.require_axis(axis)
    pair_rows = pairs(competing_runs, axis)
    require_pairs(competing_runs, axis, pair_rows)
    effect_columns = ["value", "ratio", "low", "high", "pairs"]
    rows = pair_rows.merge(pd.DataFrame(effects(competing_runs, axis))[effect_columns], on="value")
    paired_runs = competing_runs.runs.loc[pair_rows["left"]].sort_values(["num_params", "model"])
    model_names = ", ".join(paired_runs["model"].unique())
    rows = rows.assign(pair_ratio=np.exp(rows["log_ratio"]), models=model_names)
    rows = rows.sort_values(["block", "pair_ratio"], ignore_index=True)
    return rows, f"{competing_runs.note} {made_with(table)}"


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """One panel: the values of the axis, their ratios of speeds to the baseline with intervals, and the pairs."""
    baseline_value, model_names = points[["against", "models"]].iloc[0]
    heading = f"Speedup by {axis}, all else equal: {title}, {model_names}"
    caption = (
        f"Bars: {100 * CONFIDENCE:.0f} % interval of the mean ratio; no bar: "
        f"fewer than {FEWEST_PAIRS} pairs, or too few allocations."
    )
    legend = [
        {"label": f"geometric mean and {100 * CONFIDENCE:.0f} % interval", **_MEAN_LOOK},
        {"label": f"pair of runs that differ only in {axis}", **_PAIR_LOOK},
        {"label": "baseline", **_BASELINE_LOOK},
    ]
    figure, panels = panel_grid([axis], title=heading, notes=f"{caption}\n{notes}", legend=legend, height=3.0)
    axes = panels[axis]
    axes.axhline(1, color=GREY, linewidth=0.8)
    axis_values = in_order(axis, {baseline_value, *points["value"]})
    tick_labels = []
    for x, value in enumerate(axis_values):
        value_pairs = points[points["value"] == value]
        if value == baseline_value:
            axes.plot(x, 1, **_BASELINE_LOOK)
            tick_labels.append(f"{value_text(axis, value)}\nbaseline")
            continue
        max_offset = _MAX_X_OFFSET if len(value_pairs) > 1 else 0.0
        pair_xs = x + np.linspace(-max_offset, max_offset, len(value_pairs))
        axes.plot(pair_xs, value_pairs["pair_ratio"], **_PAIR_LOOK)
        ratio, low, high, num_pairs = value_pairs[["ratio", "low", "high", "pairs"]].astype(float).iloc[0]
        axes.plot([x, x], [low, high], color=_MEAN_LOOK["color"], linewidth=_MEAN_LOOK["linewidth"])
        axes.plot(x, ratio, **_MEAN_LOOK)
        tick_labels.append(f"{value_text(axis, value)}\n{counted(int(num_pairs), 'pair')}")
    axes.set_categories(tick_labels)
    axes.describe("", TITLES.get(axis, axis), f"speed relative to {axis}={value_text(axis, baseline_value)}")
    ratios = points[["pair_ratio", "low", "high"]].astype(float)
    axes.log_scale("y", min(1.0, ratios.min().min()), max(1.0, ratios.max().max()), "{x:g} x")
    return figure
