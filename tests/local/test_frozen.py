"""Agents that are stopped and never move again: their peers and the launcher notice, and the sweep goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.target import environment
from ultrabench.processes import command_line, own_processes, tag_of

pytestmark = pytest.mark.local


def agent(bench, node, prefix=""):
    """The agent of this simulated node, in an allocation whose name begins like this."""
    for pid in bench.agents():
        allocation = Path(["", *command_line(pid)][-1]).name
        if allocation.startswith(prefix) and environment(pid).get("SUBMITIT_LOCAL_GLOBALID") == f"{node}":
            return pid
    return None


def test_frozen_agents_end_their_allocations_and_the_runs_go_on(bench, monkeypatch):
    """The only agent of one node, the leading one of two, and the following one."""
    monkeypatch.setenv("STEP_S", "0.2")
    words = bench.overrides("fine", "sweep.nodes=[1,2]", "sweep.gbs=16", "launcher.heartbeat_s=0.5")
    words += ["sweep.mbs=[4]", "sweep.gas=[1,2]", "sweep.zero_stage=[0]"]
    launcher = bench.start("sweep", "launch", *words)
    left = {("n1-", 0), ("n2-", 0), ("n2-", 1)}
    while left:
        begun = len(bench.executions())
        bench.wait_for(lambda begun=begun: len(bench.executions()) > begun)
        size = "n1-" if agent(bench, 0, "n1-") else "n2-"
        frozen = next((one for one in sorted(left) if one[0] == size), None)
        if frozen and (found := agent(bench, frozen[1], size)):
            left.remove(frozen)
            os.kill(found, signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert bench.leftovers() == []
    rows = bench.rows()
    lost = [(r["nodes"], r["status"], r["reason"].split(" did not")[0]) for r in rows if r["status"] != "ok"]
    assert sorted(lost) == [
        (1, "lost", "the agent on local-0"),
        (2, "lost", "the agent on local-0"),
        (2, "node_fail", "the agent of node 1 (local-1) is gone"),
    ]
    assert sorted(r["nodes"] for r in rows if r["status"] == "ok") == [1, 2]


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
