"""The check is no rubber stamp: planted faults and dying ranks make it fail."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from tests.parity.conftest import Server
from tests.parity.test_layouts import spec_of
from tests.patience import Deadline, slowness, wait_until
from ultrabench.kernel.requests import TOLERANCE
from ultrabench.processes import descendants

pytestmark = pytest.mark.parity
FAILURE = "ultrabench.kernel.rank.failure.IgnoredOptionError"


@pytest.mark.parametrize(
    ("fault", "case", "precision"),
    [
        ("drop_tp_all_reduce", "tp=2 gas=2", "fp32"),
        ("drop_tp_all_reduce", "dp=2 tp=2 zero_stage=1", "bf16"),
        ("wrong_divisor", "dp=2 zero_stage=1 gas=2", "fp64"),
        ("wrong_divisor", "dp=2 pp=2 zero_stage=3 gas=2", "bf16"),
        ("untied_sum", "pp=2 gas=2 tied", "fp32"),
        ("drop_microbatch", "dp=2 gas=4", "fp64"),
        ("drop_microbatch", "pp=2 gas=4", "bf16"),
        ("untied_sum", "pp=2 gas=2 zbv tied", "bf16"),
        ("ring_sees_the_future", "cp=2", "bf16"),
        ("lost_key_gradients", "cp=2", "bf16"),
        ("stale_recompute", "full", "bf16"),
        ("unsummed_rows", "tp=2", "bf16"),
        ("reversed_tokens", "tp=2", "bf16"),
    ],
)
def test_planted_fault_is_caught(server: Server, fault: str, case: str, precision: str) -> None:
    """Differences far above rounding; whatever bf16 shows, fp32 and fp64 with their smaller limits show too."""
    result = server.check(replace(spec_of(case), precision=precision), fault)
    assert result.error is None
    assert not result.passed
    assert result.grad_diff is not None
    assert result.grad_diff > 2 * result.grad_allowed


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("dp=2 tp=2 zero_stage=1 gas=2", "fp32"),
        ("pp=2 gas=4 interleaved tied", "bf16"),
        ("tp=2 cp=2", "bf16"),
    ],
)
def test_rounding_is_allowed(server: Server, case: str, precision: str) -> None:
    """Layouts that add up in another order than one process pass, where fp64's tolerance would fail them."""
    result = server.check(replace(spec_of(case), precision=precision))
    assert result.passed, result
    assert result.grad_diff is not None
    assert TOLERANCE < result.grad_diff < result.grad_allowed < {"fp32": 1e-4, "bf16": 0.1}[precision]


@pytest.mark.parametrize(
    ("fault", "case", "told"),
    [
        ("no_recompute", "full", "recompute=full was asked for, none ran"),
        ("other_schedule", "pp=2 gas=2", "pp_schedule=1f1b was asked for, afab ran"),
        ("gathered_parameters", "zero_stage=3", "zero_stage=3 was asked for, 0 ran"),
        ("no_compile", "compile", "compile=True was asked for, False ran"),
        ("any_attention", "gas=1", "attention=flash was asked for, any ran"),
        ("half_the_micro_batches", "gas=4", "gas=4 was asked for, 2 ran"),
    ],
)
def test_ignored_option_is_caught(server: Server, fault: str, case: str, told: str) -> None:
    """Training is correct or nearly so; what ran is not what was asked for."""
    error = server.check(spec_of(case), fault).error
    assert error is not None
    assert error.partition(": ")[2] == f"{FAILURE}: {told}"


def test_what_torch_gets_wrong_without_a_word_is_caught(server: Server) -> None:
    """A split backward pass of sharded parameters: why `grid.refusal` names it."""
    result = server.check(spec_of("dp=2 pp=2 zero_stage=3 gas=4 zbv"))
    assert not result.passed
    assert result.missing_gradients


def test_a_group_that_only_some_ranks_make_is_caught(server: Server) -> None:
    """With gloo it trains all the same; with NCCL the other ranks would be waited for."""
    result = server.check(spec_of("dp=3"), "group_of_two")
    assert result.error == "comparison: AssertionError: ranks make different groups"


def test_dead_rank_fails_the_check(server: Server) -> None:
    """The peers of a rank that left would wait; the check does not."""
    result = server.check(spec_of("dp=2"), "dead_rank")
    assert result.error == "rank 1: SystemExit: rank 1 has had enough"
    assert result.seconds < 10 * slowness()


def test_killed_rank_fails_the_check(server: Server) -> None:
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
