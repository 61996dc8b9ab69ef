"""The words of a figure: what stands in a cell, beside a panel and under the picture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

import ultrabench
from ultrabench.analysis.cells import Cell, Panel
from ultrabench.errors import counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES, labels

_ALWAYS_TOLD = ("ok", "pending", "rejected", "skipped")


def percent(fraction: float) -> str:
    """`43.2 %`, with two digits that matter."""
    value = 100 * fraction
    return f"{value:.1f} %" if value >= 1 else f"{value:.2g} %"


def count(number: float, unit: str = "") -> str:
    """A number in three digits with its prefix, such as `1.34 G`."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def speed(cell: Cell) -> str:
    """The headline of a cell: its MFU, else its rate where no peak is known."""
    if cell.mfu is not None:
        return percent(cell.mfu)
    if cell.tokens_per_s_per_gpu is not None:
        return count(cell.tokens_per_s_per_gpu, "tok/s")
    return "ok"


def layout_lines(cell: Cell) -> tuple[str, str]:
    """The layout on two lines: how the ranks are spread, how the batch is cut."""
    return layout_words(cell.layout)


def layout_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """The layout of a row of the result table, in the same two parts."""
    batch = AXES.index("mbs")
    return " ".join(labels(row, AXES[:batch])), " ".join(labels(row, AXES[batch:]))


def memory(held_bytes: float | None) -> str | None:
    """Memory in MiB or GiB, None where unknown."""
    if held_bytes is None:
        return None
    gib = held_bytes / GIB
    if gib < 1:
        return f"{gib * 1024:.0f} MiB"
    return f"{gib:.1f} GiB" if gib >= 10 else f"{gib:.2f} GiB"


def model_label(cell: Cell) -> tuple[str, str]:
    """Name and size of a model."""
    return cell.model, "" if cell.num_params is None else f"{count(cell.num_params)} params"


def panel_title(panel: Panel) -> str:
    """Hardware, kernel and workload of a panel."""
    kernel = f"kernel {panel.kernel or '?'}" + (f" ({panel.precision})" if panel.precision else "")
    parts = [panel.hardware or "unknown hardware", kernel]
    if panel.seq_len is not None:
        parts.append(f"seq_len {panel.seq_len:,}")
    if panel.gbs is not None:
        tokens = "" if panel.seq_len is None else f" ({count(panel.gbs * panel.seq_len)} tokens)"
        parts.append(f"gbs {panel.gbs:,}{tokens}")
    return " | ".join(parts)


def scale_label(cells: Sequence[Cell]) -> str:
    """What the colour means."""
    measured = any(cell.peak_source == "measured" for cell in cells)
    return f"MFU (% of {'measured ' if measured else ''}peak)"


def doubts(table: pa.Table) -> list[str]:
    """A line on the suspect rows and one on the invalid ones, with an example; none where there are none."""
    rows = table.select(["run_id", "status", "reason", "suspect"]).to_pylist()
    suspect = [(row["run_id"], row["suspect"]) for row in rows if row["suspect"]]
    invalid = [(row["run_id"], row["reason"]) for row in rows if row["status"] == "invalid"]
    named = ((suspect, "suspect and wins no cell"), (invalid, "invalid"))
    return [f"{len(found)} of {counted(len(rows), 'row')}: {what}, such as {found[0][0]}: {found[0][1]}"
            for found, what in named if found]  # fmt: skip


def notes(table: pa.Table) -> str:
    """One sentence on the runs behind a figure: how many ended how, made by which versions."""
    rows = table.select(["run_id", "status", "is_final"]).to_pylist()
    ends = {(row["run_id"], row["status"] or "pending") for row in rows if row["is_final"]}
    by_status = Counter(status for _, status in ends)
    order = sorted(by_status, key=lambda s: (s != "ok", s in _ALWAYS_TOLD, -by_status[s], s))
    told = ", ".join(f"{by_status[status]:,} {status}" for status in order) or "no runs"
    return f"Layouts: {told}. {made_with(table)}"


def made_with(table: pa.Table) -> str:
    """One sentence on the versions behind a figure."""
    versions = [f"ultrabench {ultrabench.__version__}"]
    for column, name in (("torch_version", "torch"), ("nccl_version", "NCCL"), ("kernel_digest", "kernel")):
        found = sorted(str(v) for v in table[column].unique().to_pylist() if v is not None)
        if found:
            versions.append(f"{name} {' / '.join(found[:3])}{' / ...' if len(found) > 3 else ''}")
    return f"Made with {', '.join(versions)}."
