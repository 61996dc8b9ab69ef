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

_TITLE_BY_OPERATION = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
           "alltoall": "AllToAll", "sendrecv": "SendRecv (ring)"}  # fmt: skip
_AGGREGATIONS = {
    "p5": ("busbw_p5_bytes_per_s", "min"),
    "median": ("busbw_bytes_per_s", "median"),
    "p95": ("busbw_p95_bytes_per_s", "max"),
}
"""Column of the points -> its field in the column `bandwidths`, and how several measurements of it are combined."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """Operation, size in bytes, nodes, and p5, median and p95 in bytes/s of each point of the figure, and the note.

    A point that was measured several times has the median of the medians, the lowest 5th and the highest
    95th percentile. Points of one node come from runs on one node, or, if there are none, from the
    measurements inside the nodes of larger runs.

    Raises:
        ConfigError: the table holds no bandwidths, or those of several clusters.
    """
    runs = table.select(["status", "nodes", "cluster", "hardware", "bandwidths"]).to_pylist()
    bandwidths = [
        # The measured sizes are powers of two, rounded down to whole elements; log2 gives the power back.
        {**run, **bandwidth, "size": 2 ** round(log2(bandwidth["bytes"]))}
        for run in runs
        for bandwidth in run["bandwidths"] or ()
        if run["status"] == "ok" and None not in (bandwidth[column] for column, _ in _AGGREGATIONS.values())
    ]
    if not bandwidths:
        job_columns = [name for name in table.column_names if name.endswith("_busbw_bytes_per_s")]
        report_hint = "; draw the *_busbw_bytes_per_s of these jobs with: ultrabench report"
        hint = report_hint if any(table[name].null_count < len(table) for name in job_columns) else ""
        todo = f"measure them with: ultrabench sweep launch sweep=comm{hint}"
        raise ConfigError("the table has no bandwidths by size", todo)
    clusters = sorted({f"{run['hardware']} of {run['cluster']}" for run in bandwidths})
    if len(clusters) > 1:
        todo = "plot one with cluster=NAME or hardware=NAME"
        raise ConfigError(f"bandwidths of {len(clusters)} places ({'; '.join(clusters)}): {todo}")
    frame = pd.DataFrame(bandwidths)
    is_intra_node = frame["scope"] == "intra_node"
    if (frame["nodes"] == 1).any():
        frame = frame[~is_intra_node]
    frame["nodes"] = frame["nodes"].where(~is_intra_node, 1)
    return frame.groupby(["operation", "size", "nodes"], as_index=False).agg(**_AGGREGATIONS), _notes(table)


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each operation with a line and a band for each size; all panels have the same scale."""
    node_counts = sorted(map(int, points["nodes"].unique()))
    sizes = sorted(points["size"].unique(), reverse=True)
    styles = looks(sizes, ordered=True, name=_size)
    heading = f"Bus bandwidth over node counts: {title}"
    options: dict[str, Any] = {"legend_title": "buffer size of each rank", "sharey": True}
    figure, panels = panel_grid(OPERATIONS, title=heading, notes=notes, legend=styles.values(), **options)
    for operation, axes in panels.items():
        for size, rows in points[points["operation"] == operation].groupby("size"):
            x, rates = rows["nodes"].map(node_counts.index), (rows[name] / 1e9 for name in _AGGREGATIONS)
            axes.line_in_band(x, *rates, **styles[size], markersize=4, markeredgewidth=0)
        axes.describe(_TITLE_BY_OPERATION[operation], "nodes (1: within a node)", "bus bandwidth (GB/s)")
        # Only the panels whose shared ticks have labels get a title of the axis.
        axes.yaxis.label.set_visible(axes.yaxis.get_tick_params()["labelleft"])
        axes.categories(node_counts)
        axes.log_scale("y", points["p5"].min(), points["p95"].max())
    return figure


def _size(size: int) -> str:
    """A size as a text such as 16 KiB, 4 MiB or 1 GiB."""
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> bits:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def _notes(table: pa.Table) -> str:
    """The note under the figure: what its lines and bands mean, and where they were measured."""
    columns = (table[name].drop_null().unique().to_pylist() for name in ("gpu_name", "gpus_per_node"))
    gpu_names, gpus_per_node = ("/".join(map(str, values)) for values in columns)
    hardware_text = f"{gpu_names or 'unknown device'}, {gpus_per_node} per node"
    caption = "Lines: median; bands: 5th to 95th percentile, of the slowest rank."
    return f"{caption} Bus bandwidth as defined by nccl-tests. {hardware_text}. {made_with(table)}"
