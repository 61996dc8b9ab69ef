"""What the agent that leads takes for the best run of a cell, and what it leaves out after an OOM."""

from dataclasses import replace

import pytest

from tests.unit.agent.one_node import task
from ultrabench.agent.lead import best_step_time_s, may_fit
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


@pytest.mark.parametrize(
    ("oom_of", "confirmed", "fits"),
    [(TASK, True, False), (TASK, False, True), (OTHER_MODEL, True, True), (OTHER_BATCH, True, True)],
)
def test_after_an_oom_layouts_of_its_cell_that_recompute_less_are_left_out(oom_of, confirmed, fits):
    recomputed = replace(oom_of.spec, layout=replace(oom_of.spec.layout, recompute="full"))
    oom = ended("oom", 0.1, of=replace(oom_of, spec=recomputed), status=Status.OOM, confirmed=confirmed)
    assert may_fit(TASK, [oom]) is fits
