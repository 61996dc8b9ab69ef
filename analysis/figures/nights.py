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

_MOST_NAMED = 8
"""Number of runs with a change that have a colour and a name."""
_MOST_TICKS = 6
_OTHER_VERSION: dict[str, Any] = {
    "label": "change of commit, version or cluster", "color": "#de8f05", "linestyle": ":", "linewidth": 1.2,
}  # fmt: skip
_OTHERS: dict[str, Any] = {
    "label": "other runs", "color": "#b5b5b5", "linewidth": 0.8, "marker": ".", "markersize": 3,
}  # fmt: skip


def figure(history: History) -> Figure:
    """The rates of all runs over those of their first nights, and a line where significant changes begin."""
    cells = defaultdict[str, list[Series]](list)
    of_series = [series.cell for series in history.series]
    names = set_apart(of_series, [name for name in SETTINGS if name in of_series[0]])
    for series, settings in zip(history.series, names, strict=True):
        heading = f"{series.cell['model']} on {counted(series.cell['nodes'], 'node')}"
        cells[" | ".join((heading, *([", ".join(settings)] if settings else [])))].append(series)
    texts = [f"{number}: {history.text(move)}." for number, move in enumerate(history.moves, 1)]
    title = f"Rates over {counted(len(history.nights), 'night')}: {counted(len(history.moves), 'significant change')}"
    changed = {f"{name}, {s.layout}": s for name, of_cell in cells.items() for s in of_cell if s.changes}
    look_of = looks([*changed][:_MOST_NAMED], ordered=False, linewidth=1.2, markersize=3.5)
    keys = [*look_of.values(), *([_OTHERS] if look_of else []), _OTHER_VERSION]
    notes = "\n".join([*texts, *history.notes])
    whole, panels = panel_grid(cells, title=title, notes=notes, keys=keys, columns=1)
    for name, of_cell in cells.items():
        for series in sorted(of_cell, key=lambda s: bool(s.changes)):
            first_change = min(series.changes, default=len(series.rates))
            rates = np.array([rate or np.nan for rate in series.rates])
            unit = np.median(rates[[n for n in series.counted_nights if n < first_change]])
            panels[name].plot(rates / unit, **look_of.get(f"{name}, {series.layout}", _OTHERS))
        _mark_nights(panels[name], history, of_cell)
        panels[name].describe(name, "night", "rate / first nights")
    return whole


def _mark_nights(axes: Panel, history: History, of_cell: Sequence[Series]) -> None:
    """Names nights, and marks those with other versions and those in which changes of this cell begin."""
    for night in range(len(history.nights)):
        if history.differing(night):
            axes.axvline(night - 0.5, **_OTHER_VERSION)
    for number, move in enumerate(history.moves, 1):
        if any(history.series[n] in of_cell for n in move.series):
            axes.axvline(move.night - 0.5, color=GREY, linestyle="--", linewidth=0.8)
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(str(number), (move.night - 0.5, 1), (3, 0), fontsize=8, va="top", **place)
    ticks = range(0, len(history.nights), -(-len(history.nights) // _MOST_TICKS))
    axes.set_xticks(ticks, [history.nights[n].name for n in ticks])
    axes.yaxis.set_major_formatter("{x:.3g} x")
