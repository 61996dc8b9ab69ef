"""The time of a whole step from steps of fewer micro-batches, and its interval."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median
from types import SimpleNamespace

import pytest

from ultrabench.errors import ConfigError
from ultrabench.partial_step import (
    DEPARTURE_SD,
    Departure,
    Slice,
    biased_half_width,
    departure,
    extrapolation_error_rel,
    mean_turn,
    pooled,
    step_s,
    turns_ci95_rel,
    two_starts_error_rel,
    two_starts_times,
    whole_step_ci95_rel,
    whole_step_times_s,
)
from ultrabench.result import RunResult, Status
from ultrabench.run import Task
from ultrabench.standing import Repeat, near_best, open_contenders, standings
from ultrabench.step_time import START_SD, t_quantile

GAS = 64
PAIR = Slice(g1=4, g2=8, third=12)


STRAIGHT = Departure(value=0.0, error=0.0)


def turns(num, noise=0.0, curvature=0.0, seed=0):
    """Turns of steps that take 3 s, 0.5 s per micro-batch, and more for later ones, with relative noise."""
    random = Random(seed)

    def seconds(size):
        return (3.0 + 0.5 * size + curvature * size**2) * (1 + noise * random.gauss(0, 1))

    return [{size: seconds(size) for size in PAIR.order(turn)} for turn in range(num)]


def bent_turns(num, noise, random, bend=0.0):
    """Turns of steps that take 3 s and 0.5 s per micro-batch, of which those after the eighth take more by `bend`."""

    def seconds(size):
        return (3.0 + 0.5 * size + bend * 0.5 * max(0, size - 8)) * (1 + noise * random.gauss(0, 1))

    return [{size: seconds(size) for size in PAIR.order(turn)} for turn in range(num)]


def slow_now_and_then(num, random):
    """Turns of steps of 35 s if whole, of which each micro-batch takes 0.3 s, and one of six 1.5 s."""

    def seconds(size):
        return 3.0 + sum(0.3 + 1.2 * (random.random() < 1 / 6) for _ in range(size))

    return [{size: seconds(size) for size in PAIR.order(turn)} for turn in range(num)]


def slow_for_a_while(num, random):
    """Turns whose noise is 1 %, half of which they have in common with the turns before."""
    drawn, noise = [], dict.fromkeys(PAIR.sizes, 0.0)
    for turn in turns(num):
        noise = {size: 0.5 * noise[size] + 0.01 * random.gauss(0, 1) for size in turn}
        drawn.append({size: turn[size] * (1 + noise[size]) for size in turn})
    return drawn


def time_of(drawn: list[dict[int, float]]) -> float:
    """The step time of a run with these turns."""
    return median(whole_step_times_s(PAIR, drawn, GAS))


def coverage(cases: int, draw: Callable[[], tuple[float, list[dict[int, float]], float]]) -> float:
    """The share of cases, each the time of a whole step, turns and a half-width, whose interval holds the time."""
    drawn = [draw() for _ in range(cases)]
    return (
        sum(abs(whole_s / time_of(these) - 1) <= half_width for whole_s, these, half_width in drawn) / cases
    )


def test_a_straight_line_gives_the_whole_step():
    assert step_s(PAIR, {4: 5.0, 8: 7.0}, GAS) == 7.0 + 56 * 0.5 == pytest.approx(3.0 + 0.5 * GAS)
    assert whole_step_times_s(PAIR, turns(6), GAS) == pytest.approx([35.0] * 6)
    measured = departure(PAIR, turns(6))
    assert (measured.value, measured.error, measured.num_runs) == (pytest.approx(0), pytest.approx(0), 1)
    assert whole_step_ci95_rel(PAIR, turns(6), GAS, STRAIGHT) == pytest.approx(0)
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
    assert third.value == pytest.approx((0.5 + 0.01 * 20) / (0.5 + 0.01 * 12) - 1)
    whole_s = whole_step_times_s(PAIR, curved, GAS)[0]
    error = extrapolation_error_rel(PAIR, curved, GAS, third)
    assert error == pytest.approx(third.value * (whole_s - curved[0][8]) / whole_s)
    noisy, five_percent = turns(20, noise=0.01), Departure(value=0.05, error=0.0)
    own, both = turns_ci95_rel(PAIR, noisy, GAS), whole_step_ci95_rel(PAIR, noisy, GAS, five_percent)
    assert both > max(own, 0.04 + 0.8 * own), "a bias does not average out"
    assert departure(Slice(g1=4, g2=8), curved) is departure(PAIR, []) is departure(PAIR, curved[:5]) is None
    assert whole_step_ci95_rel(PAIR, noisy, GAS, None) is None, "no interval lacks the error of the line"


@pytest.mark.parametrize(("drawn_turns", "num_turns", "least"), [
    (partial(bent_turns, noise=0.01), 6, 0.925),
    (slow_now_and_then, 6, 0.925),
    (slow_now_and_then, 20, 0.925),
    (slow_for_a_while, 60, 0.88),  # 0.70 if turns counted as independent
])  # fmt: skip
def test_the_interval_by_turns_holds_the_mean_in_95_of_100_cases(drawn_turns, num_turns, least):
    """Whether the noise of steps is even, skewed or lasting; a share of 300 cases is uncertain by 1.3 %."""
    random = Random(num_turns)

    def draw():
        drawn = drawn_turns(num_turns, random=random)
        return drawn, turns_ci95_rel(PAIR, drawn, GAS)

    assert least <= coverage(300, lambda: (35.0, *draw())) <= 0.985


@pytest.mark.parametrize(("bend", "noise", "num_runs"), [
    (0.0, 0.01, 1), (0.0, 0.05, 3), (0.05, 0.002, 1), (0.05, 0.002, 3), (0.05, 0.03, 3), (0.2, 0.002, 1),
    (None, 0.02, 1), (None, 0.01, 3),
])  # fmt: skip
def test_the_interval_holds_the_whole_step_in_95_of_100_cases(bend, noise, num_runs):
    """On a straight line and on a bent one, with the departure that one run or three of the kind have measured; None:
    kinds are bent as differently as expected.
    """
    random = Random(num_runs)

    def draw():
        drawn_bend = random.gauss(0, DEPARTURE_SD) if bend is None else bend
        runs = [bent_turns(8, noise, random, drawn_bend) for _ in range(num_runs)]
        drawn = bent_turns(8, noise, random, drawn_bend)
        of_kind = pooled(departure(PAIR, of_run) for of_run in runs)
        return 35.0 + drawn_bend * 0.5 * (GAS - 8), drawn, whole_step_ci95_rel(PAIR, drawn, GAS, of_kind)

    assert coverage(200, draw) >= 0.92  # 0.95 with a standard error of 0.015


def test_one_noisy_departure_counts_little_and_one_lucky_one_is_not_certain():
    sure = [Departure(value=v, error=0.01) for v in (0.012, 0.008, 0.010)]
    noisy, lucky = Departure(value=0.4, error=0.3), Departure(value=0.0, error=0.05)
    of_kind = pooled([noisy, *sure])
    assert (of_kind.value, of_kind.num_runs) == (pytest.approx(0.01, abs=0.001), 4)
    assert of_kind.error < 0.01
    exact = turns(8)
    assert whole_step_ci95_rel(PAIR, exact, GAS, of_kind) < 0.03 < 0.4
    lucky_ci = whole_step_ci95_rel(PAIR, exact, GAS, lucky)
    assert lucky_ci == pytest.approx(1.96 * math.sqrt(0.5) * 0.05 * 28 / 35, rel=1e-3)
    noisy_ci = whole_step_ci95_rel(PAIR, exact, GAS, noisy)
    assert noisy_ci < 0.1, "it says little, so that the departure is as usual"
    assert whole_step_ci95_rel(PAIR, exact, GAS, Departure(value=0.4, error=0.1)) > 0.4, "it says much"
    unlike = pooled([Departure(value=v, error=0.001) for v in (0.0, 0.1)])
    assert unlike.error > 0.05, "a further run may differ as much as these do"
    assert pooled([None, lucky]) == lucky
    assert pooled([None]) is None


def test_further_runs_measure_the_third_size_while_the_departure_is_uncertain():
    def slice_after(error, num_runs):
        return PAIR.with_departure(Departure(value=0.1, error=error, num_runs=num_runs), 0.01)

    assert [slice_after(0.005, 1).third, slice_after(0.1, 2).third, slice_after(0.1, 3).third] == [
        None,
        12,
        None,
    ]
    assert slice_after(0.1, 2).departure.num_runs == 2
    assert PAIR.with_departure(None, 0.01) == PAIR


@pytest.mark.parametrize(("dof", "expected"), [(3, 3.182), (5, 2.571), (19, 2.093), (1000, 1.962)])
def test_quantiles_of_student(dof, expected):
    assert t_quantile(dof) == pytest.approx(expected, rel=2e-3)


def test_a_bias_and_noise_share_an_interval():
    assert biased_half_width(-0.3, 0.0) == 0.3
    assert biased_half_width(0.0, 1.0) == pytest.approx(1.95996, rel=1e-5)
    assert biased_half_width(5.0, 1.0) == pytest.approx(5 + 1.64485, rel=1e-5), "on one side alone"


@pytest.mark.parametrize(("g1", "g2"), [(0, 4), (4, 4), (8, 4)])
def test_a_slice_has_two_sizes(g1, g2):
    with pytest.raises(ConfigError, match="needs 0 < g1 < g2"):
        Slice(g1=g1, g2=g2)


def test_the_interval_of_a_result_holds_the_error_of_the_line():
    own = RunResult(status=Status.OK, step_times_s=(1.0, 1.01, 0.99, 1.0, 1.02, 0.98))
    by_parts = replace(own, measured_gas="2,4", parts_ci95_rel=0.1, extrapolation_error_rel=0.3)
    assert by_parts.step_time_ci95_rel == pytest.approx(math.hypot(0.1, 0.3))
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


def test_a_rough_number_by_parts_does_not_decide_who_is_measured_in_full():
    """Runs whose joint interval holds their difference are contenders, until the best is known better."""
    rough = Repeat("a", "cell", status=Status.OK, rate=100.0, ci95_rel=0.08, partial=True, screened=True)
    slower = [rough._replace(run_id=str(rate), rate=rate) for rate in (90.0, 85.0, 80.0)]

    def near(*repeats):
        return [s.run_id for s in near_best(standings(repeats)["cell"], 4)]

    assert near(rough, *slower) == ["a"], "a difference of 11 %, where both are uncertain by 8 %"
    rough_ones = [r._replace(ci95_rel=0.16) for r in (rough, *slower)]
    assert near(*rough_ones) == ["a", "90.0"]
    whole = [r._replace(partial=False, screened=False) for r in (rough, *slower)]
    assert near(*whole) == ["a"], "whole steps decide at once"
    assert near(whole[0]._replace(ci95_rel=0.0), *rough_ones[1:]) == ["a"]
    assert near(whole[0]._replace(ci95_rel=0.0, rate=97.0), *rough_ones[1:]) == ["a", "90.0"]


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
    often = [{4: 4.0, 8: 8.0}] * 8 + [{4: 4.0, 8: 10.0}] * 2
    assert median(whole_step_times_s(pair, often, 16)) == pytest.approx(16 + 2 * 6 / 10), "no accidents"


def test_the_steps_of_two_starts_are_turns():
    """The n-th measured steps of both are one turn; what one start has more of them counts nothing."""
    both = two_starts_times(PAIR, [5.0] * 7, [7.0] * 6, GAS)
    assert (both.slice.text, both.departure, both.turns) == ("4,8", None, ({4: 5.0, 8: 7.0},) * 6)
    assert both.whole_step_times_s == pytest.approx([35.0] * 6)
    assert two_starts_times(PAIR, [5.0] * 7, [], GAS) is None
    # An accident of the first start does not take a slow step from the second one.
    first, second = [5.0] * 2 + [50.0] + [5.0] * 9, [7.0, 7.2] * 6
    both = two_starts_times(PAIR, first, second, GAS)
    assert mean_turn(both.turns, (4, 8)) == pytest.approx({4: 5.0, 8: (6 * 7.0 + 5 * 7.2) / 11})


@pytest.mark.parametrize("pair", [Slice(g1=4, g2=8), Slice(g1=4, g2=12)])
def test_the_interval_of_two_starts_holds_the_whole_step_in_95_of_100_cases(pair):
    """Steps of a start are faster or slower together, which their own spread does not show."""
    random, num_held, num_without = Random(5), 0, 0
    for _ in range(400):
        times_s = [[(3.0 + 0.5 * size) * random.gauss(1, START_SD)] * 20 for size in (pair.g1, pair.g2)]
        noisy_times_s = [[seconds * random.gauss(1, 0.002) for seconds in of_start] for of_start in times_s]
        both = two_starts_times(pair, *noisy_times_s, GAS)
        error = abs(median(both.whole_step_times_s) / 35.0 - 1)
        own = turns_ci95_rel(both.slice, both.turns, GAS)
        num_held += error <= math.hypot(own, two_starts_error_rel(both.slice, both.turns, GAS))
        num_without += error <= own
    assert num_held >= 0.93 * 400, num_held
    assert num_without < 0.5 * 400, "the spread of the steps alone says little"
