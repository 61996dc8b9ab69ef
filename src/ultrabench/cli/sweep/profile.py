"""What `sweep show` prints of a run that looked inside itself."""

import contextlib
import json
from pathlib import Path
from typing import Any

from ultrabench.cli.tables import out, table
from ultrabench.rank_report import PROFILE

GIB = 1 << 30
PARTS = ("compute", "communication", "exposed_communication", "idle")


def profiles(logs: Path) -> list[dict[str, Any]]:
    """The summaries that the ranks of an attempt left, by rank; none without profile=true."""
    found = []
    for path in logs.glob(f"{PROFILE}/rank*/summary.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append({**json.loads(path.read_text()), "folder": str(path.parent)})
    return sorted(found, key=lambda summary: int(summary["rank"]))


def print_profile(seen: dict[str, Any]) -> None:
    """One rank's mean step, its memory at the peak, and its longest kernels."""
    console, step_s = out(), seen["step_time_s"]
    console.print(f"\ninside rank {seen['rank']}, {seen['steps']} steps of {step_s:.4g} s", style="bold")
    for part in PARTS:
        seconds = seen[f"{part}_s"]
        console.print(f"  {part.replace('_', ' ')}: {seconds:.4g} s ({_share(seconds, step_s)})")
    kinds = ", ".join(f"{kind} {size / GIB:.4g}" for kind, size in seen["memory_bytes"].items())
    console.print(f"  memory in GiB: {kinds}", soft_wrap=True)
    numbers = ("calls a step", "s a step", "of the step")
    made = table("", "kernel" if seen["device"] == "cuda" else "operator", *numbers, right=numbers)
    for kernel in seen["top"]:
        seconds = kernel["seconds"]
        made.add_row(kernel["name"][:60], f"{kernel['calls']:g}", f"{seconds:.4g}", _share(seconds, step_s))
    console.print(made)
    console.print(f"files: {seen['folder']}", soft_wrap=True)


def _share(seconds: float, of: float) -> str:
    return f"{seconds / of:.1%}" if of else ""
