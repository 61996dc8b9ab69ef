"""What lack of memory says about other layouts, and when it says nothing."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import left
from ultrabench.layout import dominates
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running import attempts

SCHEDULES = "sweep.pp_schedule=[1f1b,afab,interleaved,zbv]"
PLAN = make_plan(load_config(["sweep=playbook", "model=1B", "sweep.nodes=[1]", SCHEDULES, "max_p_oom=1"]))
RUNS = PLAN.runs
NEARLY = 0.996
"""With afab, whose micro-batches are all kept, half as many of twice the size need fewer small buffers."""


def of_share(run, share):
    return replace(run, predicted=replace(run.prediction, memory_share=share))


SAME = [of_share(r, 1.0) for r in RUNS if (r.nodes, r.layout.tp, r.layout.pp) == (1, 1, 1)]
SURE = RunResult(status=Status.OOM, confirmed=True)


def run_of(mbs, zero):
    return next(r for r in SAME if (r.layout.mbs, r.layout.zero_stage) == (mbs, zero))


def state_of(**ends):
    """Runs mMzZ=result."""
    made = SweepState()
    for name, end in ends.items():
        run = run_of(*map(int, name[1:].split("z")))
        for n, r in enumerate(end if isinstance(end, tuple) else (end,)):
            key = AttemptKey(run.run_id, 0, n)
            made.attempts[key] = AttemptState(key=key, result=r)
    return made


def left_out(state):
    found = attempts.left_out(SAME, state)
    return {r.layout.mbs * 10 + r.layout.zero_stage for r in SAME if r.run_id in found}


@given(st.sampled_from(RUNS), st.sampled_from(RUNS), st.sampled_from(RUNS))
def test_dominance_is_an_order(a, b, c):
    assert not dominates(a.layout, a.layout)
    if dominates(a.layout, b.layout):
        assert not dominates(b.layout, a.layout)
        assert b.prediction.peak_mem_bytes >= NEARLY * a.prediction.peak_mem_bytes
        if dominates(b.layout, c.layout):
            assert dominates(a.layout, c.layout)


def test_only_afab_in_place_of_1f1b_is_sure_to_need_as_much():
    pairs = [(a, b) for a, b in permutations(RUNS, 2) if dominates(a.layout, b.layout)]
    schedules = {(a.layout.pp_schedule, b.layout.pp_schedule) for a, b in pairs}
    same = {(word, word) for word in ("none", "1f1b", "afab", "interleaved", "zbv")}
    assert schedules == same | {("1f1b", "afab")}
    assert all(b.prediction.peak_mem_bytes >= NEARLY * a.prediction.peak_mem_bytes for a, b in pairs)


@pytest.mark.parametrize(
    ("oom", "other", "needs_more"),
    [("full", "every2", True), ("full", "none", True), ("selective", "none", True), ("none", "full", False),
     ("selective", "every2", False), ("every2", "every3", False), ("none", "attention", False)],
)  # fmt: skip
def test_what_recomputes_less_needs_more(oom, other, needs_more):
    layout = SAME[0].layout
    assert dominates(replace(layout, recompute=oom), replace(layout, recompute=other)) is needs_more


def test_larger_micro_batches_and_lower_zero_stages_are_left_out():
    assert left_out(state_of(m8z1=SURE)) == {80, 160, 161, 320, 321}
    assert left_out(state_of(m8z0=SURE)) == {160, 320}


@pytest.mark.parametrize("end", [RunResult(status=Status.OOM), RunResult(status=Status.CRASH),
                                 RunResult(status=Status.OK), replace(SURE, confirmed=False)])  # fmt: skip
def test_only_a_confirmed_oom_speaks_for_others(end):
    assert left_out(state_of(m8z1=end)) == set()


def test_an_oom_that_was_not_predicted_has_to_happen_twice():
    one, two = state_of(m8z1=SURE), state_of(m8z1=(SURE, SURE))
    unlikely = [of_share(r, 0.8) for r in SAME]
    for state, number in ((one, 0), (two, 5)):
        assert len(attempts.left_out(unlikely, state)) == number
    todo = left(unlikely, one).todo
    assert (run_of(8, 1).run_id, 0, 1) in {t.key for t in todo}


def test_a_success_lifts_it():
    ok = RunResult(status=Status.OK, step_times_s=(1.0,) * 6)
    assert left_out(state_of(m8z1=(SURE, ok))) == set(), "its own"
    assert left_out(state_of(m8z1=SURE, m16z1=ok)) == set(), "of what should not have fitted"


def test_what_the_user_asks_for_is_not_left_out():
    state = state_of(m8z1=SURE, m16z1=SURE)
    state.retried = frozenset({AttemptKey(run_of(16, 1).run_id, 0, 0)})
    assert 161 not in left_out(state)
