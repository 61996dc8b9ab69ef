import pytest

from ultrabench.agent.deadline import overdue
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
    "measure": MEASURE,
}
STARTING = {"first_step": None, "slowest_gap_s": 0.0, "phase": "init", "moved": 0.0}


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
    found = overdue(**{**CALM, **change})
    assert (found.status if found else None) == status


def test_a_hang_says_where_and_how_long():
    found = overdue(**{**CALM, "now": 75.0})
    assert found.reason == "no progress for 26.0 s in phase measure (deadline 10.0 s)"


def test_a_timeout_says_its_limit():
    found = overdue(**{**CALM, "now": 1001.0, "moved": 1001.0})
    assert found.reason == "still in phase measure after its limit of 1000 s"


def test_a_deadline_grows_with_the_slowest_gap():
    for gap in (1.0, 5.0, 30.0):
        allowed = max(10.0, 10 * gap)
        at = {"moved": 0.0, "limit_s": 1e9, "slowest_gap_s": gap}
        assert overdue(**{**CALM, **at, "now": allowed}) is None
        assert overdue(**{**CALM, **at, "now": allowed + 0.1}).status == Status.HANG
