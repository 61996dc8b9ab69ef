"""A cell of the ranking: one model on some nodes of one hardware, with its best layout."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ultrabench.layout import AXES


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
