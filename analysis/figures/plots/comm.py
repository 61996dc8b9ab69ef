"""Draws bus bandwidth over the number of nodes, with a panel for each operation and a line for each size."""

from math import log2
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.style import panel_grid, series_looks
from ultrabench.device_rates import OPERATIONS
from ultrabench.errors import ConfigError

_TITLE_BY_OPERATION = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
           "alltoall": "AllToAll", "sendrecv": "SendRecv (ring)"}  # fmt: skip
_AGGREGATIONS = {
    "p5": ("busbw_p5_bytes_per_s", "min"),
    "median": ("busbw_bytes_per_s", "median"),
    "p95": ("busbw_p95_bytes_per_s", "max"),
}
"""Column of the points -> its field in the column `bandwidths`, and the function that combines several measurements."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """Operation, size in bytes, nodes, and p5, median and p95 in bytes/s of each point of the figure, and the note.

    A point that was measured several times has the median of the medians, the lowest 5th and the highest
    95th percentile. Points of one node come from runs on one node, or, if there are none, from the
    measurements inside the nodes of larger runs.

    Raises:
        ConfigError: the table holds no bandwidths, or those of several clusters.
    """
    runs = table.select(["status", "nodes", "cluster", "hardware", "bandwidths"]).to_pylist()
    bandwidth_rows = [
        # The measured sizes are powers of two, rounded down to whole elements; log2 gives the power back.
        {**run, **bandwidth, "size": 2 ** round(log2(bandwidth["bytes"]))}
        for run in runs
        for bandwidth in run["bandwidths"] or ()
        if run["status"] == "ok" and None not in (bandwidth[column] for column, _ in _AGGREGATIONS.values())
    ]
    if not bandwidth_rows:
        job_columns = [column for column in table.column_names if column.endswith("_busbw_bytes_per_s")]
        report_hint = "; draw the *_busbw_bytes_per_s of these jobs with: ultrabench report"
        has_job_values = any(table[column].null_count < len(table) for column in job_columns)
        todo = f"measure them with: ultrabench sweep launch sweep=comm{report_hint * has_job_values}"
        raise ConfigError("the table has no bandwidths by size", todo)
    cluster_texts = sorted({f"{row['hardware']} of {row['cluster']}" for row in bandwidth_rows})
    if len(cluster_texts) > 1:
        todo = "plot one with cluster=NAME or hardware=NAME"
        raise ConfigError(f"bandwidths of {len(cluster_texts)} places ({'; '.join(cluster_texts)}): {todo}")
    frame = pd.DataFrame(bandwidth_rows)
    is_intra_node = frame["scope"] == "intra_node"
    if (frame["nodes"] == 1).any():
        frame = frame[~is_intra_node]
    frame["nodes"] = frame["nodes"].where(~is_intra_node, 1)
    return frame.groupby(["operation", "size", "nodes"], as_index=False).agg(**_AGGREGATIONS), _note(table)


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each operation with a line and a band for each size; all panels have the same scale."""
    node_counts = sorted(map(int, points["nodes"].unique()))
    sizes_bytes = sorted(points["size"].unique(), reverse=True)
    look_by_size = series_looks(sizes_bytes, is_ordered=True, label_of=_size_text)
    heading = f"Bus bandwidth over node counts: {title}"
    legend: dict[str, Any] = {"legend": look_by_size.values(), "legend_title": "buffer size of each rank"}
    figure, panels = panel_grid(OPERATIONS, title=heading, notes=notes, sharey=True, **legend)
    for operation, axes in panels.items():
        for size_bytes, size_points in points[points["operation"] == operation].groupby("size"):
            x = size_points["nodes"].map(node_counts.index)
            gb_per_s = (size_points[column] / 1e9 for column in _AGGREGATIONS)
            axes.draw_line_in_band(x, *gb_per_s, **look_by_size[size_bytes], markersize=4, markeredgewidth=0)
        axes.describe(_TITLE_BY_OPERATION[operation], "nodes (1: within a node)", "bus bandwidth (GB/s)")
        # Only the panels whose shared ticks have labels get a title of the axis.
        axes.yaxis.label.set_visible(axes.yaxis.get_tick_params()["labelleft"])
        axes.set_categories(node_counts)
        axes.log_scale("y", points["p5"].min(), points["p95"].max())
    return figure


def _size_text(size_bytes: int) -> str:
    """A size as a text such as 16 KiB, 4 MiB or 1 GiB."""
    for unit_bits, unit_name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >> unit_bits:
            return f"{size_bytes >> unit_bits} {unit_name}"
    return f"{size_bytes} B"


def _note(table: pa.Table) -> str:
    """The note under the figure: what its lines and bands mean, and where they were measured."""
    value_lists = (table[column].drop_null().unique().to_pylist() for column in ("gpu_name", "gpus_per_node"))
    gpu_names, gpus_per_node = ("/".join(map(str, values)) for values in value_lists)
    hardware_text = f"{gpu_names or 'unknown device'}, {gpus_per_node} per node"
    caption = "Lines: median; bands: 5th to 95th percentile, of the slowest rank."
    return f"{caption} Bus bandwidth as defined by nccl-tests. {hardware_text}. {made_with(table)}"
