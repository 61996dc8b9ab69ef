"""Numbers, layouts and notes in words, as figures and tables show them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

import ultrabench
from ultrabench.errors import counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES, labels

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
