"""Draws the rates of runs over nights, with a panel for each cell; runs that changed have colours."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import Panel, panel_grid, series_looks
from ultrabench.analysis.results.cells import SETTINGS, set_apart
from ultrabench.analysis.studies.history.history import History, Series
from ultrabench.errors import counted

_MAX_NAMED_RUNS = 8
"""Number of runs with a change that have a colour and a name."""
_MAX_TICK_LABELS = 6
"""Number of nights that have a label on the x axis."""
_VERSION_CHANGE_LOOK: dict[str, Any] = {
    "label": "change of commit, version or cluster", "color": "#de8f05", "linestyle": ":", "linewidth": 1.2,
}  # fmt: skip
_OTHER_RUNS_LOOK: dict[str, Any] = {
    "label": "other runs", "color": "#b5b5b5", "linewidth": 0.8, "marker": ".", "markersize": 3,
}  # fmt: skip


def figure(history: History) -> Figure:
    """The rates of all runs over those of their first nights, and a line where significant changes begin."""
    panel_runs = defaultdict[str, list[Series]](list)
    series_cells = [series.cell for series in history.series]
    distinct_settings = set_apart(series_cells, [column for column in SETTINGS if column in series_cells[0]])
    for series, settings in zip(history.series, distinct_settings, strict=True):
        cell_name = f"{series.cell['model']} on {counted(series.cell['nodes'], 'node')}"
        panel_runs[" | ".join((cell_name, *([", ".join(settings)] if settings else [])))].append(series)
    move_texts = [f"{number}: {history.text(move)}." for number, move in enumerate(history.moves, 1)]
    title = f"Rates over {counted(len(history.nights), 'night')}: {counted(len(history.moves), 'significant change')}"
    changed_runs = ((name, run) for name, runs in panel_runs.items() for run in runs if run.changes)
    run_names = [*dict.fromkeys(f"{name}, {run.layout}" for name, run in changed_runs)][:_MAX_NAMED_RUNS]
    look_by_run = series_looks(run_names, is_ordered=False, linewidth=1.2, markersize=3.5)
    legend = [*look_by_run.values(), *([_OTHER_RUNS_LOOK] if look_by_run else []), _VERSION_CHANGE_LOOK]
    notes = "\n".join([*move_texts, *history.notes])
    figure, panels = panel_grid(panel_runs, title=title, notes=notes, legend=legend, max_columns=1)
    for panel_name, axes in panels.items():
        for series in sorted(panel_runs[panel_name], key=lambda series: bool(series.changes)):
            first_change_night = min(series.changes, default=len(series.rates))
            rates = np.array([rate or np.nan for rate in series.rates])
            first_nights = [night for night in series.counted_nights if night < first_change_night]
            look = look_by_run.get(f"{panel_name}, {series.layout}", _OTHER_RUNS_LOOK)
            axes.plot(rates / np.median(rates[first_nights]), **look)
        _mark_nights(axes, history, panel_runs[panel_name])
        axes.describe(panel_name, "night", "rate / first nights")
    return figure


def _mark_nights(axes: Panel, history: History, panel_runs: Sequence[Series]) -> None:
    """Labels nights, and marks those with other versions and those in which changes of runs of this panel begin."""
    for night in range(len(history.nights)):
        if history.differing(night):
            axes.axvline(night - 0.5, **_VERSION_CHANGE_LOOK)
    for number, move in enumerate(history.moves, 1):
        if any(history.series[index] in panel_runs for index in move.series):
            axes.axvline(move.night - 0.5, color=GREY, linestyle="--", linewidth=0.8)
            options: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(str(number), (move.night - 0.5, 1), (3, 0), fontsize=8, va="top", **options)
    tick_nights = range(0, len(history.nights), -(-len(history.nights) // _MAX_TICK_LABELS))
    axes.set_xticks(tick_nights, [history.nights[night].name for night in tick_nights])
    axes.yaxis.set_major_formatter("{x:.3g} x")
