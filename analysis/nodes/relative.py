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
from math import exp, inf, log, sqrt
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from ultrabench.analysis.nodes.measurements import Measurement, Node

CONFIDENCE = 0.95
"""Probability that all intervals of an answer hold together."""
DAY_S = 20 * 3600.0
"""Seconds from the first measurement of a day to the last; all measurements of a node on one day count as one."""
FEWEST_DAYS = 2
"""Smallest number of days after which a node has an interval."""
FEWEST_NODES = 3
"""Smallest number of compared nodes in which one can be called slow."""
MIN_LOSS = 0.01
"""Relative difference up to which a node is never called slow, since it is worth no exclusion."""
_QN_FACTOR, _QN_EFFICIENCY = 2.2219, 0.8
"""Factor of the scale Q_n for a normal distribution, and its efficiency (Rousseeuw and Croux, 1993)."""


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
        return self.high is not None and self.high < 1 and self.relative < 1 - MIN_LOSS

    @property
    def smallest_loss(self) -> float | None:
        """The smallest loss with which this interval would mark the node; None without an interval."""
        return None if self.low is None else max(MIN_LOSS, 1 - self.low / self.relative)


class _Effect(NamedTuple):
    """The logarithm of a relative speed, the number of its days, its standard error, and the error's degrees of freedom."""

    effect: float
    num_days: int
    std_error: float | None = None
    freedom: float = inf


def relative_speeds(measurements: Iterable[Measurement]) -> dict[tuple[str, Node], RelativeSpeed]:
    """(rate, node) -> its speed relative to the median of the nodes that it can be compared with.

    An interval is that of Student, with a probability that is divided by the number of all intervals (Bonferroni).
    It spans what noise and the usual differences between nodes explain.
    """
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if measurement.value > 0:
            groups[measurement.rate, measurement.hardware, measurement.nodes[0].cluster].append(measurement)
    fits = ((str(rate), _fit(group)) for (rate, *_), group in groups.items())
    effects = {(rate, node): effect for rate, fit in fits for node, effect in fit.items()}
    probability = 1 - (1 - CONFIDENCE) / 2 / max(1, sum(e.std_error is not None for e in effects.values()))
    speeds = {}
    for key, (effect, num_days, std_error, freedom) in effects.items():
        width = None if std_error is None else std_error * float(stdtrit(freedom, probability))
        ends = {} if width is None else {"low": exp(effect - width), "high": exp(min(effect + width, 700.0))}
        speeds[key] = RelativeSpeed(relative=exp(effect), days=num_days, **ends)
    return speeds


def smallest_losses(speeds: Iterable[Mapping[str, RelativeSpeed]]) -> dict[str, float]:
    """Rate -> the smallest loss with which a node would be marked, the median over nodes; only rates with intervals."""
    losses_by_rate = defaultdict[str, list[float]](list)
    for rate, speed in (item for node_speeds in speeds for item in node_speeds.items()):
        losses_by_rate[rate] += [] if speed.smallest_loss is None else [speed.smallest_loss]
    return {rate: float(np.median(values)) for rate, values in losses_by_rate.items() if values}


def days_of(times_s: Iterable[float]) -> dict[float, int]:
    """Time -> the number of its day; a day begins with the first one after the last day's end."""
    day, day_begin_s, day_by_time = -1, -inf, dict[float, int]()
    for time_s in sorted(times_s):
        if time_s - day_begin_s >= DAY_S:
            day, day_begin_s = day + 1, time_s
        day_by_time[time_s] = day
    return day_by_time


class _Rows(NamedTuple):
    """What was measured as the rows of a regression: of one day, setting and set of nodes, the mean of the logarithms."""

    nodes: list[Node]
    """The node of each column."""
    took_part: Any
    """Whether a node (column) took part in a row."""
    y: Any
    days: list[int]
    constant_rows: list[list[int]]
    """The rows that share a constant."""


def _rows(group: Iterable[Measurement], day_by_time: Mapping[float, int]) -> _Rows:
    logs: dict[tuple[int, tuple[object, ...], tuple[Node, ...]], list[float]] = defaultdict(list)
    for _, _, setting, nodes, time_s, value in group:
        logs[day_by_time[time_s], setting, nodes].append(log(value))
    sorted_nodes = sorted({node for _, _, nodes in logs for node in nodes}, key=str)
    column_by_node = {node: column for column, node in enumerate(sorted_nodes)}
    took_part = np.zeros((len(logs), len(column_by_node)), dtype=bool)
    constant_rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, (day, setting, nodes) in enumerate(logs):
        took_part[row, [column_by_node[node] for node in nodes]] = True
        constant_rows[day, setting].append(row)
    y = np.array([sum(values) / len(values) for values in logs.values()])
    return _Rows([*column_by_node], took_part, y, [day for day, *_ in logs], [*constant_rows.values()])


def _fit(group: Sequence[Measurement]) -> dict[Node, _Effect]:
    """The effect of each node that one rate on one kind of hardware identifies, relative to their median.

    The variance of an effect comes from the residuals of the node's own days, which are independent of one another, and
    is at least what the residuals of all nodes say.
    """
    rows = _rows(group, days_of({measurement.time_s for measurement in group}))
    x, y = rows.took_part.astype(float), rows.y
    for row_numbers in rows.constant_rows:
        x[row_numbers] -= x[row_numbers].mean(axis=0)
        y[row_numbers] -= y[row_numbers].mean()
    gram = x.T @ x
    inverse = np.linalg.pinv(gram, rcond=1e-10, hermitian=True)
    effects, leverage = inverse @ (x.T @ y), np.diag(inverse)
    scores = np.zeros((max(rows.days) + 1, len(rows.nodes)))
    was_compared = np.zeros_like(scores, dtype=bool)
    np.add.at(scores, rows.days, (x * (y - x @ effects)[:, None]) @ inverse)
    np.logical_or.at(was_compared, rows.days, rows.took_part & (abs(x) > 1e-9))
    num_days = was_compared.sum(axis=0)
    freedom = len(y) - len(rows.constant_rows) - round(np.trace(gram @ inverse))
    # The projection on what the rows leave undetermined: 1/n among n nodes that are compared with one another, and
    # 1/2 more for two nodes that cannot be told apart.
    residual = np.eye(len(rows.nodes)) - gram @ inverse
    is_identified = (np.diag(residual) < 0.5 - 1e-6) & (num_days > 0)
    has_error = is_identified & (num_days >= FEWEST_DAYS) & (freedom > 0)
    variances = (scores**2).sum(axis=0) * num_days / np.maximum(num_days - 1, 1) * len(y) / max(freedom, 1)
    if has_error.any():
        noise_variance = np.mean(variances[has_error] / leverage[has_error])
        variances = np.maximum(variances, noise_variance * leverage)
    peers_by_column = {n: is_identified & (residual[n] > 1e-6) for n in np.flatnonzero(is_identified)}
    effect_by_node = {}
    for peers in {peers.tobytes(): peers for peers in peers_by_column.values()}.values():
        for n, effect in _effects(peers, effects, variances, has_error, num_days).items():
            effect_by_node[rows.nodes[n]] = effect
    return effect_by_node


def _effects(peers: Any, effects: Any, variances: Any, has_error: Any, num_days: Any) -> dict[int, _Effect]:
    """Column -> the effect relative to the median of `peers`, nodes that can be compared with one another.

    The error spans the noise of the node and the spread between its peers.
    """
    is_sure, columns = peers & has_error, np.flatnonzero(peers)
    if len(columns) < FEWEST_NODES:
        return {}
    median_effect = np.median(effects[peers])
    effect_by_column = {int(n): _Effect(float(effects[n] - median_effect), int(num_days[n])) for n in columns}
    if is_sure.sum() >= FEWEST_NODES:
        spread_variance = max(0.0, spread(effects[is_sure]) ** 2 - float(np.median(variances[is_sure])))
        freedom = max(1.0, _QN_EFFICIENCY * (is_sure.sum() - 1))
        for n in np.flatnonzero(is_sure):
            std_error = sqrt(spread_variance + variances[n])
            effect_by_column[int(n)] = effect_by_column[int(n)]._replace(std_error=std_error, freedom=freedom)
    return effect_by_column


def spread(values: Any) -> float:
    """The standard deviation of most values by their pairwise differences, which up to half of them may spoil."""
    n, half_count = len(values), len(values) // 2 + 1
    differences = abs(values[:, None] - values)[np.triu_indices(n, 1)]
    index = half_count * (half_count - 1) // 2 - 1
    correction = n / (n + 1.4) if n % 2 else n / (n + 3.8)
    return float(_QN_FACTOR * np.partition(differences, index)[index] * correction)
