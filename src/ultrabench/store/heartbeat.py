"""Heartbeats: launchers and agents touch their journal files, and others read the time stamps."""

import os
import socket
import time
from pathlib import Path

from ultrabench.store.folder import SweepFolder

SIGN_OF_LIFE_S = 30.0
"""Seconds after which a launcher touches its journal again."""
MISSED = 3
"""Number of missed touches after which a launcher on another host counts as gone."""


def show_presence(journal: Path) -> None:
    """Touches a journal file to show that its writer is alive."""
    os.utime(journal)


def living_launchers(folder: SweepFolder, own: Path | None = None) -> list[str]:
    """Launchers that seem to follow a sweep now, each as `process P on HOST`.

    Args:
        own: the journal file of the caller. Its time stamp is used as the current time, because the clock
            of a file server may differ from that of this host.
    """
    now = own.stat().st_mtime if own else time.time()
    here = socket.gethostname().split(".")[0]
    found = []
    for path in sorted(folder.journal.glob("launcher-*-*-*.jsonl")):
        host, pid, _ = path.stem.removeprefix("launcher-").rsplit("-", 2)
        lives = os.path.exists(f"/proc/{pid}") if host == here else True
        if path != own and lives and now - touched(path) < MISSED * SIGN_OF_LIFE_S:
            found.append(f"process {pid} on {host}")
    return found


def touched(path: Path) -> float:
    """Time stamp of a file in seconds since 1970; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
