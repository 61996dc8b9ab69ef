"""When silence becomes a hang, and when a run has used up its time."""

from dataclasses import dataclass, field
from typing import Any

from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.report import PROFILE
from ultrabench.result import Status
from ultrabench.run import Task

SLOWEST_GAP_FACTOR = 10.0
"""A run is called a hang only after a silence of this many times its own longest silence so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Why ultrabench ends a run whose ranks have neither failed nor are done."""

    status: Status
    """hang, timeout, cancelled (its allocation ends), or ok where enough was measured."""
    reason: str
    stopped: str | None = None
    """Why measuring ended here, for a run that is ok."""
    suspects: tuple[str, ...] = ()
    """Hosts of the ranks that made it hang."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """What every rank did when it hung."""


def overdue(task: Task, progress: AttemptProgress, now: float) -> RunEnd | None:
    """How a run ends that has missed a deadline at `now`, by the monotonic clock; None while there is time.

    Before any rank has reported something, only the time limit holds for a program that is not ours.
    """
    measure, phase = task.measure, progress.phase
    if now - progress.started > task.limit_s:
        reason = f"still in phase {phase} after its limit of {task.limit_s:g} s"
        return RunEnd(status=Status.TIMEOUT, reason=reason)
    if progress.first_step is None or phase == PROFILE:  # writing a large trace takes as long as a start
        allowed = max(measure.start_deadline_s, SLOWEST_GAP_FACTOR * task.predicted_step_time_s)
    else:
        allowed = max(measure.deadline_floor_s, SLOWEST_GAP_FACTOR * progress.slowest_gap_s)
    silence = now - progress.moved
    if silence > allowed and (progress.spoke or task.forked):
        reason = f"no progress for {silence:.1f} s in phase {phase} (deadline {allowed:.1f} s)"
        return RunEnd(status=Status.HANG, reason=reason)
    return None
