"""Pure functions that decide what a running sweep does next, from its plan, its state and its jobs."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from ultrabench.store.allocation import is_in_window
from ultrabench.store.events import EndCode
from ultrabench.store.jobs_seen import JobLimits, JobsSeen, Origin, is_same_place
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.attempts import AttemptsLeft, Launch, next_attempts
from ultrabench.sweep.running.price import PlannedJob, committed_gpu_hours, planned_jobs

MAX_ALLOCATIONS_WITHOUT_RUN = 3
"""The sweep stops after this many allocations in a row that ended without having claimed a run, on disjoint nodes.

Of those on the same nodes, one counts, as long as others may be tried: max_jobs may have been queued for them before.
"""
MAX_ALLOCATIONS_WITHOUT_REQUESTED = 3
"""The sweep stops after MAX_ALLOCATIONS_WITHOUT_REQUESTED * max_jobs allocations in a row that ran only control layouts."""
ENDS_ALLOWED_WITHOUT_RUN = (EndCode.PAUSED, EndCode.OUTSIDE_WINDOW)
"""Codes of ends that do not count for MAX_ALLOCATIONS_WITHOUT_RUN. They do count for MAX_ALLOCATIONS_WITHOUT_REQUESTED,
since allocations could end like this for ever where the clocks of nodes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEnd:
    """Evidence that submitting more allocations is useless."""

    num_allocations: int
    """Number of allocations in a row that were of no use."""
    missing_run: str
    """The kind of run that none of these allocations made, in words for a message."""
    allocation: AllocationState
    """The latest of these allocations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What a launch has to do now."""

    submit: tuple[PlannedJob, ...] = ()
    bad_nodes: Mapping[str, str] = field(default_factory=dict)
    """Nodes that the submitted jobs should not use, the surest first -> a line that says why."""
    end_jobs: bool = False
    """Whether all jobs that are queued or running have to be ended."""
    wait: bool = False
    """Whether there will be something to do later, even if no job is alive."""
    stop_reason: str | None = None
    """Why nothing more is submitted although something is left to do."""
    over_budget: bool = False
    """Whether the next job costs more than what is left of the budget."""
    dead_end: DeadEnd | None = None
    notes: tuple[str, ...] = ()
    """Messages for the user."""


def decide(
    plan: Plan, state: SweepState, jobs_seen: JobsSeen, limits: JobLimits, launch: Launch, now_s: float
) -> Actions:
    """What a launch has to do next.

    Args:
        state: state of the sweep, with the ends of all allocations that are not alive.
        now_s: seconds since 1970.
    """
    if state.cancelled:
        return Actions(stop_reason="cancelled", end_jobs=True)
    attempts_left = next_attempts(plan, state, jobs_seen.alive, launch)
    if attempts_left.stop_reason:
        return Actions(stop_reason=attempts_left.stop_reason, end_jobs=True)
    if not attempts_left.todo:
        return Actions(wait=attempts_left.num_waiting > 0)
    if state.paused:
        command = f"ultrabench sweep resume {shlex.quote(plan.config.name)}"
        return Actions(stop_reason=f"paused; resume with: {command}")
    if dead_end := _dead_end(state, limits, launch):
        return Actions(dead_end=dead_end)
    window = plan.config.launcher.window
    if not is_in_window(window, now_s):
        return Actions(wait=True, notes=(f"outside the window {window}: no jobs are submitted",))
    return _submit_actions(plan, state, jobs_seen, limits, launch.by, attempts_left)


def _submit_actions(
    plan: Plan, state: SweepState, jobs: JobsSeen, limits: JobLimits, origin: Origin, attempts: AttemptsLeft
) -> Actions:
    """The actions that submit as many jobs as the limits and the budget allow."""
    open_allocations = (state.allocations[name] for name in jobs.alive | jobs.leaving)
    live_allocations_here = [a for a in open_allocations if is_same_place(origin, a.by)]
    # New jobs are submitted when half of the old ones are over, so that several go into one array.
    if len(live_allocations_here) > limits.max_jobs // 2:
        return Actions(wait=True)
    num_free_jobs = limits.max_jobs - len(live_allocations_here)
    num_free_nodes = limits.max_nodes - sum(allocation.nodes for allocation in live_allocations_here)
    gpu_hours_so_far = committed_gpu_hours(plan, state, jobs.alive, jobs.held_s)
    chosen_jobs: list[PlannedJob] = []
    for job in planned_jobs(plan, attempts, state, limits.max_limit_s, jobs.held_s):
        if len(chosen_jobs) >= num_free_jobs or job.nodes > num_free_nodes:
            break
        gpu_hours_with_job = gpu_hours_so_far + job.gpu_hours
        if limits.max_gpu_hours is not None and gpu_hours_with_job > limits.max_gpu_hours:
            if chosen_jobs:
                break
            budget_text = f"to {gpu_hours_with_job:.3g}, over the budget of {limits.max_gpu_hours:.3g}"
            stop_reason = f"the next job would raise the GPU hours from {gpu_hours_so_far:.3g} {budget_text}"
            return Actions(over_budget=True, stop_reason=stop_reason)
        chosen_jobs.append(job)
        num_free_nodes -= job.nodes
        gpu_hours_so_far = gpu_hours_with_job
    return Actions(submit=tuple(chosen_jobs), bad_nodes=attempts.blame.node_lines, wait=True)


def _dead_end(state: SweepState, limits: JobLimits, launch: Launch) -> DeadEnd | None:
    """The evidence that the latest allocations of this launch were useless; None when there is none.

    This bounds the number of allocations of a launch. An allocation that runs something ends an attempt, and
    the retry policy bounds the attempts. Only a few of the other allocations may follow each other.
    """
    allocations = [a for a in state.allocations.values() if a.submission[0] == launch.name]
    ran_names = {attempt.allocation for attempt in state.attempts.values()}
    # An allocation that still runs proves that some nodes work as soon as it has claimed a run.
    telling = (a for a in allocations if a.ended is not None or a.name in ran_names)
    telling_allocations = sorted(
        (a for a in telling if a.name not in launch.excused), key=lambda allocation: allocation.submission
    )
    num_without_run = num_without_requested_run = num_in_a_row = 0
    useless_nodes = frozenset[str]()
    for allocation in telling_allocations:
        task_attempts = (state.attempts[key] for key in allocation.tasks if key in state.attempts)
        ran_keys = {attempt.key for attempt in task_attempts if attempt.allocation == allocation.name}
        requested_keys = [k for k in allocation.tasks if k.run_id != allocation.control] or allocation.tasks
        if ran_keys:
            num_without_run, num_in_a_row, useless_nodes = 0, 0, frozenset()
        elif allocation.end is None or allocation.end.code not in ENDS_ALLOWED_WITHOUT_RUN:
            failed_on = frozenset(allocation.end.failed_on if allocation.end else ())
            num_without_run += not failed_on or failed_on.isdisjoint(useless_nodes)
            num_in_a_row += 1
            useless_nodes |= failed_on
        num_without_requested_run = 0 if ran_keys & {*requested_keys} else num_without_requested_run + 1
    max_in_a_row = MAX_ALLOCATIONS_WITHOUT_RUN + limits.max_jobs
    if num_without_run >= MAX_ALLOCATIONS_WITHOUT_RUN or num_in_a_row >= max_in_a_row:
        num_useless, missing_run = num_in_a_row, "anything"
    elif num_without_requested_run >= MAX_ALLOCATIONS_WITHOUT_REQUESTED * limits.max_jobs:
        num_useless, missing_run = num_without_requested_run, "any run except control layouts"
    else:
        return None
    return DeadEnd(num_allocations=num_useless, missing_run=missing_run, allocation=telling_allocations[-1])
