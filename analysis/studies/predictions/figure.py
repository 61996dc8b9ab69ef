"""Draws predicted against measured step times and memory, and for a profile their ratio in each regime."""

from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.runs import candidate_runs, final_rows, ok_runs, runs_note
from ultrabench.analysis.figures.style import LookByValue, Panel, axis_title, drawn, panel_grid, series_looks
from ultrabench.errors import ConfigError, counted
from ultrabench.result import Status

_TIME_COLUMNS, _MEMORY_COLUMNS = ("step_time_s", "predicted_step_time_s"), ("memory_gib", "predicted_gib")
"""The column of measured values and that of predicted values."""
_COLUMNS_BY_AXIS_TITLE = {
    axis_title("step_time_s", "step time"): _TIME_COLUMNS,
    axis_title("peak_mem_reserved_bytes", "peak memory"): _MEMORY_COLUMNS,
}
_EQUAL_LINE_LOOK: dict[str, Any] = {"label": "equal", "color": GREY, "linewidth": 0.8}


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The runs that may win and that were predicted before they ran, with `predicted_gib`, and the note.

    Raises:
        ConfigError: no run has a prediction.
    """
    all_runs = ok_runs(final_rows(table))
    candidates = candidate_runs(all_runs)
    predicted_gib = drawn("predicted_peak_mem_bytes", candidates["predicted_peak_mem_bytes"])
    candidates = candidates.assign(predicted_gib=predicted_gib)
    predicted_runs = candidates[candidates[[_TIME_COLUMNS[1], _MEMORY_COLUMNS[1]]].notna().any(axis=1)]
    if not len(predicted_runs):
        problem_text = f"{counted(len(candidates), 'run')}, none with a prediction (imported rows have none)"
        todo = "predict them with: ultrabench predict validate FILE.parquet -o FILE.png"
        raise ConfigError(f"{problem_text}; {todo}")
    hint = "For those of the current profile: ultrabench predict validate FILE.parquet -o FILE.png"
    note = f"The predictions were made before the runs. {hint}\n{runs_note(table, all_runs)}"
    return predicted_runs, note


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """Panels of the step time and the memory of each run, and a third one if `points` has the column `regime`."""
    panel_names = list(points["panel"].unique())
    heading = f"Predicted against measured, {counted(len(points), 'run')}: {title}"
    look_by_panel = series_looks(panel_names, is_ordered=False, linestyle="", markersize=3.5)
    legend = [*look_by_panel.values(), _EQUAL_LINE_LOOK]
    panel_keys = [*_COLUMNS_BY_AXIS_TITLE, *(["regime"] if "regime" in points else [])]
    figure, panels = panel_grid(panel_keys, title=heading, notes=notes, legend=legend, height=3.1)
    for quantity_title, value_columns in _COLUMNS_BY_AXIS_TITLE.items():
        _draw_scatter(panels[quantity_title], points, *value_columns, look_by_panel)
        quantity_name = quantity_title.partition(" (")[0].capitalize()
        panels[quantity_title].describe(
            quantity_name, f"measured {quantity_title}", f"predicted {quantity_title}"
        )
    if "regime" in panels:
        _draw_ratio_boxes(panels["regime"], points)
    return figure


def validation_figure(rows: pd.DataFrame, profile_name: str) -> Figure:
    """The figure of the healthy runs that `predict validate` has predicted with a profile."""
    runs = rows[rows.healthy & (rows.status == Status.OK) & rows.step_time_s.notna()]
    runs = runs.sort_values(["num_params", "model", "run_id", "step_time_s"])
    memory_gib, predicted_gib = (
        drawn("predicted_peak_mem_bytes", runs[name].astype(float))
        for name in ("peak_mem_bytes", "predicted_peak_mem_bytes")
    )
    runs = runs.assign(panel=runs.model, memory_gib=memory_gib, predicted_gib=predicted_gib)
    note = f"Drawn: {len(runs):,} of {counted(len(rows), 'row')}, which are ok, healthy and have a step time."
    return figure(runs, title=f"profile {profile_name}", notes=note)


def _draw_scatter(axes: Panel, points: pd.DataFrame, x: str, y: str, look_by_panel: LookByValue) -> None:
    """Draws a marker for each run and the line of equal values, on logarithmic scales.

    Args:
        x: column of the measured values.
        y: column of the predicted values.
    """
    positive_points = points[(points[x] > 0) & (points[y] > 0)]
    axes.set(xscale="log", yscale="log")
    if not len(positive_points):
        axes.remark("not recorded or not predicted")
        return
    limits = [positive_points[[x, y]].min().min() / 1.2, positive_points[[x, y]].max().max() * 1.2]
    axes.plot(limits, limits, **_EQUAL_LINE_LOOK)
    for panel_name, panel_runs in positive_points.groupby("panel"):
        axes.plot(panel_runs[x], panel_runs[y], alpha=0.65, **look_by_panel[panel_name])
    for xy in ("x", "y"):
        axes.log_scale(xy, *limits)
    axes.set(xlim=limits, ylim=limits)


def _draw_ratio_boxes(axes: Panel, points: pd.DataFrame) -> None:
    """Draws the measured over the predicted step times of each regime as boxes."""
    time_ratios = points[_TIME_COLUMNS[0]] / points[_TIME_COLUMNS[1]]
    ratios_by_regime = time_ratios.groupby(points["regime"]).agg(list)
    if len(ratios_by_regime):
        regime_labels = [str(regime).replace("_", "\n") for regime in ratios_by_regime.index]
        axes.boxplot([*ratios_by_regime], tick_labels=regime_labels, whis=(10, 90), showfliers=False)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.describe("Step time by regime", "box: quartiles, whiskers: 10 to 90 %", "measured / predicted")
