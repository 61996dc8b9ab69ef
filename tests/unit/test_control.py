from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.allocations import PLAN
from ultrabench.sweep.running.price import SAFE_SHARE, controls, next_repeat

LIMIT = SAFE_SHARE
ONE = [r for r in PLAN.runs if r.nodes == 1]


def plan_of(predictions, nodes=1):
    """A plan whose first runs have these (memory as a share of what is safe, step time)."""
    same = [r for r in PLAN.runs if r.nodes == nodes][: len(predictions)]
    runs = [
        replace(
            run, predicted=replace(run.prediction, memory_share=share * LIMIT, step_time_s=time_s)
        )
        for run, (share, time_s) in zip(same, predictions, strict=True)
    ]  # fmt: skip
    return replace(PLAN, candidates=tuple(runs)), runs


@pytest.mark.parametrize(
    ("predictions", "chosen"),
    [
        ([(0.5, 2.0), (0.9, 1.0), (1.1, 0.5)], 1),
        ([(1.0, 1.0), (0.1, 2.0)], 0),
        ([(1.3, 1.0), (1.2, 9.0), (1.4, 0.1)], 1),
        ([(1.2, 1.0), (0.999, 9.0)], 1),
        ([(5.0, 1.0)], 0),
    ],
)
def test_the_fastest_that_surely_fits_else_the_smallest(predictions, chosen):
    plan, runs = plan_of(predictions)
    assert controls(plan) == {runs[0].cell: runs[chosen]}


@given(
    predictions=st.lists(
        st.tuples(st.floats(0.1, 2.0), st.sampled_from((1.0, 2.0, 3.0))), min_size=1, max_size=len(ONE)
    ),
    random=st.randoms(use_true_random=False),
)
def test_every_launch_chooses_the_same_control(predictions, random):
    plan, runs = plan_of(predictions)
    shuffled = list(runs)
    random.shuffle(shuffled)
    (chosen,) = controls(plan).values()
    assert controls(replace(plan, candidates=tuple(shuffled))) == {chosen.cell: chosen}
    fitting = [r for r in runs if r.prediction.memory_share <= LIMIT]
    if fitting:
        assert chosen in fitting
        assert chosen.prediction.step_time_s == min(r.prediction.step_time_s for r in fitting)
    else:
        assert chosen.prediction.memory_share == min(r.prediction.memory_share for r in runs)


def test_every_cell_that_runs_has_a_control_of_its_own():
    chosen = controls(PLAN)
    assert set(chosen) == {r.cell for r in PLAN.runs}
    for cell, run in chosen.items():
        assert cell == run.cell
        assert run.runs


def test_what_does_not_run_is_no_control():
    plan, runs = plan_of([(0.5, 1.0), (0.5, 2.0)])
    refused = replace(runs[0], rule="kernel", reason="no")
    assert list(controls(replace(plan, candidates=(refused, runs[1]))).values()) == [runs[1]]
    assert controls(replace(plan, candidates=(refused,))) == {}


@given(
    known=st.lists(st.tuples(st.sampled_from(("a", "b")), st.integers(0, 6), st.integers(0, 3))),
    repeats=st.integers(1, 4),
)
def test_the_next_repeat_is_new_and_behind_those_of_the_plan(known, repeats):
    found = next_repeat("a", known, repeats)
    assert found >= repeats
    assert found not in {repeat for run_id, repeat, _ in known if run_id == "a"}
    assert found == repeats or any(run_id == "a" and repeat == found - 1 for run_id, repeat, _ in known)
