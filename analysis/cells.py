"""The cells of a ranking (model, nodes, hardware, kernel, precision and batch) and the texts that describe them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

import ultrabench
from ultrabench.errors import counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best run of a cell, or the reason why there is none; the fields are those of `heatmap --json`."""

    model: str
    nodes: int
    run_id: str | None = None
    status: str | None
    """ok when a run won the cell, else the most common status; None while runs are pending."""
    reason: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> value of the best run; empty where there is no best run."""
    mfu: float | None = None
    """MFU of the best run, a fraction."""
    flops_formula: str | None = None
    """The formula by which MFU counts the FLOPs of a token."""
    source_mfu: float | None = None
    """MFU of a published measurement as its publisher computed it, a fraction."""
    tokens_per_s_per_gpu: float | None = None
    peak_mem_reserved_bytes: int | None = None
    num_runs: int
    """Number of runs of the cell that have ended."""
    as_good_as_best: tuple[str, ...] = ()
    """run_ids of the other runs whose 95 % intervals overlap with that of the best run."""
    ranked_by: str | None = None
    """The column that was compared: control_ratio where the cell has one control, else the one asked for."""
    hardware: str | None
    kernel: str | None
    precision: str | None
    seq_len: int | None
    gbs: int | None
    num_params: int | None
    peak_source: str | None = None
    compare_ratio: float | None = None
    """tokens_per_s_per_gpu of the best run, divided by that of the same cell in another table."""

    @property
    def panel(self) -> tuple[object, ...]:
        """What all cells of one panel of a figure share."""
        return self.hardware, self.kernel, self.precision, self.seq_len, self.gbs

    def to_json(self) -> dict[str, Any]:
        """The cell as one flat JSON object, which includes the axes of its layout."""
        told = asdict(self)
        layout = told.pop("layout")
        return told | {name: layout.get(name) for name in AXES}


def compare(cells: list[Cell], others: list[Cell]) -> list[Cell]:
    """`cells` with compare_ratio relative to the cell of the same model, nodes and batch in `others`.

    A cell of the same hardware and kernel is preferred; else the fastest of the other cells is used.
    """
    speeds = [(other, other.tokens_per_s_per_gpu) for other in others if other.tokens_per_s_per_gpu]
    speeds.sort(key=lambda pair: pair[1])  # so that the fastest of equal keys stays
    alike = {(_workload(other), other.panel): speed for other, speed in speeds}
    fastest = {_workload(other): speed for other, speed in speeds}
    out = []
    for cell in cells:
        base = alike.get((_workload(cell), cell.panel)) or fastest.get(_workload(cell))
        speed = cell.tokens_per_s_per_gpu
        out.append(replace(cell, compare_ratio=speed / base if speed and base else None))
    return out


def _workload(cell: Cell) -> tuple[object, ...]:
    """The model, nodes and batch of a cell, which must be equal in two cells that are compared."""
    return (cell.num_params or cell.model, cell.nodes, cell.seq_len, cell.gbs)


_ALWAYS_TOLD = ("ok", "pending", "rejected", "skipped")


def percent(fraction: float | None) -> str | None:
    """A percentage such as `43.2 %`, with two significant digits below 1 %; None when it is unknown."""
    if fraction is None:
        return None
    value = 100 * fraction
    return f"{value:.1f} %" if value >= 1 else f"{value:.2g} %"


def count(number: float, unit: str = "") -> str:
    """A number with three digits and a metric prefix, such as `1.34 G`."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def layout_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """The layout of a result row as two texts: the degrees and ZeRO, and everything from mbs on.

    The second one has the batch, the schedule and recomputation.
    """
    batch = AXES.index("mbs")
    return " ".join(labels(row, AXES[:batch])), " ".join(labels(row, AXES[batch:]))


def memory(held_bytes: float | None) -> str | None:
    """Memory as a text in MiB or GiB; None when it is unknown."""
    if held_bytes is None:
        return None
    gib = held_bytes / GIB
    if gib < 1:
        return f"{gib * 1024:.0f} MiB"
    return f"{gib:.1f} GiB" if gib >= 10 else f"{gib:.2f} GiB"


def doubts(table: pa.Table) -> list[str]:
    """One line about suspect rows and one about invalid rows, if there are any, each with an example."""
    rows = table.select(["run_id", "status", "reason", "suspect"]).to_pylist()
    suspect = [(row["run_id"], row["suspect"]) for row in rows if row["suspect"]]
    invalid = [(row["run_id"], row["reason"]) for row in rows if row["status"] == "invalid"]
    named = ((suspect, "suspect and wins no cell"), (invalid, "invalid"))
    return [
        f"{len(found)} of {counted(len(rows), 'row')}: {what}, such as {found[0][0]}: {found[0][1]}"
        for found, what in named
        if found
    ]


def notes(table: pa.Table) -> str:
    """The note under a figure: how many runs have each status, and the versions that made them."""
    rows = table.select(["run_id", "status", "is_final"]).to_pylist()
    ends = {(row["run_id"], row["status"] or "pending") for row in rows if row["is_final"]}
    by_status = Counter(status for _, status in ends)
    order = sorted(by_status, key=lambda s: (s != "ok", s in _ALWAYS_TOLD, -by_status[s], s))
    told = ", ".join(f"{by_status[status]:,} {status}" for status in order) or "no runs"
    return f"Layouts: {told}. {made_with(table)}"


def made_with(table: pa.Table) -> str:
    """One sentence with the versions of the software that made the runs of a figure."""
    versions = [f"ultrabench {ultrabench.__version__}"]
    for column, name in (("torch_version", "torch"), ("nccl_version", "NCCL"), ("kernel_digest", "kernel")):
        found = sorted(str(v) for v in table[column].unique().to_pylist() if v is not None)
        if found:
            versions.append(f"{name} {' / '.join(found[:3])}{' / ...' if len(found) > 3 else ''}")
    return f"Made with {', '.join(versions)}."
