"""The nodes that sweeps ran on: what they did, how fast they are, and which of them are slow or failing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from scipy.special import bdtrc

from ultrabench.allowed import require_safe_names
from ultrabench.analysis.nodes.measurements import CONTROL, RATES, Node, Row, measurements, nodes_of
from ultrabench.analysis.nodes.relative import (
    CONFIDENCE,
    FEWEST_DAYS,
    RelativeSpeed,
    days_of,
    relative_speeds,
)
from ultrabench.errors import ConfigError
from ultrabench.node_health import BAD_HEALTHS
from ultrabench.record import to_dict
from ultrabench.result import AGENT_GONE, FAILURES, Status

XID = "xid"
"""Cause of a failure that an Xid in the log of the kernel shows."""


@dataclass(kw_only=True)
class NodeReport:
    """What the results say about one node."""

    node: Node
    runs: set[object] = field(default_factory=set)
    """The runs that were tried on it, alone or with other nodes."""
    attempts: int = 0
    throttled: int = 0
    """Attempts in which a GPU was throttled, of this node or of another one that took part."""
    failures: Counter[str] = field(default_factory=Counter)
    """Cause, or else status, of failures that point at this node alone -> their number."""
    failed_at_s: list[float] = field(default_factory=list)
    """Starts of the attempts which failed because of this node, as it or Slurm said."""
    seen_s: list[float] = field(default_factory=list)
    """Starts of its attempts in seconds since 1970."""
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Rate of RATES -> its values that were measured on this node alone; without controls, whose layouts differ."""
    speeds: dict[str, RelativeSpeed] = field(default_factory=dict)
    """Rate of RATES -> its speed relative to other nodes."""
    health: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """The findings of its latest preflight, as `to_facts` writes them; empty where nothing is known."""
    health_s: float = 0.0
    """When they were written, in seconds since 1970."""
    failing: bool = False
    """Whether it fails on more days than chance gives one of the nodes, if all of them fail as often as the others."""

    @property
    def slow(self) -> list[str]:
        """The rates in which it is slow."""
        return [rate for rate in RATES if rate in self.speeds and self.speeds[rate].slow]

    @property
    def marked(self) -> bool:
        """Whether jobs should leave the node out."""
        return self.failing or bool(self.slow)

    def rate(self, name: str) -> float | None:
        """The median of a rate that was measured on this node alone; None where it was not."""
        return float(np.median(values)) if (values := self.rates.get(name)) else None

    def as_json(self) -> dict[str, Any]:
        """The entry of `ultrabench nodes --json`."""
        speeds = {name: to_dict(speed) for name, speed in self.speeds.items()}
        rates = {name: {"rate": self.rate(name), **speeds.get(name, {})} for name in {**self.rates, **speeds}}
        first, last = (_time_text(pick(self.seen_s)) if self.seen_s else None for pick in (min, max))
        return {
            **self.node._asdict(), "slow": self.slow, "failing": self.failing, "runs": len(self.runs),
            "attempts": self.attempts, "rates": rates, "throttled": self.throttled, "xids": self.failures[XID],
            "failures": dict(self.failures.most_common()), "first_seen": first, "last_seen": last,
            "health": {str(complaint): self.health.get(complaint, {}) for complaint in BAD_HEALTHS} if self.health else None,
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
            report.attempts += 1
            report.runs.add((row["sweep"], row["run_id"]))
            if node.host in row.get("health", {}) and row["preflight_s"] >= report.health_s:
                report.health, report.health_s = row["health"][node.host], row["preflight_s"]
            report.throttled += bool(row["throttled"])
            report.seen_s += [] if started_s is None else [started_s]
            if has_one_suspect and row["status"] in FAILURES and row["suspect_hosts"][0] == node.host:
                report.failures[row["cause"] or row["status"]] += 1
                node_said_so = row["status"] == Status.NODE_FAIL and row["cause"] != AGENT_GONE
                report.failed_at_s += [started_s] if node_said_so and started_s is not None else []
    node_measurements = [*measurements(rows)]
    for measurement in node_measurements:
        if len(measurement.nodes) == 1 and measurement.rate != CONTROL:
            report_by_node[measurement.nodes[0]].rates[measurement.rate].append(measurement.value)
    for (rate, node), speed in relative_speeds(node_measurements).items():
        report_by_node[node].speeds[rate] = speed
    _mark_failing([*report_by_node.values()])
    return sorted(report_by_node.values(), key=_worst_first)


def _worst_first(report: NodeReport) -> tuple[object, ...]:
    lowest_speed = min((speed.relative for speed in report.speeds.values()), default=1.0)
    return not report.failing, not report.slow, lowest_speed, -len(report.failed_at_s), str(report.node)


def _mark_failing(node_reports: Sequence[NodeReport]) -> None:
    """Marks nodes that failed on several days, and on more of their days than the other nodes of the cluster explain.

    The number of days with a failure is binomial, with the share of the other nodes' days, of which one more
    counts as failed. The probability is multiplied by the number of nodes (Bonferroni).
    """
    for cluster in {report.node.cluster for report in node_reports}:
        group = [report for report in node_reports if report.node.cluster == cluster]
        day_by_time = days_of({time_s for report in group for time_s in report.seen_s})
        days_by_id = {id(r): len({day_by_time[t] for t in r.seen_s}) for r in group}
        failed_by_id = {id(r): len({day_by_time[t] for t in r.failed_at_s}) for r in group}
        for report in group:
            num_days, num_failed = days_by_id[id(report)], failed_by_id[id(report)]
            share = (sum(failed_by_id.values()) - num_failed + 1) / (sum(days_by_id.values()) - num_days + 1)
            p_value = float(bdtrc(num_failed - 1, num_days, min(1.0, share))) if num_failed else 1.0
            report.failing = num_failed >= FEWEST_DAYS and p_value * len(group) < 1 - CONFIDENCE


def exclude_list(node_reports: Iterable[NodeReport]) -> str:
    """The names of the marked nodes as `sbatch --exclude` takes them.

    Raises:
        ConfigError: they belong to several clusters.
    """
    marked_nodes = sorted(report.node for report in node_reports if report.marked)
    require_safe_names(node.host for node in marked_nodes)
    if len(clusters := sorted({str(node.cluster) for node in marked_nodes})) > 1:
        fact = f"the marked nodes belong to {len(clusters)} clusters ({', '.join(clusters)})"
        raise ConfigError(f"{fact}; Slurm can exclude nodes of only one: give the sweeps of one cluster")
    return ",".join(node.host for node in marked_nodes)
