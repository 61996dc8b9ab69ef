"""What result rows measure of nodes: the rates of each preflight, and the control run of each allocation.

A row is a dict of COLUMNS. The command reads the rows from journals, the page and the figure from a result table.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

from ultrabench.device_digest import DatedDigest
from ultrabench.device_rates import NODE_RATES, preflight_rates
from ultrabench.errors import UltrabenchError
from ultrabench.kernel_config import kind_by_name
from ultrabench.result import Status, is_date
from ultrabench.store.damage import one_line_if_damaged
from ultrabench.store.events import DECODERS
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, SweepState, fold
from ultrabench.store.sweep_json import SweepJson, read_sweep_json
from ultrabench.sweep.running.blame import EVENTS_OF_BLAME, latest_blame

Row = dict[str, Any]
LINK_RATES = ("allreduce_intra_node_busbw_bytes_per_s", "allreduce_busbw_bytes_per_s")
"""Columns with the bandwidth of links inside a node and of those between nodes."""
CONTROL_RATE = "control_steps_per_s"
"""The rate of the control run, the reciprocal of its step time."""
_RATE_LABELS = ("matmul", "memory", "links inside", "links", "control")
RATES = dict(zip((*NODE_RATES, *LINK_RATES, CONTROL_RATE), _RATE_LABELS, strict=True))
"""Name of a rate that is compared between nodes -> its label in tables and figures."""
_SETTING_COLUMNS = ("kernel", "gpu_name", "torch_version", "cuda_version")
"""Columns that must be equal where rates are compared, beside cluster and hardware."""


class Node(NamedTuple):
    """A node of a cluster; a name without a cluster is that of this machine."""

    cluster: str | None
    host: str


_RESULT_COLUMNS = (
    "status", "cause", "suspect_hosts", "began_on", "hostnames", "throttled", "gpu_name", "torch_version",
    "cuda_version", "started_at", "measured_gas", "parts_step_time_s",
)  # fmt: skip
"""Columns that are fields of a RunResult."""
COLUMNS = (
    "sweep", "cluster", "hardware", "kernel", "allocation", "run_id", "step_time_s", "control", *NODE_RATES,
    *LINK_RATES,
    *_RESULT_COLUMNS,
)  # fmt: skip
"""The columns of results that say something about nodes."""
_EVENTS_OF_COLUMNS = ("allocation_planned", "preflight", "result", "failed", "reread")
"""The events of a journal from which COLUMNS follow."""
_DECODERS = {name: DECODERS[name] for name in {*_EVENTS_OF_COLUMNS, *EVENTS_OF_BLAME}}
"""Name of an event that says something about nodes -> its decoder."""


class Measurement(NamedTuple):
    """A rate that an allocation measured on one node, or on several of which the slowest decides."""

    rate: str
    """The name of the rate, a key of RATES."""
    hardware: str
    setting: tuple[object, ...]
    """What must be equal where this rate is compared: versions, the number of nodes, the control layout and whether it
    was measured by parts of steps."""
    nodes: tuple[Node, ...]
    time_s: float
    """When the first attempt of the allocation began, in seconds since 1970."""
    value: float
    """The rate in the unit of its name, such as bytes/s."""


class SweepNodes(NamedTuple):
    """What the journal of a sweep says about nodes."""

    rows: list[Row]
    """A row for each attempt that has a result."""
    unused: dict[str, str]
    """Node that jobs of the sweep do not use, or only if they must -> a line that says why."""
    digests: list[DatedDigest]
    """What GPUs computed in its preflights."""


def read_nodes(folder: SweepFolder, warn: Callable[[str], None]) -> SweepNodes:
    """What a sweep says about nodes, straight from its journal, which is read once.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep, state = read_sweep_json(folder), fold(read_journal(folder.journal, warn, _DECODERS))
    unused = dict[str, str]()
    # The configuration of the launch may be damaged where the results are not.
    with contextlib.suppress(UltrabenchError), one_line_if_damaged(folder.path):
        unused = latest_blame(state).node_lines
    return SweepNodes([*_journal_rows(folder, sweep, state)], unused, state.digests())


def _journal_rows(folder: SweepFolder, sweep: SweepJson, state: SweepState) -> Iterator[Row]:
    """A row for each attempt of a sweep that has a result."""
    sweep_columns = {
        "sweep": str(folder.path),
        "cluster": sweep.cluster,
        "hardware": sweep.hardware.name,
        "kernel": sweep.kernel.name,
    }
    columns_by_allocation = {
        name: sweep_columns | _allocation_columns(allocation, sweep.cluster)
        for name, allocation in state.allocations.items()
    }
    for key, attempt in state.attempts.items():
        if (result := attempt.result) is None:
            continue
        yield {
            **columns_by_allocation.get(attempt.allocation or "", sweep_columns),
            "allocation": attempt.allocation,
            "run_id": key.run_id,
            **{name: getattr(result, name) for name in _RESULT_COLUMNS},
            "started_at": result.started_at
            if is_date(result.started_at)
            else None,  # as in the rows of sweep_table
            "step_time_s": median(result.step_times_s) if result.step_times_s else None,
        }


def table_rows(table: Any) -> list[Row]:
    """The rows of a result table, with the times of their starts as seconds since 1970."""
    rows: list[Row] = table.select(COLUMNS).to_pylist()
    return [row | {"started_at": _unix_seconds(row["started_at"])} for row in rows]


def _unix_seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.astimezone(UTC).timestamp()


def _allocation_columns(allocation: AllocationState, cluster: str | None) -> Row:
    """The columns of an allocation, and the time and findings by host of its latest preflight,
    which only journals have.
    """
    nodes = allocation.preflight.get("nodes")
    node_facts = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return {
        **preflight_rates(allocation.preflight),
        "cluster": allocation.cluster(cluster),
        "control": allocation.control,
        "health": {str(node.get("host")): node["health"] for node in node_facts if node.get("health")},
        "preflight_time_s": allocation.preflight_at or 0.0,
    }


def nodes_of(row: Row) -> tuple[Node, ...]:
    """The nodes on which an attempt ran; empty where they are unknown."""
    return tuple(Node(row["cluster"], host) for host in row["hostnames"] or ())


def measurements(rows: Iterable[Row]) -> Iterator[Measurement]:
    """The rates of nodes that the rows hold.

    The preflight of an allocation counts once. The bandwidth inside nodes is that of the slowest node. Sweeps with
    kernel=probe are left out, since they measure links in another way.
    """
    timed_rows = (
        row
        for row in rows
        if row["started_at"] is not None and row["hostnames"] and kind_by_name(row["kernel"]).trains
    )
    counted_allocations = set[tuple[object, object]]()
    for row in sorted(timed_rows, key=lambda row: (row["status"] != Status.OK, row["started_at"])):
        is_control = row["run_id"] == row.get("control") and row["status"] == Status.OK and row["step_time_s"]
        allocation_key, nodes = (row["sweep"], row["allocation"]), nodes_of(row)
        hardware, started_s = row["hardware"], row["started_at"]
        setting = tuple(row.get(name) for name in _SETTING_COLUMNS)
        for by_parts, step_time_s in _times_alike(row) if is_control else ():
            control_setting, steps_per_s = (*setting, row["run_id"], by_parts), 1 / step_time_s
            yield Measurement(CONTROL_RATE, hardware, control_setting, nodes, started_s, steps_per_s)
        if allocation_key in counted_allocations:
            continue
        counted_allocations.add(allocation_key)
        for rate in NODE_RATES:
            for node, value in zip(nodes, row.get(rate) or (), strict=False):
                yield Measurement(rate, hardware, setting, (node,), started_s, value)
        for rate in LINK_RATES:
            if (value := row.get(rate)) and (rate == LINK_RATES[0] or len(nodes) > 1):
                yield Measurement(rate, hardware, (*setting, len(nodes)), nodes, started_s, value)


def _times_alike(row: Row) -> Iterator[tuple[bool, float]]:
    """Whether parts of steps were measured and the step time by them, or by whole steps, or both."""
    yield row["measured_gas"] is not None, row["step_time_s"]
    if row["parts_step_time_s"]:
        yield True, row["parts_step_time_s"]
