"""The check is no rubber stamp: planted faults and dying ranks make it fail."""

import os
import signal
import threading
import time

import pytest

from tests.mutations import CHECKS, MUTATIONS, PAGE, checked, find, replicas
from tests.parity.planted import FAULTS
from tests.parity.test_layouts import spec_of
from tests.patience import Deadline, slowness, wait_until
from ultrabench.kernel.check.parity import run_check
from ultrabench.kernel.requests import FP64_TOLERANCE
from ultrabench.processes import descendants

pytestmark = pytest.mark.parity
PLANTED = {
    (m.by, FAULTS[m.fault].place if m.by == "ignored" else FAULTS[m.fault].owner): m
    for m in reversed(MUTATIONS)
    if CHECKS[m.by] in (checked, replicas)
}
"""Check and what is changed -> the first fault there: one of each class or module,
or of each option that is read back."""


@pytest.mark.parametrize("mutation", [*reversed(PLANTED.values())], ids=lambda m: f"{m.fault}: {m.where}")
def test_planted_fault_is_caught(server, mutation):
    """By the check that is meant to see it, far above rounding; `make mutations` plants the others.

    tests/mutations.md shows what the check says of an option that is ignored.
    """
    finding = find(server, mutation)
    assert finding.by == mutation.by, finding
    if mutation.by == "ignored":
        assert f"| {mutation.where} | ignored | {finding.shown} |" in PAGE.read_text()


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        ("dp=2 tp=2 zero_stage=1 gas=2 fp32", 1e-4),
        ("pp=2 gas=4 interleaved tied bf16", 0.1),
        ("tp=2 cp=2 bf16", 0.1),
    ],
)
def test_rounding_is_allowed(server, case, bound):
    """Layouts that add up in another order than one process pass, where fp64's tolerance would fail them."""
    result = server.ask(run_check, spec_of(case))
    assert result.passed, result
    assert FP64_TOLERANCE < result.grad_diff < result.grad_allowed < bound


def test_what_torch_gets_wrong_without_a_word_is_caught(server):
    """A split backward pass of sharded parameters: why `grid.refusal` names it."""
    result = server.ask(run_check, spec_of("dp=2 pp=2 zero_stage=3 gas=4 zbv"))
    assert (result.error, result.passed) == (None, False)
    assert result.grad_diff > 1e-3


def test_killed_rank_fails_the_check(server, monkeypatch):
    """SIGKILL to a rank ends the check in seconds and leaves no process."""
    monkeypatch.setattr(server, "fault", "frozen_rank")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.ask(run_check, spec_of("dp=2"))))
    asking.start()
    # The reference ends; the process that answers and two ranks stay, one asleep, one waiting for it.
    deadline, before = Deadline(60), set[int]()
    while (processes := descendants(server.pid)) != before or len(processes) != 3:
        assert not deadline.over()
        before = processes
        time.sleep(1)
    os.kill(max(processes), signal.SIGKILL)
    asking.join(10 * slowness())
    assert not asking.is_alive()
    assert "killed by SIGKILL" in answers[0].error
    wait_until(lambda: not descendants(server.pid), 10)
