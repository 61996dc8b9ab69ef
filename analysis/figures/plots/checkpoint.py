"""Draws what saving and loading the state costs over the number of nodes: seconds, bytes/s a node, steps lost."""

from collections import Counter
from itertools import product

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.runs import final, known
from ultrabench.analysis.figures.style import looks, panel_grid
from ultrabench.errors import counted
from ultrabench.result import SLOWER

_SERIES = {
    "save": ("checkpoint_save_s", 1.0, "seconds"),
    "load": ("checkpoint_load_s", 1.0, "seconds"),
    "async save": ("checkpoint_async_s", 1.0, "seconds"),
    "async save, blocking": ("checkpoint_async_blocking_s", 1.0, "seconds"),
    "rate of save": ("checkpoint_bytes_per_s_per_node", 1e-9, "GB/s per node"),
    "steps lost during the async save": ("checkpoint_async_lost_steps", 1.0, "steps lost"),
}
"""Series -> its column, the factor from the column to the unit, and the unit; each unit has a panel."""
_UNITS = tuple(dict.fromkeys(unit for _, _, unit in _SERIES.values()))


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The ok runs with the numbers of a checkpoint, each repeat of a layout, and the note.

    Raises:
        ConfigError: no run has them.
    """
    runs = final(table, more_columns=("checkpoint_cause",))
    todo = "measure it with: ultrabench sweep launch measure.checkpoint=true"
    ok_runs = runs[runs["status"] == "ok"]
    saved_runs, _ = known(ok_runs, "checkpoint_save_s", "checkpoint", todo)
    unsaved = ok_runs[ok_runs["checkpoint_save_s"].isna()]
    count = counted(len(unsaved), "run")
    excluded_text = f"Excluded: {count} without checkpoint: {_reasons(unsaved)}.\n" if len(unsaved) else ""
    caption = "Lines: median of layouts and repeats; bands: minimum to maximum. Times are those of the slowest rank."
    caption += (
        " Loads may be served from the page cache of the nodes; steps lost do not include the blocking time."
    )
    return saved_runs, f"{caption}\n{excluded_text}{made_with(table)}"


def _reasons(unsaved: pd.DataFrame) -> str:
    """Why these runs have no numbers, such as `2 stopped early as slower (measure.race=null prevents this), 1 disk_full`."""
    slower_text = "stopped early as slower (measure.race=null prevents this)"
    reasons = unsaved["checkpoint_cause"].astype(object).fillna("not requested")
    run_counts = Counter(reasons.mask(unsaved["stopped"] == SLOWER, slower_text))
    return ", ".join(f"{num_runs:,} {reason}" for reason, num_runs in sorted(run_counts.items()))


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A row of panels for each model, all with the same node counts; each series has a line."""
    node_counts = sorted(map(int, points["nodes"].unique()))
    styles = looks([*_SERIES], ordered=False, markersize=4, markeredgewidth=0)
    panel_keys, heading = product(points["panel"].unique(), _UNITS), f"Checkpoints over node counts: {title}"
    legend, ncols = styles.values(), len(_UNITS)
    figure, panels = panel_grid(panel_keys, title=heading, notes=notes, legend=legend, ncols=ncols)
    points = points.assign(position=points["nodes"].map(node_counts.index))
    for (model, panel_unit), axes in panels.items():
        by_position = points[points["panel"] == model].groupby("position")
        for name, (column, factor, unit) in _SERIES.items():
            if unit == panel_unit:
                spans = factor * by_position[column].agg(["min", "median", "max"]).dropna()
                axes.line_in_band(spans.index, *spans.to_numpy().T, **styles[name])
        axes.describe(model, "nodes", panel_unit)
        axes.categories(node_counts)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return figure
