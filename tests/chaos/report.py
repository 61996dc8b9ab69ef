"""The report of long campaigns as a page of the documentation."""

import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ultrabench
from tests.chaos.fault import EXPLAINS

HEAD = """# Chaos

A seeded campaign on a real Slurm of simulated nodes: sweeps run while faults are injected at random moments, and
a witness file that every execution appends to judges them from outside. After each campaign every planned run has
ended exactly once in `ok` or in a status that a fault explains which was injected into it or its allocation, no
attempt ran twice, every execution is recorded, no process is left, and the nodes are idle.

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

| fault | injected | missed | ends |
|---|---|---|---|
"""


def write_report(path: Path, seed: int, campaigns: list[dict[str, Any]]) -> None:
    """Writes docs/chaos.md's counterpart."""
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
    for kind in EXPLAINS:
        mine = [fault for fault in faults if fault["kind"] == kind]
        ends = Counter(end for fault in mine for end in fault.get("ends", ()))
        missed = Counter(fault["missed"] for fault in mine if "missed" in fault)
        told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items())) or "-"
        why = ", ".join(f"{count} ({reason})" for reason, count in missed.items()) or "0"
        lines.append(f"| {kind} | {len(mine) - missed.total()} | {why} | {told} |\n")
    if problems:
        lines += ["\n## Problems\n\n", *(f"- {problem}\n" for problem in problems)]
    path.write_text("".join(lines))


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()
