"""One reckoning of what is left of a sweep, for its plan, the consent and the budget; and its control layouts."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.allocations import PLAN, first_allocations, jobs_of, open_sweep, todo_of, told, with_launcher
from ultrabench.errors import ConfigError
from ultrabench.result import Status
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.price import (
    ALLOCATION_START_S,
    CONTROL_SHARE,
    SAFE_SHARE,
    controls,
    least_limit_s,
    next_repeat,
    pack,
    price_of,
    within_limit,
)

SWEEP = ["sweep=playbook", "sweep.models=[8B]", "sweep.nodes=[1,2]", "sweep.strategy=exhaustive"]
BIG = make_plan(load_config([*SWEEP, "launcher=slurm", "max_p_oom=1"]))


def lasts(todo):
    return todo.candidate.prediction.duration_s


def tasks_of(price):
    return [t for draft in price.jobs for t in draft.attempts]


def test_the_price_is_that_of_every_task_and_of_every_start():
    price = price_of(BIG)
    tasks = sum(t.candidate.gpu_hours for t in tasks_of(price))
    starts = sum(ALLOCATION_START_S["cuda"] * d.nodes * 8 / 3600 for d in price.jobs)
    assert price.gpu_hours == pytest.approx(tasks + starts)
    parts = [*price.runs.values(), *price.extra.values()]
    assert sum(cost for _, cost in parts) == pytest.approx(price.gpu_hours)
    times = [sorted(run.prediction.step_time_s for run in runs if run.fits) for runs in BIG.cells.values()]
    repeats = 2 * sum(time_s <= 1.05 * known[0] for known in times for time_s in known[:4])
    assert {name: number for name, (number, _) in price.extra.items()} == {
        "control runs": len(tasks_of(price)) - len(BIG.runs) - repeats,
        "repeats of the best": repeats,
        "starts of jobs": len(price.jobs),
    }
    assert sum(number for number, _ in price.runs.values()) == len(BIG.runs)


def test_a_launch_submits_what_was_priced():
    """Without repeats of the best, whose number nobody knows before, price and submissions are the same."""
    price = price_of(PLAN)
    made = jobs_of(open_sweep("unused"))
    assert "repeats of the best" not in price.extra
    assert [d.attempts for d in made] == [d.attempts for d in price.jobs]
    assert sum(d.gpu_hours for d in made) == pytest.approx(price.gpu_hours)


def test_only_what_is_left_is_priced():
    state, done = SweepState(), PLAN.runs[:5]
    for run in done:
        told(state, run, Status.OK)
    left = price_of(PLAN, state)
    assert sum(number for number, _ in left.runs.values()) == len(PLAN.runs) - 5
    assert left.gpu_hours < price_of(PLAN).gpu_hours
    for run in PLAN.runs:
        told(state, run, Status.OK)
    assert price_of(PLAN, state).gpu_hours == 0


def test_a_control_run_takes_a_small_share_of_its_allocation():
    for cell, control in controls(BIG).items():
        todo = [todo_of(r) for r in BIG.runs if r.cell == cell and r.fits]
        whole = pack(todo, BIG.config, {cell: control})
        control_s, short_s = control.prediction.duration_s, 60 * BIG.config.launcher.allocation_minutes
        totals = [control_s + sum(lasts(t) for t in g if t.key.run_id != control.run_id) for g in whole]
        assert all(control_s <= CONTROL_SHARE * total for total in totals[:-1])
        for group, total in zip(whole, totals, strict=True):
            needed_s = max(short_s, control_s / CONTROL_SHARE + lasts(group[-1]), control_s + lasts(group[0]))
            assert total <= needed_s, "no longer than allocation_minutes, the share or a single run ask for"


@pytest.mark.parametrize("given", [{"time_minutes": 60}, {}])
def test_all_runs_of_a_job_begin_within_its_time_limit(given):
    plan = replace(BIG, config=with_launcher(BIG.config, allocation_minutes=600.0, **given))
    cell, control = next(iter(controls(plan).items()))
    todo = [todo_of(run) for run in plan.cells[cell]]
    groups = pack(todo, plan.config, {cell: control}, math.inf if given else 3600.0)
    free = replace(plan.config, launcher=replace(plan.config.launcher, time_minutes=None))
    assert len(groups) > len(pack(todo, free, {cell: control})), "ten hours would be too long"
    allocation = first_allocations(open_sweep("unused"))[0]
    for group in groups:
        runs_s = sum(lasts(t) for t in {t.candidate.run_id: t for t in (todo_of(control), *group)}.values())
        limit_s = least_limit_s(runs_s, plan.config)
        assert limit_s <= 3600
        ends_s = limit_s - replace(allocation, limit_s=limit_s).warning_s
        assert ends_s == pytest.approx(ALLOCATION_START_S["cuda"] + runs_s)


@pytest.mark.parametrize("given", [{"time_minutes": 20}, {}])
def test_runs_that_no_job_is_long_enough_for_are_rejected_with_a_reason(given):
    plan = replace(BIG, config=with_launcher(BIG.config, **given))
    longest_s = math.inf if given else 1200.0
    kept = within_limit(plan, longest_s)
    assert within_limit(kept, longest_s) is kept
    out = [c for c in kept.candidates if c.rule == "time_limit"]
    assert len(out) + len(kept.runs) == len(BIG.runs)
    assert {c.run_id for c in kept.candidates} == {c.run_id for c in BIG.candidates}
    source = "launcher.time_minutes=20" if given else "partition, QOS and account allow a job 20 minutes"
    assert all(
        re.fullmatch(rf"a job needs \d\d minutes with its control run; {source}", c.reason) for c in out
    )
    assert price_of(kept, max_limit_s=longest_s).jobs
    for job in price_of(kept, max_limit_s=longest_s).jobs:
        assert least_limit_s(job.predicted_s, plan.config) <= 1200, "all of its runs begin"
    for run in out:
        alone = [todo_of(replace(run, rule=None)), todo_of(controls(BIG)[run.cell])]
        assert least_limit_s(sum(map(lasts, alone)), plan.config) > 1200
    assert within_limit(BIG) is BIG


def test_a_time_limit_that_no_run_can_begin_in_is_refused():
    plan = replace(BIG, config=with_launcher(BIG.config, time_minutes=3))
    told = r"^launcher.time_minutes=3; the shortest job of \d+ runs needs \d+ minutes with its control run: allow "
    with pytest.raises(ConfigError, match=told):
        within_limit(plan)
    with pytest.raises(ConfigError, match=r"^partition, QOS and account allow a job 2 minutes; the shortest"):
        within_limit(plan, 120.0)


def test_what_does_not_fit_costs_its_start():
    large = [c for c in BIG.runs if not c.fits]
    assert len(large) > 100
    assert sum(c.gpu_hours for c in large) == pytest.approx(
        sum(20 * c.layout.world_size for c in large) / 3600
    )
    most = replace(BIG, candidates=tuple(large))
    assert "repeats of the best" not in price_of(most).extra, "an OOM is not repeated"


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
        ([(0.5, 2.0), (0.9, 1.0), (1.1, 0.5)], 1), ([(1.0, 1.0), (0.1, 2.0)], 0),
        ([(1.3, 1.0), (1.2, 9.0), (1.4, 0.1)], 1), ([(1.2, 1.0), (0.999, 9.0)], 1), ([(5.0, 1.0)], 0),
    ],
)  # fmt: skip
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
