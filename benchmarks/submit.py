"""Measures what a sweep of tiny runs costs a Slurm cluster, its file system and the launcher's host.

For comparison a sample of the runs is then submitted one by one with `sbatch --wrap`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cluster import asked, cluster, output, rpcs
from sweeps import Event, events, write_model
from timing import ultrabench

PROGRAM = Path(__file__).parent / "tiny_run.sh"
A_JOB = 80
"""Runs of one model, and so of one job; each is predicted to take 1 to 11 s, so they fit into 20 minutes."""
GBS = 720720
"""A number with many divisors; each is a value of gas, since one rank has no other axes."""
SETTLE_S = 5.0
"""Seconds to wait after the last run for the RPCs of daemons that end jobs."""
CLIENTS = ("sbatch", "squeue", "sacct", "scontrol", "sacctmgr", "sinfo", "scancel")
MODEL = """\
hidden_size: 8
num_hidden_layers: 1
num_attention_heads: 2
num_key_value_heads: 2
intermediate_size: {size}
vocab_size: 16
tie_word_embeddings: false
"""


@dataclass
class Cost:
    """The cost of a number of runs."""

    runs: int
    wall_s: float
    submit_s: float
    """Seconds spent in calls of sbatch, as the submitter sees them."""
    calls: Counter[str]
    """Name of a Slurm command -> how often it was run."""
    rpcs: Counter[str]
    files: int
    """Number of files that the runs left on the shared file system."""


def overrides(folder: Path, runs: int) -> list[str]:
    """Options of a sweep of about `runs` runs on one rank: it writes the models, each of A_JOB layouts."""
    models = [f"m{number}" for number in range(max(1, round(runs / A_JOB)))]
    for number, name in enumerate(models):
        write_model(folder, name, MODEL.format(size=8 + number))
    gas = [n for n in range(1, 1000) if GBS % n == 0][: min(A_JOB, runs)]
    return [
        "launcher=slurm", "launcher.max_nodes=8", "launcher.preflight=false", "hardware=cpu",
        "hardware.gpus_per_node=1", "measure=quick", "name=submit", "kernel=command",
        f"kernel.command=[/bin/sh,{PROGRAM}]", f"sweep.models=[{','.join(models)}]", "sweep.nodes=[1]",
        "sweep.tp=[1]", "sweep.pp=[1]", "sweep.zero_stage=[0]", "sweep.seq_len=1", f"sweep.gbs={GBS}",
        f"sweep.gas=[{','.join(map(str, gas))}]", f"sweep.mbs=[{','.join(str(GBS // g) for g in gas)}]",
    ]  # fmt: skip


def counting(folder: Path) -> Path:
    """A folder of programs with the names of Slurm's, which record that they were called."""
    shims = folder / "bin"
    shims.mkdir()
    for name in CLIENTS:
        shim = shims / name
        shim.write_text(f'#!/bin/sh\necho {name} >> {folder}/calls\nexec {shutil.which(name)} "$@"\n')
        shim.chmod(0o755)
    return shims


def cpu_s(pid: int) -> tuple[float, float]:
    """The CPU seconds of an ended child, and of the children it has waited for."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ticks = [int(t) for t in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]]
    a_second = os.sysconf("SC_CLK_TCK")
    return sum(ticks[:2]) / a_second, sum(ticks[2:]) / a_second


def sweep(folder: Path, runs: int) -> tuple[Cost, dict[str, float]]:
    """Runs a sweep; returns its cost and further numbers that only a launcher has."""
    command = ultrabench("sweep", "launch", *overrides(folder, runs), "--max-gpu-hours", "100000")
    environ = os.environ | {"PATH": f"{counting(folder)}:{os.environ['PATH']}"}
    before, began = rpcs(), time.monotonic()
    with (folder / "launch.log").open("w") as log:
        launcher = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
        own_s, children_s = cpu_s(launcher.pid)
    wall_s = time.monotonic() - began
    if launcher.wait():
        sys.exit((folder / "launch.log").read_text())
    time.sleep(SETTLE_S)
    new_rpcs = rpcs() - before
    results = folder / "results/submit"
    journal_events = events(results)
    cost = Cost(
        runs=len({e["run_id"] for e in journal_events if e["event"] == "result"}),
        wall_s=wall_s,
        submit_s=submitting_s(journal_events),
        calls=Counter((folder / "calls").read_text().split()),
        rpcs=new_rpcs,
        files=sum(path.is_file() for path in results.rglob("*")),
    )
    run_event_times = [e["time"] for e in journal_events if e["event"] in ("claimed", "result")]
    return cost, {
        "own_s": own_s,
        "children_s": children_s,
        "journal_bytes": sum(path.stat().st_size for path in results.glob("journal/*.jsonl")),
        "jobs": sum(e["event"] == "submitted" for e in journal_events),
        "running_s": run_event_times[-1] - run_event_times[0],
    }


def submitting_s(journal_events: list[Event]) -> float:
    """Seconds from `submitting` to `submitted`, counted once for each array."""
    spans: dict[str, list[float]] = {}
    token = {e["allocation"]: e["token"] for e in journal_events if e["event"] == "submitting"}
    for event in journal_events:
        if event["event"] in ("submitting", "submitted"):
            spans.setdefault(token[event["allocation"]], []).append(float(event["time"]))
    return sum(max(times) - min(times) for times in spans.values())


def one_by_one(folder: Path, runs: int) -> Cost:
    """The cost of one job for each run; no job is watched, since its output is its result."""
    wrapped = f"ULTRABENCH_REPORT=/dev/stdout /bin/sh {PROGRAM}"
    options = ["--exclusive", "--nodes=1", "--time=5", f"--output={folder}/%j.out", "--job-name=one"]
    before, began, submit_s = rpcs(), time.monotonic(), 0.0
    for _ in range(runs):
        start = time.monotonic()
        output("sbatch", *options, "--wrap", wrapped)
        submit_s += time.monotonic() - start
    while sum("done" in path.read_text() for path in folder.glob("*.out")) < runs:
        time.sleep(0.2)
    wall_s = time.monotonic() - began
    time.sleep(SETTLE_S)
    files = len(list(folder.glob("*.out")))
    return Cost(runs, wall_s, submit_s, Counter(sbatch=runs), rpcs() - before, files)


def table(swept: Cost, single: Cost) -> None:
    """Prints the cost per run of both ways, and the ratio."""
    print(f"\n{'per run':34}{'sweep':>10}{'one by one':>12}{'ratio':>9}")
    rows = {
        "calls of sbatch": lambda c: c.calls["sbatch"],
        "all calls of Slurm's commands": lambda c: c.calls.total(),
        "time in sbatch (ms)": lambda c: 1000 * c.submit_s,
        "RPCs of slurmctld": lambda c: c.rpcs.total(),
        "  of them sent by commands": lambda c: asked(c.rpcs),
        "files on the shared file system": lambda c: c.files,
        "wall-clock time (ms)": lambda c: 1000 * c.wall_s,
    }
    for name, value in rows.items():
        ours, theirs = value(swept) / swept.runs, value(single) / single.runs
        print(f"{name:34}{ours:10.3f}{theirs:12.3f}{theirs / ours:8.1f}x")
    print("\nRPCs by type:")
    for name in sorted(swept.rpcs | single.rpcs, key=lambda n: -single.rpcs[n] / single.runs):
        a_run = (swept.rpcs[name] / swept.runs, single.rpcs[name] / single.runs)
        print(f"  {name:40}{a_run[0]:10.4f}{a_run[1]:12.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=4000, help="of the sweep, about (%(default)s)")
    parser.add_argument("--sample", type=int, default=100, help="submitted one by one (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, cluster():
        folder, single = Path(name) / "sweep", Path(name) / "single"
        folder.mkdir()
        single.mkdir()
        swept, extra = sweep(folder, args.runs)
        sampled = one_by_one(single, args.sample)
    print(
        f"{swept.runs} runs ok in {swept.wall_s:.1f} s, {60 * swept.runs / swept.wall_s:.0f} a minute; "
        f"{extra['jobs']:.0f} jobs of {swept.runs / extra['jobs']:.0f} runs; from the first claim to the last "
        f"result {extra['running_s']:.1f} s"
    )
    print(
        f"launcher: {extra['own_s']:.1f} s of CPU time and {extra['children_s']:.1f} s of its children; "
        f"{swept.submit_s:.1f} s in {swept.calls['sbatch']} submissions ({swept.runs / swept.calls['sbatch']:.0f} "
        f"runs each)"
    )
    print("calls: " + ", ".join(f"{name} {swept.calls[name]}" for name in CLIENTS))
    print(f"{extra['journal_bytes'] / swept.runs:.0f} bytes of journal a run, {swept.files} files")
    table(swept, sampled)


if __name__ == "__main__":
    main()
