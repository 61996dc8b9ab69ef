"""When silence becomes a hang, and when a run has had its time."""

from dataclasses import dataclass

from ultrabench.measure import Measure
from ultrabench.report import PROFILE
from ultrabench.result import Status

SLOWEST_GAP_FACTOR = 10.0
"""No run is called a hang before it was silent for ten times its own longest silence so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A deadline that was missed."""

    status: Status
    reason: str
    stopped: str | None = None
    """Of an ok run: why its measuring ended here."""


def overdue(
    *,
    now: float,
    started: float,
    moved: float,
    first_step: float | None,
    slowest_gap_s: float,
    phase: str,
    spoke: bool,
    predicted_step_time_s: float,
    limit_s: float,
    measure: Measure,
) -> Overdue | None:
    """The deadline missed at `now`, or None.

    Args:
        now, started, moved, first_step: seconds of one monotonic clock; the start of the ranks,
            the latest progress of any rank, the end of the first step.
        slowest_gap_s: longest silence so far after the first step.
        spoke: some rank reported something; before that only the limit holds.
    """
    if now - started > limit_s:
        return Overdue(
            status=Status.TIMEOUT, reason=f"still in phase {phase} after its limit of {limit_s:g} s"
        )
    if not spoke:
        return None
    silence = now - moved
    if first_step is None or phase == PROFILE:  # large traces take their time, too
        allowed = max(measure.start_deadline_s, SLOWEST_GAP_FACTOR * predicted_step_time_s)
    else:
        allowed = max(measure.deadline_floor_s, SLOWEST_GAP_FACTOR * slowest_gap_s)
    if silence > allowed:
        return Overdue(
            status=Status.HANG,
            reason=f"no progress for {silence:.1f} s in phase {phase} (deadline {allowed:.1f} s)",
        )
    return None
