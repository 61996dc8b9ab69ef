"""What result rows measure of nodes: the rates of each preflight, and the control run of each allocation.

A row is a dict of COLUMNS. The command reads the rows from journals, the page and the figure from a result table.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from ultrabench.device_rates import NODE_RATES, preflight_rates
from ultrabench.kernel_config import kind_by_name
from ultrabench.result import Status, is_date
from ultrabench.store.events import BY_AGENT, DECODERS, Line, Preflight
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, fold, trust
from ultrabench.store.sweep_json import read_sweep_json

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


class _Result(msgspec.Struct, gc=False):
    """The fields of a result that this module decodes; decoding all of them would take most of the time."""

    status: str
    cause: str | None = None
    suspect_hosts: tuple[str, ...] = ()
    began_on: tuple[str, ...] = ()
    hostnames: tuple[str, ...] = ()
    throttled: str | None = None
    gpu_name: str | None = None
    torch_version: str | None = None
    cuda_version: str | None = None
    started_at: float | None = None
    step_times_s: tuple[float, ...] = ()


COLUMNS = (
    "sweep", "cluster", "hardware", "kernel", "allocation", "run_id", "step_time_s", "control", *NODE_RATES, *LINK_RATES,
    *(name for name in _Result.__struct_fields__ if name != "step_times_s"),
)  # fmt: skip
"""The columns of results that say something about nodes."""


class _EndEvent(msgspec.Struct, gc=False):
    """The fields of the events Result and Failed that this module decodes."""

    run_id: str
    repeat: int
    attempt: int
    result: _Result
    allocation: str | None = None
    source: str = BY_AGENT


_END_DECODERS = dict.fromkeys(("result", "failed"), msgspec.json.Decoder(_EndEvent).decode)
_DECODERS = {name: DECODERS[name] for name in ("allocation_planned", "preflight")} | _END_DECODERS
"""Name of an event from which COLUMNS follow -> its decoder."""


class Measurement(NamedTuple):
    """A rate that an allocation measured on one node, or on several of which the slowest decides."""

    rate: str
    """The name of the rate, a key of RATES."""
    hardware: str
    setting: tuple[object, ...]
    """What must be equal where this rate is compared: versions, the control layout, the number of nodes."""
    nodes: tuple[Node, ...]
    time_s: float
    """When the first attempt of the allocation began, in seconds since 1970."""
    value: float
    """The rate in the unit of its name, such as bytes/s."""


def journal_rows(folder: SweepFolder, warn: Callable[[str], None]) -> Iterator[Row]:
    """A row for each attempt of a sweep that has a result, straight from its journal.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep, lines, preflight_times_s = read_sweep_json(folder), list[Line](), dict[str, float]()
    end_by_attempt: dict[tuple[object, ...], tuple[tuple[int, int], _EndEvent]] = {}
    for line in read_journal(folder.journal, warn, _DECODERS):
        if isinstance(line.event, _EndEvent):
            attempt_key = line.event.run_id, line.event.repeat, line.event.attempt
            priority = (
                trust(line.event.result.status, line.event.result.cause, line.event.source),
                line.checksum,
            )
            if attempt_key not in end_by_attempt or end_by_attempt[attempt_key][0] < priority:
                end_by_attempt[attempt_key] = priority, line.event
        else:
            lines.append(line)
            if isinstance(line.event, Preflight):
                allocation_name = line.event.allocation
                preflight_times_s[allocation_name] = max(
                    line.time, preflight_times_s.get(allocation_name, 0.0)
                )
    sweep_columns = {
        "sweep": str(folder.path), "cluster": sweep.cluster, "hardware": sweep.hardware.name, "kernel": sweep.kernel.name,
    }  # fmt: skip
    columns_by_allocation = {
        name: sweep_columns | _allocation_columns(allocation, sweep.cluster, preflight_times_s.get(name, 0.0))
        for name, allocation in fold(lines).allocations.items()
    }
    for _, end_event in end_by_attempt.values():
        result = end_event.result
        if not is_date(result.started_at):  # as in the rows of sweep_table
            result = msgspec.structs.replace(result, started_at=None)
        yield {
            **columns_by_allocation.get(end_event.allocation or "", sweep_columns),
            "allocation": end_event.allocation,
            "run_id": end_event.run_id,
            **asdict(result),
            "step_time_s": median(result.step_times_s) if result.step_times_s else None,
        }


def table_rows(table: Any) -> list[Row]:
    """The rows of a result table, with the times of their starts as seconds since 1970."""
    rows: list[Row] = table.select(COLUMNS).to_pylist()
    return [row | {"started_at": _unix_seconds(row["started_at"])} for row in rows]


def _unix_seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.astimezone(UTC).timestamp()


def _allocation_columns(allocation: AllocationState, cluster: str | None, preflight_time_s: float) -> Row:
    """The columns of an allocation, and the time and findings by host of its latest preflight, which only journals have."""
    nodes = allocation.preflight.get("nodes")
    node_facts = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return {
        **preflight_rates(allocation.preflight),
        "cluster": allocation.cluster(cluster),
        "control": allocation.control,
        "health": {str(node.get("host")): node["health"] for node in node_facts if node.get("health")},
        "preflight_time_s": preflight_time_s,
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
        if is_control:
            steps_per_s, control_setting = 1 / row["step_time_s"], (*setting, row["run_id"])
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
