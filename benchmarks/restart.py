"""Measures the time from the last step of a run to the end of the first step of the next, on 4 ranks.

The same layouts (dp2 tp2 of a tiny model) are run by a sweep, whose fork server is warm, and each by a cold
`torchrun`, one after another. Both times come from the reports of the ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

WRAPPER = """
import os, sys
os.environ["ULTRABENCH_REPORT"] += os.environ["RANK"]
from ultrabench.kernel.worker import main
sys.exit(main())
"""
OVERRIDES = [
    "model=tiny", "hardware.gpus_per_node=4", "sweep.nodes=1", "sweep.tp=2", "sweep.pp=1",
    "sweep.mbs=[1,2,4]", "sweep.zero_stage=[0,1,3]", "sweep.gas=[1,2,4]", "sweep.seq_len=64",
    "name=restart", "measure.warmup_steps=2", "measure.max_steps=10", "measure.race=null",
]  # fmt: skip


def gaps(ends: list[float], firsts: list[float]) -> list[float]:
    """Seconds from each run's last step to the first step of the next one."""
    return [first - end for end, first in zip(ends, firsts[1:], strict=False)]


def forked(folder: Path) -> tuple[list[float], list[Path]]:
    """Runs a sweep; returns its gaps and the specs of its runs."""
    command = [sys.executable, "-m", "ultrabench.cli.main", "sweep", "launch", *OVERRIDES]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    sweep = folder / "results/restart"
    (journal,) = sweep.glob("journal/agent-*.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    at = {(e["run_id"], e["name"]): e["at"] for e in events if e["event"] == "phase"}
    order = [e["run_id"] for e in events if e["event"] == "claimed"]
    (allocation,) = sweep.glob("allocations/*/allocation.json")
    specs = []
    for task in json.loads(allocation.read_text())["tasks"]:
        path = folder / f"{task['run_id']}.json"
        path.write_text(json.dumps(task))
        specs.append(path)
    return gaps([at[r, "teardown"] for r in order], [at[r, "warmup"] for r in order]), specs


def cold(folder: Path, specs: list[Path]) -> list[float]:
    """Runs one torchrun after another; returns the gaps."""
    wrapper = folder / "wrapper.py"
    wrapper.write_text(WRAPPER)
    ends, firsts = [], []
    for spec in specs:
        report = folder / f"{spec.stem}.report"
        env = {
            **os.environ,
            "ULTRABENCH_SPEC": str(spec),
            "ULTRABENCH_REPORT": str(report),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        subprocess.run([*command, str(wrapper)], env=env, check=True)
        lines = [json.loads(line) for line in Path(f"{report}0").read_text().splitlines()]
        at = {line["name"]: line["time"] for line in lines if line["event"] == "phase"}
        ends.append(at["teardown"])
        firsts.append(at["warmup"])
    return gaps(ends, firsts)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm, specs = forked(folder)
        cold_ = cold(folder, specs)
    print(f"fork server  median {median(warm):6.2f} s  of {len(warm)} restarts")
    print(f"torchrun     median {median(cold_):6.2f} s  of {len(cold_)} restarts")
    print(f"ratio        {median(cold_) / median(warm):.1f}")


if __name__ == "__main__":
    main()
