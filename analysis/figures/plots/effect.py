"""Draws what each value of a knob is worth, all else equal: the ratio with its interval, and the single pairs."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.effects import CONFIDENCE, FEWEST_PAIRS, competing, effects, pairs, require_pairs
from ultrabench.analysis.figures.picture import DARK, GREY
from ultrabench.analysis.figures.runs import final
from ultrabench.analysis.figures.style import COLOURS, panel_grid
from ultrabench.analysis.knobs import in_order, value_text
from ultrabench.errors import counted
from ultrabench.layout import TITLES

_DOT: dict[str, Any] = {
    "color": COLOURS[0], "marker": "o", "markersize": 3, "linestyle": "", "markeredgewidth": 0, "alpha": 0.3,
}  # fmt: skip
_MEAN: dict[str, Any] = {"color": DARK, "marker": "o", "markersize": 5, "linewidth": 1.4}
_BASELINE: dict[str, Any] = {
    "color": DARK, "marker": "s", "markersize": 5, "linestyle": "", "markerfacecolor": "white",
}  # fmt: skip
_SPREAD = 0.16
"""Half the width over which the pairs of a value are spread, where values are 1 apart."""


def points(table: pa.Table, axis: str | None) -> tuple[pd.DataFrame, str]:
    """One row for each pair of runs that differ only in the axis, and the note.

    The columns are `value`, `against` (the baseline), `pair_ratio`, of the value `ratio`, `low`, `high` and
    `pairs`, and `models`, the models of all pairs.

    Raises:
        ConfigError: the axis is unknown or did not vary, or no two runs differ only in it.
    """
    final(table)  # it says what to do about a table without runs
    measured = competing(table)
    axis = measured.require_axis(axis)
    of_runs = pairs(measured, axis)
    require_pairs(measured, axis, of_runs)
    columns = ["value", "ratio", "low", "high", "pairs"]
    drawn = of_runs.merge(pd.DataFrame(effects(measured, axis))[columns], on="value")
    models = measured.runs.loc[of_runs["left"]].sort_values(["num_params", "model"])["model"].unique()
    drawn = drawn.assign(pair_ratio=np.exp(drawn["log_ratio"]), models=", ".join(models))
    return drawn.sort_values(
        ["block", "pair_ratio"], ignore_index=True
    ), f"{measured.note} {made_with(table)}"


def figure(drawn: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """One panel: the values of the axis, their ratios of speeds to the baseline with intervals, and the pairs."""
    baseline, models = drawn[["against", "models"]].iloc[0]
    heading = f"Speedup by {axis}, all else equal: {title}, {models}"
    about = f"Bars: {100 * CONFIDENCE:.0f} % interval of the mean ratio; no bar: fewer than {FEWEST_PAIRS} pairs, or too few allocations."
    keys = [
        {"label": f"geometric mean and {100 * CONFIDENCE:.0f} % interval", **_MEAN},
        {"label": f"pair of runs that differ only in {axis}", **_DOT},
        {"label": "baseline", **_BASELINE},
    ]
    whole, panels = panel_grid([axis], title=heading, notes=f"{about}\n{notes}", keys=keys, height=3.0)
    axes = panels[axis]
    axes.axhline(1, color=GREY, linewidth=0.8)
    values = in_order(axis, {baseline, *drawn["value"]})
    names = []
    for place, value in enumerate(values):
        of_value = drawn[drawn["value"] == value]
        if value == baseline:
            axes.plot(place, 1, **_BASELINE)
            names.append(f"{value_text(axis, value)}\nbaseline")
            continue
        spread = np.linspace(-_SPREAD, _SPREAD, len(of_value)) if len(of_value) > 1 else 0.0
        axes.plot(place + spread, of_value["pair_ratio"], **_DOT)
        ratio, low, high, number = of_value[["ratio", "low", "high", "pairs"]].astype(float).iloc[0]
        axes.plot([place, place], [low, high], color=_MEAN["color"], linewidth=_MEAN["linewidth"])
        axes.plot(place, ratio, **_MEAN)
        names.append(f"{value_text(axis, value)}\n{counted(int(number), 'pair')}")
    axes.categories(names)
    axes.describe("", TITLES.get(axis, axis), f"speed relative to {axis}={value_text(axis, baseline)}")
    ends = drawn[["pair_ratio", "low", "high"]].astype(float)
    axes.log_scale("y", min(1.0, ends.min().min()), max(1.0, ends.max().max()), "{x:g} x")
    return whole
