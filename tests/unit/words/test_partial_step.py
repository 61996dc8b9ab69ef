"""The time of a whole step from steps of fewer micro-batches, and its interval."""

import math
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median
from types import SimpleNamespace

import pytest

from ultrabench.errors import ConfigError
from ultrabench.partial_step import (
    Slice,
    departure,
    extrapolation_error_rel,
    step_s,
    whole_step_ci95_rel,
    whole_step_times_s,
)
from ultrabench.result import RunResult, Status
from ultrabench.run import Task
from ultrabench.standing import Repeat, near_best, open_contenders, standings
from ultrabench.step_time import ci95_rel

GAS = 64
PAIR = Slice(g1=4, g2=8, third=12)


def turns(num, noise=0.0, curvature=0.0, seed=0):
    """Turns of steps that take 3 s, 0.5 s per micro-batch, and more for later ones, with relative noise."""
    random = Random(seed)

    def seconds(size):
        return (3.0 + 0.5 * size + curvature * size**2) * (1 + noise * random.gauss(0, 1))

    return [{size: seconds(size) for size in PAIR.order(turn)} for turn in range(num)]


def test_a_straight_line_gives_the_whole_step():
    assert step_s(PAIR, {4: 5.0, 8: 7.0}, GAS) == 7.0 + 56 * 0.5 == pytest.approx(3.0 + 0.5 * GAS)
    assert whole_step_times_s(PAIR, turns(6), GAS) == pytest.approx([35.0] * 6)
    assert (departure(PAIR, turns(6)), whole_step_ci95_rel(PAIR, turns(6), GAS, 0.0)) == (
        pytest.approx(0),
        0.0,
    )
    assert step_s(PAIR, {4: 7.5, 8: 7.0}, GAS) == 7.0, "noise made a larger step the faster one"


def test_every_other_turn_goes_backwards():
    pair = Slice(g1=4, g2=8)
    assert [pair.order(n) for n in range(3)] == [(4, 8), (8, 4), (4, 8)]
    assert [PAIR.order(n) for n in range(2)] == [(4, 8, 12), (12, 8, 4)]
    drift = [5.0, 7.0 + 0.1, 7.0 + 0.2, 5.0 + 0.3]  # each step is 0.1 s slower than it would have been before
    ends = [{4: drift[0], 8: drift[1]}, {8: drift[2], 4: drift[3]}]
    assert median(whole_step_times_s(pair, ends, GAS)) == pytest.approx(35.0 + 0.15), "the drift cancels"


def test_the_interval_holds_the_departure_from_the_line():
    curved = turns(8, curvature=0.01)
    third = departure(PAIR, curved)
    assert third == pytest.approx((0.5 + 0.01 * 20) / (0.5 + 0.01 * 12) - 1)
    whole_s = whole_step_times_s(PAIR, curved, GAS)[0]
    error = extrapolation_error_rel(PAIR, curved, GAS, third)
    assert error == pytest.approx(third * (whole_s - curved[0][8]) / whole_s)
    noisy = turns(20, noise=0.01)
    own = ci95_rel(whole_step_times_s(PAIR, noisy, GAS))
    assert whole_step_ci95_rel(PAIR, noisy, GAS, 0.05) > max(own, 0.04)
    assert departure(Slice(g1=4, g2=8), curved) is departure(PAIR, []) is None
    assert whole_step_ci95_rel(PAIR, noisy, GAS, None) is None, "no interval lacks the error of the line"


def test_the_interval_holds_the_whole_step_in_95_of_100_cases():
    coverage = [
        abs(median(whole_step_times_s(PAIR, drawn, GAS)) / 35.0 - 1)
        <= whole_step_ci95_rel(PAIR, drawn, GAS, 0.0)
        for seed in range(200)
        for drawn in [turns(10, noise=0.01, seed=seed)]
    ]
    assert sum(coverage) >= 180


@pytest.mark.parametrize(("g1", "g2"), [(0, 4), (4, 4), (8, 4)])
def test_a_slice_has_two_sizes(g1, g2):
    with pytest.raises(ConfigError, match="needs 0 < g1 < g2"):
        Slice(g1=g1, g2=g2)


def test_the_interval_of_a_result_holds_the_error_of_the_line():
    own = RunResult(status=Status.OK, step_times_s=(1.0, 1.01, 0.99, 1.0, 1.02, 0.98))
    by_parts = replace(own, measured_gas="2,4", extrapolation_error_rel=0.3)
    assert by_parts.step_time_ci95_rel == pytest.approx(math.hypot(own.step_time_ci95_rel, 0.3))
    assert replace(by_parts, extrapolation_error_rel=None).step_time_ci95_rel is None


def test_what_only_screens_a_run():
    """Parts alone and few whole steps alone; together, or by all whole steps, they measure it in full."""
    pair = Slice(g1=2, g2=4)
    tasks = (SimpleNamespace(slice=s, few_steps=few) for s in (None, pair) for few in (False, True))
    assert [Task.is_screened.fget(task) for task in tasks] == [False, True, True, False]


def test_no_screened_run_is_the_best():
    """Not even the fastest, nor as good as the best; a run that was measured in full counts by that alone."""

    def place(*repeats, is_partial):
        rows = (
            Repeat(
                run, "cell", status=Status.OK, rate=rate, partial=is_partial and screened, screened=screened
            )
            for run, rate, screened in repeats
        )
        return [(s.run_id, s.rate, s.best, s.as_good) for s in standings(rows)["cell"]]

    screened = [("a", 9.0, True), ("b", 8.0, True), ("c", 7.0, True)]
    for is_partial in (True, False):
        placed = partial(place, is_partial=is_partial)
        assert placed(*screened[:2]) == [("a", 9.0, False, False), ("b", 8.0, False, False)]
        assert placed(*screened, ("b", 8.5, False)) == [
            ("b", 8.5, True, False), ("a", 9.0, False, False), ("c", 7.0, False, False),
        ]  # fmt: skip
        assert placed(*screened, ("b", 8.5, False), ("a", 8.5, False))[:2] == [
            ("a", 8.5, True, False), ("b", 8.5, False, True),
        ]  # fmt: skip


def test_a_run_whose_start_in_full_has_failed_stands_as_that_start_ended():
    """Nothing that screened it competes, not even where no other run was measured."""
    parts = Repeat("a", "cell", status=Status.OK, rate=9.0, partial=True, screened=True)
    slower = parts._replace(run_id="b", rate=5.0)

    def ranked(*repeats):
        ranking = standings(repeats)["cell"]
        return [(s.run_id, s.outcome) for s in ranking], [s.run_id for s in near_best(ranking, 4)]

    for status in (Status.OOM, Status.CRASH, Status.INVALID, Status.TIMEOUT, Status.HANG):
        failure = Repeat("a", "cell", status=status)
        assert ranked(parts, failure, slower) == ([("b", "ok"), ("a", status)], ["b"])
        assert ranked(parts, failure) == ([("a", status)], [])
        assert ranked(parts, failure._replace(screened=True)) == ([("a", "ok")], ["a"]), "parts once more"
        assert ranked(parts, failure, parts._replace(screened=False))[1] == ["a"], (
            "another start confirmed it"
        )
    for status in (None, Status.LOST, Status.CANCELLED, Status.PREEMPTED, Status.NODE_FAIL):
        assert ranked(parts, Repeat("a", "cell", status=status)) == ([("a", "ok")], ["a"]), (
            "it is tried again"
        )


def test_parts_of_other_starts_show_what_starts_differ_in():
    """One start has measured whole steps 10 % slower than its parts; the parts of another start were 4 % faster."""
    whole = Repeat(
        "a", "cell", status=Status.OK, rate=90.0, ci95_rel=0.01, parts_ratio=0.9, parts_ci95_rel=0.0
    )
    part = Repeat(
        "a",
        "cell",
        status=Status.OK,
        rate=104.0,
        partial=True,
        screened=True,
        parts_ci95_rel=0.02,
        ci95_rel=0.5,
    )
    ((alone,), (both,)) = (standings(repeats)["cell"] for repeats in ([whole], [whole, part]))
    assert (both.rate, both.competing) == (90.0, (0,)), "whole steps alone are shown"
    assert both.interval == (alone.interval[0], pytest.approx(93.6 / (1 - math.hypot(0.02, 0.01))))
    unknown = whole._replace(parts_ratio=None)
    assert standings([unknown, part])["cell"][0].interval == alone.interval
    few = part._replace(partial=False, rate=93.6, ci95_rel=0.02)
    (screened_first,) = standings([few, unknown])["cell"]
    assert (screened_first.rate, screened_first.interval[1]) == (90.0, pytest.approx(93.6 / 0.98)), (
        "as they are"
    )


def test_a_single_start_decides_only_beyond_what_starts_differ_in():
    def open_ids(*rates, ci=0.0):
        repeats = (Repeat(str(rate), "cell", status=Status.OK, rate=rate, ci95_rel=ci) for rate in rates)
        return [s.run_id for s in open_contenders(near_best(standings(repeats)["cell"], 4))]

    assert open_ids(100.0, 98.0, 97.5, 96.0) == ["100.0", "98.0", "97.5"]
    assert open_ids(100.0, 96.0, ci=0.03) == ["100.0", "96.0"]


def test_the_time_of_a_step_is_the_mean_of_its_turns_without_accidents():
    """A third of the micro-batches is slow, of which the median knows nothing; one turn had an accident."""
    pair, slow = Slice(g1=4, g2=8), [False, False, True] * 6
    drawn = [{4: 4.0, 8: 8.0 + 2 * is_slow} for is_slow in slow] + [{4: 4.0, 8: 80.0}, {4: 4.0, 8: 8.0}]
    assert median(whole_step_times_s(pair, drawn, 16)) == pytest.approx((13 * 16 + 6 * 22) / 19)
