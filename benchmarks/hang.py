"""Measures the time from the moment a rank is frozen to the first measured step of the next run.

A sweep of two layouts runs on this machine; a rank of the first is stopped with SIGSTOP while it
measures. The ratio is to the deadline of a steady step, here its floor (argument: seconds).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweeps import Event, events
from timing import ultrabench

from ultrabench.processes import command_line, descendants, own_processes, tag_of

OVERRIDES = [
    "model=tiny", "hardware.gpus_per_node=2", "sweep.nodes=1", "sweep.tp=2", "sweep.pp=1", "sweep.seq_len=32",
    "sweep.gbs=8", "sweep.mbs=[1,2]", "sweep.gas=[8,4]", "sweep.zero_stage=0", "name=hang",
    "measure.warmup_steps=2", "measure.min_steps=60", "measure.max_steps=60", "retry.attempts.hang=0",
]  # fmt: skip


def measured(sweep: Path) -> list[Event]:
    """The events by which runs began to measure, with the time by the clock of their ranks."""
    return [e for e in events(sweep) if e["event"] == "phase" and e["name"] == "measure"]


def freeze(sweep: Path) -> float:
    """Stops one forked rank of this sweep and of no other sweep; returns the time."""
    ours = {path.name for path in sweep.glob("allocations/*")}
    servers = [
        pid
        for pid in own_processes()
        if "ultrabench.agent.ranks.fork_server" in command_line(pid)
        and (tag_of(pid) or "").split(":")[0] in ours
    ]
    ranks = [pid for server in servers for pid in descendants(server) if pid in servers]
    os.kill(max(ranks), signal.SIGSTOP)
    return time.time()


def main() -> None:
    floor_s = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with tempfile.TemporaryDirectory() as name:
        sweep = Path(name) / "results/hang"
        command = ultrabench("sweep", "launch", *OVERRIDES, f"measure.deadline_floor_s={floor_s}")
        with subprocess.Popen(command, cwd=name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            while not measured(sweep):
                time.sleep(0.05)
            frozen_s = freeze(sweep)
        result = next(e["result"] for e in events(sweep) if e["event"] == "failed")
        first, *later = measured(sweep)  # a run that goes on measuring has several such events
        again_s = next(e["at"] for e in later if e["run_id"] != first["run_id"]) - frozen_s
    print(result["reason"])
    print(f"frozen rank to the next run measuring: {again_s:.1f} s, {again_s / floor_s:.2f} of {floor_s:g} s")


if __name__ == "__main__":
    main()
