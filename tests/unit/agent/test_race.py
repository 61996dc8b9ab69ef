"""What the agent that leads takes for the best run of a cell, and what it leaves out after an OOM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from ultrabench.agent.lead import Leader, best_step_time_s, may_fit
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.partial_step import Slice
from ultrabench.result import SLOWER, RunResult, Status

TASK = replace(task("x.py", "cpu"), run_id="new")


def ended(run_id, time_s, *, of=TASK, **fields):
    result = {"status": Status.OK, "step_times_s": (time_s,) * 3} | fields
    return replace(of, run_id=run_id), RunResult(**result)


CONTROL, SLOW = ended("control", 0.4), ended("slow", 0.8)
OTHER_MODEL = replace(TASK, spec=replace(TASK.spec, shape=replace(TASK.spec.shape, vocab_size=1024)))
OTHER_BATCH = replace(TASK, spec=replace(TASK.spec, workload=replace(TASK.spec.workload, seq_len=1024)))


@pytest.mark.parametrize(
    ("results", "elsewhere", "best_s"),
    [
        ([], {}, None), ([SLOW], {}, 0.8), ([SLOW, CONTROL], {}, 0.4), ([SLOW], {"best_step_time_s": 0.3}, 0.3),
        ([CONTROL, SLOW, ended("fast", 0.3)], {}, 0.3),
        # Runs of another cell, runs that were stopped and runs in doubt are no measure.
        ([SLOW, ended("tiny", 0.1, of=OTHER_MODEL)], {}, 0.8), ([SLOW, ended("short", 0.1, of=OTHER_BATCH)], {}, 0.8),
        ([SLOW, ended("stopped", 0.1, stopped=SLOWER)], {}, 0.8),
        ([SLOW, ended("hot", 0.1, throttled="power")], {}, 0.8),
        ([ended("crashed", 0.1, status=Status.CRASH)], {}, None), ([ended("hot", 0.1, throttled="power")], {}, None),
        # The fastest counts, also if it was only screened, unless its start in full has failed.
        ([SLOW, ended("parts", 0.2, screened=True)], {}, 0.2),
        ([ended("parts", 0.2, screened=True), ended("parts", 0.3)], {}, 0.3),
        ([SLOW, ended("parts", 0.2, screened=True), ended("parts", 0, status=Status.OOM, step_times_s=())], {}, 0.8),
        ([ended("parts", 0.2, screened=True), ended("parts", 0, status=Status.LOST, step_times_s=())], {}, 0.2),
        # The best of another allocation took 0.2 s beside a control of 0.3 s; here the control takes 0.4 s.
        ([CONTROL], {"best_step_time_s": 0.2, "best_control_ratio": 1.5}, 0.4 / 1.5),
        ([SLOW], {"best_step_time_s": 0.2, "best_control_ratio": 1.5}, 0.2),
        # Now the control takes 0.6 s instead of 0.4 s, so that a run of 0.3 s would take 0.45 s.
        ([CONTROL, ended("fast", 0.3), ended("control", 0.6)], {}, 0.45),
        ([CONTROL, ended("control", 0.6)], {"best_step_time_s": 0.2, "best_control_ratio": 1.5}, 0.6 / 1.5),
    ],
)  # fmt: skip
def test_the_best_of_the_cell_as_it_would_run_here(results, elsewhere, best_s):
    best = best_step_time_s(replace(TASK, **elsewhere), results, "control")
    assert best == (best_s and pytest.approx(best_s))


def ended_in_race(lines, best_s=1.0, **fields):
    """Why a run with these report lines is ended beside a best run of its cell; None if it is not."""
    allocation = SimpleNamespace(name="n1", control=None, limit_s=1e9, warning_s=0.0)
    identity = SimpleNamespace(job=None, owner_facts=lambda name: {})
    progress = AttemptProgress(1, ("n0",))
    progress.add([{"rank": 0, "line": line} for line in lines])
    polls = iter(range(10))
    group = SimpleNamespace(progress=progress, end_reason=None, listen=lambda seconds: next(polls))
    disk = SimpleNamespace(retry=lambda action: None)  # nothing is written
    node = SimpleNamespace(allocation=allocation, identity=identity, disk=disk)
    leader = Leader(node, group, journal=None)
    limits = replace(measure(race=1.3), loss_step=1)
    raced = replace(TASK, measure=limits, best_step_time_s=best_s, limit_s=1e9, **fields)
    try:
        return leader.watch(raced).reason
    except StopIteration:  # nothing has ended it
        return None


def in_parts(*turns):
    """The report lines of turns of steps of 2 and 4 micro-batches of 16, by their seconds."""
    return [
        {"event": "step", "seconds": seconds, "gas": size, "whole_gas": 16, "turn": turn, "measured": True}
        for turn, times_s in enumerate(turns)
        for size, seconds in zip((2, 4), times_s, strict=False)
    ]


def whole(*times_s):
    return [{"event": "step", "seconds": seconds, "measured": True} for seconds in times_s]


PAIR = {"slice": Slice(g1=2, g2=4)}


@pytest.mark.parametrize(
    ("lines", "fields", "reason"),
    [
        (whole(2.0), {}, None),
        (whole(2.0, 1.8), {}, "the fastest of 2 steps took 1.8 s; the best of its cell takes 1 s"),
        # One turn says how long a whole step of 16 takes: 0.5 s + 12 * 0.125 s = 2 s.
        (in_parts((0.25,)), PAIR, None),
        (in_parts((0.25, 0.5)), PAIR, "the fastest of 1 turn took 2 s; the best of its cell takes 1 s"),
        (in_parts((0.25, 0.5), (0.15, 0.3)), PAIR, None),
        # A start that is to confirm the run is not in the race.
        (whole(2.0, 2.0), {**PAIR, "few_steps": True, "repeat": 1}, None),
    ],
)
def test_a_run_is_ended_after_two_steps_or_the_first_turn_of_its_parts(lines, fields, reason):
    assert ended_in_race(lines, **fields) == reason


@pytest.mark.parametrize(
    ("oom_of", "confirmed", "fits"),
    [(TASK, True, False), (TASK, False, True), (OTHER_MODEL, True, True), (OTHER_BATCH, True, True)],
)
def test_after_an_oom_layouts_of_its_cell_that_recompute_less_are_left_out(oom_of, confirmed, fits):
    recomputed = replace(oom_of.spec, layout=replace(oom_of.spec.layout, recompute="full"))
    oom = ended("oom", 0.1, of=replace(oom_of, spec=recomputed), status=Status.OOM, confirmed=confirmed)
    assert may_fit(TASK, [oom]) is fits
