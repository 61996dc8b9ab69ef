"""Parts of steps in an agent: what their reports say of a run, and how one run's departure reaches the next one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from tests.unit.agent.test_cleanup import one_node  # noqa: F401
from tests.unit.agent.test_outcome import progress_of
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.lead import Leader
from ultrabench.agent.ranks.rank_progress import MeasuredPhase, RankProgress
from ultrabench.partial_step import Departure, Slice
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status

MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=8, loss_step=5, target_ci95_rel=0.05)
SLICE = Slice(g1=2, g2=4, third=6)
GAS = 16
TASK = replace(task("x.py", "cpu"), measure=MEASURE)
SCREENED, IN_FULL = replace(TASK, slice=SLICE), replace(TASK, slice=SLICE, few_steps=True)
KNOWN = Departure(value=0.2, error=0.0)
"""A departure that another run has measured."""


def step_s(gas, curve=0.0):
    """Seconds of a step on a straight line up to 4 micro-batches, whose slope is larger by `curve` beyond."""
    return 0.1 + 0.01 * gas + 0.01 * curve * max(0, gas - 4)


def whole_step(seconds, measured=True):
    return {"event": "step", "seconds": seconds, "loss": 5.0, "measured": measured}


def parts(sizes=SLICE.sizes, turns=8, **curve):
    """The report lines of turns of parts, every other one backwards."""
    return [
        {**whole_step(step_s(gas, **curve)), "gas": gas, "whole_gas": GAS, "turn": turn}
        for turn in range(turns)
        for gas in sizes[:: 1 if turn % 2 == 0 else -1]
    ]


def result_of(steps, task):
    reporter = RankProgress(steps=steps, code=0, done_line={"event": "done"})
    return classify(progress_of([reporter]), task, None)


def of_parts(result):
    names = (
        "measured_gas",
        "screened",
        "departure",
        "extrapolation_error_rel",
        "parts_step_time_s",
        "parts_ci95_rel",
    )
    return {name: value for name in names if (value := getattr(result, name)) is not None}


@pytest.mark.parametrize(
    ("curve", "error"),
    # A slope that is larger by half beyond g2 adds half of what 12 further micro-batches take.
    [(0.0, 0.0), (0.5, 0.5 * 0.12 / 0.26)],
)
def test_a_run_by_parts_has_the_departure_of_its_third_size(curve, error):
    result = result_of(parts(curve=curve), SCREENED)
    assert result.step_times_s == pytest.approx([step_s(GAS)] * 8)
    assert of_parts(result) == pytest.approx({
        "measured_gas": "2,4", "screened": True, "departure": curve, "extrapolation_error_rel": error,
        "parts_ci95_rel": 0.0,
    })  # fmt: skip
    assert result.part_times_s == pytest.approx({str(gas): step_s(gas, curve) for gas in SLICE.sizes})
    assert result.step_time_ci95_rel == pytest.approx(error)


def test_a_run_without_a_third_size_has_the_departure_of_others_or_an_unknown_error():
    steps = parts((2, 4))
    known = result_of(steps, SCREENED.with_departure(KNOWN))
    assert (known.departure, known.extrapolation_error_rel) == (
        None,
        pytest.approx(KNOWN.value * 0.12 / 0.26),
    )
    unknown = result_of(steps, replace(SCREENED, slice=replace(SLICE, third=None)))
    assert (unknown.departure, unknown.extrapolation_error_rel, unknown.step_time_ci95_rel) == (None,) * 3
    assert (unknown.status, unknown.ci_reached) == ("ok", None)


def test_a_start_in_full_has_the_time_by_whole_steps_and_that_by_parts():
    result = result_of([whole_step(0.3)] * 6 + parts(curve=0.5), IN_FULL)
    assert result.step_times_s == (0.3,) * 6
    assert of_parts(result) == pytest.approx({
        "departure": 0.5, "extrapolation_error_rel": 0.5 * 0.12 / 0.26, "parts_step_time_s": step_s(GAS),
        "parts_ci95_rel": 0.0,
    })  # fmt: skip
    assert result.step_time_ci95_rel == 0.0, "whole steps need no line"
    assert result.parts_interval_rel == pytest.approx(0.5 * 0.12 / 0.26)


@pytest.mark.parametrize("steps", [[whole_step(0.3)] * 6, [whole_step(0.3)] * 6 + parts(turns=1)[:1]])
def test_a_start_that_ends_before_its_first_turn_has_no_columns_of_parts(steps):
    result = result_of(steps, IN_FULL)
    assert (of_parts(result), result.part_times_s, result.step_times_s) == ({}, {}, (0.3,) * 6)


def test_whole_steps_of_a_run_without_parts_have_no_columns_of_parts():
    few = replace(TASK, few_steps=True)
    assert of_parts(result_of([whole_step(0.3)] * 6, TASK)) == {}
    assert of_parts(result_of([whole_step(0.3)] * 6, few)) == {"screened": True}


def measured_by(*lines):
    """Whether the ranks were in measured steps after each of these report lines."""
    phase = MeasuredPhase(warmup_steps=2)
    for line in lines:
        phase.observe([{"rank": 0, "line": line}])
        yield phase.is_measuring


def test_parts_are_measured_steps_unless_whole_steps_came_before_them():
    warmup, part = whole_step(0.3, measured=False), parts(turns=1)[0]
    part_warmup = {**part, "measured": False}
    assert [*measured_by(part_warmup, part, part)] == [False, True, True]
    assert [*measured_by(warmup, whole_step(0.3), part_warmup, part)] == [False, True, False, False]
    # A program that marks no step has warmed up after as many as it was told.
    unmarked = {"event": "step", "seconds": 0.3}
    assert [*measured_by(unmarked, unmarked, unmarked)] == [False, False, True]


def leader_after(*departures, task=SCREENED):
    """The agent that leads, after runs of this kind measured these departures."""
    allocation = SimpleNamespace(name="n1", limit_s=600.0, warning_s=0.0)
    identity = SimpleNamespace(job=None, owner_facts=lambda name: {})
    leader = Leader(SimpleNamespace(allocation=allocation, identity=identity), group=None, journal=None)
    leader._task_results = [
        (
            replace(task, run_id=str(number)),
            RunResult(
                status=Status.OK, departure=value and value.value, departure_error=value and value.error
            ),
        )
        for number, value in enumerate(departures)
    ]
    return leader


OTHER_KIND = replace(TASK, spec=replace(TASK.spec, layout=replace(TASK.spec.layout, zero_stage=1)))


def test_a_run_needs_no_third_size_after_one_of_its_kind_in_the_allocation():
    assert leader_after()._with_departure(SCREENED) is SCREENED
    assert leader_after(None)._with_departure(SCREENED) is SCREENED
    assert leader_after(KNOWN, task=OTHER_KIND)._with_departure(SCREENED) is SCREENED
    for whole in (TASK, replace(TASK, few_steps=True)):
        assert leader_after(KNOWN)._with_departure(whole) is whole
    for by_parts in (SCREENED, IN_FULL):
        known = leader_after(None, KNOWN)._with_departure(by_parts).slice
        assert (known.sizes, known.departure) == ((2, 4), KNOWN)


def test_the_ranks_of_a_node_measure_no_third_size_if_the_leader_knows_the_departure(one_node):  # noqa: F811
    node = one_node("here()")
    node.wait_for(1)
    for departure, third in ((None, 6), (to_dict(KNOWN), None)):
        node.ask("[node.kill(), node.finish(False)] and 0")
        sizes = node.ask(f"slice_of_ranks(node, {departure!r})")
        assert (sizes["g1"], sizes["g2"], sizes.get("third"), sizes.get("departure")) == (
            2,
            4,
            third,
            departure,
        )
