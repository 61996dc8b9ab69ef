"""Which state of ultrabench's sources runs: the commit, and what was changed since."""

import subprocess
from pathlib import Path

import ultrabench

GIT_TIMEOUT_S = 10.0


def commit() -> str | None:
    """The commit of the clone that is imported; None for an installed package."""
    return _git("rev-parse", "HEAD")


def difference() -> str:
    """What the tracked files of the clone have that its commit has not, as a patch."""
    return _git("diff", "HEAD", "--no-color", "--no-ext-diff") or ""


def _git(*words: str) -> str | None:
    folder = Path(ultrabench.__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
