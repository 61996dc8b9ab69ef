"""What is held back until a number of nodes has proved itself, and how attempts share an allocation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import left
from tests.unit.allocations import CONFIG, PLAN, key_of, todo_of, told, with_launcher
from ultrabench.result import Status
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running.price import ROUND_S, START_S, allocation_limit_s, pack, run_limit_s

ONE = [r for r in PLAN.runs if r.nodes == 1]
TWO = [r for r in PLAN.runs if r.nodes == 2]
RUNS = [*ONE[:3], *TWO[:3]]


def holds(state, name, *runs):
    nodes = runs[0].nodes
    state.allocations[name] = AllocationState(name=name, nodes=nodes, tasks=tuple(key_of(r) for r in runs))
    return state


def canary(state, *alive):
    return left(RUNS, state, frozenset(alive), canary=True)


def sizes(decision):
    return [t.candidate.nodes for t in decision.todo]


def test_a_new_sweep_has_tried_no_size():
    decision = canary(SweepState())
    assert (sizes(decision), decision.untried) == ([1, 1, 1, 2, 2, 2], {1, 2})
    assert left(RUNS, SweepState()).untried == frozenset()


def test_the_rest_of_a_size_waits_for_its_first_allocation():
    state = holds(SweepState(), "n1-a.0", ONE[0])
    decision = canary(state, "n1-a.0")
    assert (sizes(decision), decision.untried) == ([2, 2, 2], {1, 2})
    assert decision.waiting == 1 + 2
    assert not decision.over


def test_a_run_that_passed_frees_its_size_only():
    state = told(holds(SweepState(), "n1-a.0", ONE[0], ONE[1]), ONE[0], Status.OK)
    decision = canary(state, "n1-a.0")
    assert sizes(decision) == [1, 2, 2, 2]
    assert decision.untried == {2}
    assert decision.waiting == 1


@pytest.mark.parametrize(
    "status", [s for s in Status if s not in (Status.OK, Status.SKIPPED, Status.REJECTED)]
)
def test_another_end_frees_nothing(status):
    state = told(holds(SweepState(), "n1-a.0", ONE[0]), ONE[0], status)
    assert 1 not in sizes(canary(state, "n1-a.0"))
    # When that allocation is over the next one is tried, again alone.
    decision = canary(state)
    assert 1 in sizes(decision)
    assert 1 in decision.untried


def test_a_sweep_that_is_done_has_nothing_untried():
    state = SweepState()
    for run in RUNS:
        told(state, run, Status.CRASH)
    decision = canary(state)
    assert (decision.over, decision.untried) == (True, frozenset())


def test_a_passed_run_without_its_claim_proves_nothing():
    state = told(SweepState(), ONE[0], Status.OK)
    for spec in (None, {}, {"nodes": None}):
        state.attempts[key_of(ONE[0])].spec = spec
        assert 1 in canary(state).untried


@given(data=st.data())
def test_nothing_is_lost_by_holding_back(data):
    state = SweepState()
    for run in RUNS:
        if data.draw(st.booleans()):
            told(state, run, data.draw(st.sampled_from((None, Status.OK, Status.LOST, Status.CRASH))))
    for n, runs in enumerate((ONE[:1], ONE[1:3], TWO[:2], TWO[2:3])):
        holds(state, f"a{n}", *runs)
    alive = frozenset(name for name in state.allocations if data.draw(st.booleans()))
    free = left(RUNS, state, alive)
    held = left(RUNS, state, alive, canary=True)
    assert {t.key for t in held.todo} <= {t.key for t in free.todo}
    assert len(held.todo) + held.waiting == len(free.todo) + free.waiting
    assert held.over == free.over
    # Whatever is held back waits for something that is alive, so the sweep goes on.
    assert held.todo or held.over or alive


# pack


def lasting(run, seconds):
    return replace(run, predicted=replace(run.prediction, duration_s=seconds))


def of_model(run, name):
    return replace(run, spec=replace(run.spec, shape=replace(run.shape, name=name)))


@pytest.mark.parametrize(("control", "groups"), [(True, [2, 2]), (False, [4])])
def test_models_share_an_allocation_only_where_there_is_no_control(control, groups):
    runs = [ONE[0], of_model(ONE[1], "other"), ONE[2], of_model(ONE[3], "other")]
    made = pack([todo_of(r) for r in runs], with_launcher(control=control))
    assert [len(group) for group in made] == groups
    if control:
        assert [{t.candidate.shape.name for t in group} for group in made] == [{"tiny"}, {"other"}]


@given(
    chosen=st.lists(st.sampled_from(ONE), min_size=1, max_size=6),
    patience=st.sampled_from((1.0, 2.0, 4.0)),
    seconds=st.floats(0.1, 1e6),
)
def test_any_one_run_may_be_slow(chosen, patience, seconds):
    group = [todo_of(lasting(r, seconds), patience=patience) for r in chosen]
    limit = allocation_limit_s(group, CONFIG)
    for slow in group:
        others = sum(t.candidate.prediction.duration_s for t in group if t is not slow)
        assert START_S + others + run_limit_s(slow, CONFIG) <= limit
    assert allocation_limit_s(group[:1], CONFIG) <= limit
    assert limit % ROUND_S == 0
    assert allocation_limit_s(group, with_launcher(time_minutes=7)) == 420.0
