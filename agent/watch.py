"""One attempt from the start of its ranks to the moment when they are gone, or have to go."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ultrabench.agent.deadline import Overdue, overdue
from ultrabench.agent.gang import POLL_S, Gang
from ultrabench.agent.gathering import Gathering
from ultrabench.run import Task

PEER_GRACE_S = 2.0
"""After the first failure of a rank its peers get this long to say what they know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Why the watching ended; nothing set: the ranks ended by themselves."""

    missed: Overdue | None = None
    """The deadline for which the ranks have to go."""
    ended: str | None = None
    """Why the allocation ends under the run."""


def watch(
    gang: Gang, task: Task, gathering: Gathering, ends: float, tell_phase: Callable[[Gathering], None]
) -> Watched:
    """Follows the ranks of `task`.

    Args:
        ends: end of the allocation by time.monotonic().
        tell_phase: called when rank 0 enters another phase.
    """
    told_port, told_phase, failed_at = False, "", 0.0
    while gathering.running:
        gang.listen(gathering, POLL_S)
        if gathering.port is not None and not told_port:
            told_port = True
            gang.tell_port(gathering.port)
        if gathering.phase != told_phase:
            told_phase = gathering.phase
            tell_phase(gathering)
        now = time.monotonic()
        ended = gang.interrupted or ("the time of its allocation ended" if now > ends else None)
        if ended:
            return Watched(ended=ended)
        if gathering.failed:
            failed_at = failed_at or now
            if now - failed_at > PEER_GRACE_S:
                return Watched()
            continue
        missed = _overdue(task, gathering, now)
        if missed:
            return Watched(missed=missed)
    return Watched()


def _overdue(task: Task, gathering: Gathering, now: float) -> Overdue | None:
    return overdue(
        now=now,
        started=gathering.started,
        moved=gathering.moved,
        first_step=gathering.first_step,
        slowest_gap_s=gathering.slowest_gap_s,
        phase=gathering.phase,
        spoke=gathering.spoke or task.forked,
        predicted_step_time_s=task.predicted_step_time_s,
        limit_s=task.limit_s,
        measure=task.measure,
    )
