"""One reckoning of what is left of a sweep, for its plan, the consent and the budget."""

from dataclasses import replace

import pytest

from tests.unit.allocations import PLAN, jobs_of, open_sweep
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import PlannedAttempt
from ultrabench.sweep.running.price import ALLOCATION_START_S, CONTROL_SHARE, controls, pack, reckon

BIG = make_plan(load_config(["sweep=playbook", "launcher=slurm", "sweep.models=[8B]", "sweep.nodes=[1,2]"]))


def todo_of(run):
    return PlannedAttempt(candidate=run, key=AttemptKey(run.run_id, 0, 0))


def tasks_of(price):
    return [t for draft in price.jobs for t in draft.attempts]


def test_the_price_is_that_of_every_task_and_of_every_start():
    price = reckon(BIG)
    tasks = sum(t.candidate.gpu_hours for t in tasks_of(price))
    starts = sum(ALLOCATION_START_S["cuda"] * d.nodes * 8 / 3600 for d in price.jobs)
    assert price.gpu_hours == pytest.approx(tasks + starts)
    parts = [*price.runs.values(), *price.extra.values()]
    assert sum(cost for _, cost in parts) == pytest.approx(price.gpu_hours)
    assert {name: number for name, (number, _) in price.extra.items()} == {
        "control runs": sum(d.attempts[0].key.repeat == 3 + n for d in price.jobs for n in range(99)),
        "repeats of the best": 2 * 2 * 4,
        "starts of jobs": len(price.jobs),
    }
    assert sum(number for number, _ in price.runs.values()) == len(BIG.runs)


def test_a_launch_submits_what_was_priced():
    """Without repeats of the best, whose number nobody knows before, price and submissions are the same."""
    price = reckon(PLAN)
    made = jobs_of(open_sweep("unused"))
    assert "repeats of the best" not in price.extra
    assert [d.attempts for d in made] == [d.attempts for d in price.jobs]
    assert sum(d.gpu_hours for d in made) == pytest.approx(price.gpu_hours)


def test_only_what_is_left_is_priced():
    state, done = SweepState(), PLAN.runs[:5]
    for run in done:
        key = AttemptKey(run.run_id, 0, 0)
        state.attempts[key] = AttemptState(key=key, result=RunResult(status=Status.OK, step_times_s=(1.0,)))
    left = reckon(PLAN, state)
    assert sum(number for number, _ in left.runs.values()) == len(PLAN.runs) - 5
    assert left.gpu_hours < reckon(PLAN).gpu_hours
    for run in PLAN.runs:
        key = AttemptKey(run.run_id, 0, 0)
        state.attempts[key] = AttemptState(key=key, result=RunResult(status=Status.OK, step_times_s=(1.0,)))
    assert reckon(PLAN, state).gpu_hours == 0


def test_a_control_run_takes_a_small_share_of_its_allocation():
    for cell, control in controls(BIG).items():
        todo = [todo_of(r) for r in BIG.runs if r.cell == cell and r.fits]
        whole = pack(todo, BIG.config, {cell: control})
        assert len(whole) < len(pack(todo, BIG.config)), "by allocation_minutes they would be shorter"
        for group in whole[:-1]:
            seconds = [t.candidate.prediction.duration_s for t in group]
            assert control.prediction.duration_s <= CONTROL_SHARE * sum(seconds)


def test_what_does_not_fit_costs_its_start():
    large = [c for c in BIG.runs if not c.fits]
    assert len(large) == 176
    assert sum(c.gpu_hours for c in large) == pytest.approx(
        sum(20 * c.layout.world_size for c in large) / 3600
    )
    most = replace(BIG, candidates=tuple(large))
    assert "repeats of the best" not in reckon(most).extra, "an OOM is not repeated"
