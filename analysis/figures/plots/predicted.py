"""Draws predicted against measured step times and memory, and for a profile their ratio in each regime."""

from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.runs import final, may_be_best, measured, notes
from ultrabench.analysis.figures.style import Looks, Panel, looks, panel_grid
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB

_TIME_COLUMNS, _MEMORY_COLUMNS = ("step_time_s", "predicted_step_time_s"), ("memory_gib", "predicted_gib")
"""The column of measured and that of predicted values."""
_COLUMNS = {"step time (s)": _TIME_COLUMNS, "peak memory (GiB)": _MEMORY_COLUMNS}
_EQUAL_LOOK: dict[str, Any] = {"label": "equal", "color": GREY, "linewidth": 0.8}


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The runs that may win and that were predicted before they ran, with `predicted_gib`, and the note.

    Raises:
        ConfigError: no run has a prediction.
    """
    all_runs = measured(final(table))
    runs = may_be_best(all_runs)
    runs = runs.assign(predicted_gib=runs["predicted_peak_mem_bytes"] / GIB)
    runs_predicted = runs[runs[[_TIME_COLUMNS[1], _MEMORY_COLUMNS[1]]].notna().any(axis=1)]
    if not len(runs_predicted):
        fact = f"{counted(len(runs), 'run')}, none with a prediction (imported rows have none)"
        raise ConfigError(f"{fact}; predict them with: ultrabench predict validate FILE.parquet -o FILE.png")
    hint = "For those of the current profile: ultrabench predict validate FILE.parquet -o FILE.png"
    note = f"The predictions were made before the runs. {hint}\n{notes(table, all_runs)}"
    return runs_predicted, note


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """Panels of the step time and the memory of each run; a third one if `drawn` has the column `regime`."""
    names = list(points["panel"].unique())
    heading = f"Predicted against measured, {counted(len(points), 'run')}: {title}"
    styles = looks(names, ordered=False, linestyle="", markersize=3.5)
    regimes = ["regime"] if "regime" in points else []
    legend = [*styles.values(), _EQUAL_LOOK]
    figure, panels = panel_grid([*_COLUMNS, *regimes], title=heading, notes=notes, legend=legend, height=3.1)
    for axis_title, columns in _COLUMNS.items():
        _scatter(panels[axis_title], points, *columns, styles)
        name = axis_title.partition(" (")[0].capitalize()
        panels[axis_title].describe(name, f"measured {axis_title}", f"predicted {axis_title}")
    for regime in regimes:
        _ratios(panels[regime], points)
    return figure


def validated(rows: pd.DataFrame, profile: str) -> Figure:
    """The figure of the healthy runs that `ultrabench.analysis.predict.validate` has predicted with a profile."""
    runs = rows[rows.healthy & (rows.status == "ok") & rows.step_time_s.notna()]
    runs = runs.sort_values(["num_params", "model", "run_id", "step_time_s"])
    peaks_gib = runs[["peak_mem_reserved_bytes", "predicted_peak_mem_bytes"]].astype(float) / GIB
    runs = runs.assign(panel=runs.model, memory_gib=peaks_gib.iloc[:, 0], predicted_gib=peaks_gib.iloc[:, 1])
    note = f"Drawn: {len(runs):,} of {counted(len(rows), 'row')}, which are ok, healthy and have a step time."
    return figure(runs, title=f"profile {profile}", notes=note)


def _scatter(axes: Panel, points: pd.DataFrame, measured: str, predicted: str, styles: Looks) -> None:
    """Draws a marker for each run and the line of equal values, on logarithmic scales."""
    positive_points = points[(points[measured] > 0) & (points[predicted] > 0)]
    axes.set(xscale="log", yscale="log")
    if not len(positive_points):
        axes.remark("not recorded or not predicted")
        return
    values = positive_points[[measured, predicted]]
    limits = [values.min().min() / 1.2, values.max().max() * 1.2]
    axes.plot(limits, limits, **_EQUAL_LOOK)
    for name, panel_runs in positive_points.groupby("panel"):
        axes.plot(panel_runs[measured], panel_runs[predicted], alpha=0.65, **styles[name])
    for direction in ("x", "y"):
        axes.log_scale(direction, *limits)
    axes.set(xlim=limits, ylim=limits)


def _ratios(axes: Panel, points: pd.DataFrame) -> None:
    """Draws the measured over the predicted step times of each regime as boxes."""
    ratios = (points[_TIME_COLUMNS[0]] / points[_TIME_COLUMNS[1]]).groupby(points["regime"]).agg(list)
    if len(ratios):
        names = [str(name).replace("_", "\n") for name in ratios.index]
        axes.boxplot([*ratios], tick_labels=names, whis=(10, 90), showfliers=False)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.describe("Step time by regime", "box: quartiles, whiskers: 10 to 90 %", "measured / predicted")
