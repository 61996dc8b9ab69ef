"""Writes the report of long campaigns: tests/chaos/README.md with other numbers."""

import os
import platform
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ultrabench
from tests.chaos.fault import EXPLAINS

PAGE = Path(__file__).parents[2] / "tests/chaos/README.md"


def write_report(path: Path, seed: int, campaigns: list[dict[str, Any]]) -> None:
    """Writes a copy of tests/chaos/README.md to `path`, whose tables have the numbers of `campaigns`."""
    faults = [fault for campaign in campaigns for fault in campaign["faults"]]
    problems = [problem for campaign in campaigns for problem in campaign["problems"]]
    rows = {
        "command": f"`make chaos FAULTS={len(faults)} SEED={seed}`: {len(campaigns)} campaigns",
        "commit": _said("git", "rev-parse", "HEAD")[:12],
        "ultrabench, Python, Slurm":
            f"{ultrabench.__version__}, {platform.python_version()}, {_said('slurmd', '-V')}",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "date": time.strftime("%Y-%m-%d", time.localtime(campaigns[0]["began"])),
        "duration": f"{sum(c['duration_s'] for c in campaigns) / 60:.0f} minutes",
        "problems": f"{len(problems)}",
        **{kind: _cells([fault for fault in faults if fault["kind"] == kind]) for kind in EXPLAINS},
    }  # fmt: skip
    text = PAGE.read_text()
    for name, cells in rows.items():
        text, count = re.subn(rf"(?m)^\| {name} \|.*", lambda _: f"| {name} | {cells} |", text)  # noqa: B023
        assert count == 1, f"{PAGE} has no row for {name}"
    listed = ["\n## Problems\n\n", *(f"- {problem}\n" for problem in problems)] if problems else []
    path.write_text("".join([text, *listed]))


def _cells(faults: list[dict[str, Any]]) -> str:
    """How many of these faults hit something, how many found nothing to hit, and the ends they explain."""
    ends = Counter(end for fault in faults for end in fault.get("ends", ()))
    missed = Counter(fault["missed"] for fault in faults if "missed" in fault)
    ends_text = ", ".join(f"{count} {end}" for end, count in sorted(ends.items())) or "-"
    why = ", ".join(f"{count} ({reason})" for reason, count in missed.items()) or "0"
    return f"{len(faults) - missed.total()} | {why} | {ends_text}"


def _said(*words: str) -> str:
    process = subprocess.run(words, capture_output=True, text=True, cwd=PAGE.parent)
    return process.stdout.strip()
