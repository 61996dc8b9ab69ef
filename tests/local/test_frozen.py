"""Agents that are stopped and never move again: their peers and the launcher notice, and the sweep goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.local.conftest import Bench
from ultrabench.processes import command_line, own_processes, tag_of

pytestmark = pytest.mark.local


def agent(bench: Bench, node: int) -> int | None:
    """The agent of this simulated node."""
    for pid in [*own_processes()]:
        words = command_line(pid)
        if "ultrabench.agent" in words and str(bench.folder) in words[-1]:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"SUBMITIT_LOCAL_GLOBALID={node}".encode() in environ:
                return pid
    return None


@pytest.mark.parametrize(
    ("nodes", "frozen", "expected"),
    [
        (1, 0, ("lost", "the agent on local-0")),
        (2, 0, ("lost", "the agent on local-0")),
        (2, 1, ("node_fail", "the agent of node 1 (local-1) is gone")),
    ],
)
def test_a_frozen_agent_ends_its_allocation_and_the_runs_go_on(bench, monkeypatch, nodes, frozen, expected):
    monkeypatch.setenv("STEP_S", "0.2")
    words = bench.overrides(
        "fine", f"sweep.nodes=[{nodes}]", f"sweep.gbs={8 * nodes}", "launcher.heartbeat_s=0.5"
    )
    launcher = bench.start(
        "sweep", "launch", *words, "sweep.mbs=[4]", "sweep.gas=[1,2]", "sweep.zero_stage=[0]"
    )
    bench.wait_for(lambda: len(bench.executions()) >= 1)
    os.kill(agent(bench, frozen), signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert bench.leftovers() == []
    (lost,) = (row for row in bench.rows() if row["status"] != "ok")
    assert (lost["status"], lost["reason"].split(" did not")[0]) == expected


def test_a_job_that_is_suspended_and_resumed_goes_on(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.1")
    words = bench.overrides("fine", "sweep.nodes=[2]", "sweep.gbs=4", "launcher.heartbeat_s=2")
    launcher = bench.start(
        "sweep", "launch", *words, "sweep.mbs=[1]", "sweep.zero_stage=[0]", "sweep.gas=[1]"
    )
    bench.wait_for(lambda: len(bench.executions()) >= 1)
    suspended = [pid for pid in own_processes() if (tag_of(pid) or "").split(":")[0] in bench.allocations()]
    suspended += [agent(bench, 0), agent(bench, 1)]
    for number, wait_s in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
        for pid in suspended:
            os.kill(pid, number)
        if wait_s:
            os.kill(launcher.pid, number)  # a launcher would end agents that do not move
            time.sleep(wait_s * bench.slowness)
    launcher.send_signal(signal.SIGCONT)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert [r["status"] for r in bench.rows()] == ["ok"]
