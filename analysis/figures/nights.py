"""Draws the rates of runs over nights, with a panel for each cell; runs that changed have colours."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ultrabench.analysis.cells import SETTINGS, set_apart
from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import Panel, looks, panel_grid
from ultrabench.analysis.history import History, Series
from ultrabench.errors import counted

_MAX_NAMED_RUNS = 8
"""Number of runs with a change that have a colour and a name."""
_MAX_TICKS = 6
_VERSION_LOOK: dict[str, Any] = {
    "label": "change of commit, version or cluster", "color": "#de8f05", "linestyle": ":", "linewidth": 1.2,
}  # fmt: skip
_OTHER_LOOK: dict[str, Any] = {
    "label": "other runs", "color": "#b5b5b5", "linewidth": 0.8, "marker": ".", "markersize": 3,
}  # fmt: skip


def figure(history: History) -> Figure:
    """The rates of all runs over those of their first nights, and a line where significant changes begin."""
    cells = defaultdict[str, list[Series]](list)
    cell_by_series = [series.cell for series in history.series]
    settings_by_series = set_apart(cell_by_series, [name for name in SETTINGS if name in cell_by_series[0]])
    for series, settings in zip(history.series, settings_by_series, strict=True):
        cell_name = f"{series.cell['model']} on {counted(series.cell['nodes'], 'node')}"
        cells[" | ".join((cell_name, *([", ".join(settings)] if settings else [])))].append(series)
    change_texts = [f"{number}: {history.text(move)}." for number, move in enumerate(history.moves, 1)]
    title = f"Rates over {counted(len(history.nights), 'night')}: {counted(len(history.moves), 'significant change')}"
    changed_runs = {f"{name}, {s.layout}": s for name, group in cells.items() for s in group if s.changes}
    styles = looks([*changed_runs][:_MAX_NAMED_RUNS], ordered=False, linewidth=1.2, markersize=3.5)
    legend = [*styles.values(), *([_OTHER_LOOK] if styles else []), _VERSION_LOOK]
    notes = "\n".join([*change_texts, *history.notes])
    figure, panels = panel_grid(cells, title=title, notes=notes, legend=legend, ncols=1)
    for name, group in cells.items():
        for series in sorted(group, key=lambda s: bool(s.changes)):
            first_change = min(series.changes, default=len(series.rates))
            rates = np.array([rate or np.nan for rate in series.rates])
            usual_rate = np.median(rates[[n for n in series.counted_nights if n < first_change]])
            panels[name].plot(rates / usual_rate, **styles.get(f"{name}, {series.layout}", _OTHER_LOOK))
        _mark_nights(panels[name], history, group)
        panels[name].describe(name, "night", "rate / first nights")
    return figure


def _mark_nights(axes: Panel, history: History, group: Sequence[Series]) -> None:
    """Names nights, and marks those with other versions and those in which changes of this cell begin."""
    for night in range(len(history.nights)):
        if history.differing(night):
            axes.axvline(night - 0.5, **_VERSION_LOOK)
    for number, move in enumerate(history.moves, 1):
        if any(history.series[n] in group for n in move.series):
            axes.axvline(move.night - 0.5, color=GREY, linestyle="--", linewidth=0.8)
            placement: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(str(number), (move.night - 0.5, 1), (3, 0), fontsize=8, va="top", **placement)
    ticks = range(0, len(history.nights), -(-len(history.nights) // _MAX_TICKS))
    axes.set_xticks(ticks, [history.nights[n].name for n in ticks])
    axes.yaxis.set_major_formatter("{x:.3g} x")
