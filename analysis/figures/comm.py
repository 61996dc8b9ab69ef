"""The picture of the links: bus bandwidth over node counts, a panel an operation, a line a size."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

import matplotlib
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ultrabench.analysis.captions import made_with
from ultrabench.analysis.figures.picture import GREY
from ultrabench.device_rates import OPERATIONS
from ultrabench.errors import ConfigError

GB = 1e9
_NAMES = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
          "alltoall": "AllToAll", "sendrecv": "SendRecv (ring)"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Bus bandwidth of one operation and size on some nodes."""

    operation: str
    size_bytes: int
    nodes: int
    """1: inside a node."""
    p5_bytes_per_s: float
    median_bytes_per_s: float
    p95_bytes_per_s: float


def points(table: pa.Table) -> list[Point]:
    """The points of a table of results, by operation, size and nodes.

    What was measured several times has the median of the medians, the lowest 5th and the highest
    95th percentile. Without a run on one node, those on several say what a node is like inside.

    Raises:
        ConfigError: the table holds no such measurements, or those of several clusters.
    """
    found: dict[tuple[str, int, int], list[tuple[float, float, float]]] = defaultdict(list)
    places = set()
    rows = table.select(["status", "nodes", "cluster", "hardware", "bandwidths"]).to_pylist()
    rows = [row for row in rows if row["status"] == "ok" and row["bandwidths"]]
    alone = any(row["nodes"] == 1 for row in rows)
    for row in rows:
        places.add(f"{row['hardware']} of {row['cluster']}")
        for told in row["bandwidths"]:
            inside = told["scope"] == "intra_node"
            rates = [told[f"busbw_{name}bytes_per_s"] for name in ("p5_", "", "p95_")]
            if None in rates or (inside and alone):
                continue
            # The ranks' equal shares rounded it down a little, by more where there are more of them.
            size = 2 ** round(log2(told["bytes"]))
            found[told["operation"], size, 1 if inside else row["nodes"]].append(tuple(rates))
    if not found:
        raise ConfigError(
            "no bandwidths over node counts here; measure them with: ultrabench sweep launch sweep=comm"
        )
    if len(places) > 1:
        raise ConfigError(
            f"bandwidths of {len(places)} places ({'; '.join(sorted(places))}): plot one at a time"
        )
    return [
        Point(
            operation=operation,
            size_bytes=size,
            nodes=nodes,
            p5_bytes_per_s=min(low for low, _, _ in rates),
            median_bytes_per_s=median(middle for _, middle, _ in rates),
            p95_bytes_per_s=max(high for _, _, high in rates),
        )
        for (operation, size, nodes), rates in sorted(found.items())
    ]


def figure(drawn: Sequence[Point], *, title: str, notes: str) -> Figure:
    """Bandwidth over node counts as a matplotlib figure, all panels on one scale."""
    picture = Figure(figsize=(11, 6.6), facecolor="white")
    grid = picture.subplots(2, 3, sharey=True, squeeze=False)
    panels = [axes for line in grid for axes in line]
    nodes, sizes = sorted({p.nodes for p in drawn}), sorted({p.size_bytes for p in drawn})
    for axes, operation in zip(panels, OPERATIONS, strict=False):
        _paint(axes, [p for p in drawn if p.operation == operation], nodes, sizes)
        axes.set_title(_NAMES[operation], fontsize=11, fontweight="bold", loc="left")
    picture.suptitle(
        f"Bus bandwidth (GB/s) over node counts: {title}", x=0.06, ha="left", fontsize=14, fontweight="bold"
    )
    lines, names = panels[0].get_legend_handles_labels()
    panels[-1].axis("off")
    panels[-1].legend(
        lines[::-1], names[::-1], title="bytes of a rank's buffer", loc="upper left", frameon=False
    )
    note = textwrap.fill(notes, 160, break_on_hyphens=False)
    picture.text(0.06, 0.015, note, fontsize=7.5, color=GREY, va="bottom", linespacing=1.35)
    picture.subplots_adjust(left=0.06, right=0.985, top=0.89, bottom=0.15, hspace=0.38, wspace=0.06)
    return picture


def _paint(axes: Axes, drawn: Sequence[Point], nodes: Sequence[int], sizes: Sequence[int]) -> None:
    """The lines of one operation, each in the colour of its size."""
    colours = matplotlib.colormaps["viridis"]
    for i, size in enumerate(sizes):
        line = [p for p in drawn if p.size_bytes == size]
        at = [nodes.index(p.nodes) for p in line]
        colour = colours(0.92 * (1 - i / max(1, len(sizes) - 1)))
        axes.fill_between(
            at, [p.p5_bytes_per_s / GB for p in line], [p.p95_bytes_per_s / GB for p in line],
            color=colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
        middle = [p.median_bytes_per_s / GB for p in line]
        axes.plot(at, middle, "o-", color=colour, markersize=4, linewidth=1.6, label=_size(size))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(nodes)), ["1\ninside" if n == 1 else str(n) for n in nodes])
    axes.set_xlim(-0.3, len(nodes) - 0.7)
    axes.set_xlabel("nodes", fontsize=8.5, loc="right", labelpad=-8)
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _size(size: int) -> str:
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> bits:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def notes(table: pa.Table) -> str:
    """What the lines and bands are, and where they were measured."""
    gpus, per_node = (
        "/".join(str(v) for v in table[name].unique().to_pylist() if v is not None)
        for name in ("gpu_name", "gpus_per_node")
    )
    return (
        "Lines: median; bands: 5th to 95th percentile, of the slowest rank. Bus bandwidth as nccl-tests "
        f"defines it. {gpus or 'unknown device'}, {per_node} a node. {made_with(table)}"
    )
