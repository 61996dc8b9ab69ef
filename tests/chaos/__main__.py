"""Long campaigns: `python -m tests.chaos --faults 200 --seed 7`; the same command continues a stopped one.

`--kinds port_scan,other_user` draws only these kinds; `failures`, `interference`,
`misleading`, `refusals`, `bad_nodes` and `ownership` name groups of kinds. With `--embedded` all campaigns run the
embedded kernel, every second sweep by parts of steps.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.campaign import Campaign
from tests.chaos.fault import (
    BAD_NODES,
    EXPLAINS,
    FAILURES,
    INTERFERENCE,
    MISLEADING,
    OF_A_PROGRAM,
    OWNERSHIP,
    REFUSALS,
    draw,
)
from tests.chaos.report import write_report
from tests.slurm.conftest import SETTINGS, Cluster
from tests.slurm.sweeps import SlurmBench

PART = 25
"""Number of faults in one campaign; every fourth campaign runs the embedded kernel, and parts in every second sweep."""
GROUPS = {"failures": FAILURES, "interference": INTERFERENCE, "misleading": MISLEADING, "refusals": REFUSALS,
          "bad_nodes": BAD_NODES, "ownership": OWNERSHIP}  # fmt: skip
ALL = ",".join(GROUPS)


def say(note: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {note}", flush=True)


def kinds_of(names: str) -> tuple[str, ...]:
    """The kinds of faults that a list of names stands for."""
    kinds = tuple(kind for name in names.split(",") for kind in GROUPS.get(name, (name,)))
    if unknown := sorted(set(kinds) - set(EXPLAINS)):
        raise SystemExit(f"--kinds {', '.join(unknown)}: they are {', '.join((*GROUPS, *EXPLAINS))}")
    return kinds


def part(
    folder: Path, cluster: Cluster, seed: str, count: int, kinds: Sequence[str], embedded: bool
) -> dict[str, Any]:
    """Runs one campaign in its own folder, which is kept if there are problems; returns facts for the report."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.time()
    campaign = Campaign(SlurmBench(folder), cluster, say)
    try:
        campaign.run(draw(seed, count, kinds), embedded)
    finally:
        if campaign.problems:  # the file system with the results is removed
            rescued = folder.with_name(f"problems.{seed}")
            for source, target in ((folder, rescued), (cluster.folder / "log", rescued / "cluster_log")):
                subprocess.run(["cp", "-a", str(source), str(target)], check=False)
        campaign.close()
    facts = {"seed": seed, "kernel": "embedded" if embedded else "command", "began": began}
    took = {"duration_s": time.time() - began}
    return {**facts, **took, "faults": campaign.records, "problems": campaign.problems}


def main() -> int:
    """Runs the campaigns; returns 0 if none of them found a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="default: one for each seed and kinds in /tmp")
    parser.add_argument("--kinds", default=ALL, help="names with commas between them; default: all")
    parser.add_argument("--embedded", action="store_true", help="run the embedded kernel in all campaigns")
    args = parser.parse_args()
    kinds = kinds_of(args.kinds)
    fit = [k for k in kinds if k not in OF_A_PROGRAM and k not in ("node_silent", "stop_leader")]
    # Signals clean up like any other end. A shell makes programs in the background ignore Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    suffix = f"-{zlib.crc32(args.kinds.encode()):08x}" if args.kinds != ALL else ""
    suffix += "-embedded" * args.embedded
    folder = (args.folder or Path(f"/tmp/ultrabench-chaos-{args.seed}{suffix}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    done_file = folder / "campaigns.jsonl"
    done_file.touch()
    cluster = Cluster(folder / "cluster")
    os.environ["SLURM_CONF"] = str(cluster.folder / "slurm.conf")
    try:
        for number in range(len(done_file.read_text().splitlines()), -(-args.faults // PART)):
            cluster.tool("up", *SETTINGS)
            count = min(PART, args.faults - number * PART)
            say(f"campaign {number + 1}: {count} faults")
            embedded = (args.embedded or number % 4 == 3) and bool(fit)
            seed, drawn = f"{args.seed}.{number}", fit if embedded else kinds
            facts = part(folder / "work", cluster, seed, count, drawn, embedded)
            with done_file.open("a") as file:
                file.write(json.dumps(facts) + "\n")
    finally:
        cluster.tool("down")
    campaigns = [json.loads(line) for line in done_file.read_text().splitlines()]
    write_report(folder / "chaos.md", args.seed, campaigns)
    say(f"report: {folder}/chaos.md")
    return int(any(campaign["problems"] for campaign in campaigns))


if __name__ == "__main__":
    sys.exit(main())
