"""How fast nodes are relative to others, on simulated clusters with a planted slow node."""

import numpy as np
import pytest

from ultrabench.analysis.studies.nodes.measurements import CONTROL_RATE, NODE_RATES, Measurement, Node
from ultrabench.analysis.studies.nodes.relative import min_slowdowns, relative_speeds

NODES = [Node("big", f"n{number:02}") for number in range(32)]
SLOW, PARTNER, HEALTHY = NODES[7], NODES[8], range(1000, 1100)
PRODUCTS, MEMORY = NODE_RATES
DAY_S = 24 * 3600.0


def measured(rate, nodes, value, day=0.0, setting=()):
    return Measurement(rate, "h100x8", setting, tuple(nodes), 1e9 + day * DAY_S, value)


def each_day(days, rate, value):
    """A measurement of each node on each day; `value` gives it for the node, its number and the day."""
    places = [(day, n, node) for day in range(days) for n, node in enumerate(NODES)]
    return [measured(rate, [node], value(node, n, day), day) for day, n, node in places]


def cluster(
    seed,
    days,
    *,
    rates=(PRODUCTS, MEMORY, CONTROL_RATE),
    nodes_together=1,
    noise=0.01,
    between=0.005,
    slower=0.04,
):
    """Each node is measured on each day: it differs from others for good, from day to day, and all of them by day.

    A control on several nodes has the rate of the slowest one and a noise of its own.
    """
    random = np.random.default_rng(seed)
    for rate in rates:
        usual = random.normal(0, between, len(NODES))
        usual[NODES.index(SLOW)] += np.log(1 - slower)
        for day in range(days):
            logs = usual + random.normal(0, noise, len(NODES)) + random.normal(0, 0.02)
            groups = random.permutation(len(NODES)).reshape(-1, nodes_together if rate == CONTROL_RATE else 1)
            for group in groups:
                alone = nodes_together == 1 or rate != CONTROL_RATE
                value = np.exp(logs[group].min() + (0.0 if alone else random.normal(0, noise / 2)))
                yield measured(rate, [NODES[n] for n in group], value, day)


def slow_nodes(measurements):
    return {node for (_, node), speed in relative_speeds(measurements).items() if speed.slow}


@pytest.mark.parametrize(
    ("days", "options"),
    [
        (5, {}),
        (10, {"rates": (CONTROL_RATE,), "nodes_together": 4, "between": 0.0}),
        (24, {"rates": (PRODUCTS,), "noise": 0.029, "between": 0.0}),
    ],
)
def test_a_slow_node_is_found_and_healthy_ones_are_left_in_peace(days, options):
    """The numbers of days are those of docs/guide/cluster.md."""
    with_slow = [slow_nodes(cluster(seed, days, **options)) for seed in range(100)]
    assert sum(SLOW in slow for slow in with_slow) >= 95
    assert sum(bool(slow - {SLOW}) for slow in with_slow) <= 5
    assert sum(bool(slow_nodes(cluster(seed, days, slower=0.0, **options))) for seed in HEALTHY) <= 5


def test_the_smallest_loss_is_the_one_that_marks():
    """Twins of one cluster: the node that is a little slower than the smallest loss is marked, the other is not."""
    healthy = relative_speeds(cluster(3, 5, slower=0.0))
    losses = min_slowdowns({rate: speed} for (rate, _), speed in healthy.items())
    at_node = healthy[PRODUCTS, SLOW]
    for factor, marked in ((0.9, False), (1.1, True)):
        target = 1 - factor * at_node.min_slowdown
        rows = [
            row._replace(value=row.value * target / at_node.relative)
            if (row.rate, row.nodes) == (PRODUCTS, (SLOW,)) else row
            for row in cluster(3, 5, slower=0.0)
        ]  # fmt: skip
        assert relative_speeds(rows)[PRODUCTS, SLOW].slow is marked
    assert losses[PRODUCTS] == pytest.approx(at_node.min_slowdown, rel=0.3)


def test_a_node_is_told_from_its_partners():
    """Its partners are as slow as it is in three of four controls, and as fast as others once."""
    pairs = [(SLOW, NODES[0]), (SLOW, NODES[1]), (SLOW, NODES[2]), (NODES[0], NODES[1])]
    for n in range(3, 32, 2):
        pairs += [(NODES[n], NODES[(n + 1) % 32]), (NODES[n], NODES[(n + 5) % 32])]
    rows = [
        measured(CONTROL_RATE, pair, 0.96 if SLOW in pair else 1 + 0.001 * np.sin(n * day), day)
        for day in range(1, 4)
        for n, pair in enumerate(pairs)
    ]
    assert slow_nodes(rows) == {SLOW}


def test_nodes_that_were_always_together_get_no_answer():
    rest = [node for node in NODES if node not in (SLOW, PARTNER)]
    rows = [
        measured(CONTROL_RATE, pair, 0.9 if SLOW in pair else 1 + 0.001 * np.sin(n * day), day)
        for day in range(1, 5)
        for n, pair in enumerate([(SLOW, PARTNER), *((node,) for node in rest)])
    ]
    speeds = relative_speeds(rows)
    assert not {(CONTROL_RATE, SLOW), (CONTROL_RATE, PARTNER)} & speeds.keys()
    assert len(speeds) == len(rest)
    two = each_day(9, PRODUCTS, lambda _, n, day: 1 - 0.1 * n)
    # Of two nodes neither is the usual one.
    assert relative_speeds(row for row in two if row.nodes[0] in NODES[:2]) == {}


@pytest.mark.parametrize(("first_day", "hours_apart"), [(0.0, 1), (23.5 / 24, 1), (0.0, 0)])
def test_measurements_of_one_day_are_one_observation(first_day, hours_apart):
    """Also those of a night that begins before midnight, and those of one allocation."""
    rows = [
        measured(PRODUCTS, [node], 0.9 if node == SLOW else 1 + 1e-4 * n, first_day + hour * hours_apart / 24)
        for hour in range(8)
        for n, node in enumerate(NODES)
    ]
    speed = relative_speeds(rows)[PRODUCTS, SLOW]
    assert (speed.days, speed.low, speed.high, speed.slow) == (1, None, None, False)
    assert speed.relative == pytest.approx(0.9, abs=0.01)
    later = [row._replace(time_s=row.time_s + DAY_S) for row in rows]
    assert slow_nodes([*rows, *later]) == {SLOW}


def test_a_node_is_compared_only_with_what_was_measured_alike():
    """On another day, or in another setting, all nodes are a tenth slower."""
    rows = each_day(4, PRODUCTS, lambda _, n, day: (0.9 if n < 9 else 1) * (1 + 0.001 * np.sin(n + 7 * day)))
    old_or_new = [row._replace(setting=("old" if row.nodes[0] in NODES[:9] else "new",)) for row in rows]
    assert slow_nodes(old_or_new) == set()
    assert slow_nodes(row for row in rows if row.nodes[0] in NODES[6:]) == {*NODES[6:9]}


def test_a_node_that_is_slow_on_some_days_only_needs_more_of_them():
    for bad_days, slow in ((1, set()), (6, {SLOW})):

        def value(node, n, day, bad_days=bad_days):
            return 0.85 if node == SLOW and day < bad_days else 1 + 0.002 * np.sin(n * (day + 1))

        assert slow_nodes(each_day(6, MEMORY, value)) == slow


def test_a_small_difference_is_never_marked():
    def value(node, n, day):
        return 0.992 if node == SLOW else 1 + 1e-5 * np.sin(n * (day + 1))

    speed = relative_speeds(each_day(6, MEMORY, value))[MEMORY, SLOW]
    assert speed.high < 1
    assert not speed.slow
