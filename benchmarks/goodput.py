"""Measures the share of allocated node time that is inside measured steps: packed, a job per run, and cold.

A real sweep of the embedded kernel runs three times on the two ranks of one node: as `sweep launch` packs it,
with `launcher.pack=1`, and with a job for each run that starts a cold `torchrun`. One job runs at a time, so
that all three have the same cores.
"""

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import sweeps
from cluster import cluster, output

from ultrabench.launchers.slurm.job import duration_s

ONE_JOB = (
    "launcher=slurm", "launcher.max_jobs=1", "launcher.max_nodes=1", "launcher.poll_s=1", "measure.race=null",
)  # fmt: skip
"""Preflight and control are as usual; no run stops early, since runs started by a cold torchrun do not, either."""
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")


@dataclass
class Way:
    """One way to run the sweep."""

    name: str
    runs: int
    jobs: int
    node_s: float
    """Node seconds that its jobs held, as Slurm reports them."""
    steps_s: float
    """Seconds inside measured steps."""

    @property
    def goodput(self) -> float:
        """The share of node time that is inside measured steps."""
        return self.steps_s / self.node_s

    @property
    def overhead_s(self) -> float:
        """Node seconds per run outside of measured steps."""
        return (self.node_s - self.steps_s) / self.runs


def held(job_names: Sequence[str]) -> list[float]:
    """Waits until all jobs with these names are over; returns the node seconds of each."""
    names = f"--name={','.join(job_names)}"
    listed = ("squeue", "-h", "-r", "-t", "all", names, "-o")
    while {*ACTIVE} & {*output(*listed, "%T").split()}:
        time.sleep(0.5)
    time.sleep(3)  # the accounting gets the end a little later
    try:
        text = output("sacct", "-X", "-n", "-P", names, "--format=State,ElapsedRaw,NNodes")
        rows = [line.split("|") for line in text.splitlines()]
        if rows and not any(state in ACTIVE for state, _, _ in rows):
            return [float(seconds) * int(nodes) for _, seconds, nodes in rows]
    except subprocess.CalledProcessError:
        pass
    text = output(*listed, "%M %D")
    rows = [line.split() for line in text.splitlines()]
    return [(duration_s(clock) or 0.0) * int(nodes) for clock, nodes in rows]


def launch(folder: Path, name: str, *overrides: str) -> tuple[Way, list[sweeps.Event]]:
    """Runs a sweep; returns its times and the events of its journal."""
    sweeps.launch(folder, *sweeps.LAYOUTS, *ONE_JOB, *overrides, f"name={name}", "--max-gpu-hours", "1000")
    events = sweeps.events(folder / "results" / name)
    results = [e["result"] for e in events if e["event"] == "result"]
    jobs = {re.sub(r"\.\d+$", "", e["allocation"]) for e in events if e["event"] == "submitted"}
    node_s = held([f"ub-{name}-{job}" for job in sorted(jobs)])
    steps_s = sum(sum(result["step_times_s"]) for result in results)
    return Way(name, len(results), len(node_s), sum(node_s), steps_s), events


def cold(folder: Path, tasks: Sequence[Path]) -> Way:
    """Runs one job for each run, one after another; returns the times."""
    job, command = f"cold-{os.getpid()}", f"srun {shlex.join(sweeps.cold_ranks(folder, 2))}"
    options = [f"--job-name={job}", "--dependency=singleton", "--exclusive", "--nodes=1", "--time=10"]
    for task in tasks:
        log = f"--output={task}.log"
        output("sbatch", *options, log, "--wrap", command, env=sweeps.task_variables(task))
    node_s, steps_s = held([job]), 0.0
    for task in tasks:
        lines = sweeps.report(task)
        assert any(line["event"] == "done" for line in lines), Path(f"{task}.log").read_text()
        steps_s += sum(line["seconds"] for line in lines if line["event"] == "step" and line["measured"])
    return Way("cold torchrun", len(tasks), len(node_s), sum(node_s), steps_s)


def account(events: list[sweeps.Event], node_s: float) -> str:
    """A text that says how the packed job spent its time, by the journal."""
    time_by_event = {
        e["event"]: e["time"] for e in events if e["event"].startswith(("allocation_", "preflight"))
    }
    ends = {e["run_id"]: e["time"] for e in events if e["event"] == "result"}
    claims = {e["run_id"]: e["time"] for e in events if e["event"] == "claimed" and e["run_id"] in ends}
    phases: dict[str, list[float]] = {}
    for run_id in claims:
        run_phases = (e for e in events if e["event"] == "phase" and e["run_id"] == run_id)
        phase_starts = [("fork", claims[run_id]), *((e["name"], e.get("at", e["time"])) for e in run_phases)]
        for (name, start), (_, end) in pairwise([*phase_starts, ("", ends[run_id])]):
            phases.setdefault(name, []).append(end - start)
    first, last = min(claims.values()), max(ends.values())
    outside = node_s - (time_by_event["allocation_ended"] - time_by_event["allocation_started"])
    lines = [
        f"job without its agents' journal {outside:.1f} s (start of the job and of Python, clean-up)",
        f"before the first run {first - time_by_event['allocation_started']:.1f} s (import of torch, preflight)",
        f"after the last run {time_by_event['allocation_ended'] - last:.1f} s",
        "a run, median: " + ", ".join(f"{name} {median(spans):.2f} s" for name, spans in phases.items()),
        f"between runs {(last - first - sum(ends[r] - claims[r] for r in claims)) / len(claims):.3f} s",
    ]
    return "\n  ".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, cluster():
        folder = Path(name)
        sweeps.write_model(folder)
        packed, events = launch(folder, "packed")
        alone, _ = launch(folder, "alone", "launcher.pack=1")
        torchrun = cold(folder, sweeps.write_tasks(folder / "results/packed", folder))
    print(
        f"{'':14}{'runs':>6}{'jobs':>6}{'node s':>9}{'in steps s':>12}{'goodput':>9}{'x cold':>8}{'rest s/run':>12}"
    )
    for way in (packed, alone, torchrun):
        print(
            f"{way.name:14}{way.runs:6}{way.jobs:6}{way.node_s:9.0f}{way.steps_s:12.2f}{way.goodput:9.3f}"
            f"{way.goodput / torchrun.goodput:8.1f}{way.overhead_s:12.2f}"
        )
    if packed.jobs == 1:
        print(f"packed:\n  {account(events, packed.node_s)}")
    print(
        f"packed / pack=1 {packed.goodput / alone.goodput:.1f}; packed / cold {packed.goodput / torchrun.goodput:.1f}"
    )


if __name__ == "__main__":
    main()
