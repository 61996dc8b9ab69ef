"""A cell of the ranking, one model on some nodes of one hardware, and the texts that name its layouts."""

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
class Panel:
    """What cells must share to stand in one picture."""

    hardware: str | None
    kernel: str | None
    precision: str | None
    seq_len: int | None
    gbs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best run of a cell, or why there is none; the fields are those of `heatmap --json`."""

    model: str
    nodes: int
    run_id: str | None
    status: str | None
    """ok when a run won the cell; else the most common status, or None while runs are pending."""
    reason: str | None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> value of the best run; empty where there is none."""
    mfu: float | None = None
    """MFU of the best run, a fraction."""
    source_mfu: float | None = None
    """MFU as its publisher computed it, a fraction."""
    tokens_per_s_per_gpu: float | None = None
    peak_mem_reserved_bytes: int | None = None
    num_runs: int
    """Number of runs of the cell that have ended."""
    as_good_as_best: tuple[str, ...] = ()
    """run_id of the other runs whose 95 % intervals overlap with that of the best."""
    ranked_by: str | None = None
    """The column that found the best: control_ratio where the cell has one control, else the column that was asked for."""
    panel: Panel
    """The picture this cell belongs to."""
    num_params: int | None
    peak_source: str | None = None
    compare_ratio: float | None = None
    """tokens_per_s_per_gpu of this cell's best run, divided by that of the same cell in the other table."""

    def to_json(self) -> dict[str, Any]:
        """The cell as JSON values, the fields of its panel and its layout among the others."""
        told: dict[str, Any] = asdict(self) | {"as_good_as_best": list(self.as_good_as_best)}
        layout = told.pop("layout")
        told |= told.pop("panel") | {name: layout.get(name) for name in AXES}
        return told


def compare(cells: list[Cell], others: list[Cell]) -> list[Cell]:
    """`cells` with compare_ratio filled in from the same model, nodes and batch in `others`.

    A cell of the same hardware and kernel is preferred; else the fastest one stands for the rest.
    """
    fastest: dict[tuple[object, ...], float] = {}
    for other in others:
        speed = other.tokens_per_s_per_gpu
        if speed is not None:
            for key in (_workload(other), (_workload(other), other.panel)):
                fastest[key] = max(speed, fastest.get(key, 0.0))
    out = []
    for cell in cells:
        base = fastest.get((_workload(cell), cell.panel)) or fastest.get(_workload(cell))
        speed = cell.tokens_per_s_per_gpu
        out.append(replace(cell, compare_ratio=speed / base if speed and base else None))
    return out


def _workload(cell: Cell) -> tuple[object, ...]:
    """What two cells of different tables must share to be compared."""
    return (cell.num_params or cell.model, cell.nodes, cell.panel.seq_len, cell.panel.gbs)


_ALWAYS_TOLD = ("ok", "pending", "rejected", "skipped")


def percent(fraction: float) -> str:
    """A fraction as a percentage such as `43.2 %`; one below 1 % has two significant digits."""
    value = 100 * fraction
    return f"{value:.1f} %" if value >= 1 else f"{value:.2g} %"


def count(number: float, unit: str = "") -> str:
    """A number in three digits with its prefix, such as `1.34 G`."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def layout_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """The layout of a row of results, in two parts: how the ranks are spread, how the batch is cut."""
    batch = AXES.index("mbs")
    return " ".join(labels(row, AXES[:batch])), " ".join(labels(row, AXES[batch:]))


def memory(held_bytes: float | None) -> str | None:
    """Bytes of memory in MiB or GiB; None when they are unknown."""
    if held_bytes is None:
        return None
    gib = held_bytes / GIB
    if gib < 1:
        return f"{gib * 1024:.0f} MiB"
    return f"{gib:.1f} GiB" if gib >= 10 else f"{gib:.2f} GiB"


def doubts(table: pa.Table) -> list[str]:
    """One line on the suspect rows, if there are any, and one on the invalid rows, each with an example."""
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
    """What stands under a figure: how many runs ended with which status, and the versions that made them."""
    rows = table.select(["run_id", "status", "is_final"]).to_pylist()
    ends = {(row["run_id"], row["status"] or "pending") for row in rows if row["is_final"]}
    by_status = Counter(status for _, status in ends)
    order = sorted(by_status, key=lambda s: (s != "ok", s in _ALWAYS_TOLD, -by_status[s], s))
    told = ", ".join(f"{by_status[status]:,} {status}" for status in order) or "no runs"
    return f"Layouts: {told}. {made_with(table)}"


def made_with(table: pa.Table) -> str:
    """One sentence that names the versions that made the runs of a figure."""
    versions = [f"ultrabench {ultrabench.__version__}"]
    for column, name in (("torch_version", "torch"), ("nccl_version", "NCCL"), ("kernel_digest", "kernel")):
        found = sorted(str(v) for v in table[column].unique().to_pylist() if v is not None)
        if found:
            versions.append(f"{name} {' / '.join(found[:3])}{' / ...' if len(found) > 3 else ''}")
    return f"Made with {', '.join(versions)}."
