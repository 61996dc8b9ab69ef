"""Agents that do not move, or that a launcher cannot see: it ends the frozen ones only, and the sweep goes on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import patience
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
    launcher = bench.start(*bench.launch("fine", "launcher.heartbeat_s=0.5", nodes=[1, 2], gbs=16, mbs=4))
    unfrozen = {("n1-", 0), ("n2-", 0), ("n2-", 1)}
    while unfrozen:
        begun = len(bench.executions())
        bench.wait_for(lambda begun=begun: len(bench.executions()) > begun)
        size = "n1-" if agent(bench, 0, "n1-") else "n2-"
        frozen = next((node for node in sorted(unfrozen) if node[0] == size), None)
        if frozen and (pid := agent(bench, frozen[1], size)):
            unfrozen.remove(frozen)
            os.kill(pid, signal.SIGSTOP)
    bench.end(launcher)
    assert bench.leftovers() == []
    rows = bench.rows()
    lost = [
        (r["nodes"], r["status"], r["reason"].split(" was frozen")[0]) for r in rows if r["status"] != "ok"
    ]
    assert sorted(lost) == [
        (1, "lost", "the agent on local-0"),
        (2, "lost", "the agent on local-0"),
        (2, "node_fail", "the agent of node 1 (local-1) is gone"),
    ]
    assert sorted(r["nodes"] for r in rows if r["status"] == "ok") == [1, 2]


def test_a_job_that_is_suspended_and_resumed_goes_on(bench, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.1")
    limit = "measure.run_limit_s=5"
    launcher = bench.start(*bench.launch("fine", "launcher.heartbeat_s=2", limit, nodes=2, gbs=4, mbs=1))
    bench.wait_for(bench.executions)
    suspended = [pid for pid in own_processes() if (tag_of(pid) or "").split(":")[0] in bench.allocations()]
    suspended += [agent(bench, 0), agent(bench, 1)]
    suspended += [launcher.pid]  # which would end agents that do not move
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in suspended:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(7.0 * bench.slowness)  # longer than the limit, which is scaled alike
    bench.end(launcher)
    assert [r["status"] for r in bench.rows()] == ["ok"]


def test_a_launcher_on_another_host_waits_for_what_it_cannot_see(bench, monkeypatch):
    """Two hosts that share a results folder, each with its own processes: here, two UTS namespaces."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("no UTS namespace can be made here: another host needs root")
    monkeypatch.setenv("STEP_S", "0.8")
    words = bench.launch("fine", gbs=2, mbs=1)
    launcher = bench.start(*words)
    bench.wait_for(bench.executions)
    other = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *bench.command(*words)]
    process = patience.run(other, cwd=bench.folder)
    output = bench.end(launcher)
    assert process.returncode == 0, process.stderr
    assert "this launcher can neither end nor replace it" in process.stderr
    assert "disappeared" not in process.stderr + output
    (row,) = bench.rows()
    assert (row["status"], len(bench.executions())) == ("ok", 1)
