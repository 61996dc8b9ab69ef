"""What result rows measure of nodes: the rates of each preflight, and the control run of each allocation.

A row is a dict of COLUMNS. The command reads the rows from journals, the page and the figure from a result table.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

from ultrabench.device_rates import NODE_RATES, rates_by_node, summary
from ultrabench.result import Status
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, fold
from ultrabench.store.sweep_json import read_sweep_json

Row = dict[str, Any]
LINKS = ("allreduce_intra_node_busbw_bytes_per_s", "allreduce_busbw_bytes_per_s")
CONTROL = "control_steps_per_s"
"""The rate of the control run, the reciprocal of its step time."""
RATES = dict(
    zip(
        (*NODE_RATES, *LINKS, CONTROL),
        ("products", "memory", "links inside", "links", "control"),
        strict=True,
    )
)
"""Rate that is compared between nodes -> what it is of."""
_OF_RESULT = (
    "status", "cause", "suspect_hosts", "hostnames", "throttled", "gpu_name", "torch_version", "cuda_version",
)  # fmt: skip
_OF_ALLOCATION = ("control", *NODE_RATES, *LINKS)
COLUMNS = (
    "sweep", "cluster", "hardware", "kernel", "allocation", "run_id", "started_at", "step_time_s", *_OF_RESULT, *_OF_ALLOCATION,
)  # fmt: skip
"""The columns of results that say something about nodes."""
_READ = frozenset({"allocation_planned", "preflight", "result", "failed"})
"""The events that these columns follow from."""
_SETTING = ("kernel", "gpu_name", "torch_version", "cuda_version")
"""Columns that must be equal where rates are compared, beside cluster and hardware."""
_result_values = operator.attrgetter(*_OF_RESULT)


class Node(NamedTuple):
    """A node of a cluster; a name without a cluster is that of this machine."""

    cluster: str | None
    host: str


class Measurement(NamedTuple):
    """A rate that an allocation measured on one node, or on several of which the slowest decides."""

    rate: str
    """A key of RATES."""
    hardware: str
    setting: tuple[object, ...]
    """What must be equal where this rate is compared: versions, the control layout, the number of nodes."""
    nodes: tuple[Node, ...]
    time_s: float
    """When the first attempt of the allocation began, in seconds since 1970."""
    value: float


def journal_rows(folder: SweepFolder, warn: Callable[[str], None]) -> Iterator[Row]:
    """A row for each attempt of a sweep that has a result, straight from its journal.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep, state = read_sweep_json(folder), fold(read_journal(folder.journal, warn, _READ))
    of_sweep = {"sweep": str(folder.path), "cluster": sweep.cluster, "hardware": sweep.hardware.name}
    of_sweep["kernel"] = sweep.kernel.name
    of_allocation = {name: of_sweep | _rates(allocation) for name, allocation in state.allocations.items()}
    for key, attempt in state.attempts.items():
        if result := attempt.result:
            yield {
                **of_allocation.get(attempt.allocation or "", of_sweep),
                "allocation": attempt.allocation,
                "run_id": key.run_id,
                "started_at": result.started_at,
                "step_time_s": median(result.step_times_s) if result.step_times_s else None,
                **dict(zip(_OF_RESULT, _result_values(result), strict=True)),
            }


def table_rows(table: Any) -> list[Row]:
    """The rows of a result table, with the times of their starts as seconds since 1970."""
    rows: list[Row] = table.select(COLUMNS).to_pylist()
    return [row | {"started_at": _seconds(row["started_at"])} for row in rows]


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.astimezone(UTC).timestamp()


def _rates(allocation: AllocationState) -> Row:
    """The columns of _OF_ALLOCATION that an allocation has."""
    probe, nodes = allocation.preflight.get("probe"), allocation.preflight.get("nodes")
    rates: Row = {"control": allocation.control}
    if isinstance(probe, dict) and isinstance(nodes, list):
        rates |= summary(probe) | rates_by_node(probe, len(nodes))
    return rates


def nodes_of(row: Row) -> tuple[Node, ...]:
    """The nodes on which an attempt ran; empty where they are unknown."""
    return tuple(Node(row["cluster"], host) for host in row["hostnames"] or ())


def measurements(rows: Iterable[Row]) -> Iterator[Measurement]:
    """What the rows measure of nodes.

    The preflight of an allocation counts once. `links` are those between nodes; a bandwidth inside nodes is that of
    the slowest node. Sweeps that measure only links have another probe, and are left out.
    """
    timed = (
        row for row in rows if row["started_at"] is not None and row["hostnames"] and row["kernel"] != "probe"
    )
    seen = set[tuple[object, object]]()
    for row in sorted(timed, key=lambda row: (row["status"] != Status.OK, row["started_at"])):
        nodes, at, setting = nodes_of(row), row["started_at"], tuple(row.get(name) for name in _SETTING)
        place = row["sweep"], row["allocation"]
        for name in NODE_RATES if place not in seen else ():
            for node, value in zip(nodes, row.get(name) or (), strict=False):
                yield Measurement(name, row["hardware"], setting, (node,), at, value)
        for name in LINKS if place not in seen and any(row.get(name) for name in NODE_RATES) else ():
            if (value := row.get(name)) and (name == LINKS[0] or len(nodes) > 1):
                yield Measurement(name, row["hardware"], (*setting, len(nodes)), nodes, at, value)
        seen.add(place)
        is_control = row["run_id"] == row.get("control") and row["status"] == Status.OK
        if is_control and row["step_time_s"]:
            yield Measurement(
                CONTROL, row["hardware"], (*setting, row["run_id"]), nodes, at, 1 / row["step_time_s"]
            )
