"""Watches one attempt until its ranks have ended, or ultrabench has a reason to end them."""

import time
from collections.abc import Callable
from dataclasses import replace

from ultrabench.agent.agent_group import AgentGroup
from ultrabench.agent.connection import POLL_S
from ultrabench.agent.diagnose.hang_cause import find_hang_cause, hang_row
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.rank_report import PROFILE
from ultrabench.result import SLOWER, RunResult, Status
from ultrabench.run import Task

WritePhase = Callable[[str, float | None], None]

SLOWEST_GAP_FACTOR = 10.0
"""A run hangs only after this many times its own longest time without progress so far."""
PEER_GRACE_S = 2.0
"""Seconds for the other ranks to report their failures after the first failure."""
RACE_STEPS = 2
"""Number of measured steps after which a run may be ended as too slow."""


def watch(
    group: AgentGroup,
    task: Task,
    ends: float,
    race_s: float | None = None,
    write_phase: WritePhase | None = None,
) -> RunResult | None:
    """Watches the ranks of `task`; returns why ultrabench ends them, or None if they ended by themselves.

    Args:
        ends: the end of the allocation, by time.monotonic().
        race_s: seconds; a run whose fastest step takes longer cannot be the best, and is ended.
        write_phase: called with the phase and its time when rank 0 enters another phase.
    """
    progress, phase, failed_at = group.progress, "", 0.0
    while progress.running:
        group.listen(POLL_S)
        if progress.port is not None:
            group.order("store", port=progress.port)
            progress.port = None
        rank0, now = progress.ranks[0], time.monotonic()
        if write_phase and rank0.phase != phase:
            phase = rank0.phase
            write_phase(phase, rank0.phase_at)
        ended = group.interrupted or ("the time of its allocation ended" if now > ends else None)
        if ended:
            return RunResult(status=Status.CANCELLED, reason=ended, cause="stopped")
        if progress.failed:
            failed_at = failed_at or now
            if now - failed_at > PEER_GRACE_S:
                return None
        elif missed := overdue(task, progress, now):
            hangs = missed.status == Status.HANG
            return _hung(group, missed) if hangs else _out_of_time(task, progress, missed)
        elif lost := _lost_race(task, rank0, race_s):
            return lost
    return None


def _hung(group: AgentGroup, missed: RunResult) -> RunResult:
    """Collects the evidence of a hang and finds its cause, before the ranks are killed."""
    group.examine()
    cause = find_hang_cause(group.progress.ranks)
    evidence = {"hang_cause": cause.text, "hang_evidence": [hang_row(rank) for rank in group.progress.ranks]}
    reason = f"{cause.headline}; {missed.reason}"
    return replace(missed, reason=reason, suspect_hosts=cause.hosts, evidence=evidence)


def _out_of_time(task: Task, progress: AttemptProgress, missed: RunResult) -> RunResult:
    """The end of a run that has reached its time limit: ok if it has measured enough steps."""
    rank = progress.ranks[0]
    reason = f"{missed.reason}; {len(rank.steps)} steps done" if rank.steps else missed.reason
    enough = len(rank.measured_steps(task.measure)) >= task.measure.min_steps
    if enough and len(rank.steps) >= task.measure.loss_step:
        return RunResult(status=Status.OK, reason=reason, stopped="time_limit")
    return replace(missed, reason=reason)


def _lost_race(task: Task, rank: RankProgress, race_s: float | None) -> RunResult | None:
    """The end of a run that is clearly slower than the best of its cell; None while it may still win.

    It is not ended before the step at which losses are compared.
    """
    if race_s is None or rank.done or len(rank.steps) < task.measure.loss_step:
        return None
    times = rank.measured_steps(task.measure)
    if len(times) < RACE_STEPS or min(times) <= race_s:
        return None
    best = f"the best of its cell needs {race_s / (task.measure.race or 1.0):.4g} s"
    reason = f"the fastest of {len(times)} steps took {min(times):.4g} s; {best}"
    return RunResult(status=Status.OK, reason=reason, stopped=SLOWER)


def overdue(task: Task, progress: AttemptProgress, now: float) -> RunResult | None:
    """How a run ends that has missed a deadline at `now`, by the monotonic clock; None while there is time.

    Until a program of the user has reported something, only its time limit applies.
    """
    measure, phase = task.measure, progress.ranks[0].phase
    if now - progress.started > task.limit_s:
        reason = f"still in phase {phase} after its limit of {task.limit_s:g} s"
        return RunResult(status=Status.TIMEOUT, reason=reason, cause="time_limit")
    if progress.first_step is None or phase == PROFILE:  # writing a large trace may take as long as a start
        allowed = max(measure.start_deadline_s, SLOWEST_GAP_FACTOR * task.predicted_step_time_s)
    else:
        allowed = max(measure.deadline_floor_s, SLOWEST_GAP_FACTOR * progress.slowest_gap_s)
    silence = now - progress.moved
    if silence > allowed and (progress.spoke or task.forked):
        reason = f"no progress for {silence:.1f} s in phase {phase} (deadline {allowed:.1f} s)"
        return RunResult(status=Status.HANG, reason=reason, cause="hang")
    return None
