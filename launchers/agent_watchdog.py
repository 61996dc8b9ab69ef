"""Finds out which leading agents of allocations still live, by the time stamps of their journals."""

import time
from collections.abc import Container, Iterable
from pathlib import Path

from ultrabench.store.folder import SweepFolder
from ultrabench.store.heartbeat import MISSED, touched
from ultrabench.store.state import AllocationState
from ultrabench.sweep.config.launcher_config import LauncherConfig

LATE = 1.5
"""Number of grace periods after which a touch of a journal is surely visible on other hosts (NFS caches)."""


class AgentWatchdog:
    """Tells which agents touch their journals, and which have stopped."""

    def __init__(self, folder: SweepFolder, choice: LauncherConfig, outlives_us: bool) -> None:
        """`outlives_us` means that the agents are on other hosts."""
        self._folder = folder
        self.patience_s = max(MISSED * choice.heartbeat_s, LATE * choice.grace_s if outlives_us else 0.0)
        """Seconds without a touch after which an agent counts as dead or frozen."""
        self._silence = SilenceTimer(self.patience_s / MISSED)
        self._silent_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}
        """Allocation -> seconds for which it had been silent when it was last called frozen."""
        self.frozen: dict[str, str] = {}
        """Allocation that was found frozen -> what was found."""

    def observe(self, unended: Iterable[AllocationState], running: Container[str]) -> None:
        """Reads the time stamps of allocations: those of their journals or, before there are any, of their claims.

        Args:
            running: those whose processes run; the silence of others, such as suspended ones, proves nothing.
        """
        now = time.monotonic()
        paths = {held.name: self._paths(held) for held in unended}
        self._silent_s = {n: self._silence.observe(n, found, now) for n, found in paths.items() if found}
        self._told_s |= {n: silent_s for n, silent_s in self._silent_s.items() if n not in running}

    def _paths(self, held: AllocationState) -> list[Path]:
        if not held.agents:
            return [self._folder.claims / held.name]
        return [self._folder.journal / a.journal for a in held.agents if a.journal]

    def silent(self, name: str, more_s: float = 0.0) -> bool:
        """Whether an allocation shows no sign of life, or keeps no journal that could show one.

        Args:
            more_s: seconds beyond the usual patience.
        """
        return self._silent_s.get(name, float("inf")) > self.patience_s + more_s

    def frozen_now(self, held: AllocationState) -> str | None:
        """Why this running allocation has to be ended; None while it lives. It is said again after each `patience_s`."""
        silent_s = self._silent_s.get(held.name, 0.0) if held.agents else 0.0
        if silent_s < self._told_s.get(held.name, 0.0):
            del self._told_s[held.name]
        if silent_s - self._told_s.get(held.name, 0.0) <= self.patience_s:
            return None
        self._told_s[held.name] = silent_s
        self.frozen[held.name] = f"the agent on {held.agents[-1].host} did not move for {silent_s:.0f} s"
        return self.frozen[held.name]


class SilenceTimer:
    """Counts for how long the writers of journal files have not touched them, as far as somebody looked.

    A time stamp that changes is a sign of life, whatever clock made it. A pause of the launcher itself (a stuck
    file server, a sleeping laptop) says nothing about the agents, so it counts for a short time only.
    """

    def __init__(self, most_gap_s: float) -> None:
        """`most_gap_s` is the largest number of seconds between two looks that is counted in full."""
        self._most_gap_s = most_gap_s
        self._seen: dict[str, tuple[float, float, float]] = {}
        """Name -> latest time stamp, when it was looked at, and seconds without a change."""

    def observe(self, name: str, journals: list[Path], now: float) -> float:
        """Seconds that none of these files was touched; `now` is of a monotonic clock."""
        stamp = max((touched(path) for path in journals), default=0.0)
        held, looked, still_s = self._seen.get(name, (stamp, now, 0.0))
        still_s = still_s + min(now - looked, self._most_gap_s) if stamp == held else 0.0
        self._seen[name] = (stamp, now, still_s)
        return still_s
