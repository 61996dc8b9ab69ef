"""Draws bus bandwidth over the number of nodes, with a panel for each operation and a line for each size."""

import textwrap
from math import log2
from typing import Any

import pandas as pd
import pyarrow as pa
import seaborn as sns
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.picture import GREY
from ultrabench.device_rates import OPERATIONS
from ultrabench.errors import ConfigError

_TITLES = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
           "alltoall": "AllToAll", "sendrecv": "SendRecv (ring)"}  # fmt: skip
_LINE: dict[str, Any] = {
    "linewidth": 1.6, "marker": "o", "markersize": 4, "markeredgewidth": 0, "palette": "viridis",
    "estimator": "median", "errorbar": ("pi", 100), "err_kws": {"linewidth": 0},
}  # fmt: skip
"""Options of seaborn for a line through the medians and a band from the lowest to the highest rate."""
_RATES = {
    "p5": ("busbw_p5_bytes_per_s", "min"),
    "median": ("busbw_bytes_per_s", "median"),
    "p95": ("busbw_p95_bytes_per_s", "max"),
}
"""Name of a rate in `points` -> its name in the column `bandwidths`, and what is taken of several."""


def points(table: pa.Table) -> pd.DataFrame:
    """The points of the figure: operation, size in bytes, nodes, and p5, median and p95 in bytes/s.

    A point that was measured several times has the median of the medians, the lowest 5th and the highest
    95th percentile. Points of one node come from runs on one node, or, if there are none, from the
    measurements inside the nodes of larger runs.

    Raises:
        ConfigError: the table holds no bandwidths, or those of several clusters.
    """
    runs = table.select(["status", "nodes", "cluster", "hardware", "bandwidths"]).to_pylist()
    found = [
        {**run, **told, "size": 2 ** round(log2(told["bytes"]))}  # undoes the rounding down of sizes
        for run in runs
        for told in run["bandwidths"] or ()
        if run["status"] == "ok" and None not in (told[column] for column, _ in _RATES.values())
    ]
    if not found:
        raise ConfigError("no bandwidths here; measure them with: ultrabench sweep launch sweep=comm")
    places = sorted({f"{run['hardware']} of {run['cluster']}" for run in found})
    if len(places) > 1:
        raise ConfigError(f"bandwidths of {len(places)} places ({'; '.join(places)}): plot one at a time")
    frame = pd.DataFrame(found)
    inside = frame["scope"] == "intra_node"
    if (frame["nodes"] == 1).any():
        frame = frame[~inside]
    frame["nodes"] = frame["nodes"].where(~inside, 1)
    return frame.groupby(["operation", "size", "nodes"], as_index=False).agg(**_RATES)


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """The figure of the points in `drawn`; all panels have the same scale."""
    picture = Figure(figsize=(11, 6.6), facecolor="white")
    panels = picture.subplots(2, 3, sharey=True).flat
    nodes = sorted(drawn["nodes"].unique())
    rates = drawn.melt(["operation", "size", "nodes"], [*_RATES], value_name="rate")
    rates = rates.assign(GB_per_s=rates["rate"] / 1e9, at=rates["nodes"].map(nodes.index))
    sizes = {size: _size(size) for size in sorted(drawn["size"].unique(), reverse=True)}
    rates["buffer"] = rates["size"].map(sizes)
    for axes, operation in zip(panels, OPERATIONS, strict=False):
        held = rates[rates["operation"] == operation]
        if len(held):
            sns.lineplot(held, x="at", y="GB_per_s", hue="buffer", hue_order=sizes.values(), ax=axes, **_LINE)
            lines = axes.get_legend_handles_labels()
            axes.get_legend().remove()
        axes.set_title(_TITLES[operation], fontsize=11, fontweight="bold", loc="left")
        axes.set(yscale="log", ylabel=None, xlim=(-0.3, len(nodes) - 0.7))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(nodes)), ["1\ninside" if n == 1 else str(n) for n in nodes])
        axes.set_xlabel("nodes", fontsize=8.5, loc="right", labelpad=-8)
        axes.grid(axis="y", color="#e0e0e0", linewidth=0.7)
    sns.despine(picture)
    picture.axes[-1].axis("off")
    picture.axes[-1].legend(*lines, title="bytes of a rank's buffer", loc="upper left", frameon=False)
    heading = f"Bus bandwidth (GB/s) over node counts: {title}"
    picture.suptitle(heading, x=0.06, ha="left", fontsize=14, fontweight="bold")
    note = textwrap.fill(notes, 160, break_on_hyphens=False)
    picture.text(0.06, 0.015, note, fontsize=7.5, color=GREY, va="bottom", linespacing=1.35)
    picture.subplots_adjust(left=0.06, right=0.985, top=0.89, bottom=0.15, hspace=0.38, wspace=0.06)
    return picture


def _size(size: int) -> str:
    """A size as a text such as 16 KiB, 4 MiB or 1 GiB."""
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> bits:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def notes(table: pa.Table) -> str:
    """The note under the figure: what its lines and bands mean, and where they were measured."""
    found = (table[name].drop_null().unique().to_pylist() for name in ("gpu_name", "gpus_per_node"))
    gpus, per_node = ("/".join(map(str, values)) for values in found)
    where = f"{gpus or 'unknown device'}, {per_node} a node"
    lines = "Lines: median; bands: 5th to 95th percentile, of the slowest rank."
    return f"{lines} Bus bandwidth as nccl-tests defines it. {where}. {made_with(table)}"
