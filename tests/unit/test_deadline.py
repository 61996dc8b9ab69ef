from dataclasses import replace

import pytest

from tests.unit.one_node import task
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.agent.ranks.watch import overdue
from ultrabench.measure import Measure
from ultrabench.result import Status

MEASURE = Measure(start_deadline_s=100.0, deadline_floor_s=10.0)
CALM = {
    "now": 50.0,
    "started": 0.0,
    "moved": 49.0,
    "first_step": 20.0,
    "slowest_gap_s": 0.5,
    "phase": "measure",
    "spoke": True,
    "predicted_step_time_s": 0.5,
    "limit_s": 1000.0,
}
STARTING = {"first_step": None, "slowest_gap_s": 0.0, "phase": "init", "moved": 0.0}
TASK = replace(task("x.py", "cpu"), measure=MEASURE)


def missed(**change):
    """The deadline that a run missed which is as CALM but for `change`."""
    case = {**CALM, **change}
    progress = AttemptProgress(1, ("n0",))
    progress.ranks[0] = RankProgress(phase=case["phase"], first_gaps_s={"steady": case["slowest_gap_s"]})
    for name in ("started", "moved", "first_step", "spoke"):
        setattr(progress, name, case[name])
    limits = {name: case[name] for name in ("limit_s", "predicted_step_time_s")}
    return overdue(replace(TASK, **limits), progress, case["now"])


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, None),
        # After the first step: the floor, or ten times the slowest gap.
        ({"moved": 40.0}, None),
        ({"moved": 39.9}, Status.HANG),
        ({"moved": 30.0, "slowest_gap_s": 2.0}, None),
        ({"moved": 29.9, "slowest_gap_s": 2.0}, Status.HANG),
        # A slow first step does not excuse silence after it, nor does a slow prediction.
        ({"moved": 30.0, "predicted_step_time_s": 99.0}, Status.HANG),
        # Before the first step: the start deadline, or ten times the predicted step.
        ({**STARTING, "now": 100.0}, None),
        ({**STARTING, "now": 100.1}, Status.HANG),
        ({**STARTING, "now": 500.0, "predicted_step_time_s": 50.0}, None),
        ({**STARTING, "now": 500.1, "predicted_step_time_s": 50.0}, Status.HANG),
        ({**STARTING, "now": 190.0, "moved": 95.0}, None),
        # Writing and reading a trace is as silent as a start.
        ({"phase": "profile", "now": 149.0}, None),
        ({"phase": "profile", "now": 149.1}, Status.HANG),
        # A program that says nothing has its limit only.
        ({**STARTING, "now": 999.0, "spoke": False}, None),
        ({**STARTING, "now": 1000.1, "spoke": False}, Status.TIMEOUT),
        # The limit counts from the start, whatever moves.
        ({"now": 1000.0, "moved": 1000.0}, None),
        ({"now": 1000.1, "moved": 1000.1}, Status.TIMEOUT),
        ({"now": 1100.0, "started": 200.0, "moved": 1100.0}, None),
        # Both at once: it had its time.
        ({"now": 2000.0}, Status.TIMEOUT),
    ],
)
def test_deadlines(change, status):
    found = missed(**change)
    assert (found.status if found else None) == status


def test_a_hang_says_where_and_how_long():
    found = missed(now=75.0)
    assert found.reason == "no progress for 26.0 s in phase measure (deadline 10.0 s)"


def test_a_timeout_says_its_limit():
    found = missed(now=1001.0, moved=1001.0)
    assert found.reason == "still in phase measure after its limit of 1000 s"


def test_a_deadline_grows_with_the_slowest_gap():
    for gap in (1.0, 5.0, 30.0):
        allowed = max(10.0, 10 * gap)
        at = {"moved": 0.0, "limit_s": 1e9, "slowest_gap_s": gap}
        assert missed(**at, now=allowed) is None
        assert missed(**at, now=allowed + 0.1).status == Status.HANG


class Simulated:
    """A run told second by second; every silence is held against the deadline at its end."""

    def __init__(self, world_size, floor_s=2.0):
        self.progress = AttemptProgress(world_size, ("n0",))
        self.progress.started = self.progress.moved = 0.0
        measure = Measure(deadline_floor_s=floor_s, start_deadline_s=100.0)
        self.task = replace(TASK, measure=measure, predicted_step_time_s=0.1, limit_s=1e9)

    def tell(self, at, rank, **item):
        assert self.missed(at) is None, (at, rank, item)
        self.progress.add([{"rank": rank, **item}], now=at)

    def step(self, at, rank, seconds=1.0):
        self.tell(at, rank, line={"event": "step", "seconds": seconds})

    def part(self, at, rank, part, microbatches=0):
        self.tell(at, rank, microbatches=microbatches, step=1, part=part)

    def missed(self, at):
        return overdue(self.task, self.progress, at)


def test_a_healthy_run_is_as_slow_as_it_likes():
    """Fifty times slower than the floor, with a first step that told its pace."""
    run = Simulated(1)
    for number in range(1, 8):
        run.step(100.0 * number, 0)
        assert run.missed(100.0 * number + 999.0) is None
    assert run.missed(1701.0).status == Status.HANG


def test_a_slow_rank_among_quick_ones_is_healthy():
    """Every second somebody moves; then all the quick ones wait 20 s for the slow one, twice."""
    run = Simulated(3)
    for rank in range(3):
        run.tell(0.0, rank, line={"event": "phase", "name": "first_step"})
    for start in (0.0, 30.0, 60.0):
        for second in range(1, 10):
            run.part(start + second, second % 2, "forward_backward", microbatches=int(start) + second)
        run.part(start + 29.0, 2, "forward_backward", microbatches=int(start) + 1)
        for rank in range(3):
            run.step(start + 30.0, rank)


def test_what_a_first_step_took_is_forgotten_after_the_second():
    run = Simulated(1)
    run.step(60.0, 0)
    assert run.missed(659.0) is None
    run.step(61.0, 0)
    assert run.missed(70.9) is None
    assert run.missed(71.1).status == Status.HANG


def test_starting_up_is_no_part_of_the_first_step():
    run = Simulated(1)
    run.tell(1.0, 0, line={"event": "phase", "name": "build"})
    run.tell(90.0, 0, line={"event": "phase", "name": "first_step"})
    run.step(91.0, 0)
    assert run.missed(101.1).status == Status.HANG


def test_the_optimizer_has_a_deadline_of_its_own():
    """Steps of 1 s and an optimizer of 50 s: a silence of 11 s is a hang in one, not in the other."""
    run = Simulated(1)
    run.tell(0.0, 0, line={"event": "phase", "name": "first_step"})
    now = 0.0
    for _ in range(3):
        run.part(now, 0, "forward_backward")
        run.part(now + 1.0, 0, "optimizer", microbatches=int(now))
        now += 51.0
        run.step(now, 0)
        run.part(now, 0, "data")
    assert run.missed(now + 9.9) is None
    assert run.missed(now + 10.1).status == Status.HANG
    run.part(now + 1.0, 0, "optimizer", microbatches=int(now))
    assert run.missed(now + 400.0) is None


def test_what_is_found_at_a_hanging_rank_is_no_progress():
    run = Simulated(1)
    run.step(1.0, 0)
    run.progress.add([{"rank": 0, "found": {"state": "T"}}], now=9.0)
    assert run.progress.moved == 1.0
    assert run.progress.ranks[0].found == {"state": "T"}
