"""The table of nodes that the command and the page show."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ultrabench.analysis.nodes.measurements import RATES
from ultrabench.analysis.nodes.nodes import XID, NodeReport
from ultrabench.analysis.nodes.relative import FEWEST_DAYS, FEWEST_NODES, SMALLEST, days_of, smallest_losses
from ultrabench.analysis.numbers import percent, with_unit
from ultrabench.errors import counted
from ultrabench.node_health import COMPLAINTS, complaints

HEADS = (
    "node", "mark", ">runs", ">attempts", *RATES.values(), ">throttled", ">Xids", "failures",
    "first seen", "last seen",
)  # fmt: skip
NOTE = (
    "A rate is that of the slowest device, followed by its ratio to the median node and the interval of this ratio "
    "(95 % for all nodes and rates together). A node is slow if an interval ends below 1 and the node is more than "
    f"{100 * SMALLEST:g} % slower. No interval: fewer than {FEWEST_DAYS} days, or too few nodes."
)


def cells(report: NodeReport) -> list[object]:
    """The cells of a node under HEADS."""
    speeds = [_speed(report, rate) for rate in RATES]
    slow = ", ".join(RATES[rate] for rate in report.slow)
    marks = ["failing"] * report.failing + [f"slow: {slow}"] * bool(slow)
    failures = ", ".join(f"{cause} {number}" for cause, number in report.failures.most_common())
    counts = report.throttled or None, report.failures[XID] or None
    return [
        report.node.host, "; ".join(marks), len(report.runs), report.attempts, *speeds, *counts, failures,
        _day(report, min), _day(report, max),
    ]  # fmt: skip


def health_text(report: NodeReport) -> str | None:
    """The findings of the latest preflight of a node, such as `power limit (GPU 0: 200 W below)`; None if unknown."""
    none = "no findings" if report.health else None
    return "; ".join(complaints(report.health, *COMPLAINTS).values()) or none


def losses_text(reports: Sequence[NodeReport]) -> str:
    """How slow a node must be to be marked, as a line under the table: without marks, nodes may still be a bit slow."""
    losses = smallest_losses(report.speeds for report in reports)
    measured = {rate for report in reports for rate in (*report.rates, *report.speeds)}
    rule = f"this takes {FEWEST_DAYS} days and {FEWEST_NODES} nodes measured in the same way"
    if not losses:
        return f"Too few days or nodes to mark a node as slow: {rule}."
    shown = [f"{percent(losses[rate])} slower in {RATES[rate]}" for rate in RATES if rate in losses]
    unknown = ", ".join(RATES[rate] for rate in RATES if rate in measured - losses.keys())
    too_few = f" Too few days or nodes to mark one as slow by {unknown}: {rule}." if unknown else ""
    return f"A node measured {' or '.join(shown)} would be marked.{too_few}"


def days_text(reports: Sequence[NodeReport]) -> str:
    """How many days were read, as a line under the table."""
    times_s = {time_s for report in reports for time_s in report.seen_s}
    if not times_s:
        return "No days: no attempt has started."
    first, last = (f"{datetime.fromtimestamp(f(times_s), UTC):%Y-%m-%d}" for f in (min, max))
    days = counted(len({*days_of(times_s).values()}), "day")
    return f"Read {days}, {first} to {last}. To exclude older ones, for example after a repair: --since DATE."


def _day(report: NodeReport, which: Callable[[list[float]], float]) -> str | None:
    return f"{datetime.fromtimestamp(which(report.seen_s), UTC):%Y-%m-%d}" if report.seen_s else None


def _speed(report: NodeReport, name: str) -> str | None:
    """A rate of a node, and that relative to other nodes with its interval, such as `612 TFLOP/s 0.96 (0.95-0.97)`."""
    shown, speed = [with_unit(name, report.rate(name))], report.speeds.get(name)
    if speed is not None:
        shown.append(f"{speed.relative:.3f}")
        if speed.low is not None and speed.high is not None:
            shown.append(f"({speed.low:.3f}-{speed.high:.3f})")
    return " ".join(filter(None, shown)) or None
