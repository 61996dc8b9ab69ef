"""Pure functions that decide what a running sweep does next, from its plan, its state and its jobs."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ultrabench.column import GPU_HOURS
from ultrabench.run import AttemptKey
from ultrabench.store.allocation import is_in_window, offset_text, utc_offset_s
from ultrabench.store.jobs_seen import JobLimits, JobsSeen, Origin, is_same_site
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.attempts import AttemptsLeft, Launch, next_attempts
from ultrabench.sweep.running.price import PlannedJob, committed_gpu_hours, planned_jobs, with_measured_times
from ultrabench.sweep.running.starts import Starts, keys_by_allocation, starts_of, telling_allocations

MAX_ALLOCATIONS_WITHOUT_REQUESTED = 3
"""The sweep stops after MAX_ALLOCATIONS_WITHOUT_REQUESTED * max_jobs allocations in a row that ran
only control layouts.

Ends in ENDS_ALLOWED_WITHOUT_RUN count, too, since allocations could end like this for ever where the
clocks of nodes differ.
"""


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
    unstartable: Mapping[AttemptKey, str] = field(default_factory=dict)
    """Attempts that fail because their container or interpreter cannot start -> the reason."""
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
    plan = with_measured_times(plan, state)
    attempts_left = next_attempts(plan, state, jobs_seen.alive, launch)
    if attempts_left.stop_reason:
        return Actions(stop_reason=attempts_left.stop_reason, end_jobs=True)
    if not attempts_left.todo:
        return Actions(wait=attempts_left.num_waiting > 0)
    if state.paused:
        command = f"ultrabench sweep resume {shlex.quote(plan.config.name)}"
        return Actions(stop_reason=f"paused; resume with: {command}")
    starts = starts_of(state, launch)
    if reasons := starts.unstartable(limits):
        failures = {
            t.key: reasons[t.candidate.runtime] for t in attempts_left.todo if t.candidate.runtime in reasons
        }
        if failures:
            return Actions(unstartable=failures, wait=True)
    if dead_end := _dead_end(state, limits, launch, starts, attempts_left):
        return Actions(dead_end=dead_end)
    window = plan.config.launcher.window
    if not is_in_window(window, now_s):
        return Actions(
            wait=True,
            notes=(
                f"outside the window {window} ({offset_text(utc_offset_s(now_s))}): no jobs are submitted",
            ),
        )
    todo = sorted(
        attempts_left.todo, key=lambda t: len(starts.row_by_runtime[t.candidate.runtime].allocations)
    )
    attempts_left = replace(attempts_left, todo=tuple(todo))
    return _submit_actions(plan, state, jobs_seen, limits, launch.by, attempts_left)


def _submit_actions(
    plan: Plan, state: SweepState, jobs: JobsSeen, limits: JobLimits, origin: Origin, attempts: AttemptsLeft
) -> Actions:
    """The actions that submit as many jobs as the limits and the budget allow."""
    open_allocations = (state.allocations[name] for name in jobs.alive | jobs.leaving)
    live_allocations_here = [a for a in open_allocations if is_same_site(origin, a.by)]
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
            hours = (gpu_hours_so_far, gpu_hours_with_job, limits.max_gpu_hours)
            used_text, raised_text, budget_text = map(GPU_HOURS.bare_text, hours)
            change_text = f"from {used_text} to {raised_text}, over the budget of {budget_text}"
            stop_reason = f"the next job would raise the {GPU_HOURS.symbol} {change_text}"
            return Actions(over_budget=True, stop_reason=stop_reason)
        chosen_jobs.append(job)
        num_free_nodes -= job.nodes
        gpu_hours_so_far = gpu_hours_with_job
    notes: tuple[str, ...] = ()
    if over_limit := attempts.blame.over_limit:
        num_excluded = plan.config.retry.max_excluded
        fact = f"retry.max_excluded={num_excluded} is reached, so that jobs still use {','.join(over_limit)}"
        notes = (f"{fact}: these nodes failed, too. Raise it, or have the nodes repaired",)
    return Actions(submit=tuple(chosen_jobs), bad_nodes=attempts.blame.node_lines, wait=True, notes=notes)


def _dead_end(
    state: SweepState, limits: JobLimits, launch: Launch, starts: Starts, attempts: AttemptsLeft
) -> DeadEnd | None:
    """The evidence that the latest allocations of this launch were useless; None when there is none.

    This bounds the number of allocations of a launch. An allocation that runs something ends an attempt, and
    the retry policy bounds the attempts. Only a few of the other allocations may follow each other.
    """
    open_runtimes = {attempt.candidate.runtime for attempt in attempts.todo}
    if useless_allocations := starts.dead_end(limits, open_runtimes):
        return DeadEnd(
            num_allocations=len(useless_allocations),
            missing_run="anything",
            allocation=useless_allocations[-1],
        )
    num_without_requested_run = 0
    latest_allocation: AllocationState | None = None
    ran_keys_by_name = keys_by_allocation(state)
    for allocation in telling_allocations(state, launch, ran_keys_by_name):
        ran_keys = ran_keys_by_name.get(allocation.name, frozenset())
        if allocation.variant and not ran_keys:
            continue  # where the sweep has several variants, these are counted for each of them
        latest_allocation = allocation
        requested_keys = [k for k in allocation.tasks if k.run_id != allocation.control]
        is_useful = not ran_keys.isdisjoint(requested_keys or allocation.tasks)
        num_without_requested_run = 0 if is_useful else num_without_requested_run + 1
    max_allocations = MAX_ALLOCATIONS_WITHOUT_REQUESTED * limits.max_jobs
    if latest_allocation is None or num_without_requested_run < max_allocations:
        return None
    return DeadEnd(
        num_allocations=num_without_requested_run, missing_run="any run except control layouts",
        allocation=latest_allocation,
    )  # fmt: skip
