"""What is left of a sweep as allocations: their runs, limits and price, and their control layouts."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.unit import allocations
from tests.unit.allocations import PLAN, first_allocations, predicted, todo_of, told, with_launcher
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.result import Status
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running import price

SWEEP = ["sweep=playbook", "sweep.models=[8B]", "sweep.nodes=[1,2]", "sweep.strategy=exhaustive"]
BIG = make_plan(load_config([*SWEEP, "launcher=slurm", "max_p_oom=1"]))
ONE = [r for r in PLAN.runs if r.nodes == 1]


def lasts(todo):
    return todo.candidate.prediction.duration_s


def test_the_price_is_that_of_every_task_and_of_every_start():
    whole = price.price_of(BIG)
    tasks = [t for job in whole.jobs for t in job.attempts]
    starts = sum(DEVICE_KINDS["cuda"].allocation_start_s * job.nodes * 8 / 3600 for job in whole.jobs)
    assert whole.gpu_hours == pytest.approx(sum(t.candidate.gpu_hours for t in tasks) + starts)
    parts = [*whole.runs.values(), *whole.extra.values()]
    assert sum(cost for _, cost in parts) == pytest.approx(whole.gpu_hours)
    times = [sorted(run.prediction.step_time_s for run in runs if run.fits) for runs in BIG.cells.values()]
    repeats = 2 * sum(time_s <= 1.05 * cell_times[0] for cell_times in times for time_s in cell_times[:4])
    assert {name: number for name, (number, _) in whole.extra.items()} == {
        "control runs": len(tasks) - len(BIG.runs) - repeats,
        "repeats of the best": repeats,
        "starts of jobs": len(whole.jobs),
    }
    assert sum(number for number, _ in whole.runs.values()) == len(BIG.runs)


def test_a_launch_submits_what_was_priced():
    """Repeats of the best, whose number nobody knows before, are left out."""
    whole = price.price_of(PLAN)
    jobs = allocations.jobs_of(allocations.open_sweep("unused"))
    assert "repeats of the best" not in whole.extra
    assert [d.attempts for d in jobs] == [d.attempts for d in whole.jobs]
    assert sum(d.gpu_hours for d in jobs) == pytest.approx(whole.gpu_hours)


@pytest.mark.parametrize("num_ended", [5, len(PLAN.runs)])
def test_only_what_is_left_is_priced(num_ended):
    state = SweepState()
    for run in PLAN.runs[:num_ended]:
        told(state, run, Status.OK, step_times_s=(run.prediction.step_time_s,) * 6)
    rest = price.price_of(PLAN, state)
    assert sum(number for number, _ in rest.runs.values()) == len(PLAN.runs) - num_ended
    assert rest.gpu_hours < price.price_of(PLAN).gpu_hours if num_ended == 5 else rest.gpu_hours == 0


def test_measured_starts_price_the_runs_that_are_left_on_all_numbers_of_nodes():
    """The first start fills the caches of compilers; a start whose end nobody has seen is at least as long as its run.

    A start is predicted to take 1.2 s on one simulated node, and twice as long on two.
    """
    tried, left, elsewhere = ONE[0], ONE[-1], next(r for r in PLAN.runs if r.nodes > 1)

    def added_s(*results):
        state = SweepState()
        for attempt, (status, seconds) in enumerate(results):
            told(state, tried, status, attempt=attempt, **seconds)
        runs = {run.run_id: run for run in price.with_measured_times(PLAN, state).runs}
        return [round(runs[run.run_id].start_excess_s, 3) for run in (left, elsewhere)]

    ok, late, over = Status.OK, Status.TIMEOUT, Status.CANCELLED
    assert added_s() == [0.0, 0.0]
    assert added_s((ok, {"init_time_s": 95.0})) == [93.8, 187.6]
    assert added_s((ok, {"init_time_s": 600.0}), (Status.CRASH, {"init_time_s": 30.0})) == [28.8, 57.6]
    assert added_s((late, {"duration_s": 300.0})) == [298.8, 597.6]
    assert added_s((over, {"duration_s": 1.0}), (Status.CRASH, {"duration_s": 90.0})) == [0.0, 0.0]
    assert added_s((late, {"duration_s": 300.0}), (ok, {"init_time_s": 0.6})) == [-0.6, -1.2]


def test_measured_steps_price_the_runs_that_are_left_in_all_cells_and_change_no_prediction():
    """The median ratio of a cell counts for its runs, and that of all cells elsewhere;
    the steps of a run alone grow.
    """
    state, elsewhere = SweepState(), next(r for r in PLAN.runs if r.nodes > 1 and r.fits)
    for run, factor in zip(ONE, (3.0, 4.0, 50.0), strict=False):
        told(state, run, Status.OK, step_times_s=(factor * run.prediction.step_time_s,) * 6)
    learnt = {run.run_id: run for run in price.with_measured_times(PLAN, state).runs}
    for run in (ONE[-1], elsewhere):
        extra_s = 3 * PLAN.config.measure.priced_s(run.prediction.step_time_s)
        assert learnt[run.run_id].duration_s == pytest.approx(run.duration_s + extra_s)
        assert learnt[run.run_id].prediction == run.prediction
    whole, rest = price.price_of(PLAN), price.price_of(PLAN, state)
    ratio = rest.gpu_hours / whole.gpu_hours
    assert 1 < ratio < 4
    assert rest.interval[0] < rest.gpu_hours < rest.interval[1]
    large = replace(PLAN, candidates=tuple(predicted(run, p_oom=0.9) for run in PLAN.runs))
    assert {run.step_factor for run in price.with_measured_times(large, state).runs} == {1.0}, "only starts"


def test_limits_and_jobs_follow_the_measured_starts():
    state = told(SweepState(), ONE[0], Status.OK, init_time_s=500.0)
    measured = price.with_measured_times(PLAN, state)
    (run,) = (r for r in measured.runs if r.run_id == ONE[-1].run_id)
    assert price.run_limit_s(todo_of(run), measured.config) == price.LIMIT_FACTOR * run.duration_s > 1440
    assert price.price_of(measured, state).gpu_hours == price.price_of(PLAN, state).gpu_hours
    assert price.price_of(PLAN, state).gpu_hours > 5 * price.price_of(PLAN).gpu_hours
    (task, *_) = first_allocations(allocations.open_sweep("unused", measured))[0].tasks
    assert task.predicted_start_s == 500.0


def test_what_does_not_fit_costs_its_start_and_is_not_repeated():
    large = [c for c in BIG.runs if not c.fits]
    assert len(large) > 100
    seconds = sum(20 * c.layout.world_size for c in large)
    assert sum(c.gpu_hours for c in large) == pytest.approx(seconds / 3600)
    assert "repeats of the best" not in price.price_of(replace(BIG, candidates=tuple(large))).extra


# how attempts share allocations


@given(
    numbers=st.sets(st.tuples(st.integers(0, len(PLAN.runs) - 1), st.integers(0, 2)), max_size=30),
    max_tasks=st.none() | st.integers(1, 5),
    minutes=st.floats(0.1, 30),
)
def test_pack_loses_nothing_and_keeps_the_order(numbers, max_tasks, minutes):
    tasks = [todo_of(PLAN.runs[i], repeat) for i, repeat in numbers]
    groups = price.pack(tasks, with_launcher(pack=max_tasks, allocation_minutes=minutes))
    places = [[tasks.index(t) for t in group] for group in groups]
    assert sorted(place for indices in places for place in indices) == list(range(len(tasks)))
    assert [indices[0] for indices in places] == sorted(indices[0] for indices in places)
    for group, indices in zip(groups, places, strict=True):
        assert indices == sorted(indices)
        assert len({(t.candidate.nodes, t.key.repeat) for t in group}) == 1
        assert max_tasks is None or len(group) <= max_tasks
        assert len(group) == 1 or sum(map(lasts, group)) <= 60 * minutes * (1 + 1e-9)


def of_model(run, name):
    return replace(run, spec=replace(run.spec, shape=replace(run.shape, name=name)))


@pytest.mark.parametrize(
    ("launcher", "groups"),
    [({"control": True}, ["tiny tiny", "other other"]), ({"control": False}, ["tiny other tiny other"]),
     ({"control": False, "pack": 3}, ["tiny other tiny", "other"])],
)  # fmt: skip
def test_an_allocation_is_filled_with_runs_of_one_model_where_it_has_a_control(launcher, groups):
    runs = [ONE[0], of_model(ONE[1], "other"), ONE[2], of_model(ONE[3], "other")]
    packed = price.pack([todo_of(r) for r in runs], with_launcher(**launcher))
    assert [" ".join(t.candidate.shape.name for t in group) for group in packed] == groups


def test_a_control_run_takes_a_small_share_of_its_allocation():
    for key, control in price.controls(BIG).items():
        todo = [todo_of(r) for r in BIG.runs if price.control_key(r) == key and r.fits]
        whole = price.pack(todo, BIG.config, {key: control})
        control_s, short_s = control.prediction.duration_s, 60 * BIG.config.launcher.allocation_minutes
        totals = [control_s + sum(lasts(t) for t in g if t.key.run_id != control.run_id) for g in whole]
        assert all(control_s <= price.CONTROL_SHARE * total for total in totals[:-1])
        for group, total in zip(whole, totals, strict=True):
            filled_s = control_s / price.CONTROL_SHARE + lasts(group[-1])
            needed_s = max(short_s, filled_s, control_s + lasts(group[0]))
            assert total <= needed_s, "no longer than allocation_minutes, the share or a single run ask for"


# time limits


def test_the_limit_of_a_run_follows_prediction_and_patience():
    short = price.run_limit_s(todo_of(ONE[0]), PLAN.config)
    assert short == PLAN.config.measure.run_limit_s
    assert price.run_limit_s(todo_of(ONE[0], patience=2.0), PLAN.config) == 2 * short
    long = todo_of(predicted(ONE[0], duration_s=1e6))
    assert price.run_limit_s(long, PLAN.config) == price.LIMIT_FACTOR * 1e6


def test_any_one_run_of_an_allocation_may_be_slow():
    lengths = ((10.0, 1.0), (1e3, 1.0), (600.0, 4.0), (1e5, 2.0))
    group = [
        todo_of(predicted(ONE[0], duration_s=s), repeat=n, patience=p) for n, (s, p) in enumerate(lengths)
    ]
    limit_s = price.allocation_limit_s(group, PLAN.config)
    longest_s = max(price.run_limit_s(slow, PLAN.config) - lasts(slow) for slow in group)
    assert price.AGENTS_START_S + sum(map(lasts, group)) + longest_s <= limit_s
    assert price.allocation_limit_s(group[:1], PLAN.config) <= limit_s
    assert limit_s % price.LIMIT_ROUNDING_S == 0
    assert price.allocation_limit_s(group, with_launcher(time_minutes=7)) == 420.0


@pytest.mark.parametrize("limits", [{"time_minutes": 60}, {}])
def test_all_runs_of_a_job_begin_within_its_time_limit(limits):
    plan = replace(BIG, config=with_launcher(BIG.config, allocation_minutes=600.0, **limits))
    key, control = next(iter(price.controls(plan).items()))
    todo = [todo_of(run) for run in plan.cells[control.cell]]
    groups = price.pack(todo, plan.config, {key: control}, math.inf if limits else 3600.0)
    free = replace(plan.config, launcher=replace(plan.config.launcher, time_minutes=None))
    assert len(groups) > len(price.pack(todo, free, {key: control})), "ten hours would be too long"
    allocation = allocations.first_allocations(allocations.open_sweep("unused"))[0]
    for group in groups:
        runs_s = sum(lasts(t) for t in {t.candidate.run_id: t for t in (todo_of(control), *group)}.values())
        limit_s = price.least_limit_s(runs_s, plan.config)
        assert limit_s <= 3600
        ends_s = limit_s - replace(allocation, limit_s=limit_s).warning_s
        signal_s = (
            60.0 + DEVICE_KINDS["cuda"].allocation_start_s + runs_s
        )  # Slurm may send it a minute too early
        assert ends_s == pytest.approx(signal_s)


@pytest.mark.parametrize("limits", [{"time_minutes": 20}, {}])
def test_runs_that_no_job_is_long_enough_for_are_rejected_with_a_reason(limits):
    plan = replace(BIG, config=with_launcher(BIG.config, **limits))
    longest_s = math.inf if limits else 1200.0
    runnable = price.within_limit(plan, longest_s)
    assert price.within_limit(runnable, longest_s) is runnable
    out = [c for c in runnable.candidates if c.rule == "time_limit"]
    assert len(out) + len(runnable.runs) == len(BIG.runs)
    assert {c.run_id for c in runnable.candidates} == {c.run_id for c in BIG.candidates}
    source = "launcher.time_minutes=20" if limits else "partition, QOS and account limit a job to 20 minutes"
    pattern = rf"a job needs \d\d minutes with its control run; {source}"
    assert all(re.fullmatch(pattern, c.reason) for c in out)
    jobs = price.price_of(runnable, max_limit_s=longest_s).jobs
    assert jobs
    assert all(price.least_limit_s(job.predicted_s, plan.config) <= 1200 for job in jobs), "all runs begin"
    for run in out:
        alone = [todo_of(replace(run, rule=None)), todo_of(price.controls(BIG)[price.control_key(run)])]
        assert price.least_limit_s(sum(map(lasts, alone)), plan.config) > 1200
    assert price.within_limit(BIG) is BIG


@pytest.mark.parametrize(
    ("limits", "longest_s", "source"),
    [({"time_minutes": 3}, math.inf, "launcher.time_minutes=3"),
     ({}, 120.0, "partition, QOS and account limit a job to 2 minutes")],
)  # fmt: skip
def test_a_time_limit_that_no_run_can_begin_in_is_refused(limits, longest_s, source):
    least = r"the shortest of \d+ runs needs \d+ minutes with its control run: allow more"
    with refused(match=rf"^{source}; {least}"):
        price.within_limit(replace(BIG, config=with_launcher(BIG.config, **limits)), longest_s)


# control layouts


def plan_of(predictions):
    """A plan whose runs, all of one node, have these (memory as a share of what is safe, step time)."""
    runs = [
        predicted(run, memory_share=share * price.SAFE_MEMORY_SHARE, step_time_s=time_s)
        for run, (share, time_s) in zip(ONE, predictions, strict=False)
    ]
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
    assert price.controls(plan) == {price.control_key(runs[0]): runs[chosen]}


def test_every_launch_chooses_the_same_control():
    plan, runs = plan_of([(0.5, 1.0)] * 3)
    assert price.controls(replace(plan, candidates=tuple(runs[::-1]))) == price.controls(plan)


def test_every_cell_that_runs_has_a_control_of_its_own_that_runs():
    chosen = price.controls(PLAN)
    assert chosen.keys() == {*map(price.control_key, PLAN.runs)}
    assert all(price.control_key(run) == key for key, run in chosen.items())
    plan, runs = plan_of([(0.5, 1.0), (0.5, 2.0)])
    refused = replace(runs[0], rule="kernel", reason="no")
    assert list(price.controls(replace(plan, candidates=(refused, runs[1]))).values()) == [runs[1]]
    assert price.controls(replace(plan, candidates=(refused,))) == {}


LAPTOP = make_plan(load_config(["model=tiny"]))


@pytest.mark.parametrize(
    ("num_runs", "parts"), [(1, []), (2, []), (3, [3]), (7, [7]), (8, [4, 4]), (14, [5, 4, 5])]
)
def test_on_shared_cores_the_control_is_repeated_after_every_few_runs(num_runs, parts):
    """Each part of the runs has a control run before and after it; `parts` is the number of runs of each."""
    runs = [run for run in LAPTOP.runs if run.nodes == 2]
    plan = replace(LAPTOP, candidates=tuple(runs))
    (control,) = price.controls(plan).values()
    others = [run for run in runs if run.run_id != control.run_id][:num_runs]
    plan = replace(plan, candidates=(*others, control))
    (job,) = price.price_of(plan).jobs
    is_control = [attempt.key.run_id == control.run_id for attempt in job.attempts]
    expected = [True, *(flag for size in parts for flag in (*[False] * size, True))]
    assert is_control == (expected if parts else [True] + [False] * num_runs)
    keys = [attempt.key for attempt in job.attempts]
    assert len({*keys}) == len(keys), "each one is a repeat of its own"
    assert [key.run_id for key in keys if key.run_id != control.run_id] == [run.run_id for run in others]
    whole_nodes = replace(plan, config=with_launcher(plan.config, exclusive=True))
    assert sum(len(job.attempts) for job in price.price_of(whole_nodes).jobs) == num_runs + 1


@pytest.mark.parametrize(
    ("words", "control"),
    [([], True), (["hardware=h100x8"], False), (["sweep=comm"], False), (["launcher.control=false"], False)],
)
def test_a_laptop_has_control_runs_unless_they_are_turned_off(words, control):
    assert load_config(["launcher=local", *words]).launcher.control is control
