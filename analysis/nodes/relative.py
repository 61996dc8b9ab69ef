"""How fast nodes are relative to the other nodes of their kind, with intervals that hold for all of them together.

The logarithm of a rate that was measured on the nodes S of an allocation is

    y = c + sum of b_h over h in S + noise,

with a constant c for each day and setting, so that only what was measured alike on one day is compared. A
measurement on several nodes is as slow as its slowest node. The sum says the same where at most one of them is
slow, so that a slow node is told from its partners by the allocations in which they were without it. Nodes that
were always measured together cannot be told apart, and get no answer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from ultrabench.analysis.nodes.measurements import Measurement, Node

CONFIDENCE = 0.95
"""Probability that all intervals of an answer hold together."""
DAY_S = 20 * 3600.0
"""Seconds from the first measurement of a day to the last; measurements of a node on one day count as one."""
FEWEST_DAYS = 2
"""Smallest number of days after which a node has an interval."""
FEWEST_NODES = 3
"""Smallest number of nodes of which one can be called slow."""
SMALLEST = 0.01
"""Relative difference up to which a node is never called slow, since it is worth no exclusion."""
_QN, _QN_FREEDOM = 2.2219, 0.8
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
        return self.high is not None and self.high < 1 and self.relative < 1 - SMALLEST


class _Effect(NamedTuple):
    """The logarithm of a relative speed, its standard error and the degrees of freedom of that."""

    effect: float
    days: int
    error: float | None = None
    freedom: float = inf


def relative_speeds(measured: Iterable[Measurement]) -> dict[tuple[str, Node], RelativeSpeed]:
    """(rate, node) -> its speed relative to the median of the nodes that it can be compared with.

    An interval is that of Student, with a probability that is divided by the number of all intervals (Bonferroni).
    It spans what noise and the usual differences between nodes explain.
    """
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for one in measured:
        if one.value > 0:
            groups[one.rate, one.hardware, one.nodes[0].cluster].append(one)
    effects = {
        (str(rate), node): e for (rate, *_), group in groups.items() for node, e in _fit(group).items()
    }
    level = 1 - (1 - CONFIDENCE) / 2 / max(1, sum(e.error is not None for e in effects.values()))
    speeds = {}
    for key, (effect, days, error, freedom) in effects.items():
        width = None if error is None else error * float(stdtrit(freedom, level))
        ends = {} if width is None else {"low": exp(effect - width), "high": exp(min(effect + width, 700.0))}
        speeds[key] = RelativeSpeed(relative=exp(effect), days=days, **ends)
    return speeds


def days_of(times_s: Iterable[float]) -> dict[float, int]:
    """Time -> the number of its day; a day begins with the first measurement after the end of the last one."""
    day, begin_s, days = -1, -inf, dict[float, int]()
    for time_s in sorted(times_s):
        if time_s - begin_s >= DAY_S:
            day, begin_s = day + 1, time_s
        days[time_s] = day
    return days


def _fit(group: Sequence[Measurement]) -> dict[Node, _Effect]:
    """The effect of each node that one rate on one kind of hardware identifies, relative to their median."""
    day_of = days_of(one.time_s for one in group)
    logs: dict[tuple[int, tuple[object, ...], tuple[Node, ...]], list[float]] = defaultdict(list)
    for one in group:
        logs[day_of[one.time_s], one.setting, tuple(sorted(set(one.nodes), key=str))].append(log(one.value))
    columns = {node: n for n, node in enumerate(sorted({n for _, _, nodes in logs for n in nodes}, key=str))}
    x, y = np.zeros((len(logs), len(columns))), np.array([np.mean(values) for values in logs.values()])
    for row, (_, _, nodes) in enumerate(logs):
        x[row, [columns[node] for node in nodes]] = 1
    rows_by_constant: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, (day, setting, _) in enumerate(logs):
        rows_by_constant[day, setting].append(row)
    is_on = x > 0
    for rows in rows_by_constant.values():
        x[rows], y[rows] = x[rows] - x[rows].mean(axis=0), y[rows] - y[rows].mean()
    squares = x.T @ x
    inverse = np.linalg.pinv(squares, hermitian=True)
    same = np.eye(len(columns)) - squares @ inverse
    """The projection on what the measurements leave open: 1/n on a set of n nodes that are compared with one another,
    and at least 1/2 more on nodes that cannot be told apart."""
    effects = inverse @ (x.T @ y)
    freedom = len(y) - len(rows_by_constant) - round(float(np.trace(squares @ inverse)))
    compared = is_on & (abs(x) > 1e-9)
    scores = np.zeros((max(day_of.values()) + 1, len(columns)))
    days = np.zeros_like(scores, dtype=bool)
    of_rows = [day for day, _, _ in logs]
    np.add.at(scores, of_rows, (x * (y - x @ effects)[:, None]) @ inverse)
    np.logical_or.at(days, of_rows, compared)
    number = days.sum(axis=0)
    told_apart = (np.diag(same) < 0.5 - 1e-6) & (number > 0)
    enough = told_apart & (number >= FEWEST_DAYS) & (freedom > 0)
    own = (scores**2).sum(axis=0) * number / np.maximum(number - 1, 1) * len(y) / max(freedom, 1)
    if enough.any():
        pooled = np.mean(own[enough] / np.diag(inverse)[enough])
        own = np.maximum(own, pooled * np.diag(inverse))
    found = {}
    for node, column in columns.items():
        peers = told_apart & (same[column] > 1e-6)
        if told_apart[column] and peers.sum() >= FEWEST_NODES:
            found[node] = _relative(column, effects, own, peers, enough, number)
    return found


def _relative(column: int, effects: Any, own: Any, peers: Any, enough: Any, days: Any) -> _Effect:
    """The effect of a node relative to its peers, with an error that spans its noise and the spread of the peers."""
    effect = float(effects[column] - np.median(effects[peers]))
    sure = peers & enough
    if not enough[column] or sure.sum() < FEWEST_NODES:
        return _Effect(effect, int(days[column]))
    between = max(0.0, spread(effects[sure]) ** 2 - float(np.median(own[sure])))
    freedom = max(1.0, _QN_FREEDOM * (sure.sum() - 1))
    return _Effect(effect, int(days[column]), (between + float(own[column])) ** 0.5, freedom)


def spread(values: Any) -> float:
    """The standard deviation of most values by their pairwise differences, which up to half of them may spoil."""
    n, half = len(values), len(values) // 2 + 1
    differences = abs(values[:, None] - values)[np.triu_indices(n, 1)]
    place = half * (half - 1) // 2 - 1
    correction = n / (n + 1.4) if n % 2 else n / (n + 3.8)
    return float(_QN * np.partition(differences, place)[place] * correction)
