"""What lack of memory says about other layouts, and when it says nothing."""

from dataclasses import replace

import pytest

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
NEARLY = 0.996
"""With afab, whose micro-batches are all kept, half as many of twice the size need fewer small buffers."""


def of_share(run, share):
    return replace(run, predicted=replace(run.prediction, memory_share=share))


SAME = [of_share(r, 1.0) for r in PLAN.runs if (r.nodes, r.layout.tp, r.layout.pp) == (1, 1, 1)]
SURE = RunResult(status=Status.OOM, confirmed=True)
UNSURE = RunResult(status=Status.OOM)
CRASH = RunResult(status=Status.CRASH)
OK = RunResult(status=Status.OK, step_times_s=(1.0,) * 6)


def run_of(mbs, zero):
    return next(r for r in SAME if (r.layout.mbs, r.layout.zero_stage) == (mbs, zero))


def state_of(*ends):
    """The state after attempts of (micro-batch size, ZeRO stage, result), each of which follows the last of its run."""
    made = SweepState()
    for mbs, zero, result in ends:
        run_id = run_of(mbs, zero).run_id
        key = AttemptKey(run_id, 0, len(made.by_run().get(run_id, ())))
        made.attempts[key] = AttemptState(key=key, result=result)
    return made


def left_out(state, runs=SAME):
    found = attempts.left_out(runs, state)
    return {(r.layout.mbs, r.layout.zero_stage) for r in runs if r.run_id in found}


def test_dominance_is_an_order_of_memory_in_which_schedules_are_alike_or_afab_is_in_place_of_1f1b():
    mem_bytes = {r.layout: r.prediction.peak_mem_bytes for r in PLAN.runs}
    larger = {a: {b for b in mem_bytes if dominates(a, b)} for a in mem_bytes}
    assert all(a not in larger[a] and larger[b] <= larger[a] for a in larger for b in larger[a])
    pairs = [(a, b) for a in larger for b in larger[a]]
    assert all(mem_bytes[b] >= NEARLY * mem_bytes[a] for a, b in pairs)
    same = {(word, word) for word in ("none", "1f1b", "afab", "interleaved", "zbv")}
    assert {(a.pp_schedule, b.pp_schedule) for a, b in pairs} == same | {("1f1b", "afab")}


@pytest.mark.parametrize(
    ("oom", "other", "needs_more"),
    [("full", "every2", True), ("full", "none", True), ("selective", "none", True), ("none", "full", False),
     ("selective", "every2", False), ("every2", "every3", False), ("none", "attention", False)],
)  # fmt: skip
def test_what_recomputes_less_needs_more(oom, other, needs_more):
    layout = SAME[0].layout
    assert dominates(replace(layout, recompute=oom), replace(layout, recompute=other)) is needs_more


@pytest.mark.parametrize(
    ("ends", "out"),
    [
        ([(8, 1, SURE)], {(8, 0), (16, 0), (16, 1), (32, 0), (32, 1)}), ([(8, 0, SURE)], {(16, 0), (32, 0)}),
        ([(8, 1, UNSURE)], set()), ([(8, 1, replace(SURE, confirmed=False))], set()),
        ([(8, 1, CRASH)], set()), ([(8, 1, OK)], set()),
        ([(8, 1, SURE), (8, 1, OK)], set()),  # it fits after all
        ([(8, 1, SURE), (16, 1, OK)], set()),  # what needs more fits
    ],
)  # fmt: skip
def test_after_a_confirmed_oom_larger_micro_batches_and_lower_zero_stages_are_left_out(ends, out):
    assert left_out(state_of(*ends)) == out


def test_an_oom_that_was_not_predicted_has_to_happen_twice():
    one, two = state_of((8, 1, SURE)), state_of((8, 1, SURE), (8, 1, SURE))
    unlikely = [of_share(r, 0.8) for r in SAME]
    assert [len(left_out(state, unlikely)) for state in (one, two)] == [0, 5]
    assert (run_of(8, 1).run_id, 0, 1) in {t.key for t in left(unlikely, one).todo}


def test_what_the_user_asks_for_is_not_left_out():
    state = state_of((8, 1, SURE), (16, 1, SURE))
    state.retried = frozenset({AttemptKey(run_of(16, 1).run_id, 0, 0)})
    assert (16, 1) not in left_out(state)
