"""Agents that freeze on a real Slurm: the job ends, others go on, and the runs are tried again."""

import os
import signal
from pathlib import Path

import pytest

from tests.slurm.sweeps import FEW, SlurmBench
from ultrabench.processes import command_line, descendants, own_processes

pytestmark = pytest.mark.slurm


def leading_agent(bench: SlurmBench) -> int | None:
    """Of some allocation that has ranks now."""
    for pid in [*own_processes()]:
        words = command_line(pid)
        if "ultrabench.agent" in words and str(bench.folder) in words[-1]:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [p for p in descendants(pid) if str(bench.witness) in command_line(p)]
            if b"SLURM_NODEID=0" in environ and ranks:
                return pid
    return None


def test_a_frozen_leading_agent_costs_at_most_one_run(sweeps):
    os.environ["STEP_S"] = "0.2"
    launcher = sweeps.start(*sweeps.launch("fine", *FEW, "launcher.heartbeat_s=1"))
    sweeps.wait_for(lambda: leading_agent(sweeps))
    os.kill(leading_agent(sweeps) or 0, signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=250)
    assert launcher.returncode == 0, output
    rows = sweeps.judge(runs=10, allowed=frozenset({"lost", "cancelled", "node_fail"}))
    # One that had just told the end of its allocation costs nothing; its job is ended all the same.
    assert sum(row["status"] != "ok" for row in rows) <= 1
