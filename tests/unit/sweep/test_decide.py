"""What a launch does next, by its plan, its state, what was seen of its jobs, and the limits."""

from dataclasses import replace

import pytest

from tests.unit.allocations import PLAN, told, with_launcher
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.jobs_seen import JobLimits, JobsSeen
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running.attempts import Launch
from ultrabench.sweep.running.decide import decide

BIG = {"user": "ann", "cluster": "big", "host": "login1"}
LAUNCH = Launch(name="launcher-a", by=BIG)
ONES = [run for run in PLAN.runs if run.nodes == 1]
NOON = 1_700_000_000.0


def plan_of(*runs, **launcher):
    """Each run is an allocation of its own."""
    config = with_launcher(PLAN.config, **{"pack": 1, "control": False, **launcher})
    return replace(PLAN, candidates=tuple(runs or ONES), config=config)


def in_flight(*allocations, state=None):
    """Each of (name, run, by) is alive."""
    state = state or SweepState()
    for name, run, by in allocations:
        key = AttemptKey(run.run_id, 0, 0)
        state.allocations[name] = AllocationState(name=name, nodes=run.nodes, tasks=(key,), by=by)
    return state, JobsSeen(alive=frozenset(name for name, *_ in allocations))


def actions(state=None, seen=None, plan=None, launch=LAUNCH, **limits):
    allowed = JobLimits(**{"max_jobs": 8, **limits})
    return decide(plan or plan_of(), state or SweepState(), seen or JobsSeen(), allowed, launch, NOON)


def submitted(found):
    return [tuple(t.key) for job in found.submit for t in job.attempts]


def test_as_many_jobs_as_may_be_in_flight():
    assert submitted(actions(max_jobs=3)) == [(run.run_id, 0, 0) for run in ONES[:3]]
    assert len(actions(max_nodes=2).submit) == 2
    two = next(run for run in PLAN.runs if run.nodes == 2)
    mixed = plan_of(ONES[0], two, ONES[1])
    assert len(actions(plan=mixed, max_nodes=2).submit) == 1, "the order of the plan is kept"


@pytest.mark.parametrize(("alive", "number"), [(0, 4), (1, 3), (2, 2), (3, 0), (4, 0)])
def test_it_is_refilled_when_half_of_the_jobs_are_over(alive, number):
    state, seen = in_flight(*((f"n1-{n}.0", run, BIG) for n, run in enumerate(ONES[:alive])))
    found = actions(state, seen, max_jobs=4)
    assert (len(found.submit), found.wait, found.stopped) == (number, True, None)


def test_only_jobs_in_the_same_place_take_room():
    elsewhere = {"user": "ann", "cluster": "small", "host": "login1"}
    bobs = {**BIG, "user": "bob"}
    for by, number in ((elsewhere, 2), (bobs, 0)):
        state, seen = in_flight(*((f"n1-{n}.0", run, by) for n, run in enumerate(ONES[:2])))
        assert len(actions(state, seen, max_jobs=2).submit) == number


def test_a_budget_holds_what_is_used_and_what_is_planned():
    price = actions().submit[0].gpu_hours
    assert len(actions(max_gpu_hours=1.01 * price).submit) == 1
    none = actions(max_gpu_hours=0.99 * price)
    assert (none.submit, none.over_budget, none.wait) == ((), True, False)
    assert none.stopped.endswith("that may be used")
    state, seen = in_flight(("n1-a.0", ONES[0], BIG))
    seen = replace(seen, held_s={"n1-a.0": 7200.0})  # two GPUs for two hours
    assert actions(state, seen, max_gpu_hours=4.0 + 0.5 * price).over_budget
    assert not actions(state, seen, max_gpu_hours=4.0 + 3 * price).over_budget


def test_outside_its_window_it_waits():
    for window, number in (("00:00-00:00", 8), ("00:00-00:01", 0)):
        found = actions(plan=plan_of(*ONES[:8], window=window))
        assert (len(found.submit), found.wait, bool(found.notes)) == (number, True, number == 0)


def test_what_a_person_has_stopped():
    paused = actions(SweepState(paused=True))
    assert (paused.submit, paused.end_jobs, paused.wait) == ((), False, False)
    assert paused.stopped == f"paused; go on with: ultrabench sweep resume {PLAN.config.name}"
    cancelled = actions(SweepState(cancelled=True, paused=True))
    assert (cancelled.submit, cancelled.end_jobs, cancelled.stopped) == ((), True, "cancelled")


def test_runs_that_all_fail_alike_end_the_sweep():
    state, ended_s = SweepState(), {}
    for n, run in enumerate(ONES[:10]):
        told(state, run, Status.CRASH, fingerprint="same", reason="no module x")
        ended_s[AttemptKey(run.run_id, 0, 0)] = 10.0 - n
    found = actions(state, launch=replace(LAUNCH, ended_s=ended_s))
    assert (found.end_jobs, found.submit) == (True, ())
    assert "no module x" in found.stopped


def test_a_sweep_with_nothing_left_is_over():
    state, seen = in_flight(("n1-a.0", ONES[0], BIG))
    assert actions(state, seen, plan_of(ONES[0])).wait
    told(state, ONES[0], Status.OK, allocation="n1-a.0")
    config = replace(plan_of().config, measure=replace(PLAN.config.measure, confirm=1))
    assert actions(state, plan=replace(plan_of(ONES[0]), config=config)) == actions(
        SweepState(), plan=replace(plan_of(), candidates=())
    )


def test_nodes_under_suspicion_are_named_with_the_submission():
    state = SweepState()
    for n in range(2):
        lost = {"suspect_hosts": ("gpu07",), "hostnames": ("gpu07",), "reason": "no answer"}
        told(state, ONES[n], Status.NODE_FAIL, allocation=f"n1-{n}.0", **lost)
    assert actions(state).avoid == {"gpu07": "no answer"}
