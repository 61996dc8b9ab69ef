"""The nodes that sweeps ran on: what they did, how fast they are, and which of them are slow or failing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from scipy.special import bdtrc

from ultrabench.allowed import require_safe_names
from ultrabench.analysis.studies.nodes.measurements import (
    CONTROL_RATE,
    RATES,
    Node,
    Row,
    measurements,
    nodes_of,
)
from ultrabench.analysis.studies.nodes.relative import (
    CONFIDENCE,
    FEWEST_DAYS,
    RelativeSpeed,
    days_of,
    relative_speeds,
)
from ultrabench.errors import ConfigError
from ultrabench.node_health import BAD_HEALTHS
from ultrabench.record import to_dict
from ultrabench.result import FAILURES, proves_node_fault

XID = "xid"
"""Cause of a failure that an Xid in the log of the kernel shows."""


@dataclass(kw_only=True)
class NodeReport:
    """What the results say about one node."""

    node: Node
    label: str = ""
    """Its host, with its cluster where the rows have nodes of several clusters."""
    run_keys: set[object] = field(default_factory=set)
    """Sweep and run_id of each run that was tried on it, alone or with other nodes."""
    num_attempts: int = 0
    num_throttled: int = 0
    """Number of attempts in which a GPU was throttled, of this node or of another one that took part."""
    num_by_failure: Counter[str] = field(default_factory=Counter)
    """Cause, or else status, of failures of which this node is the only suspect -> their number."""
    failed_starts_s: list[float] = field(default_factory=list)
    """Starts of the attempts whose failure proves a fault of this node, in seconds since 1970."""
    starts_s: list[float] = field(default_factory=list)
    """Starts of its attempts in seconds since 1970."""
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Name of a rate -> its values that were measured on this node alone; without CONTROL_RATE,
    whose layouts differ."""
    speeds: dict[str, RelativeSpeed] = field(default_factory=dict)
    """Name of a rate -> the node's speed relative to other nodes."""
    health: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """The findings of its latest preflight, as `to_facts` writes them; empty where nothing is known."""
    health_time_s: float = 0.0
    """When these findings were written, in seconds since 1970."""
    failing: bool = False
    """Whether it fails on more days than chance explains, if all nodes fail as often as the others do."""

    @property
    def slow_rates(self) -> list[str]:
        """The names of the rates in which it is slow."""
        return [rate_name for rate_name in RATES if rate_name in self.speeds and self.speeds[rate_name].slow]

    @property
    def marked(self) -> bool:
        """Whether jobs should leave the node out."""
        return self.failing or bool(self.slow_rates)

    def median_rate(self, name: str) -> float | None:
        """The median of the rate of this name over the measurements on this node alone; None without any."""
        return float(np.median(values)) if (values := self.rates.get(name)) else None

    def as_json(self) -> dict[str, Any]:
        """The entry of `ultrabench nodes --json`."""
        speeds = {name: to_dict(speed) for name, speed in self.speeds.items()}
        rate_names = {**self.rates, **speeds}
        rates = {name: {"rate": self.median_rate(name), **speeds.get(name, {})} for name in rate_names}
        first, last = (_time_text(pick(self.starts_s)) if self.starts_s else None for pick in (min, max))
        return {
            **self.node._asdict(), "slow": self.slow_rates, "failing": self.failing, "runs": len(self.run_keys),
            "attempts": self.num_attempts, "rates": rates, "throttled": self.num_throttled,
            "xids": self.num_by_failure[XID],
            "failures": dict(self.num_by_failure.most_common()), "first_seen": first, "last_seen": last,
            "health": {str(complaint): self.health.get(complaint,
                {}) for complaint in BAD_HEALTHS} if self.health else None,
        }  # fmt: skip


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def reports(rows: Sequence[Row]) -> list[NodeReport]:
    """A report of each node in the rows, the marked ones first, then the slowest."""
    report_by_node: dict[Node, NodeReport] = {}
    for row in rows:
        started_s, has_one_suspect = row["started_at"], len(row.get("suspect_hosts") or ()) == 1
        for node in nodes_of(row):
            report = report_by_node.get(node) or report_by_node.setdefault(node, NodeReport(node=node))
            report.num_attempts += 1
            report.run_keys.add((row["sweep"], row["run_id"]))
            if node.host in row.get("health", {}) and row["preflight_time_s"] >= report.health_time_s:
                report.health, report.health_time_s = row["health"][node.host], row["preflight_time_s"]
            report.num_throttled += bool(row["throttled"])
            report.starts_s += [] if started_s is None else [started_s]
            if has_one_suspect and row["status"] in FAILURES and row["suspect_hosts"][0] == node.host:
                report.num_by_failure[row["cause"] or row["status"]] += 1
                is_node_fault = proves_node_fault(row["status"], row["cause"])
                report.failed_starts_s += [started_s] if is_node_fault and started_s is not None else []
    node_measurements = [*measurements(rows)]
    for measurement in node_measurements:
        if len(measurement.nodes) == 1 and measurement.rate != CONTROL_RATE:
            report_by_node[measurement.nodes[0]].rates[measurement.rate].append(measurement.value)
    for (rate_name, node), speed in relative_speeds(node_measurements).items():
        report_by_node[node].speeds[rate_name] = speed
    has_one_cluster = len({node.cluster for node in report_by_node}) == 1
    for node, report in report_by_node.items():
        report.label = node.host if has_one_cluster else f"{node.host} ({node.cluster})"
    _mark_failing([*report_by_node.values()])
    return sorted(report_by_node.values(), key=_severity_key)


def _severity_key(report: NodeReport) -> tuple[object, ...]:
    """Sort key by which failing nodes come first, then slow ones, the slowest first."""
    lowest_speed = min((speed.relative for speed in report.speeds.values()), default=1.0)
    num_failed = len(report.failed_starts_s)
    return not report.failing, not report.slow_rates, lowest_speed, -num_failed, str(report.node)


def _mark_failing(node_reports: Sequence[NodeReport]) -> None:
    """Marks nodes that failed on several days, and on more of their days than the other nodes of the cluster explain.

    The test is binomial: a node fails on a day with the probability that the days of the other nodes show, one more
    of which counts as failed. The p-value is multiplied by the number of nodes (Bonferroni).
    """
    for cluster in {report.node.cluster for report in node_reports}:
        cluster_reports = [report for report in node_reports if report.node.cluster == cluster]
        day_by_time = days_of({time_s for report in cluster_reports for time_s in report.starts_s})
        day_counts = [len({day_by_time[t] for t in report.starts_s}) for report in cluster_reports]
        failed_counts = [len({day_by_time[t] for t in report.failed_starts_s}) for report in cluster_reports]
        for report, num_days, num_failed in zip(cluster_reports, day_counts, failed_counts, strict=True):
            failed_share = (sum(failed_counts) - num_failed + 1) / (sum(day_counts) - num_days + 1)
            p_value = float(bdtrc(num_failed - 1, num_days, min(1.0, failed_share))) if num_failed else 1.0
            report.failing = num_failed >= FEWEST_DAYS and p_value * len(cluster_reports) < 1 - CONFIDENCE


def exclude_list(node_reports: Iterable[NodeReport]) -> str:
    """The names of the marked nodes as `sbatch --exclude` takes them.

    Raises:
        ConfigError: they belong to several clusters.
    """
    marked_nodes = sorted(report.node for report in node_reports if report.marked)
    require_safe_names(node.host for node in marked_nodes)
    if len(clusters := sorted({str(node.cluster) for node in marked_nodes})) > 1:
        fact = f"the marked nodes belong to {len(clusters)} clusters ({', '.join(clusters)})"
        raise ConfigError(f"{fact}; a job can exclude nodes of only one: give the sweeps of one cluster")
    return ",".join(node.host for node in marked_nodes)
