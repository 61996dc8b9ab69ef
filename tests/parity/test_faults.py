"""The check is no rubber stamp: planted faults and dying ranks make it fail."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import Server
from test_layouts import spec_of

from tests.patience import Deadline, slowness

pytestmark = pytest.mark.parity
PLANTED = str(Path(__file__).with_name("planted.py"))


def faulty(name: str) -> Server:
    """A check server with the planted fault `name`."""
    return Server((sys.executable, "-P", PLANTED, name))


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("drop_tp_all_reduce", "tp=2 gas=2"),
        ("drop_tp_all_reduce", "dp=2 tp=2 zero_stage=1"),
        ("wrong_divisor", "dp=2 zero_stage=1 gas=2"),
        ("wrong_divisor", "dp=2 pp=2 zero_stage=3 gas=2"),
        ("untied_sum", "pp=2 gas=2 tied"),
        ("drop_microbatch", "dp=2 gas=4"),
        ("drop_microbatch", "pp=2 gas=4"),
        ("untied_sum", "pp=2 gas=2 zbv tied"),
        ("ring_sees_the_future", "cp=2"),
        ("lost_key_gradients", "cp=2"),
        ("stale_recompute", "full"),
        ("compiled_collective", "tp=2 compile"),
    ],
)
def test_planted_fault_is_caught(fault: str, case: str) -> None:
    """Differences far above rounding."""
    with faulty(fault) as server:
        result = server.check(spec_of(case))
    assert result.error is None
    assert not result.passed
    assert result.grad_diff is not None
    assert result.grad_diff > 1e-6


def test_what_torch_gets_wrong_without_a_word_is_caught(server: Server) -> None:
    """A split backward pass of sharded parameters: why `support.split_backward` refuses it."""
    result = server.check(spec_of("dp=2 pp=2 zero_stage=3 gas=4 zbv"))
    assert not result.passed
    assert result.missing_gradients


def test_dead_rank_fails_the_check() -> None:
    """The peers of a rank that left would wait; the check does not."""
    with faulty("dead_rank") as server:
        result = server.check(spec_of("dp=2"))
    assert result.error == "rank 1: SystemExit: rank 1 has had enough"
    assert result.seconds < 10


def children_of(pid: int) -> list[int]:
    """Living children of `pid`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == pid and after_name[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def test_killed_rank_fails_the_check() -> None:
    """SIGKILL to a rank ends the check in seconds and leaves no process."""
    with faulty("frozen_rank") as server:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(server.check(spec_of("dp=2"))))
        asking.start()
        # The reference ends; the two ranks stay, one asleep, one waiting for it.
        deadline = Deadline(60)
        while True:
            ranks = children_of(server.pid)
            time.sleep(2)
            if len(ranks) == 2 and ranks == children_of(server.pid):
                break
            assert not deadline.over()
        os.kill(max(ranks), signal.SIGKILL)
        asking.join(10 * slowness())
        assert not asking.is_alive()
        assert "killed by SIGKILL" in answers[0].error
        assert children_of(server.pid) == []
