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
    """Ticks since the boot of the host."""

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
        self._began_s = self._sampled_s = 0.0

    def sample(self, at_once: bool = False) -> None:
        """Samples the host, at most once in SAMPLE_S seconds; `at_once` takes the last sample of a run that has begun."""
        now = time.monotonic()
        if (at_once and self._first is None) or (not at_once and now - self._sampled_s < SAMPLE_S):
            return
        ticks = core_ticks()
        idle = ticks[3] + ticks[4]
        agent_ticks = sum(map(cpu_ticks, {os.getpid(), *descendants(os.getpid())}))
        self._last = Sample(busy=sum(ticks) - idle, total=sum(ticks), agent=agent_ticks)
        self._sampled_s = now
        if self._first is None:
            self._first, self._began_s = self._last, now

    @property
    def shares(self) -> tuple[float, float] | None:
        """The shares of the host's cores that were used, and used by this agent, from 0 to 1; None if unknown."""
        if self._first is None or self._last is None or self._sampled_s - self._began_s < SHORTEST_S:
            return None
        total = max(1, self._last.total - self._first.total)
        return (self._last.busy - self._first.busy) / total, (self._last.agent - self._first.agent) / total
