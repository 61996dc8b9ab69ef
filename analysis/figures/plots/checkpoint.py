"""Draws what saving and loading the state costs over the number of nodes: seconds, bytes/s a node, steps lost."""

from collections import Counter
from itertools import product
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.runs import final_rows, runs_with_value
from ultrabench.analysis.figures.style import drawn, panel_grid, series_looks
from ultrabench.analysis.results.cells import made_with
from ultrabench.analysis.results.columns import column_of
from ultrabench.errors import counted
from ultrabench.result import SLOWER, Status

_SERIES = {
    "save": "checkpoint_save_s",
    "load": "checkpoint_load_s",
    "async save": "checkpoint_async_s",
    "async save, blocking": "checkpoint_async_blocking_s",
    "rate of save": "checkpoint_bytes_per_s_per_node",
    "steps lost during the async save": "checkpoint_async_lost_steps",
}
"""Series -> its column; the columns of one unit share a panel."""
_UNIT_BY_SERIES = {series: column_of(column).unit for series, column in _SERIES.items()}
_UNITS = tuple(dict.fromkeys(_UNIT_BY_SERIES.values()))


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The ok runs that measured a checkpoint, with a row for each repeat, and the note.

    Raises:
        ConfigError: no run has them.
    """
    rows = final_rows(table, more_columns=("checkpoint_cause",))
    todo = "measure it with: ultrabench sweep launch measure.checkpoint=true"
    ok_runs = rows[rows["status"] == Status.OK]
    saved_runs, _ = runs_with_value(ok_runs, "checkpoint_save_s", "checkpoint", todo)
    unsaved_runs = ok_runs[ok_runs["checkpoint_save_s"].isna()]
    unsaved_text = f"{counted(len(unsaved_runs), 'run')} without checkpoint: {_reasons_text(unsaved_runs)}"
    excluded_text = f"Excluded: {unsaved_text}.\n" if len(unsaved_runs) else ""
    caption = "Lines: median of layouts and repeats; bands: minimum to maximum. Times are those of the slowest rank."
    caption += (
        " Loads may be served from the page cache of the nodes; steps lost do not include the blocking time."
    )
    return saved_runs, f"{caption}\n{excluded_text}{made_with(table)}"


def _reasons_text(unsaved_runs: pd.DataFrame) -> str:
    """The reasons why these runs measured no checkpoint, such as
    `2 stopped early as slower (measure.race=null prevents this), 1 disk_full`.
    """
    slower_text = "stopped early as slower (measure.race=null prevents this)"
    reasons = unsaved_runs["checkpoint_cause"].astype(object).fillna("not requested")
    run_counts = Counter(reasons.mask(unsaved_runs["stopped"] == SLOWER, slower_text))
    return ", ".join(f"{num_runs:,} {reason}" for reason, num_runs in sorted(run_counts.items()))


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A row of panels for each model, all with the same node counts; each series has a line."""
    node_counts = sorted(map(int, points["nodes"].unique()))
    look_by_series = series_looks([*_SERIES], is_ordered=False, markersize=4, markeredgewidth=0)
    panel_keys, heading = product(points["panel"].unique(), _UNITS), f"Checkpoints over node counts: {title}"
    options: dict[str, Any] = {"legend": look_by_series.values(), "max_columns": len(_UNITS)}
    figure, panels = panel_grid(panel_keys, title=heading, notes=notes, **options)
    points = points.assign(position=points["nodes"].map(node_counts.index))
    for (panel_name, panel_unit), axes in panels.items():
        position_groups = points[points["panel"] == panel_name].groupby("position")
        for series_name, column in _SERIES.items():
            if _UNIT_BY_SERIES[series_name] == panel_unit:
                bands = drawn(column, position_groups[column].agg(["min", "median", "max"]).dropna())
                axes.draw_line_in_band(bands.index, *bands.to_numpy().T, **look_by_series[series_name])
        axes.describe(panel_name, "nodes", panel_unit.axis.symbol)
        axes.set_categories(node_counts)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return figure
