"""Programs that run steps of one size per start: which of them start twice, once for each part of a step."""

from dataclasses import replace

import pytest

from tests.unit.allocations import key_of, told
from tests.unit.analysis.sweeps import make_sweep
from ultrabench.cli.sweep.screening import screening_lines
from ultrabench.partial_step import Slice
from ultrabench.result import Status
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import read_rows, runs_of, write_plan
from ultrabench.sweep.predict.predict import start_s
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.outliers import suspect_attempts
from ultrabench.sweep.running.price import price_of, with_measured_times
from ultrabench.sweep.running.standings import standings_of

GAS_WORDS = "[python,train.py,'--gas={gas}','--batch={gbs}']"
PROGRAM = [
    "kernel=command", f"kernel.command={GAS_WORDS}", "launcher=slurm", "hardware=cpu", "model=tiny",
    "sweep.nodes=[1]", "sweep.gbs=64", "sweep.gas=null", "sweep.zero_stage=[0]", "sweep.mbs=[1]",
    "launcher.control=false", "measure.partial_steps=auto", "sweep.tp=[1]",
]  # fmt: skip
"""The overrides of two runs, pp=1 and pp=2, of 32 and 64 micro-batches."""


def plan_of(*overrides):
    """The plan of the program; of overrides of the same name the last one counts."""
    last = {override.partition("=")[0]: override for override in (*PROGRAM, *overrides)}
    return make_plan(load_config([*last.values()]))


PLAN = plan_of()
RUNS = PLAN.runs
MEASURE = PLAN.config.measure


def test_a_program_starts_twice_with_parts_as_wide_as_they_may_be():
    for run in RUNS:
        assert run.slice == Slice(g1=2, g2=6, two_starts=True, keeps_memory=run.slice.keeps_memory)
        whole = run.in_full(MEASURE)
        assert (whole.slice, whole.few_steps, whole.is_screened) == (None, False, False)
        assert run.by_few_steps(MEASURE) == whole, "a program measures all steps that it is asked for"
        assert run.after_full(MEASURE) == whole, "no start of it has whole steps and parts"
    assert {run.spec.layout.gas for run in RUNS} == {32, 64}
    lines = [*screening_lines(PLAN, SweepState())]
    assert lines[0].startswith("measure.partial_steps=auto: 2 of 2 runs are screened by parts of steps")
    assert lines[1:] == [
        "2 of them start twice, once for each number of micro-batches: kernel command runs steps of one size"
    ]


def test_a_second_start_is_in_the_price():
    for run in RUNS:
        whole, step_s = run.in_full(MEASURE), run.prediction.step_time_s
        second_s = start_s(PLAN.config.hardware, 1)
        saved_s = MEASURE.priced_s(step_s) - MEASURE.priced_s(run.turn_share * step_s)
        assert run.duration_s == pytest.approx(whole.duration_s + second_s - saved_s)
        assert run.search_cost == pytest.approx(run.duration_s / whole.duration_s)
        later = replace(run, start_excess_s=7.0)
        assert later.duration_s - run.duration_s == pytest.approx(14.0)
        assert later.in_full(MEASURE).duration_s - whole.duration_s == pytest.approx(7.0)


def test_a_run_whose_whole_steps_take_less_than_two_starts_is_measured_in_full():
    few_steps = "sweep.gbs=24", "measure.max_steps=6", "measure.warmup_steps=1", "measure.loss_step=1"
    short = plan_of(*few_steps)
    assert not any(run.is_screened for run in short.runs)
    nearest = min(short.runs, key=lambda run: run.dear_two_starts.two_starts_s / run.dear_two_starts.whole_s)
    assert nearest.dear_two_starts.whole_s == pytest.approx(nearest.duration_s)
    assert nearest.dear_two_starts.two_starts_s > nearest.duration_s
    first, line = screening_lines(short, SweepState())
    assert "0 of 2 runs are screened by parts of steps" in first
    start = "2 are measured in full, since two starts would take no less; the nearest: "
    assert line == start + nearest.dear_two_starts.text == start + nearest.whole_steps.reason
    listed = plan_of(*few_steps, "measure.partial_steps=[2,4]")
    assert {run.slice.text for run in listed.runs} == {"2,4"}, "listed numbers hold in any case"


def test_longer_starts_than_predicted_make_two_of_them_too_dear():
    """A run that was measured by two starts before is not measured again for that reason."""
    begun, other = RUNS
    state = told(
        SweepState(), begun, Status.OK, step_times_s=(begun.prediction.step_time_s,) * 6, init_time_s=900.0
    )
    run_by_id = {run.run_id: run for run in with_measured_times(PLAN, state).runs}
    assert run_by_id[begun.run_id].has_two_starts
    late = run_by_id[other.run_id]
    assert (late.is_screened, late.dear_two_starts.whole_s > 900) == (False, True)


@pytest.mark.parametrize(("overrides", "reason"), [
    (["kernel.command=[python,train.py,'--mbs={mbs}']"],
     "the command and the files of kernel command are the same with other gas and gbs"),
    (["+kernel.supports={gas: [8, 16, 32, 64]}"], "with gas=2: kernel command supports gas"),
    (["sweep.gbs=8"], "is less than 3 * g2 = 12"),
])  # fmt: skip
def test_programs_that_no_part_stands_for_are_measured_in_full(overrides, reason):
    plan = plan_of(*overrides)
    assert not any(run.is_screened for run in plan.runs)
    assert all(reason in run.whole_steps.reason for run in plan.runs), {
        run.whole_steps.reason for run in plan.runs
    }


def test_files_tell_a_program_the_size_of_its_steps():
    plan = plan_of(
        "kernel.command=[python,train.py,'{files}/a.json']", "kernel.files={a.json: '{\"batch\": {gbs}}'}"
    )
    assert all(run.has_two_starts for run in plan.runs)


def measured(state, run, step_s, *, parts, repeat=0):
    of_parts = (
        {"measured_gas": "2,6", "extrapolation_error_rel": 0.04, "parts_ci95_rel": 0.0, "screened": True}
        if parts
        else {}
    )
    return told(state, run, Status.OK, repeat, step_times_s=(step_s,) * 6, hostnames=("h",), **of_parts)


def planned(state, plan):
    return [
        (RUNS.index(next(r for r in RUNS if r.run_id == t.key.run_id)), t.key.repeat, t.candidate.is_screened)
        for t in next_attempts(plan, state).todo
    ]


@pytest.mark.parametrize("status", [Status.CRASH, Status.HANG, Status.INVALID])
def test_a_program_that_fails_at_the_size_of_a_part_is_measured_in_full(status):
    """It may not be able to run such a size, which says nothing about whole steps."""
    state, attempt = measured(SweepState(), RUNS[1], 1.5, parts=True), 0
    while planned(state, PLAN) == [(0, 0, True)]:
        told(state, RUNS[0], status, 0, attempt, screened=True, reason="cannot run gas 6", cause="exit_code")
        attempt += 1
    assert attempt, "parts are tried first, as often as the retry policy says"
    assert planned(state, PLAN) == [(0, 1, False)]
    failed = replace(state, attempts=dict(state.attempts))
    while todo := [place for place in planned(failed, PLAN) if place[0] == 0]:
        assert todo == [(0, 1, False)], "whole steps are tried again, too, and then no more"
        told(failed, RUNS[0], status, 1, attempt, reason="cannot run at all", cause="exit_code")
        attempt += 1
    assert planned(failed, PLAN) == [(1, 1, False)]
    measured(state, RUNS[0], 1.0, parts=False, repeat=1)
    (ranking,) = standings_of(RUNS, state, "cpu").values()
    assert [s.run_id for s in ranking if s.best] == [RUNS[0].run_id]
    assert [place for place in planned(state, PLAN) if place[2]] == [], "no parts any more"


def test_memory_that_does_not_suffice_for_a_part_does_not_for_whole_steps():
    state = measured(SweepState(), RUNS[1], 1.5, parts=True)
    for attempt in range(2):
        told(state, RUNS[0], Status.OOM, 0, attempt, screened=True, confirmed=True)
    assert planned(state, PLAN) == [(1, 1, False)]


def test_contenders_are_measured_in_full_in_all_their_other_starts():
    plan = replace(PLAN, config=replace(PLAN.config, measure=replace(MEASURE, confirm=3)))
    state = SweepState()
    assert planned(state, plan) == [(0, 0, True), (1, 0, True)]
    measured(state, RUNS[0], 1.0, parts=True)
    measured(state, RUNS[1], 1.5, parts=True)
    for repeat in (1, 2):
        assert planned(state, plan) == [(0, repeat, False)]
        measured(state, RUNS[0], 1.02, parts=False, repeat=repeat)
    assert planned(state, plan) == []
    confirmations = [
        t.key for job in price_of(plan).jobs for t in job.attempts if not t.candidate.is_screened
    ]
    assert sorted(key.repeat for key in confirmations if key.run_id == confirmations[0].run_id) == [1, 2]


def test_after_a_contradiction_the_other_runs_are_measured_in_full():
    state = SweepState()
    for run in RUNS:
        measured(state, run, 1.0, parts=True)
    measured(state, RUNS[0], 2.5, parts=False, repeat=1)
    assert {key.run_id for key in suspect_attempts(state, device="cuda")} == {run.run_id for run in RUNS}
    within = measured(SweepState(), RUNS[0], 1.0, parts=True)
    measured(within, RUNS[0], 1.044, parts=False, repeat=1)
    assert not suspect_attempts(within, device="cuda"), "the start with whole steps may differ, too"

    def todo():
        return [(t.key, t.candidate.is_screened) for t in next_attempts(PLAN, state).todo]

    assert todo() == [(key_of(RUNS[0], 2), False)], "one start may be slow by chance"
    measured(state, RUNS[0], 2.4, parts=False, repeat=2)
    assert todo() == [(key_of(RUNS[1], 1), False)]


def test_the_plan_file_keeps_two_starts(tmp_path):
    folder = make_sweep(tmp_path / "s", [run.spec for run in RUNS])
    write_plan(PLAN.candidates, tmp_path / "plan.parquet")
    rows = read_rows(tmp_path / "plan.parquet", runs_only=True)
    read = [*runs_of(read_sweep_json(folder), rows, SweepState())]
    kept = [(run.slice, run.second_start_s, run.prediction.duration_s) for run in RUNS]
    assert [(run.slice, run.second_start_s, run.prediction.duration_s) for run in read] == kept
