"""Which runs are measured by parts of a step, and by which."""

import json
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.configs import refused
from tests.sweep_folder import ended
from tests.unit.allocations import key_of, told, with_launcher
from tests.unit.analysis.sweeps import make_sweep
from ultrabench.agent.diagnose.outcome import without_unlike
from ultrabench.cli.sweep.live import attempt_line, panel
from ultrabench.cli.sweep.screening import screening_lines
from ultrabench.layout import Layout, dominates
from ultrabench.partial_step import Departure, Slice
from ultrabench.result import SLOWER, Status, doubt_text
from ultrabench.store.events import Launched
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep import plan as sweep_plan
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.partial_steps import auto_slice, listed_slice, partial_steps_of, size_refusal
from ultrabench.sweep.plan import make_plan, with_strategy
from ultrabench.sweep.plan_table import read_rows, runs_of, write_plan
from ultrabench.sweep.refusals import schedule_refusals
from ultrabench.sweep.running.attempts import AttemptsLeft, PlannedAttempt, dominator_by_run, next_attempts
from ultrabench.sweep.running.outliers import suspect_attempts
from ultrabench.sweep.running.price import (
    control_key,
    controls,
    least_limit_s,
    pack,
    planned_jobs,
    price_of,
    run_limit_s,
    with_measured_times,
    within_limit,
)
from ultrabench.sweep.running.progress import progress_of
from ultrabench.sweep.running.searched_cell import outcomes
from ultrabench.sweep.running.standings import fastest_of_cells, standings_of

IN_PARTS = [
    *("launcher=slurm", "hardware=cpu", "model=tiny", "sweep.nodes=[1]", "sweep.gbs=64", "sweep.gas=null"),
    *("sweep.zero_stage=[0]", "sweep.mbs=[1]", "launcher.control=false"),
]
"""The overrides of three runs with many micro-batches."""


def layout(gas, pp=1, schedule=None, **axes):
    return Layout(dp=1, pp=pp, gas=gas, pp_schedule=schedule or ("none" if pp == 1 else "1f1b"), **axes)


@pytest.mark.parametrize(("axes", "sizes"), [
    ({}, (2, 4, 6)),
    ({"pp": 4}, (4, 8, 12)),
    ({"pp": 4, "schedule": "interleaved", "virtual_stages": 2}, (8, 16, 24)),
    ({"pp": 4, "schedule": "zbv", "virtual_stages": 2}, (7, 14, 21)),
])  # fmt: skip
def test_auto_chooses_the_least_linear_size(axes, sizes):
    g1, g2, third = sizes
    least_gas = 3 * g2
    if axes.get("schedule") == "interleaved":
        least_gas = 64
    slice_ = Slice(g1=g1, g2=g2, third=third)
    assert auto_slice(layout(least_gas, **axes)) == slice_
    assert f"is less than 3 * g2 = {3 * g2}" in auto_slice(layout(3 * g2 - 4, **axes)).reason
    # A wider slice saves enough from 3 * third micro-batches on.
    assert auto_slice(layout(3 * third, **axes)) == replace(slice_, wider=third)


def test_layouts_that_auto_measures_whole():
    assert "afab keeps all micro-batches" in auto_slice(layout(64, pp=4, schedule="afab")).reason
    # Torch cuts 66 micro-batches of pp=3 into 22 rounds of 3, and 64 of pp=5 into none of equal size.
    uneven = layout(33, pp=4, schedule="interleaved", virtual_stages=2)
    reason = auto_slice(uneven).reason
    assert "is less than" in reason or "rounds of" in reason


@pytest.mark.parametrize(("axes", "pair", "expected"), [
    ({"gas": 8}, (2, 4), Slice(g1=2, g2=4, third=6)),
    ({"gas": 5}, (2, 4), Slice(g1=2, g2=4, third=5)),
    ({"gas": 8}, (1, 4), "pp=1 needs 2 micro-batches; 1 given"),
    ({"gas": 16, "pp": 4, "schedule": "afab"}, (3, 6), "afab with pp=4 needs 4 micro-batches; 3 given"),
    ({"gas": 16, "pp": 4, "schedule": "afab"}, (4, 8), Slice(g1=4, g2=8, third=12)),
    ({"gas": 4}, (2, 4), "gas=4 is not more than g2=4"),
    ({"gas": 16, "pp": 4}, (2, 4), "gas=2 is less than pp-1=3"),
    ({"gas": 32, "pp": 4, "schedule": "zbv", "virtual_stages": 2}, (4, 8), "needs 7 micro-batches; 4 given"),
    ({"gas": 32, "pp": 4, "schedule": "interleaved", "virtual_stages": 2}, (8, 12), Slice(g1=8, g2=12, third=16)),
    ({"gas": 32, "pp": 4, "schedule": "interleaved", "virtual_stages": 2}, (4, 12), "needs 8 micro-batches; 4 given"),
])  # fmt: skip
def test_listed_sizes_are_taken_where_the_schedule_allows_them(axes, pair, expected):
    slice_ = listed_slice(layout(**axes), *pair)
    assert slice_ == expected if isinstance(expected, Slice) else expected in slice_.reason


@pytest.mark.parametrize(
    ("pp", "schedule"), [(1, "none"), (3, "interleaved"), (4, "interleaved"), (3, "zbv"), (4, "1f1b")]
)
def test_a_layout_that_runs_two_sizes_runs_the_third(pp, schedule):
    """It is at most twice g2, so that no turn costs much more than its pair."""
    stages = {"virtual_stages": 2} if schedule in ("interleaved", "zbv") else {}
    for gas in range(2, 26):
        whole = layout(gas, pp, schedule, **stages)
        pairs = ((g1, g2) for g2 in range(2, gas) for g1 in range(1, g2))
        slices = [s for pair in pairs if isinstance(s := listed_slice(whole, *pair), Slice)]
        if not [*schedule_refusals(whole)]:
            assert [s for s in slices if size_refusal(whole, s.third) or not s.g2 < s.third < 2 * s.g2] == []


@pytest.mark.parametrize(("value", "message"), [
    ("[4,4]", "measure.partial_steps=[4, 4]; needs [g1, g2] with 0 < g1 < g2"),
    ("[0,4]", "measure.partial_steps=[0, 4]; needs [g1, g2] with 0 < g1 < g2"),
    ("[2]", "must be off, auto or two numbers of micro-batches [g1, g2]"),
    ("yes", "measure.partial_steps='yes'; must be off, auto or two numbers of micro-batches [g1, g2]"),
])  # fmt: skip
def test_other_values_of_partial_steps_are_refused(value, message):
    with refused(message):
        load_config(["hardware=cpu", f"measure.partial_steps={value}"])


ADAPTIVE = "sweep.strategy=adaptive"
PROGRAM = ("kernel=command", "kernel.command=[train]")


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ((), "off"), ((ADAPTIVE,), "auto"), ((ADAPTIVE, "measure=quick"), "auto"),
        ((ADAPTIVE, *PROGRAM), "off"), ((ADAPTIVE, "trace=true"), "off"),
        ((ADAPTIVE, "measure.checkpoint=true"), "off"),
        ((ADAPTIVE, "measure.partial_steps=off"), "off"), ((ADAPTIVE, "measure.partial_steps=false"), "off"),
        ((ADAPTIVE, "measure.partial_steps=null"), "auto"), ((ADAPTIVE, "measure.partial_steps=[2,4]"), (2, 4)),
        (("measure.partial_steps=auto",), "auto"), (("measure.partial_steps=[2,4]", "trace=true"), (2, 4)),
    ],
)  # fmt: skip
def test_the_strategy_decides_about_parts_where_no_value_is_given(overrides, value):
    config = load_config(["hardware=cpu", *overrides])
    assert partial_steps_of(config) == value
    assert partial_steps_of(config_from_tree(json.loads(json.dumps(config.resolved)))) == value


def test_a_sweep_of_an_earlier_version_is_continued_by_whole_steps():
    resolved = load_config(["hardware=cpu", ADAPTIVE]).resolved
    measure = {key: value for key, value in resolved["measure"].items() if key != "partial_steps"}
    assert partial_steps_of(config_from_tree(resolved | {"measure": measure})) == "off"


PARTS = make_plan(load_config([*IN_PARTS, "measure.partial_steps=auto"]))
RUNS = PARTS.runs
STEP_S = 1.0


def next_of(state, plan=PARTS):
    return next_attempts(plan, state).todo


def measured(state, run, step_s, *, parts, repeat=0, **words):
    """Adds an ok attempt with steps of this length, by parts or by whole steps."""
    of_parts = {"measured_gas": "2,4", "extrapolation_error_rel": 0.02, "screened": True} if parts else {}
    of_parts |= {"parts_ci95_rel": 0.0} if parts else {}
    return told(state, run, Status.OK, repeat, step_times_s=(step_s,) * 6, **{**of_parts, **words})


def confirmed(state, run, whole_s, parts_s, repeat=1):
    """Adds an ok attempt that has measured whole steps and then parts."""
    beside = {"parts_step_time_s": parts_s, "parts_ci95_rel": 0.0, "extrapolation_error_rel": 0.02}
    return measured(state, run, whole_s, parts=False, repeat=repeat, **beside)


def planned(state, plan):
    """The attempts to make: the number of the run, the repeat, and whether whole steps are measured, too."""
    return [
        (RUNS.index(next(r for r in RUNS if r.run_id == t.key.run_id)), t.key.repeat,
         t.candidate.has_whole_steps)
        for t in next_of(state, plan)
    ]  # fmt: skip


def all_by_parts(best_s=STEP_S):
    """The state after all runs were measured by parts: the second is 2 % slower than the first, the others 50 %."""
    state = SweepState()
    for n, run in enumerate(RUNS):
        measured(state, run, best_s * (1.0 if n == 0 else 1.02 if n == 1 else 1.5), parts=True)
    return state


def best_of(state, plan=PARTS):
    (ranking,) = standings_of(plan.runs, state, "cpu").values()
    return [standing.run_id for standing in ranking if standing.best or standing.as_good]


def test_parts_choose_and_whole_steps_confirm():
    assert all(attempt.candidate.slice for attempt in next_of(SweepState()))
    state = all_by_parts()
    assert best_of(state) == [], "no number by parts is called the best"
    assert planned(state, PARTS) == [(0, 1, True), (1, 1, True)]
    measured(state, RUNS[0], 1.01, parts=False, repeat=1)
    measured(state, RUNS[1], 1.005, parts=False, repeat=1)
    assert (best_of(state)[0], next_of(state)) == (RUNS[1].run_id, ())
    measured(state, RUNS[2], 0.9, parts=True)
    assert best_of(state)[0] == RUNS[1].run_id, "a faster part wins nothing"
    assert [t.key for t in next_of(state)] == [key_of(RUNS[2], 1)]


UNCONFIRMED = (
    "in 1 cell the fastest run was only screened, and is measured in full before it is called the best"
)


def shown(state):
    """The text that `sweep status` shows of a sweep."""
    progress = progress_of("s", RUNS, state, "cpu")
    return "\n".join(map(str, panel(progress, is_active=False).renderables))


def test_the_status_says_that_a_screened_run_leads_until_it_was_measured_in_full():
    state = all_by_parts()
    progress = progress_of("s", RUNS, state, "cpu")
    assert (progress.best, progress.unconfirmed, progress.as_json()["unconfirmed"]) == ((), 1, 1)
    assert UNCONFIRMED in shown(state)
    measured(state, RUNS[1], 1.01, parts=False, repeat=1)
    assert UNCONFIRMED in shown(state), "the fastest is still one that was only screened"
    measured(state, RUNS[0], 1.02, parts=False, repeat=1)
    (best,) = progress_of("s", RUNS, state, "cpu").best
    assert (best[0].run_id, "the fastest run was only screened" in shown(state)) == (RUNS[1].run_id, False)


def test_lines_about_screened_attempts_say_how_they_were_measured():
    state = told(SweepState(), RUNS[0], Status.OK, measured_gas="2,4", screened=True, step_times_s=(1.0,) * 6)
    told(state, RUNS[1], Status.OK, screened=True, step_times_s=(1.0,) * 6)
    told(state, RUNS[2], Status.OK, step_times_s=(1.0,) * 6)
    lines = [str(attempt_line(run, state.attempts[key_of(run)])) for run in RUNS]
    ends = ["step 1 s by parts of 2,4 micro-batches", "step 1 s by few whole steps", "step 1 s"]
    assert [line.rpartition(", ")[2] for line in lines] == ends


def test_whole_steps_that_fail_confirm_nothing():
    """The next ones are measured in full instead, once nothing is tried again, and nothing competes with the failed."""
    state = all_by_parts()
    state = told(state, RUNS[0], Status.OOM, 1)
    assert {t.key for t in next_of(state)} == {key_of(RUNS[0], 1, 1)}, "it is tried again before others begin"
    told(state, RUNS[0], Status.OOM, 1, 1, confirmed=True)
    assert next_of(state)[0].key == key_of(RUNS[1], 1)
    (reference,) = fastest_of_cells(RUNS, state, "cpu").values()
    assert reference.run_id == RUNS[1].run_id, "the race has no reference that cannot run"
    told(state, RUNS[1], Status.CRASH, 1)
    told(state, RUNS[1], Status.CRASH, 1, 1)
    while (todo := next_of(state)) and todo[0].key.run_id == RUNS[1].run_id:
        told(state, RUNS[1], Status.CRASH, 1, todo[0].key.attempt)
    assert best_of(state) == []
    assert [t.key for t in todo] == [key_of(run, 1) for run in RUNS[2:]]
    (tried,) = (cell.tried for cell in outcomes(RUNS, state, 1.0))
    assert (tried.oom_ids, tried.failed_ids) == ({RUNS[0].run_id}, {RUNS[1].run_id})
    assert tried.times_s.keys() == {run.run_id for run in RUNS[2:]}
    progress = progress_of("s", RUNS, state, "cpu")
    assert (progress.by_status, progress.unconfirmed) == ({"crash": 1, "ok": len(RUNS) - 2, "oom": 1}, 1)
    assert UNCONFIRMED in shown(state)
    for run in RUNS[2:]:
        told(state, run, Status.OOM, 1, confirmed=True)
        told(state, run, Status.OOM, 1, 1, confirmed=True)
    assert next_of(state) == ()
    assert progress_of("s", RUNS, state, "cpu").unconfirmed == 0, "no cell waits for what does not come"
    assert "the fastest run was only screened" not in shown(state)


def test_a_contender_whose_starts_in_full_are_suspect_leaves_its_place_to_the_next():
    state, throttled = all_by_parts(), {"parts": False, "throttled": "software thermal slowdown"}
    measured(state, RUNS[0], 1.0, repeat=1, **throttled)
    measured(state, RUNS[1], 1.03, parts=False, repeat=1)
    assert planned(state, PARTS) == [(0, 2, True)], "it is measured once more"
    measured(state, RUNS[0], 1.0, repeat=2, **throttled)
    assert (planned(state, PARTS), best_of(state)) == ([], [RUNS[1].run_id])
    alone = all_by_parts()
    for repeat in (1, 2):
        measured(alone, RUNS[0], 1.0, repeat=repeat, **throttled)
    assert planned(alone, PARTS) == [(1, 1, True)]
    measured(alone, RUNS[1], 1.03, repeat=1, **throttled)
    measured(alone, RUNS[1], 1.03, repeat=2, **throttled)
    assert planned(alone, PARTS) == [(2, 1, True)]
    measured(alone, RUNS[2], 1.5, parts=False, repeat=1)
    assert best_of(alone) == [RUNS[2].run_id]
    assert progress_of("s", RUNS, alone, "cpu").unconfirmed == 0, "nothing more comes"


def test_a_start_in_full_that_is_tried_again_is_not_settled():
    state = all_by_parts()
    state.launched = Launched(generation=1, config=PARTS.config.resolved)
    told(state, RUNS[0], Status.OOM, 1)
    progress = progress_of("s", RUNS, state, "cpu", frozenset())
    assert (progress.left, [*progress.pause_by_key]) == (1, [key_of(RUNS[0], 1)])
    told(state, RUNS[0], Status.OOM, 1, 1, confirmed=True)
    assert progress_of("s", RUNS, state, "cpu", frozenset()).left == 0


def test_whole_steps_that_no_agent_survives_do_not_keep_the_others_waiting():
    """A lost start is not the fault of its run, so that the next launch tries it again."""
    state = all_by_parts()
    for run in RUNS[:2]:
        for attempt in range(10):
            told(state, run, Status.LOST, 1, attempt, cause="agent_gone")
    assert {t.key for t in next_of(state)} == {key_of(run, 1) for run in RUNS[2:]}


def test_one_failed_screening_does_not_keep_a_contender_from_its_start_in_full():
    plan = replace(PARTS, config=replace(PARTS.config, repeats=2))
    state = SweepState()
    for (n, run), repeat in product(enumerate(RUNS), range(2)):
        measured(state, run, STEP_S + n, parts=True, repeat=repeat)
    for status, words in (
        (Status.OOM, {"confirmed": True, "screened": True}), (Status.CRASH, {"screened": True}), (Status.LOST, {}),
    ):  # fmt: skip
        for attempt in range(10):
            told(state, RUNS[0], status, 0, attempt, **words)
        assert planned(state, plan) == [(0, 2, True)], status
    told(state, RUNS[0], Status.OOM, 2, 0, confirmed=True)
    told(state, RUNS[0], Status.OOM, 2, 1, confirmed=True)
    assert planned(state, plan) == [(1, 2, True)]


def test_a_run_that_ran_out_of_memory_in_full_does_not_fit():
    """Runs that need more are left out, although its parts were ok."""
    plan = make_plan(load_config([
        *(word for word in IN_PARTS if "mbs" not in word), "sweep.mbs=[1,2]", "sweep.tp=[1]", "sweep.pp=[1]",
        "measure.partial_steps=auto",
    ]))  # fmt: skip
    small, large = sorted(plan.runs, key=lambda run: run.layout.mbs)[:2]
    assert dominates(small.layout, large.layout)
    state = measured(SweepState(), small, STEP_S, parts=True)
    assert dominator_by_run(plan.runs, state) == {}
    for attempt in range(2):
        told(state, small, Status.OOM, 1, attempt, confirmed=True)
    assert dominator_by_run(plan.runs, state) == {large.run_id: small.run_id}


def test_a_whole_sweep_reuses_no_partial_attempt_but_parts_reuse_whole_ones():
    whole_plan = make_plan(load_config(IN_PARTS))
    assert {t.key for t in next_of(all_by_parts(), whole_plan)} == {key_of(run, 1) for run in whole_plan.runs}
    state = SweepState()
    for n, run in enumerate(RUNS):
        measured(state, run, STEP_S + n, parts=False)
    assert next_of(state) == ()
    adaptive = make_plan(load_config([*IN_PARTS, ADAPTIVE, "measure.partial_steps=null"]))
    assert next_of(state, adaptive) == ()
    measured_whole = measured(SweepState(), RUNS[0], 10 * STEP_S, parts=False)
    (next_attempt,) = next_of(measured_whole, adaptive)
    assert next_attempt.key.run_id != RUNS[0].run_id
    assert next_attempt.candidate.slice


@pytest.mark.parametrize("settings", [(), ("sweep.max_runs=2",)])
def test_a_plan_with_another_strategy_is_that_of_a_sweep_with_it(settings):
    plans = {
        strategy: make_plan(load_config([*IN_PARTS, *settings, f"sweep.strategy={strategy}"]))
        for strategy in ("exhaustive", "adaptive")
    }
    for strategy, other in (("adaptive", "exhaustive"), ("exhaustive", "adaptive")):
        changed, planned = with_strategy(plans[other], strategy), plans[strategy]
        for name in ("run_id", "rule", "slice", "few_steps", "whole_steps", "turn_share"):
            values, planned_values = ([getattr(c, name) for c in p.candidates] for p in (changed, planned))
            assert values == planned_values, name
        durations_s, planned_s = ([run.duration_s for run in p.runs] for p in (changed, planned))
        assert durations_s == pytest.approx(planned_s)


def test_a_whole_sweep_measures_again_what_measured_any_parts():
    """Also a start in full, which has measured few whole steps; what parts cannot fit, whole steps cannot either."""
    whole_plan = make_plan(load_config(IN_PARTS))
    state = confirmed(all_by_parts(), RUNS[0], 1.01, 1.0)
    assert {t.key for t in next_of(state, whole_plan)} == {
        key_of(RUNS[0], 2), key_of(RUNS[1], 1), key_of(RUNS[2], 1),
    }  # fmt: skip
    measured(state, RUNS[0], 1.02, parts=False, repeat=2)
    told(state, RUNS[1], Status.CRASH, screened=True)
    told(state, RUNS[2], Status.OOM, 0, 0, screened=True, confirmed=True)
    told(state, RUNS[2], Status.OOM, 0, 1, screened=True, confirmed=True)
    assert {t.key for t in next_of(state, whole_plan)} == {key_of(RUNS[1], 1)}
    measured(state, RUNS[1], 1.0, parts=False, repeat=1)
    assert next_of(state, whole_plan) == ()
    assert best_of(state, whole_plan)[0] == RUNS[1].run_id
    few = measured(SweepState(), RUNS[0], 1.0, parts=False, screened=True)
    measured(few, RUNS[0], 1.0, parts=False, repeat=1)
    again = {t.key.run_id for t in next_of(few, whole_plan)}
    assert again == {RUNS[1].run_id, RUNS[2].run_id}, "all whole steps were measured in the second start"


FEW = replace(PARTS, candidates=tuple(run.by_few_steps(PARTS.config.measure) for run in RUNS))
"""The same runs, as if their steps were too short for parts."""


def test_few_whole_steps_choose_and_all_confirm():
    """One start in full among `measure.confirm`; the others screen the contenders again."""
    measure = replace(FEW.config.measure, confirm=3)
    plan, state = replace(FEW, config=replace(FEW.config, measure=measure)), SweepState()

    def todo():
        return [(t.key.run_id, t.key.repeat, t.candidate.few_steps) for t in next_of(state, plan)]

    assert todo() == [(run.run_id, 0, True) for run in RUNS]
    for n, run in enumerate(RUNS):
        measured(state, run, 1.0 + n / 2, parts=False, screened=True)
    first = RUNS[0].run_id
    assert (best_of(state), todo()) == ([], [(first, 1, False)])
    measured(state, RUNS[0], 1.01, parts=False, repeat=1)
    assert (best_of(state), todo()) == ([first], [(first, 2, True)])
    measured(state, RUNS[0], 1.02, parts=False, repeat=2, screened=True)
    (ranking,) = standings_of(RUNS, state, "cpu").values()
    assert (todo(), ranking[0].num_competing) == ([], 1)
    rate = RUNS[0].spec.tokens_per_step / 1.01 / RUNS[0].layout.world_size
    assert ranking[0].rate == pytest.approx(rate), "the number that confirmed it counts alone"
    whole = replace(plan, candidates=make_plan(load_config(IN_PARTS)).candidates)
    whole_runs = {t.key.run_id for t in next_of(state, whole) if not t.candidate.is_screened}
    assert whole_runs == {run.run_id for run in RUNS} - {first}, "a sweep in full reuses no screened run"


def test_a_screened_run_is_priced_by_its_few_steps():
    measure, step_s = FEW.config.measure, RUNS[0].prediction.step_time_s
    few, full = FEW.runs[0], FEW.runs[0].in_full(FEW.config.measure)
    assert (few.is_screened, full.is_screened, few.in_full(measure).in_full(measure)) == (True, False, full)
    assert full.duration_s - few.duration_s == pytest.approx(
        measure.priced_s(step_s) - measure.few_steps.priced_s(step_s)
    )
    assert measure.few_steps.min_steps == measure.few_steps.max_steps == 6


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_one_of_the_starts_of_a_contender_has_whole_steps(repeats):
    """There are as many starts as confirm says, and one with whole steps in any case."""
    plan = replace(PARTS, config=replace(
        PARTS.config, repeats=repeats, measure=replace(PARTS.config.measure, confirm=3)
    ))  # fmt: skip
    state = SweepState()
    for repeat in range(repeats):
        for n, run in enumerate(RUNS):
            measured(state, run, STEP_S * (1 + n), parts=True, repeat=repeat)
    assert planned(state, plan) == [(0, repeats, True)]
    confirmed(state, RUNS[0], STEP_S, STEP_S, repeats)
    assert planned(state, plan) == [(0, repeats + 1, False)] * (repeats == 1)


def test_a_contender_whose_whole_steps_are_far_behind_needs_no_more_starts():
    plan = replace(PARTS, config=replace(
        PARTS.config, measure=replace(PARTS.config.measure, confirm=3)
    ))  # fmt: skip
    for behind, num_starts in ((1.02, 2), (1.045, 1)):
        state = all_by_parts()
        confirmed(state, RUNS[0], 1.0, 1.0)
        assert planned(state, plan)[0] == (1, 1, True), "whole steps come first"
        confirmed(state, RUNS[1], behind, behind)
        assert planned(state, plan) == [(n, 2, False) for n in range(num_starts)]


def test_a_second_start_decides_whether_whole_steps_contradict_parts():
    state = confirmed(all_by_parts(), RUNS[0], 2.5, 1.0)
    doubts = suspect_attempts(state, device="cuda")
    assert {key.repeat for key in doubts} == {0}, "parts of all runs are suspect, at once"
    assert planned(state, PARTS) == [(0, 2, True)]
    confirmed(state, RUNS[0], 1.01, 1.0, repeat=2)
    assert not suspect_attempts(state, device="cuda"), "the first one was an accident"
    assert planned(state, PARTS) == [(1, 1, True)]
    confirmed(state, RUNS[0], 2.5, 1.0, repeat=2)
    todo = next_of(state)
    assert {t.key.run_id for t in todo} == {run.run_id for run in RUNS[1:]}
    assert not any(t.candidate.slice for t in todo), "all others are measured whole"
    measured(state, RUNS[1], 2.2, parts=False, repeat=1, screened=True)
    (cell,) = outcomes(RUNS, state, 1.0)
    times_s = [cell.tried.times_s[run.run_id] for run in RUNS]
    assert times_s == [2.5, 2.2, 1.5], (
        "the search believes whole steps, where there are any, and no mean with parts"
    )


def contradicted(whole_s):
    return measured(all_by_parts(), RUNS[0], whole_s, parts=False, repeat=1)


def test_whole_steps_that_contradict_their_parts_make_the_parts_of_the_cell_suspect():
    assert not suspect_attempts(contradicted(1.015), device="cuda")
    assert not suspect_attempts(contradicted(1.25), device="cpu"), "other programs use the cores, too"
    doubts = suspect_attempts(contradicted(1.25), device="cuda")
    assert {key.run_id for key in doubts} == {run.run_id for run in RUNS}
    assert {key.repeat for key in doubts} == {0}, "whole steps are not in doubt"
    (text,) = {doubt_text(of_attempt) for of_attempt in doubts.values()}
    assert text.startswith(
        f"whole steps of {RUNS[0].run_id} took 1.25 x the time by its parts, interval 2.8%: nothing measured"
    )
    assert planned(contradicted(2.5), PARTS) == [(0, 2, True)], "one start may be slow by chance"
    todo = next_of(measured(contradicted(2.5), RUNS[0], 2.4, parts=False, repeat=2))
    assert {t.key.run_id for t in todo} == {run.run_id for run in RUNS[1:]}, "all others are measured whole"
    assert not any(t.candidate.slice for t in todo)


def test_the_control_beside_both_takes_out_what_allocations_differ_in():
    state = contradicted(1.25)
    for name, control_s, parts in (("slow", 2.5, False), ("fast", 2.0, True)):
        state.allocations[name] = AllocationState(name=name, nodes=1, control=RUNS[1].run_id)
        measured(state, RUNS[1], control_s, parts=parts, repeat=5 + parts, allocation=name, hostnames=(name,))
    for attempt in state.attempts.values():
        if attempt.key.run_id == RUNS[0].run_id:
            attempt.allocation = "fast" if attempt.key.repeat == 0 else "slow"
        elif attempt.key.repeat == 0:
            attempt.allocation = "fast"
    del state.attempts[key_of(RUNS[1])]
    assert not suspect_attempts(state, device="cuda")


def test_parts_cost_less_and_the_whole_steps_of_contenders_are_in_the_price():
    whole_plan = make_plan(load_config(IN_PARTS))
    whole, parts = price_of(whole_plan), price_of(PARTS)
    (num_whole, whole_hours), (num_parts, parts_hours) = (
        next(iter(price.runs.values())) for price in (whole, parts)
    )
    assert num_whole == num_parts
    assert parts_hours < 0.6 * whole_hours
    candidates = [t.candidate for job in parts.jobs for t in job.attempts]
    (confirming,) = [run for run in candidates if run.has_whole_steps]
    run = next(run for run in RUNS if run.run_id == confirming.run_id)
    step_s = run.prediction.step_time_s
    assert confirming.duration_s - run.duration_s == pytest.approx(
        PARTS.config.measure.priced_beside_parts_s(step_s, run.turn_share * step_s)
        - PARTS.config.measure.priced_s(run.turn_share * step_s)
    )


def test_a_measured_departure_saves_the_third_size_of_its_kind():
    of_kind = with_departures((0.03, 0.002))
    alike = {run.run_id for run in RUNS if run.spec.linearity_kind == RUNS[0].spec.linearity_kind}
    for run in of_kind.runs:
        known = (run.slice.third, run.slice.departure) == (None, Departure(value=0.03, error=0.002))
        assert known == (run.run_id in alike)


def with_departures(*measured_departures):
    """The plan after runs of the kind of the first one have measured these departures and their errors."""
    state = SweepState()
    for repeat, (value, error) in enumerate(measured_departures):
        measured(state, RUNS[0], STEP_S, parts=True, repeat=repeat, departure=value, departure_error=error)
    return with_measured_times(PARTS, state)


def test_up_to_three_runs_measure_an_uncertain_departure():
    """The departures that they have measured are pooled, and priced with a third size are as many runs as need it."""
    noisy = with_departures((0.1, 0.2), (-0.1, 0.1)).runs[0].slice
    assert (noisy.third, noisy.departure.num_runs) == (RUNS[0].slice.third, 2)
    assert noisy.departure.value == pytest.approx((0.1 / 0.04 - 0.1 / 0.01) / (1 / 0.04 + 1 / 0.01))
    assert with_departures((0.1, 0.2), (-0.1, 0.1), (0.0, 0.1)).runs[0].slice.third is None
    assert with_departures((0.3, None)).runs[0].slice == RUNS[0].slice, "too few turns"


def test_the_first_runs_of_a_kind_are_priced_with_a_third_size():
    """One where devices are not shared, up to three where they are or where the departure proves uncertain; the others
    are priced by pairs.
    """
    shared = replace(PARTS, config=load_config([*IN_PARTS[1:], "measure.partial_steps=auto"]))
    twins = tuple(replace(RUNS[0], run_id=f"{n:016x}") for n in range(5))
    uncertain = measured(SweepState(), twins[0], STEP_S, parts=True, departure=0.1, departure_error=0.2)
    assert [r.has_third for r in with_measured_times(replace(PARTS, candidates=twins), uncertain).runs] == [
        True, True, False, False, False,
    ]  # fmt: skip
    for plan, num_third in ((PARTS, 1), (shared, 3)):
        priced = with_measured_times(replace(plan, candidates=twins), SweepState()).runs
        assert [run.has_third for run in priced] == [n < num_third for n in range(5)]
        assert priced[0].duration_s > priced[-1].duration_s
        assert {run.slice for run in priced} == {RUNS[0].slice}, "what is measured is left to the allocation"
    third, pair = (
        with_measured_times(replace(PARTS, candidates=twins), SweepState()).runs[n] for n in (0, 1)
    )
    step_s, measure, slice_ = pair.prediction.step_time_s, PARTS.config.measure, pair.slice
    without_third = pair.by_slice(replace(slice_, third=None), measure)
    turn_s, pair_s = third.turn_share * step_s, without_third.turn_share * step_s
    assert third.priced_s(measure, step_s) == pytest.approx(measure.priced_s(turn_s))
    assert (
        pair.priced_s(measure, step_s) == without_third.priced_s(measure, step_s) == measure.priced_s(pair_s)
    )
    # The prediction is a straight line: a turn has a time for each of its steps, and one for each micro-batch.
    constant_s = step_s - pair.layout.gas * (step_s - (turn_s - pair_s)) / (pair.layout.gas - slice_.third)
    microbatch_s = (step_s - constant_s) / pair.layout.gas
    assert pair_s == pytest.approx(2 * constant_s + (slice_.g1 + slice_.g2) * microbatch_s)


def test_a_slice_that_becomes_wider_is_in_the_price_and_in_the_limits():
    """As likely as it has happened in the sweep, for the price; for sure, for the limit of an attempt."""
    measure, run = replace(PARTS.config.measure, run_limit_s=1e-6), RUNS[0]
    plan, state = replace(PARTS, config=replace(PARTS.config, measure=measure)), SweepState()

    def p_wider():
        return with_measured_times(plan, state).runs[0].p_wider

    shared = replace(PARTS, config=load_config([*IN_PARTS[1:], "measure.partial_steps=auto"]))
    assert (p_wider(), with_measured_times(shared, SweepState()).runs[0].p_wider) == (0.0, 1.0)
    measured(state, run, STEP_S, parts=True, part_times_s={"2": 0.1, "6": 0.2})
    assert p_wider() == 1 / 2
    measured(state, RUNS[1], STEP_S, parts=True, part_times_s={"2": 0.1, "4": 0.2, "6": 0.3})
    assert p_wider() == 1 / 3
    measured(state, RUNS[2], STEP_S, parts=True, part_times_s={"2": 0.1, "6": 0.2}, stopped=SLOWER)
    assert p_wider() == 1 / 3, "a slow run is not measured to the end"

    for as_measured in (run, run.in_full(measure)):
        narrow, wide = (as_measured.measured_by(measure, has_third=False, p_wider=p) for p in (0.0, 1.0))
        half = as_measured.measured_by(measure, has_third=False, p_wider=0.5)
        assert half.duration_s == pytest.approx((narrow.duration_s + wide.duration_s) / 2)
        parts_s = measure.max_steps * run.turn_share * run.prediction.step_time_s
        attempt = PlannedAttempt(candidate=narrow, key=key_of(run))
        limit_s = run_limit_s(attempt, plan.config)
        # All turns with three sizes, and as many of the wider slice, of which a turn takes less than these.
        assert limit_s > narrow.duration_s + 2 * parts_s
        assert limit_s == pytest.approx(3 * as_measured.measured_by(measure, p_wider=1.0).duration_s)


@pytest.mark.parametrize("control", [False, True])
def test_a_run_whose_start_in_full_fits_no_job_is_not_screened(control):
    """It could never be the best. The control run beside it is measured in full, too."""
    config = with_launcher(PARTS.config, control=control)
    for plan in (replace(PARTS, config=config), replace(FEW, config=config)):
        screened_s = max(run.duration_s for run in plan.runs)
        in_full = {run.run_id: run.in_full(config.measure).duration_s for run in plan.runs}
        longest_id = max(in_full, key=in_full.__getitem__)
        beside = controls(plan)[control_key(plan.runs[0])].run_id
        needed_s = in_full[longest_id] + in_full[beside] * (control and beside != longest_id)
        assert within_limit(plan, least_limit_s(needed_s, config)) is plan
        left = within_limit(plan, least_limit_s(needed_s, config) - 1)
        assert {run.run_id for run in plan.runs} - {run.run_id for run in left.runs} == {longest_id}
        assert screened_s + in_full[beside] * control < needed_s, "its screening would fit"
        reason = next(c.reason for c in left.candidates if c.run_id == longest_id)
        assert re.search(r"a job needs \d+ minutes( with its control run)? to measure it in full; ", reason)
    with refused("to measure it in full: allow more time"):
        within_limit(plan, 1.0)


def test_a_control_in_full_takes_its_time_in_a_job():
    """Beside a run that is measured in full the control run is, too, so that fewer runs fit beside it."""
    config = with_launcher(PARTS.config, control=True)
    plan = replace(PARTS, config=config)
    control_by_key, measure = controls(plan), config.measure
    control = control_by_key[control_key(RUNS[0])]
    first, second = (run for run in RUNS if run.run_id != control.run_id)
    todo = [PlannedAttempt(candidate=run, key=key_of(run, 1)) for run in (first, second.in_full(measure))]
    parts_s = control.duration_s + first.duration_s + second.in_full(measure).duration_s
    in_full_s = parts_s + control.in_full(measure).duration_s - control.duration_s
    num_groups = [
        len(pack(todo, config, control_by_key, least_limit_s(seconds + 1e-6, config)))
        for seconds in (parts_s, in_full_s)
    ]
    assert num_groups == [2, 1]


def test_the_control_is_whole_beside_whole_steps():
    other = RUNS[1]
    config = with_launcher(PARTS.config, control=True)
    plan = replace(PARTS, config=config)
    few = RUNS[2].by_few_steps(config.measure)
    for runs, is_whole in (
        (RUNS[1:3], False), ([other.in_full(config.measure), RUNS[2]], True), ([other, few], True),
    ):  # fmt: skip
        todo = tuple(PlannedAttempt(candidate=run, key=key_of(run, 1)) for run in runs)
        (job,) = planned_jobs(plan, AttemptsLeft(todo=todo, num_waiting=0), SweepState())
        controls = [t.candidate for t in job.attempts if t.key.run_id == job.control]
        assert {run.has_whole_steps for run in controls} == {is_whole}


def test_the_plan_file_keeps_the_parts(tmp_path):
    folder = make_sweep(tmp_path / "s", [run.spec for run in RUNS])
    write_plan(PARTS.candidates, tmp_path / "plan.parquet")
    read = [
        *runs_of(read_sweep_json(folder), read_rows(tmp_path / "plan.parquet", runs_only=True), SweepState())
    ]
    assert [(r.slice, r.turn_share, r.whole_steps) for r in read] == [
        (r.slice, r.turn_share, r.whole_steps) for r in RUNS
    ]
    few = [run.by_few_steps(PARTS.config.measure) for run in RUNS]
    write_plan(few, tmp_path / "few.parquet")
    rows = read_rows(tmp_path / "few.parquet", runs_only=True)
    assert all(r.few_steps and not r.slice for r in runs_of(read_sweep_json(folder), rows, SweepState()))
    write_plan(make_plan(load_config(IN_PARTS)).candidates, tmp_path / "whole.parquet")
    assert "slice" not in pq.read_schema(tmp_path / "whole.parquet").names


def test_what_parts_measure_is_blank_where_whole_steps_differ():
    result = ended(loss_final=3.0, gradient_norm=1.0, power_w_mean=500.0, peak_mem_reserved_bytes=7)
    task = SimpleNamespace(slice=RUNS[0].slice, few_steps=False)
    alike = without_unlike(result, task)
    assert (alike.loss_final, alike.gradient_norm, alike.power_w_mean, alike.peak_mem_reserved_bytes) == (
        None, None, None, 7,
    )  # fmt: skip
    unlike = SimpleNamespace(slice=replace(RUNS[0].slice, keeps_memory=False), few_steps=False)
    assert without_unlike(result, unlike).peak_mem_reserved_bytes is None
    beside_whole = SimpleNamespace(slice=RUNS[0].slice, few_steps=True)
    assert (
        without_unlike(result, SimpleNamespace(slice=None)) == without_unlike(result, beside_whole) == result
    )


def test_a_plan_says_what_is_measured_by_parts_and_why_others_are_not():
    overrides = [arg for arg in IN_PARTS if "gbs" not in arg]
    mixed = make_plan(load_config([*overrides, "sweep.gbs=[16,64]", "measure.partial_steps=auto"]))
    num_small = sum(run.layout.gas < 12 for run in mixed.runs)
    first, *reasons = screening_lines(mixed, SweepState())
    num_parts = len(mixed.runs) - num_small
    assert first.startswith(
        f"measure.partial_steps=auto: {num_parts} of {len(mixed.runs)} runs are screened by parts"
    )
    assert num_small == 1
    assert reasons == ["1 is screened by 6 whole steps: gas=8 is less than 3 * g2 = 12"]
    assert {run.is_screened for run in mixed.runs} == {True}
    fewer = make_plan(load_config([*overrides, "sweep.gbs=[8,16,64]", "measure.partial_steps=auto"]))
    _, *lines = screening_lines(fewer, SweepState())
    first_reason = next(run.whole_steps.reason for run in fewer.runs if run.whole_steps)
    num_few = sum(run.whole_steps is not None for run in fewer.runs)
    assert lines[0] == f"{num_few} are screened by 6 whole steps, the first since {first_reason}", (
        "one line for one rule"
    )
    assert lines[1:] == [
        "to have the reason of each: ultrabench sweep plan -o FILE.parquet (column whole_reason)"
    ]
    traced = ["every run is measured in full: trace=true, which shows a whole step"]
    for settings, lines in (
        ((), []), ((ADAPTIVE, "trace=true"), traced), ((ADAPTIVE, "measure.partial_steps=off"), []),
    ):  # fmt: skip
        plan = make_plan(load_config([*IN_PARTS, *settings]))
        assert [*screening_lines(plan, SweepState())] == lines
        assert not any(run.is_screened or run.whole_steps for run in plan.runs)
    first, advice = screening_lines(make_plan(load_config([*IN_PARTS, ADAPTIVE])), SweepState())
    assert first.startswith("measure.partial_steps=auto: 3 of 3 runs are screened by parts of steps; ")
    assert advice == "to measure every run in full, add measure.partial_steps=off"
    for setting, reason in (
        ("trace=true", "trace=true"),
        ("measure.checkpoint=true", "measure.checkpoint=true"),
    ):
        plan = make_plan(load_config([*IN_PARTS, "measure.partial_steps=auto", setting]))
        assert all(reason in run.whole_steps.reason and run.slice is None for run in plan.runs)
        assert not any(run.is_screened for run in plan.runs), "no part chooses in such a sweep"


def test_a_plan_of_whole_steps_says_that_runs_are_measured_again():
    state = SweepState()
    for run in RUNS[:2]:
        measured(state, run, STEP_S, parts=True)
    confirmed(state, RUNS[1], STEP_S, STEP_S)
    measured(state, RUNS[2], STEP_S, parts=False)
    lines = [*screening_lines(make_plan(load_config(IN_PARTS)), state)]
    assert lines == ["2 measured runs are measured again in full: measure.partial_steps=off"]
    traced = make_plan(load_config([*IN_PARTS, "measure.partial_steps=auto", "trace=true"]))
    first = next(screening_lines(traced, state))
    assert first == "1 measured run is measured again in full: trace=true, which shows a whole step"
    assert not any("again" in line for line in screening_lines(PARTS, state))


def test_memory_is_as_measured_where_steps_of_the_second_size_need_as_much(monkeypatch):
    """Larger parts are not run in every start, so that they do not count."""
    (cell,), run = PARTS.cells, RUNS[0]
    peak = PARTS.config.hardware.peak(cell.precision, cell.nodes, PARTS.core_flops_per_s, PARTS.cores)
    predict = sweep_plan.predictor(PARTS.config, cell.nodes, peak).predict
    second, third, whole = (
        predict(run.spec.with_gas(size)).peak_mem_bytes for size in (*run.slice.sizes[1:], run.layout.gas)
    )
    assert third > second, "the tokens of the batch"
    for least_ratio, keeps_memory in ((whole / second, True), ((whole / second + whole / third) / 2, False)):
        monkeypatch.setattr(sweep_plan, "MEMORY_TOLERANCE", least_ratio - 1 + 1e-12)
        made_runs = make_plan(PARTS.config).runs
        (slice_,) = (made.slice for made in made_runs if made.run_id == run.run_id)
        assert slice_.keeps_memory is keeps_memory


def test_a_program_that_runs_steps_of_one_size_is_measured_in_full():
    """Its plan says so, with the reason, where parts are asked for."""
    overrides = [arg for arg in IN_PARTS if not arg.startswith("launcher")]
    program = ("launcher=slurm", "kernel=command", "kernel.command=[python,train.py]")
    whole = make_plan(load_config([*overrides, *program, "measure.partial_steps=auto"]))
    assert {(run.slice, run.is_screened) for run in whole.runs} == {(None, False)}
    (reason,) = {run.whole_steps.reason for run in whole.runs}
    first, *reasons = screening_lines(whole, SweepState())
    assert f"0 of {len(whole.runs)} runs are screened by parts" in first
    assert reasons == [f"{len(whole.runs)} are measured in full: {reason}"]
