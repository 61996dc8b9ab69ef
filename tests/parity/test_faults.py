"""The check is no rubber stamp: planted faults and dying ranks make it fail."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from tests.mutations import IN_TESTS, find
from tests.parity.test_layouts import spec_of
from tests.patience import Deadline, slowness, wait_until
from ultrabench.kernel.requests import TOLERANCE
from ultrabench.processes import descendants

pytestmark = pytest.mark.parity
TOLD = {
    "no_recompute": "recompute=full was asked for, none ran",
    "other_schedule": "pp_schedule=1f1b was asked for, afab ran",
    "gathered_parameters": "zero_stage=3 was asked for, 0 ran",
    "full_for_selective": "recompute=selective was asked for, full ran",
    "zero2_as_1": "zero_stage=2 was asked for, 1 ran",
    "no_bf16": "precision=bf16 was asked for, fp32 ran",
    "no_compile": "compile=True was asked for, False ran",
    "any_attention": "attention=flash was asked for, any ran",
    "half_the_micro_batches": "gas=4 was asked for, 2 ran",
}
"""Fault -> what the check says of an option that is ignored although training is correct or nearly so."""


@pytest.mark.parametrize("mutation", IN_TESTS, ids=lambda m: f"{m.fault}: {m.where}")
def test_planted_fault_is_caught(server, mutation):
    """By the check that is meant to see it, far above rounding; `make mutations` plants the others."""
    found = find(server, mutation)
    assert found.by == mutation.by, found
    if mutation.fault in TOLD:
        assert found.shown == TOLD[mutation.fault]


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("dp=2 tp=2 zero_stage=1 gas=2", "fp32"),
        ("pp=2 gas=4 interleaved tied", "bf16"),
        ("tp=2 cp=2", "bf16"),
    ],
)
def test_rounding_is_allowed(server, case, precision):
    """Layouts that add up in another order than one process pass, where fp64's tolerance would fail them."""
    result = server.check(replace(spec_of(case), precision=precision))
    assert result.passed, result
    assert result.grad_diff is not None
    assert TOLERANCE < result.grad_diff < result.grad_allowed < {"fp32": 1e-4, "bf16": 0.1}[precision]


def test_what_torch_gets_wrong_without_a_word_is_caught(server):
    """A split backward pass of sharded parameters: why `grid.refusal` names it."""
    result = server.check(spec_of("dp=2 pp=2 zero_stage=3 gas=4 zbv"))
    assert result.error is None
    assert not result.passed
    assert result.grad_diff is not None
    assert result.grad_diff > 1e-3


def test_dead_rank_fails_the_check(server):
    """The peers of a rank that left would wait; the check does not."""
    result = server.check(spec_of("dp=2"), "dead_rank")
    assert result.error == "rank 1: SystemExit: rank 1 has had enough"
    assert result.seconds < 10 * slowness()


def test_killed_rank_fails_the_check(server):
    """SIGKILL to a rank ends the check in seconds and leaves no process."""
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.check(spec_of("dp=2"), "frozen_rank")))
    asking.start()
    # The reference ends; the copy of the server and two ranks stay, one asleep, one waiting for it.
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
