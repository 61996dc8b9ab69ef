"""Draws bus bandwidth over the number of nodes, with a panel for each operation and a line for each size."""

from math import log2
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.style import looks, panel_grid
from ultrabench.device_rates import OPERATIONS
from ultrabench.errors import ConfigError

_TITLES = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
           "alltoall": "AllToAll", "sendrecv": "SendRecv (ring)"}  # fmt: skip
_RATES = {
    "p5": ("busbw_p5_bytes_per_s", "min"),
    "median": ("busbw_bytes_per_s", "median"),
    "p95": ("busbw_p95_bytes_per_s", "max"),
}
"""Name of a rate in `points` -> its name in the column `bandwidths`, and what is taken of several."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """Operation, size in bytes, nodes, and p5, median and p95 in bytes/s of each point of the figure, and the note.

    A point that was measured several times has the median of the medians, the lowest 5th and the highest
    95th percentile. Points of one node come from runs on one node, or, if there are none, from the
    measurements inside the nodes of larger runs.

    Raises:
        ConfigError: the table holds no bandwidths, or those of several clusters.
    """
    runs = table.select(["status", "nodes", "cluster", "hardware", "bandwidths"]).to_pylist()
    rates = [
        # Undoes the rounding down of sizes.
        {**run, **bandwidth, "size": 2 ** round(log2(bandwidth["bytes"]))}
        for run in runs
        for bandwidth in run["bandwidths"] or ()
        if run["status"] == "ok" and None not in (bandwidth[column] for column, _ in _RATES.values())
    ]
    if not rates:
        jobs = [name for name in table.column_names if name.endswith("_busbw_bytes_per_s")]
        page = "; draw the *_busbw_bytes_per_s of these jobs with: ultrabench report"
        advice = page if any(table[name].null_count < len(table) for name in jobs) else ""
        todo = f"measure them with: ultrabench sweep launch sweep=comm{advice}"
        raise ConfigError("the table has no bandwidths by size", todo)
    places = sorted({f"{run['hardware']} of {run['cluster']}" for run in rates})
    if len(places) > 1:
        todo = "plot one with cluster=NAME or hardware=NAME"
        raise ConfigError(f"bandwidths of {len(places)} places ({'; '.join(places)}): {todo}")
    frame = pd.DataFrame(rates)
    inside = frame["scope"] == "intra_node"
    if (frame["nodes"] == 1).any():
        frame = frame[~inside]
    frame["nodes"] = frame["nodes"].where(~inside, 1)
    return frame.groupby(["operation", "size", "nodes"], as_index=False).agg(**_RATES), _notes(table)


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each operation with a line and a band for each size; all panels have the same scale."""
    nodes, sizes = sorted(map(int, drawn["nodes"].unique())), sorted(drawn["size"].unique(), reverse=True)
    styles = looks(sizes, ordered=True, name=_size)
    heading = f"Bus bandwidth over node counts: {title}"
    options: dict[str, Any] = {"keys_title": "buffer size of each rank", "sharey": True}
    whole, panels = panel_grid(OPERATIONS, title=heading, notes=notes, keys=styles.values(), **options)
    for operation, axes in panels.items():
        for size, rates in drawn[drawn["operation"] == operation].groupby("size"):
            places, spans = rates["nodes"].map(nodes.index), (rates[name] / 1e9 for name in _RATES)
            axes.line_in_band(places, *spans, **styles[size], markersize=4, markeredgewidth=0)
        axes.describe(_TITLES[operation], "nodes (1: within a node)", "bus bandwidth (GB/s)")
        axes.yaxis.label.set_visible(axes.yaxis.get_tick_params()["labelleft"])  # once, as the shared ticks
        axes.categories(nodes)
        axes.log_scale("y", drawn["p5"].min(), drawn["p95"].max())
    return whole


def _size(size: int) -> str:
    """A size as a text such as 16 KiB, 4 MiB or 1 GiB."""
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> bits:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def _notes(table: pa.Table) -> str:
    """The note under the figure: what its lines and bands mean, and where they were measured."""
    columns = (table[name].drop_null().unique().to_pylist() for name in ("gpu_name", "gpus_per_node"))
    gpus, per_node = ("/".join(map(str, values)) for values in columns)
    where = f"{gpus or 'unknown device'}, {per_node} per node"
    lines = "Lines: median; bands: 5th to 95th percentile, of the slowest rank."
    return f"{lines} Bus bandwidth as defined by nccl-tests. {where}. {made_with(table)}"
