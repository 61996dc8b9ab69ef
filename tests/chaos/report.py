"""Writes the report of long campaigns as a page of the documentation."""

import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ultrabench
from tests.chaos.fault import FAILURES, INTERFERENCE

HEAD = """# Chaos

A campaign runs sweeps on a real Slurm with simulated nodes, and injects faults at random moments that a seed
decides. Every execution of the program writes its start, its steps and its end into a witness file, by which
the campaign is judged from outside. After each campaign all of this must hold:

- Every planned run has ended exactly once, in `ok` or in a status that is explained by a fault injected into
  the run or its allocation.
- No repeat is ok twice, and no attempt ran twice.
- No two executions of one run, of one allocation or on one node ran at the same time.
- Every execution is recorded, and every ok run came to its end.
- The number of jobs is within a bound that follows from the plan and the faults.
- No process is left, and the nodes are idle.

`make chaos FAULTS={faults} SEED={seed}` runs {number} campaigns of up to 25 faults; the same seed draws the same faults.
`make chaos FAULTS=20 KINDS=port_scan,other_user` injects only some kinds.

| | |
|---|---|
| commit | {commit} |
| ultrabench, Python, Slurm | {versions} |
| hardware | {hardware} |
| date | {date} |
| duration | {minutes:.0f} minutes |
| problems | {problems} |

In the tables `injected` counts the faults that hit something, and `missed` those that found nothing to hit.
`ends` are the ends of attempts that the faults explain; all other attempts ended ok.
"""
TABLE = """
## {title}

{about}

| fault | injected | missed | ends |
|---|---|---|---|
"""
SECTIONS = {
    "Failures": (
        FAILURES,
        "Something dies, stands still or is full. All reports so far contain these kinds.",
    ),
    "Interference": (
        INTERFERENCE,
        "Somebody else looks on or launches; Slurm, a clock or a file is wrong; or a program does what no program\n"
        "should. These kinds are newer.",
    ),
}
NOT_TRIED = """
## Not tried

- **Real NFS.** The results are on a tmpfs of one host, so there is no attribute cache, no stale handle and no
  second server.
- **Quotas.** A full file system stands for them; no quota on a user or on the number of files was tried.
- **GPUs.** The nodes have none, so there is no Xid, no device memory that stays held, and no NCCL.
- **Several hosts.** All nodes share one Linux kernel, one clock and one loopback interface; only the clock of
  a launcher was set wrong.
"""


def write_report(path: Path, seed: int, campaigns: list[dict[str, Any]]) -> None:
    """Writes the report of `campaigns`, in the form of docs/chaos.md, to `path`."""
    faults = [fault for campaign in campaigns for fault in campaign["faults"]]
    problems = [problem for campaign in campaigns for problem in campaign["problems"]]
    lines = [
        HEAD.format(
            faults=len(faults), seed=seed, number=len(campaigns), commit=_said("git", "rev-parse", "HEAD")[:12],
            versions=f"{ultrabench.__version__}, {platform.python_version()}, {_said('slurmd', '-V')}",
            hardware=f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
            date=time.strftime("%Y-%m-%d", time.localtime(campaigns[0]["began"])),
            minutes=sum(c["duration_s"] for c in campaigns) / 60, problems=len(problems),
        )
    ]  # fmt: skip
    for title, (kinds, about) in SECTIONS.items():
        lines.append(TABLE.format(title=title, about=about))
        lines += [_row(kind, [fault for fault in faults if fault["kind"] == kind]) for kind in kinds]
    if problems:
        lines += ["\n## Problems\n\n", *(f"- {problem}\n" for problem in problems)]
    path.write_text("".join([*lines, NOT_TRIED]))


def _row(kind: str, faults: list[dict[str, Any]]) -> str:
    ends = Counter(end for fault in faults for end in fault.get("ends", ()))
    missed = Counter(fault["missed"] for fault in faults if "missed" in fault)
    told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items())) or "-"
    why = ", ".join(f"{count} ({reason})" for reason, count in missed.items()) or "0"
    return f"| {kind} | {len(faults) - missed.total()} | {why} | {told} |\n"


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()
