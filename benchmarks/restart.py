"""Measures the time from the last step of a run to the end of the first step of the next, on 4 ranks.

The same layouts (dp2 tp2 of a tiny model) are run by a sweep, whose fork server is warm, and each by a cold
`torchrun`, one after another. Both times come from the reports of the ranks.
"""

import subprocess
import tempfile
from pathlib import Path
from statistics import median

import sweeps

OVERRIDES = [
    "model=tiny", "hardware.gpus_per_node=4", "sweep.nodes=1", "sweep.tp=2", "sweep.pp=1",
    "sweep.mbs=[1,2,4]", "sweep.zero_stage=[0,1,3]", "sweep.gas=[1,2,4]", "sweep.seq_len=64",
    "name=restart", "measure.warmup_steps=2", "measure.max_steps=10", "measure.race=null",
]  # fmt: skip


def gaps(ends: list[float], firsts: list[float]) -> list[float]:
    """Seconds from each run's last step to the first step of the next one."""
    return [first - end for end, first in zip(ends, firsts[1:], strict=False)]


def forked(folder: Path) -> tuple[list[float], list[Path]]:
    """Runs a sweep; returns its gaps and the files of its tasks."""
    sweeps.launch(folder, *OVERRIDES)
    sweep = folder / "results/restart"
    events = sweeps.events(sweep)
    times = {(e["run_id"], e["name"]): e["at"] for e in events if e["event"] == "phase" and "at" in e}
    order = [e["run_id"] for e in events if e["event"] == "claimed"]
    tasks = sweeps.write_tasks(sweep, folder)
    return gaps([times[r, "teardown"] for r in order], [times[r, "warmup"] for r in order]), tasks


def cold(folder: Path, tasks: list[Path]) -> list[float]:
    """Runs one torchrun after another; returns the gaps."""
    command, ends, firsts = sweeps.cold_ranks(folder, 4), [], []
    for task in tasks:
        subprocess.run(command, env=sweeps.task_variables(task), check=True)
        times = {line["name"]: line["time"] for line in sweeps.report(task) if line["event"] == "phase"}
        ends.append(times["teardown"])
        firsts.append(times["warmup"])
    return gaps(ends, firsts)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm, tasks = forked(folder)
        cold_ = cold(folder, tasks)
    print(f"fork server  median {median(warm):6.2f} s  of {len(warm)} restarts")
    print(f"torchrun     median {median(cold_):6.2f} s  of {len(cold_)} restarts")
    print(f"ratio        {median(cold_) / median(warm):.1f}")


if __name__ == "__main__":
    main()
