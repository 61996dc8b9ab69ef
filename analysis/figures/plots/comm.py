"""Draws bus bandwidth over the number of nodes, with a panel for each operation and a line for each size."""

from math import log2
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.style import axis_title, drawn, panel_grid, series_looks
from ultrabench.analysis.results.cells import made_with
from ultrabench.device_rates import OPERATIONS
from ultrabench.errors import ConfigError
from ultrabench.result import Status

_TITLE_BY_OPERATION = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
           "alltoall": "AllToAll", "sendrecv": "SendRecv (ring)"}  # fmt: skip
_BUSBW = "busbw_bytes_per_s"
_STATISTICS = {
    "p5": ("busbw_p5_bytes_per_s", "min"),
    "median": (_BUSBW, "median"),
    "p95": ("busbw_p95_bytes_per_s", "max"),
}
"""Statistic, a column of the points -> its field in the column `bandwidths` of the table,
and the function that combines several measurements."""


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
        {**run, **measurement, "size": 2 ** round(log2(measurement["bytes"]))}
        for run in runs
        for measurement in run["bandwidths"] or ()
        if run["status"] == Status.OK
        and None not in (measurement[column] for column, _ in _STATISTICS.values())
    ]
    if not bandwidth_rows:
        job_busbw_columns = [column for column in table.column_names if column.endswith("_busbw_bytes_per_s")]
        hint = "; draw the *_busbw_bytes_per_s of these jobs with: ultrabench report"
        has_job_busbw = any(table[column].null_count < len(table) for column in job_busbw_columns)
        remedy = f"measure them with: ultrabench sweep launch sweep=comm{hint if has_job_busbw else ''}"
        raise ConfigError("the table has no bandwidths by size", remedy)
    cluster_texts = sorted({f"{row['hardware']} of {row['cluster']}" for row in bandwidth_rows})
    if len(cluster_texts) > 1:
        remedy = "plot one with cluster=NAME or hardware=NAME"
        raise ConfigError(f"bandwidths of {len(cluster_texts)} places ({'; '.join(cluster_texts)}): {remedy}")
    bandwidths = pd.DataFrame(bandwidth_rows)
    is_intra_node = bandwidths["scope"] == "intra_node"
    if (bandwidths["nodes"] == 1).any():
        bandwidths = bandwidths[~is_intra_node]
    bandwidths["nodes"] = bandwidths["nodes"].where(~is_intra_node, 1)
    return bandwidths.groupby(["operation", "size", "nodes"], as_index=False).agg(**_STATISTICS), _note(table)


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each operation with a line and a band for each size; all panels have the same scale."""
    node_counts = sorted(map(int, points["nodes"].unique()))
    sizes_bytes = sorted(points["size"].unique(), reverse=True)
    look_by_size = series_looks(sizes_bytes, is_ordered=True, label_of=_size_text)
    heading = f"Bus bandwidth over node counts: {title}"
    legend_kw: dict[str, Any] = {"legend": look_by_size.values(), "legend_title": "buffer size of each rank"}
    figure, panels = panel_grid(OPERATIONS, title=heading, notes=notes, sharey=True, **legend_kw)
    y_title = axis_title(_BUSBW, "bus bandwidth")
    for operation, axes in panels.items():
        for size_bytes, size_points in points[points["operation"] == operation].groupby("size"):
            x = size_points["nodes"].map(node_counts.index)
            rates = (drawn(_BUSBW, size_points[column]) for column in _STATISTICS)
            axes.draw_line_in_band(x, *rates, **look_by_size[size_bytes], markersize=4, markeredgewidth=0)
        axes.describe(_TITLE_BY_OPERATION[operation], "nodes (1: within a node)", y_title)
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
    distinct_values = (table[name].drop_null().unique().to_pylist() for name in ("gpu_name", "gpus_per_node"))
    gpu_names_text, gpus_per_node_text = ("/".join(map(str, values)) for values in distinct_values)
    hardware_text = f"{gpu_names_text or 'unknown device'}, {gpus_per_node_text} per node"
    caption = "Lines: median; bands: 5th to 95th percentile, of the slowest rank."
    return f"{caption} Bus bandwidth as defined by nccl-tests. {hardware_text}. {made_with(table)}"
