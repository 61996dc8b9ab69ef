"""The columns that say in what state an allocation was, from what its preflight measured."""

import math
from typing import Any

COLLECTIVES = ("allreduce", "allgather", "reducescatter")


def summary(probe: dict[str, Any]) -> dict[str, float | None]:
    """Column of the results -> its value; None for what was not measured or cannot be read.

    Args:
        probe: what `ultrabench.kernel.probe.probe` returns, or the `probe` event of a report.

    Returns:
        gemm_flops_per_s of the slowest device, and of each collective in its largest size the bus
        bandwidth over all ranks (`allreduce_busbw_bytes_per_s`) and inside the slowest node
        (`allreduce_intra_node_busbw_bytes_per_s`).
    """
    columns = {"gemm_flops_per_s": _slowest(probe.get("gemm_flops_per_s"))}
    for scope, infix in (("all", ""), ("intra_node", "_intra_node")):
        for name in COLLECTIVES:
            columns[f"{name}{infix}_busbw_bytes_per_s"] = _busbw(probe, name, scope)
    return columns


def _slowest(rates: Any) -> float | None:
    """The lowest rate; None unless that of every device is known."""
    known = [_number(rate) for rate in rates] if isinstance(rates, list) else []
    lowest = [rate for rate in known if rate is not None]
    return min(lowest) if lowest and len(lowest) == len(known) else None


def _busbw(probe: dict[str, Any], name: str, scope: str) -> float | None:
    try:
        rows = probe["collectives"][name][scope]
        return _number(max(rows, key=lambda row: row["bytes"])["busbw_bytes_per_s"])
    except (LookupError, TypeError, ValueError):
        return None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None
