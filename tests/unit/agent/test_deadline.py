"""When a run is called a hang or a timeout."""

from dataclasses import replace

import pytest

from tests.configs import measure as measure_of
from tests.sweep_folder import ended
from tests.unit.agent.one_node import task
from ultrabench.agent.lead import result_if_overdue
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.partial_step import Slice
from ultrabench.start_up import with_measured_times

CALM = {
    "started_s": 0.0, "moved_s": 49.0, "first_step_s": 20.0, "slowest_gap_s": 0.5, "phase": "measure",
    "has_reported": True,
    "predicted_step_time_s": 0.5, "limit_s": 1000.0,
    "predicted_start_s": 20.0,
}  # fmt: skip
STARTING = {"first_step_s": None, "slowest_gap_s": 0.0, "phase": "init", "moved_s": 0.0}
TASK = replace(task("x.py", "cpu"), measure=measure_of(start_deadline_s=100.0, deadline_floor_s=10.0))


@pytest.mark.parametrize(
    ("change", "until", "status", "reason"),
    [
        # After the first step: the floor, or ten times the slowest gap, but not the predicted step.
        ({}, 59.0, "hang", "no progress for 10.1 s in phase measure (deadline 10.0 s)"),
        ({"slowest_gap_s": 2.0}, 69.0, "hang", "deadline 20.0 s"),
        ({"predicted_step_time_s": 99.0}, 59.0, "hang", "deadline 10.0 s"),
        # Before the first step: the start deadline, or ten times the predicted step.
        (STARTING, 100.0, "hang", "in phase init (deadline 100.0 s)"),
        ({**STARTING, "predicted_step_time_s": 50.0}, 500.0, "hang", "deadline 500.0 s"),
        # Runs before it have shown that starts are long.
        ({**STARTING, "predicted_start_s": 60.0}, 180.0, "hang", "deadline 180.0 s"),
        # Writing and reading a trace is as silent as a start.
        ({"phase": "profile"}, 149.0, "hang", "deadline 100.0 s"),
        # A program that reports nothing has only its limit.
        ({**STARTING, "has_reported": False}, 1000.0, "timeout", "still in phase init"),
        # The limit counts from the start, whatever moves; where both are missed, it is a timeout.
        ({"moved_s": 1000.0}, 1000.0, "timeout", "still in phase measure after its limit of 1000 s"),
        ({"moved_s": 1200.0, "started_s": 200.0}, 1200.0, "timeout", "limit of 1000 s"),
        ({"limit_s": 59.0}, 59.0, "timeout", "limit of 59 s"),
    ],
)
def test_deadlines(change, until, status, reason):
    case = {**CALM, **change}
    progress = AttemptProgress(1, ("n0",))
    gaps = {"steady": case["slowest_gap_s"]}
    progress.ranks[0] = RankProgress(phase=case["phase"], first_gaps_s=gaps, last_progress_s=case["moved_s"])
    for name in ("started_s", "first_step_s", "has_reported"):
        setattr(progress, name, case[name])
    limits = {name: case[name] for name in ("limit_s", "predicted_step_time_s", "predicted_start_s")}
    limited = replace(TASK, **limits)
    assert result_if_overdue(limited, progress, until) is None
    result = result_if_overdue(limited, progress, until + 0.1)
    assert result.status == status
    assert reason in result.reason


def test_a_task_has_the_time_that_runs_of_its_allocation_took():
    expected = replace(TASK, predicted_start_s=20.0, predicted_duration_s=50.0, limit_s=300.0)
    assert with_measured_times(expected, [ended(init_time_s=15.0)]) == expected
    longer = with_measured_times(expected, [ended(init_time_s=200.0)])
    assert (longer.predicted_start_s, longer.predicted_duration_s, longer.limit_s) == (200.0, 230.0, 690.0)
    runs = [
        ended(duration_s=90.0),
        ended(duration_s=400.0),
        ended(duration_s=1.0, stopped="slower_than_best"),
    ]
    longer = with_measured_times(expected, runs)
    assert (longer.predicted_start_s, longer.predicted_duration_s, longer.limit_s) == (20.0, 90.0, 300.0)


def test_the_life_of_a_rank_that_reports_nothing_is_no_gap():
    """In the log of most programs only one rank reports steps."""
    progress = AttemptProgress(2, ("n0",))
    for now_s in (90.0, 91.0, 92.0):
        progress.add([{"rank": 0, **STEP}], now_s)
    progress.add([{"rank": 1, "code": 0}], now_s=100.0)
    assert progress.longest_gap_s == 1.0


def test_a_checkpoint_has_a_limit_of_its_own_and_is_no_hang():
    """It may be silent, and last beyond the limit of the run, which stays ok."""
    limited = replace(TASK, limit_s=100.0, measure=replace(TASK.measure, checkpoint_limit_s=50.0))
    progress = AttemptProgress(1, ("n0",))
    progress.add([{"rank": 0, **STEP}, {"rank": 0, **phase("checkpoint")}], now_s=90.0)
    assert result_if_overdue(limited, progress, 140.0) is None
    missed = result_if_overdue(limited, progress, 140.1)
    assert (missed.status, missed.cause, missed.suspect_hosts) == ("ok", "disk_slow", ())
    progress.add([{"rank": 0, **phase("teardown")}], now_s=140.2)
    assert result_if_overdue(limited, progress, 140.2).status != "ok", "the limit of the run counts again"


def part_steps(num_turns, sizes, first_turn=0):
    """The report lines of measured turns of steps of these sizes, 0.1 s for each micro-batch."""
    return [
        {"event": "step", "seconds": 0.1 * size, "gas": size, "whole_gas": 64, "turn": turn, "measured": True}
        for turn in range(first_turn, first_turn + num_turns)
        for size in sizes
    ]


def whole_steps(num):
    """The report lines of measured whole steps of 6.4 s."""
    return [{"event": "step", "seconds": 6.4, "measured": True}] * num


PARTS = {"slice": Slice(g1=2, g2=4, wider=6)}


@pytest.mark.parametrize(
    ("asked", "lines", "num_times"),
    [
        ({}, whole_steps(19), None), ({}, whole_steps(20), 20), (PARTS, part_steps(19, (2, 4)), None),
        (PARTS, part_steps(20, (2, 4)), 20),
        # The first pair counts until the wider one has as many turns as are needed.
        (PARTS, part_steps(50, (2, 4)) + part_steps(19, (2, 6), 50), 50),
        (PARTS, part_steps(50, (2, 4)) + part_steps(20, (2, 6), 50), 20),
        # A start in full has measured its few whole steps.
        ({**PARTS, "few_steps": True}, whole_steps(5), None),
        ({**PARTS, "few_steps": True}, whole_steps(6) + part_steps(3, (2, 4)), 6),
    ],
)  # fmt: skip
def test_at_its_limit_a_run_is_ok_if_it_has_measured_what_it_was_asked_for(asked, lines, num_times):
    limits = replace(TASK.measure, min_steps=20, max_steps=50, loss_step=1)
    limited = replace(TASK, limit_s=60.0, measure=limits, **asked)
    progress = AttemptProgress(1, ("n0",))
    progress.add([{"rank": 0, "line": line} for line in lines], now_s=60.0)
    result = result_if_overdue(limited, progress, 60.1)
    assert result.status == ("timeout" if num_times is None else "ok")
    times_s = progress.reporter.measured_step_times_s(limited.measure)
    if num_times is not None:
        assert times_s == pytest.approx([6.4] * num_times)


STEP = {"line": {"event": "step", "seconds": 1.0}}


def phase(name):
    return {"line": {"event": "phase", "name": name}}


def in_part(part, microbatches=0):
    return {"microbatches": int(microbatches), "step": 1, "part": part}


class Simulated:
    """A run whose events are given with their times; at each, no deadline may have been missed."""

    def __init__(self, world_size=1):
        self.progress = AttemptProgress(world_size, ("n0",))
        self.progress.started_s = 0.0
        for rank in self.progress.ranks:
            rank.last_progress_s = 0.0
        measure = measure_of(deadline_floor_s=2.0, start_deadline_s=100.0)
        self.task = replace(TASK, measure=measure, predicted_step_time_s=0.1, limit_s=1e9)

    def add(self, now_s, event, rank=0):
        assert not self.hangs(now_s), (now_s, rank, event)
        self.progress.add([{"rank": rank, **event}], now_s=now_s)

    def hangs(self, now_s):
        return result_if_overdue(self.task, self.progress, now_s) is not None


def test_a_slow_rank_among_quick_ones_is_healthy():
    """Some rank moves every second; then all the quick ones wait 20 s for the slow one, twice."""
    run = Simulated(3)
    for rank in range(3):
        run.add(0.0, phase("first_step_s"), rank)
    for start in (0.0, 30.0, 60.0):
        for second in range(1, 10):
            run.add(start + second, in_part("forward_backward", start + second), second % 2)
        run.add(start + 29.0, in_part("forward_backward", start + 1), 2)
        for rank in range(3):
            run.add(start + 30.0, STEP, rank)


def test_what_the_start_and_the_first_step_took_is_forgotten():
    run = Simulated()
    run.add(1.0, phase("build"))
    run.add(90.0, phase("first_step_s"))
    run.add(110.0, STEP)
    assert not run.hangs(309.9), "ten times the first step"
    assert run.hangs(310.1), "the start is no part of the first step"
    run.add(111.0, STEP)
    assert not run.hangs(120.9)
    assert run.hangs(121.1), "from the second step on the first does not count"
    # What is found at a rank that hangs is no progress.
    run.progress.add([{"rank": 0, "evidence": {"state": "T"}}], now_s=112.0)
    assert (run.progress.ranks[0].last_progress_s, run.progress.ranks[0].evidence) == (111.0, {"state": "T"})


def test_the_optimizer_has_a_deadline_of_its_own():
    """With steps of 1 s and an optimizer of 50 s, a silence of 11 s is a hang only in a step."""
    run = Simulated()
    run.add(0.0, phase("first_step_s"))
    for now in (0.0, 51.0, 102.0):
        run.add(now, in_part("forward_backward"))
        run.add(now + 1.0, in_part("optimizer", now))
        run.add(now + 51.0, STEP)
        run.add(now + 51.0, in_part("data"))
    assert not run.hangs(153.0 + 9.9)
    assert run.hangs(153.0 + 10.1)
    run.add(154.0, in_part("optimizer", 153))
    assert not run.hangs(153.0 + 400.0)
