"""How busy the cores of this host are during a run, and how much of that is the work of this agent and its ranks."""

import os
import time
from typing import NamedTuple

from ultrabench.processes import core_ticks, cpu_ticks, descendants

SAMPLE_S = 1.0
"""Seconds between two samples; each looks at all processes of the host."""
SHORTEST_S = 0.5
"""Shortest time in seconds that is judged; ticks of 10 ms tell nothing about a shorter one."""


class Sample(NamedTuple):
    """Ticks since the boot of the host, and when they were read by the monotonic clock."""

    time_s: float
    busy: int
    """Ticks of all cores that were used."""
    total: int
    """Ticks of all cores."""
    agent: int
    """Ticks of this agent and all its descendants, those that have ended included."""


class HostLoad:
    """The load of this host between the first and the last sample of a run."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops the samples of the last run."""
        self._first: Sample | None = None
        self._last: Sample | None = None

    def sample(self, at_once: bool = False) -> None:
        """Samples the host, at most once in SAMPLE_S seconds; `at_once` takes the last sample of a run that has begun."""
        now, last = time.monotonic(), self._last
        if (at_once and not last) or (not at_once and last and now - last.time_s < SAMPLE_S):
            return
        ticks = core_ticks()
        idle = ticks[3] + ticks[4]
        agent_ticks = sum(map(cpu_ticks, {os.getpid(), *descendants(os.getpid())}))
        self._last = Sample(time_s=now, busy=sum(ticks) - idle, total=sum(ticks), agent=agent_ticks)
        self._first = self._first or self._last

    @property
    def shares(self) -> tuple[float, float] | None:
        """The shares of the host's cores that were used, and used by this agent, from 0 to 1; None if unknown."""
        first, last = self._first, self._last
        if first is None or last is None or last.time_s - first.time_s < SHORTEST_S:
            return None
        total = max(1, last.total - first.total)
        return (last.busy - first.busy) / total, (last.agent - first.agent) / total
