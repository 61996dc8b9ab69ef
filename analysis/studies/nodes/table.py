"""The table of nodes that the command and the page show."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ultrabench.analysis.results.numbers import percent, with_unit
from ultrabench.analysis.studies.nodes.measurements import RATES
from ultrabench.analysis.studies.nodes.nodes import XID, NodeReport
from ultrabench.analysis.studies.nodes.relative import (
    FEWEST_DAYS,
    FEWEST_NODES,
    MIN_SLOWDOWN,
    days_of,
    min_slowdowns,
)
from ultrabench.errors import counted
from ultrabench.node_health import BAD_HEALTHS, complaints

HEADS = (
    "node", "mark", ">runs", ">attempts", *RATES.values(), ">throttled", ">Xids", "failures",
    "first seen", "last seen",
)  # fmt: skip
"""Heads of the columns of the table; a column is aligned to the right where its head begins with `>`."""
NOTE = (
    "A rate is that of the slowest device, followed by its ratio to the median node and the interval of this ratio "
    "(95 % for all nodes and rates together). A node is slow if an interval ends below 1 and the node is more than "
    f"{100 * MIN_SLOWDOWN:g} % slower. No interval: fewer than {FEWEST_DAYS} days, or too few nodes."
)


def cells(report: NodeReport) -> list[object]:
    """The cells of a node under HEADS."""
    speed_texts = [_speed_text(report, rate_name) for rate_name in RATES]
    slow_rates_text = ", ".join(RATES[rate_name] for rate_name in report.slow_rates)
    mark_texts = ["failing"] * report.failing + [f"slow: {slow_rates_text}"] * bool(slow_rates_text)
    failures_text = ", ".join(f"{cause} {n}" for cause, n in report.num_by_failure.most_common())
    num_throttled, num_xids = report.num_throttled or None, report.num_by_failure[XID] or None
    return [
        report.label, "; ".join(mark_texts), len(report.run_keys), report.num_attempts, *speed_texts, num_throttled,
        num_xids, failures_text,
        _day_text(report, min), _day_text(report, max),
    ]  # fmt: skip


def health_text(report: NodeReport) -> str | None:
    """The findings of the latest preflight of a node, such as `power limit (GPU 0: 200 W below)`; None if unknown."""
    no_findings_text = "no findings" if report.health else None
    return "; ".join(complaints(report.health, *BAD_HEALTHS).values()) or no_findings_text


def slowdowns_text(node_reports: Sequence[NodeReport]) -> str:
    """The line under the table that says how slow a node must be to be marked:
    one without a mark may be slower than others, too.
    """
    min_slowdown_by_rate = min_slowdowns(report.speeds for report in node_reports)
    rate_names = {name for report in node_reports for name in (*report.rates, *report.speeds)}
    requirement_text = f"this takes {FEWEST_DAYS} days and {FEWEST_NODES} nodes measured in the same way"
    if not min_slowdown_by_rate:
        return f"Too few days or nodes to mark a node as slow: {requirement_text}."
    known_rates = [name for name in RATES if name in min_slowdown_by_rate]
    slower_texts = [f"{percent(min_slowdown_by_rate[name])} slower in {RATES[name]}" for name in known_rates]
    other_rates_text = ", ".join(RATES[name] for name in RATES if name in rate_names - {*known_rates})
    hint = f" Too few days or nodes to mark one as slow by {other_rates_text}: {requirement_text}."
    return f"A node measured {' or '.join(slower_texts)} would be marked.{hint if other_rates_text else ''}"


def days_text(node_reports: Sequence[NodeReport]) -> str:
    """How many days were read, as a line under the table."""
    times_s = {time_s for report in node_reports for time_s in report.starts_s}
    if not times_s:
        return "No days: no attempt has started."
    first_day, last_day = (f"{datetime.fromtimestamp(pick(times_s), UTC):%Y-%m-%d}" for pick in (min, max))
    num_days_text = counted(len({*days_of(times_s).values()}), "day")
    return (
        f"Read {num_days_text}, {first_day} to {last_day}. To exclude older ones, "
        "for example after a repair: --since DATE."
    )


def _day_text(report: NodeReport, pick: Callable[[list[float]], float]) -> str | None:
    """The day of the start that `pick` (min or max) chooses, such as `2026-11-12`; None without any start."""
    return f"{datetime.fromtimestamp(pick(report.starts_s), UTC):%Y-%m-%d}" if report.starts_s else None


def _speed_text(report: NodeReport, rate_name: str) -> str | None:
    """A rate of a node, and that relative to other nodes with its interval, such as `612 TFLOP/s 0.96 (0.95-0.97)`."""
    texts = [with_unit(rate_name, report.median_rate(rate_name))]
    if (relative_speed := report.speeds.get(rate_name)) is not None:
        texts.append(f"{relative_speed.relative:.3f}")
        if relative_speed.low is not None and relative_speed.high is not None:
            texts.append(f"({relative_speed.low:.3f}-{relative_speed.high:.3f})")
    return " ".join(filter(None, texts)) or None
