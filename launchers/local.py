"""Allocations on this machine: one agent process a simulated node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ultrabench.allocation import Allocation
from ultrabench.errors import ClusterError
from ultrabench.processes import (
    clean_up_after_the_dead,
    command_line,
    kill_until_gone,
    own_processes,
    start_time,
)

SUBMIT_TIMEOUT_S = 60.0
STOP_PATIENCE_S = 10.0
OURS = {"ultrabench.agent", "ultrabench.launchers.submit_local", "submitit.local._local"}


class LocalLauncher:
    """Starts, finds and kills allocations that are processes of this host."""

    max_in_flight = 1
    """Two at once would disturb each other's measurements."""

    def submit(self, allocation: Allocation) -> dict[str, Any]:
        """Starts the agents; gives back how to find them.

        Raises:
            ClusterError: they could not be started.
        """
        command = [sys.executable, "-P", "-m", "ultrabench.launchers.submit_local", str(allocation.folder)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=(allocation.folder / "submit.err").open("wb"),
                start_new_session=True,
                timeout=SUBMIT_TIMEOUT_S,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise ClusterError(
                f"cannot start {allocation.name}: {error}; see {allocation.folder}/submit.err"
            ) from error
        pid = int(done.stdout.split()[-1])
        return {"host": socket.gethostname(), "pid": pid, "start_time": start_time(pid)}

    def alive(self, folders: Iterable[Path]) -> frozenset[str]:
        """Names of the allocations, of these folders, that have a process on this host.

        Command lines are looked at, not remembered pids: that holds whenever a launcher died, and
        when a pid has come round again.
        """
        return frozenset(folder.name for folder in folders if _processes_of(folder))

    def kill(self, folder: Path) -> None:
        """Ends an allocation: asks its agents, then kills whatever is left of it."""
        for pid in _processes_of(folder):
            _signal(pid, signal.SIGTERM)
        end = time.monotonic() + STOP_PATIENCE_S
        while _processes_of(folder) and time.monotonic() < end:
            time.sleep(0.05)
        kill_until_gone(lambda: _processes_of(folder))
        self.clean()

    def clean(self) -> None:
        """Removes what agents that are no more have left."""
        clean_up_after_the_dead()


def _processes_of(folder: Path) -> list[int]:
    """Processes of ours that have this folder, or a file in it, as an argument."""

    def is_ours(words: list[str]) -> bool:
        inside = any(word == str(folder) or word.startswith(f"{folder}/") for word in words)
        return inside and bool(OURS & set(words))

    return [p for p in own_processes() if is_ours(command_line(p)) and start_time(p) is not None]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
