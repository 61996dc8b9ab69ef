"""Long campaigns: `python -m tests.chaos --faults 200 --seed 7`; the same command continues a stopped one.

`--kinds port_scan,other_user` draws only these kinds; `failures`, `interference` and
`misleading` name groups of kinds.
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
from tests.chaos.fault import EXPLAINS, FAILURES, INTERFERENCE, MISLEADING, OF_A_PROGRAM, draw
from tests.chaos.report import write_report
from tests.slurm.conftest import SETTINGS, Cluster
from tests.slurm.sweeps import SlurmBench

PART = 25
"""Number of faults in one campaign; every fourth campaign runs the embedded kernel."""
GROUPS = {"failures": FAILURES, "interference": INTERFERENCE, "misleading": MISLEADING}
ALL = ",".join(GROUPS)


def say(note: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {note}", flush=True)


def kinds_of(words: str) -> tuple[str, ...]:
    """The kinds of faults that a list of names stands for."""
    kinds = tuple(kind for word in words.split(",") for kind in GROUPS.get(word, (word,)))
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
            kept = folder.with_name(f"problems.{seed}")
            for some, to in ((folder, kept), (cluster.folder / "log", kept / "cluster_log")):
                subprocess.run(["cp", "-a", str(some), str(to)], check=False)
        campaign.close()
    facts = {"seed": seed, "kernel": "embedded" if embedded else "command", "began": began}
    took = {"duration_s": time.time() - began}
    return {**facts, **took, "faults": campaign.records, "problems": campaign.problems}


def main() -> int:
    """Runs the campaigns; returns 0 if none of them found a problem."""
    given = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given.add_argument("--faults", type=int, default=200)
    given.add_argument("--seed", type=int, default=7)
    given.add_argument("--folder", type=Path, help="default: one for each seed and kinds in /tmp")
    given.add_argument("--kinds", default=ALL, help="names with commas between them; default: all")
    words = given.parse_args()
    kinds = kinds_of(words.kinds)
    fit = [k for k in kinds if k not in OF_A_PROGRAM and k not in ("node_silent", "stop_leader")]
    # Signals clean up like any other end. A shell makes programs in the background ignore Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    some = f"-{zlib.crc32(words.kinds.encode()):08x}" if words.kinds != ALL else ""
    folder = (words.folder or Path(f"/tmp/ultrabench-chaos-{words.seed}{some}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    done_file = folder / "campaigns.jsonl"
    done_file.touch()
    cluster = Cluster(folder / "cluster")
    os.environ["SLURM_CONF"] = str(cluster.folder / "slurm.conf")
    try:
        for number in range(len(done_file.read_text().splitlines()), -(-words.faults // PART)):
            cluster.tool("up", *SETTINGS)
            count = min(PART, words.faults - number * PART)
            say(f"campaign {number + 1}: {count} faults")
            embedded = number % 4 == 3 and bool(fit)
            seed, drawn = f"{words.seed}.{number}", fit if embedded else kinds
            told = part(folder / "work", cluster, seed, count, drawn, embedded)
            with done_file.open("a") as file:
                file.write(json.dumps(told) + "\n")
    finally:
        cluster.tool("down")
    campaigns = [json.loads(line) for line in done_file.read_text().splitlines()]
    write_report(folder / "chaos.md", words.seed, campaigns)
    say(f"report: {folder}/chaos.md")
    return int(any(campaign["problems"] for campaign in campaigns))


if __name__ == "__main__":
    sys.exit(main())
