"""Draws what saving and loading the state costs over the number of nodes: seconds, bytes/s a node, steps lost."""

from collections import Counter
from itertools import product
from typing import Any

import pandas as pd
import pyarrow as pa
import seaborn as sns
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.runs import final, known
from ultrabench.analysis.figures.style import categories, label, legend, legend_entry, looks, panel_grid
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
"""Series -> its column, what the column is multiplied by, and the unit, each of which has a panel."""
_UNITS = tuple(dict.fromkeys(unit for _, _, unit in _SERIES.values()))
_LINE: dict[str, Any] = {"estimator": "median", "errorbar": ("pi", 100), "err_kws": {"linewidth": 0}}
"""Options of seaborn for a line through the medians and a band from the lowest to the highest value."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The ok runs with the numbers of a checkpoint, each repeat of a layout, and the note.

    Raises:
        ConfigError: no run has them.
    """
    runs = final(table, more=("checkpoint_cause",))
    todo = "measure it with: ultrabench sweep launch measure.checkpoint=true"
    ok_runs = runs[runs["status"] == "ok"]
    saved, _ = known(ok_runs, "checkpoint_save_s", "checkpoint", todo)
    without = ok_runs[ok_runs["checkpoint_save_s"].isna()]
    count = counted(len(without), "run")
    left_out = f"Excluded: {count} without checkpoint: {_reasons(without)}.\n" if len(without) else ""
    lines = "Lines: median of layouts and repeats; bands: minimum to maximum. Times are those of the slowest rank."
    caches = (
        "Loads may be served from the page cache of the nodes; steps lost do not include the blocking time."
    )
    return saved, f"{lines} {caches}\n{left_out}{made_with(table)}"


def _reasons(without: pd.DataFrame) -> str:
    """Why these runs have no numbers, such as `2 stopped early as slower (measure.race=null prevents this), 1 disk_full`."""
    slower = "stopped early as slower (measure.race=null prevents this)"
    reasons = without["checkpoint_cause"].astype(object).fillna("not requested")
    counts = Counter(reasons.mask(without["stopped"] == SLOWER, slower))
    return ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.items()))


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A row of panels for each model, all with the same node counts; each series has a line."""
    models, nodes = list(drawn["panel"].unique()), sorted(drawn["nodes"].unique())
    heading = f"Checkpoints over node counts: {title}"
    whole, middle, panels = panel_grid(
        len(models) * len(_UNITS), title=heading, notes=notes, columns=len(_UNITS)
    )
    styles = looks([*_SERIES], ordered=False, markersize=4, markeredgewidth=0)
    at = drawn["nodes"].map(nodes.index)
    for axes, (model, panel_unit) in zip(panels, product(models, _UNITS), strict=True):
        here = drawn["panel"] == model
        for name, (column, factor, unit) in _SERIES.items():
            if unit == panel_unit:
                sns.lineplot(x=at[here], y=factor * drawn.loc[here, column], ax=axes, **_LINE, **styles[name])
        label(axes, model, "nodes", panel_unit)
        categories(axes, [int(number) for number in nodes])
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    legend(middle, [legend_entry(name, **styles[name]) for name in _SERIES])
    return whole
