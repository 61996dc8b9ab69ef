"""How fast nodes are relative to the other nodes of their kind, with intervals that hold for all of them together.

The logarithm of a rate that was measured on the nodes S of an allocation is

    y = c + sum of b_h over h in S + noise,

with a constant c for each day and setting, so that only what was measured alike on one day is compared. A
measurement on several nodes is as slow as its slowest node. The sum says the same where at most one of them is
slow, so that a slow node is told from its partners by the allocations in which they were without it. Nodes that
were always measured together cannot be told apart, and get no answer.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, inf, log, sqrt
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from ultrabench.analysis.studies.nodes.measurements import Measurement, Node

CONFIDENCE = 0.95
"""Probability that all intervals of an answer hold together."""
DAY_LENGTH_S = 20 * 3600.0
"""Longest time from the first to the last measurement of a day, in seconds; all of a node on one day count as one."""
FEWEST_DAYS = 2
"""Smallest number of days after which a node has an interval."""
FEWEST_NODES = 3
"""Smallest number of compared nodes among which one can be called slow."""
MIN_SLOWDOWN = 0.01
"""Fraction by which a node must be slower than the others to be called slow; less is not worth excluding it."""
_QN_FACTOR, _QN_EFFICIENCY = 2.2219, 0.8
"""Factor of the scale Q_n for a normal distribution, and its statistical efficiency (Rousseeuw and Croux, 1993)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeSpeed:
    """A rate of a node relative to the median node."""

    relative: float
    days: int
    """Number of days on which it was compared with other nodes."""
    low: float | None = None
    """Ends of the interval, which holds with 95 % for all nodes and rates together; None after too few days."""
    high: float | None = None

    @property
    def slow(self) -> bool:
        """Whether the interval says that the node is slower than the others."""
        return self.high is not None and self.high < 1 and self.relative < 1 - MIN_SLOWDOWN

    @property
    def min_slowdown(self) -> float | None:
        """The smallest slowdown, a fraction, with which this interval would mark the node; None without an interval."""
        return None if self.low is None else max(MIN_SLOWDOWN, 1 - self.low / self.relative)


class _NodeEffect(NamedTuple):
    """The logarithm of a node's relative speed with its standard error."""

    log_speed: float
    num_days: int
    std_error: float | None = None
    """None where the node has no interval."""
    degrees_of_freedom: float = inf
    """Those of the standard error."""


def relative_speeds(measurements: Iterable[Measurement]) -> dict[tuple[str, Node], RelativeSpeed]:
    """(name of a rate, node) -> its speed relative to the median of the nodes that it can be compared with.

    An interval is that of Student, with a probability that is divided by the number of all intervals (Bonferroni).
    It spans what noise and the usual differences between nodes explain.
    """
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if measurement.value > 0:
            groups[measurement.rate, measurement.hardware, measurement.nodes[0].cluster].append(measurement)
    fits = ((str(rate_name), _fit(group)) for (rate_name, *_), group in groups.items())
    effects = {(rate_name, node): effect for rate_name, fit in fits for node, effect in fit.items()}
    num_intervals = sum(effect.std_error is not None for effect in effects.values())
    quantile = 1 - (1 - CONFIDENCE) / 2 / max(1, num_intervals)
    speeds = {}
    for key, (log_speed, num_days, std_error, degrees_of_freedom) in effects.items():
        low = high = None
        if std_error is not None:
            half_width = std_error * float(stdtrit(degrees_of_freedom, quantile))
            low, high = exp(log_speed - half_width), exp(min(log_speed + half_width, 700.0))
        speeds[key] = RelativeSpeed(relative=exp(log_speed), days=num_days, low=low, high=high)
    return speeds


def min_slowdowns(speeds: Iterable[Mapping[str, RelativeSpeed]]) -> dict[str, float]:
    """Name of a rate -> the smallest slowdown with which a node would be marked, a fraction: the median over nodes.

    Rates without intervals are left out.

    Args:
        speeds: for each node the name of a rate -> its relative speed.
    """
    slowdowns_by_rate = defaultdict[str, list[float]](list)
    for rate_name, speed in chain.from_iterable(node_speeds.items() for node_speeds in speeds):
        slowdowns_by_rate[rate_name] += [] if speed.min_slowdown is None else [speed.min_slowdown]
    return {name: float(np.median(slowdowns)) for name, slowdowns in slowdowns_by_rate.items() if slowdowns}


def days_of(times_s: Iterable[float]) -> dict[float, int]:
    """Time in seconds -> the number of its day; a day begins with the first time after the end of the last day."""
    day, day_begin_s, day_by_time = -1, -inf, dict[float, int]()
    for time_s in sorted(times_s):
        if time_s - day_begin_s >= DAY_LENGTH_S:
            day, day_begin_s = day + 1, time_s
        day_by_time[time_s] = day
    return day_by_time


class _Regression(NamedTuple):
    """Measurements of one rate as a regression, with a row for each day, setting and set of nodes that took part."""

    nodes: list[Node]
    """The node of each column."""
    took_part: Any
    """Row x column: whether the node took part."""
    log_rates: Any
    """Row -> mean of the logarithms of the measured rates."""
    days: list[int]
    """Row -> number of the day."""
    rows_by_constant: list[list[int]]
    """The rows of each day and setting, which share a constant c."""


def _regression(measurements: Iterable[Measurement], day_by_time: Mapping[float, int]) -> _Regression:
    log_rates: dict[tuple[int, tuple[object, ...], tuple[Node, ...]], list[float]] = defaultdict(list)
    for _, _, setting, nodes, time_s, value in measurements:
        log_rates[day_by_time[time_s], setting, nodes].append(log(value))
    sorted_nodes = sorted({node for _, _, nodes in log_rates for node in nodes}, key=str)
    column_by_node = {node: column for column, node in enumerate(sorted_nodes)}
    took_part = np.zeros((len(log_rates), len(column_by_node)), dtype=bool)
    rows_by_constant: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, (day, setting, nodes) in enumerate(log_rates):
        took_part[row, [column_by_node[node] for node in nodes]] = True
        rows_by_constant[day, setting].append(row)
    means = np.array([sum(row_log_rates) / len(row_log_rates) for row_log_rates in log_rates.values()])
    days = [day for day, *_ in log_rates]
    return _Regression([*column_by_node], took_part, means, days, [*rows_by_constant.values()])


def _fit(measurements: Sequence[Measurement]) -> dict[Node, _NodeEffect]:
    """The effect of each node that one rate on one kind of hardware identifies, relative to their median.

    The variance of an effect comes from the residuals of the node's own days, which are independent of one another, and
    is at least what the residuals of all nodes say.
    """
    rows = _regression(measurements, days_of({measurement.time_s for measurement in measurements}))
    design, log_rates = rows.took_part.astype(float), rows.log_rates
    for constant_rows in rows.rows_by_constant:  # differences to the mean of these rows do not depend on c
        design[constant_rows] -= design[constant_rows].mean(axis=0)
        log_rates[constant_rows] -= log_rates[constant_rows].mean()
    gram = design.T @ design
    inverse_gram = np.linalg.pinv(gram, rcond=1e-10, hermitian=True)
    effects, leverages = inverse_gram @ (design.T @ log_rates), np.diag(inverse_gram)
    # Day x node: what the residuals of the day add to the error of the node's effect.
    day_errors = np.zeros((max(rows.days) + 1, len(rows.nodes)))
    was_compared = np.zeros_like(day_errors, dtype=bool)
    np.add.at(day_errors, rows.days, (design * (log_rates - design @ effects)[:, None]) @ inverse_gram)
    np.logical_or.at(was_compared, rows.days, rows.took_part & (abs(design) > 1e-9))
    num_days = was_compared.sum(axis=0)
    degrees_of_freedom = len(log_rates) - len(rows.rows_by_constant) - round(np.trace(gram @ inverse_gram))
    # The projection on what the rows leave undetermined: 1/n among n nodes that are compared with one another, and
    # 1/2 more for two nodes that cannot be told apart.
    undetermined = np.eye(len(rows.nodes)) - gram @ inverse_gram
    is_identified = (np.diag(undetermined) < 0.5 - 1e-6) & (num_days > 0)
    has_error = is_identified & (num_days >= FEWEST_DAYS) & (degrees_of_freedom > 0)
    variances = (day_errors**2).sum(axis=0) * num_days / np.maximum(num_days - 1, 1)
    variances = variances * len(log_rates) / max(degrees_of_freedom, 1)
    if has_error.any():
        noise_variance = np.mean(variances[has_error] / leverages[has_error])
        variances = np.maximum(variances, noise_variance * leverages)
    peers_of_columns = (is_identified & (undetermined[n] > 1e-6) for n in np.flatnonzero(is_identified))
    effect_by_node = {}
    for peers in {peers.tobytes(): peers for peers in peers_of_columns}.values():
        for column, effect in _node_effects(peers, effects, variances, has_error, num_days).items():
            effect_by_node[rows.nodes[column]] = effect
    return effect_by_node


def _node_effects(
    is_peer: Any, log_speeds: Any, variances: Any, has_error: Any, num_days: Any
) -> dict[int, _NodeEffect]:
    """Column -> the effect relative to the median of the peers, nodes that can be compared with one another.

    The error spans the noise of the node and the spread between its peers. Each argument has a value for each column.
    """
    has_interval, peer_columns = is_peer & has_error, np.flatnonzero(is_peer)
    if len(peer_columns) < FEWEST_NODES:
        return {}
    relative_logs = log_speeds - np.median(log_speeds[is_peer])
    effects = {int(n): _NodeEffect(float(relative_logs[n]), int(num_days[n])) for n in peer_columns}
    if has_interval.sum() >= FEWEST_NODES:
        noise_variance = float(np.median(variances[has_interval]))
        spread_variance = max(0.0, spread(log_speeds[has_interval]) ** 2 - noise_variance)
        degrees_of_freedom = max(1.0, _QN_EFFICIENCY * (has_interval.sum() - 1))
        for n in np.flatnonzero(has_interval):
            std_error = sqrt(spread_variance + variances[n])
            effects[int(n)] = effects[int(n)]._replace(
                std_error=std_error, degrees_of_freedom=degrees_of_freedom
            )
    return effects


def spread(values: Any) -> float:
    """The standard deviation of the values by the scale Q_n, which holds even if up to half of them are outliers."""
    n, half_count = len(values), len(values) // 2 + 1
    differences = abs(values[:, None] - values)[np.triu_indices(n, 1)]
    quantile_index = half_count * (half_count - 1) // 2 - 1
    correction = n / (n + 1.4) if n % 2 else n / (n + 3.8)
    return float(_QN_FACTOR * np.partition(differences, quantile_index)[quantile_index] * correction)
