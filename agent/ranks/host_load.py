"""How busy the cores of this host are during a run, and how much of that is the work of this agent and its ranks."""

import os
import time
from typing import NamedTuple

from ultrabench.processes import core_ticks, cpu_ticks, descendants

SAMPLE_INTERVAL_S = 1.0
"""Seconds between two samples; each reads all processes of the host."""
MIN_SPAN_S = 0.5
"""Shortest time between two samples, in seconds, for which shares are given; a tick has 10 ms."""


class LoadSample(NamedTuple):
    """The ticks that the cores of the host have counted since its boot."""

    time_s: float
    """When they were read, by the monotonic clock."""
    busy_ticks: int
    """Ticks in which cores were used."""
    total_ticks: int
    """Ticks of all cores."""
    agent_ticks: int
    """Ticks of this agent and all its descendants, including those that have ended."""


class HostLoad:
    """The load of this host between the first and the last sample of a run."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops the samples of the last run."""
        self._first_sample: LoadSample | None = None
        self._last_sample: LoadSample | None = None

    def sample(self, is_last: bool = False) -> None:
        """Samples the host, at most once in SAMPLE_INTERVAL_S seconds; the last sample of a run has no such limit."""
        now_s, last = time.monotonic(), self._last_sample
        if (is_last and not last) or (not is_last and last and now_s - last.time_s < SAMPLE_INTERVAL_S):
            return
        ticks = core_ticks()
        total_ticks, idle_ticks = sum(ticks), ticks[3] + ticks[4]
        agent_ticks = sum(map(cpu_ticks, {os.getpid(), *descendants(os.getpid())}))
        self._last_sample = LoadSample(now_s, total_ticks - idle_ticks, total_ticks, agent_ticks)
        self._first_sample = self._first_sample or self._last_sample

    @property
    def core_shares(self) -> tuple[float, float] | None:
        """The shares of the host's cores, from 0 to 1, that all processes and this agent used; None if unknown."""
        first, last = self._first_sample, self._last_sample
        if first is None or last is None or last.time_s - first.time_s < MIN_SPAN_S:
            return None
        total_ticks = max(1, last.total_ticks - first.total_ticks)
        busy_ticks, agent_ticks = last.busy_ticks - first.busy_ticks, last.agent_ticks - first.agent_ticks
        return busy_ticks / total_ticks, agent_ticks / total_ticks
