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

A seeded campaign on a real Slurm of simulated nodes: sweeps run while faults are injected at random moments, and
a witness file in which every execution notes its start, its steps and its end judges them from outside. After each
campaign every planned run has ended exactly once in `ok` or in a status that a fault explains which was injected into
it or its allocation; no repeat is ok twice and no attempt ran twice; nothing that shares a run, an allocation or a
node ran at the same time; every execution is recorded and every ok run came to its end; the number of jobs has a
bound that follows from the plan and the faults; no process is left, and the nodes are idle.

`make chaos FAULTS={faults} SEED={seed}` ({number} campaigns of up to 25 faults; the same seed draws the same faults).

| | |
|---|---|
| commit | {commit} |
| ultrabench, Python, Slurm | {versions} |
| hardware | {hardware} |
| date | {date} |
| duration | {minutes:.0f} minutes |
| problems | {problems} |

`injected` counts the faults that hit something, `missed` those that found nothing to hit. `ends` are the ends of
attempts that the faults explain; all other attempts ended ok.
"""
TABLE = """
## {title}

{about}

| fault | injected | missed | ends |
|---|---|---|---|
"""
SECTIONS = {
    "Failures": (FAILURES, "Something dies, stands still or is full. These kinds are in all reports so far."),
    "Interference": (
        INTERFERENCE,
        "Somebody else looks on or launches, Slurm or a clock or a file lies, a program does what none should. "
        "These kinds are newer.",
    ),
}
NOT_TRIED = """
## Not tried

- **Real NFS.** The results lie on a tmpfs of one host: no attribute cache, no stale handle, no second server.
- **Quotas.** A full file system stands for them; one that refuses a user or a number of files was not made.
- **GPUs.** The nodes have none: no Xid, no device memory that stays held, no NCCL.
- **Several hosts.** All nodes share one kernel, one clock and one loopback interface; the wrong clock is that of a
  launcher only.
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
