"""Watches over the leading agents of running allocations: one that is frozen cannot say so."""

import time
from pathlib import Path

from ultrabench.presence import MISSED, Stillness
from ultrabench.state import AllocationState
from ultrabench.sweep.launcher_choice import LauncherChoice

LATE = 1.5
"""Times the grace of a cluster: so late other hosts may hear of a time stamp from their file server."""


class Vigil:
    """Of one launcher."""

    def __init__(self, journals: Path, choice: LauncherChoice, outlives_us: bool) -> None:
        """`outlives_us`: the agents are on other hosts."""
        self._journals = journals
        self._patience_s = max(MISSED * choice.heartbeat_s, LATE * choice.grace_s if outlives_us else 0.0)
        self._stillness = Stillness(self._patience_s / MISSED)
        self.frozen: dict[str, str] = {}
        """Allocation -> how its agent was found, of those that were found frozen."""

    def look(self, held: AllocationState) -> str | None:
        """Why this running allocation has to be ended, as often as that does not help; None: it lives."""
        agents = [agent for agent in held.agents if agent.get("journal")]
        journals = [self._journals / str(agent["journal"]) for agent in agents]
        still_s = self._stillness.look(held.name, journals, time.monotonic())
        if not journals or still_s <= self._patience_s:
            return None
        self._stillness.forget(held.name)
        self.frozen[held.name] = f"the agent on {agents[-1].get('host')} did not move for {still_s:.0f} s"
        return self.frozen[held.name]
