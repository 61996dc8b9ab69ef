"""Follows the allocations of a sweep and records how they ended; attempts they did not finish are lost."""

import math
import shutil
import time
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ultrabench.errors import ClusterError, UltrabenchError, may_pass
from ultrabench.launchers.job_log import telling_line
from ultrabench.launchers.launcher import Allocations, Launcher, Say
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.record import to_dict
from ultrabench.result import NOT_STARTED, STOPPED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.allocation import Allocation, read_allocation
from ultrabench.store.events import (
    BY_LAUNCHER,
    Adopted,
    AllocationEnded,
    AllocationPlanned,
    EndCode,
    Failed,
    Start,
)
from ultrabench.store.folder import SweepFolder, mtime_s
from ultrabench.store.jobs_seen import JobEnd, JobsSeen, sees
from ultrabench.store.lease import lives, living_launchers
from ultrabench.store.state import AllocationState, AttemptState, SweepState
from ultrabench.sweep.config.launcher_config import LauncherConfig
from ultrabench.sweep.running.attempts import NO_LAUNCH, Launch
from ultrabench.variant import job_options

MISSED_TOUCHES = 3
"""Number of missed touches of its journal after which an agent counts as gone."""
GRACES_UNTIL_SEEN = 1.5
"""Number of grace periods after which other hosts see that a journal was touched, despite NFS caches."""


@dataclass(slots=True, kw_only=True)
class LaunchMemory:
    """What a launch remembers from one look at its allocations to the next."""

    launch: Launch = NO_LAUNCH
    """What does not change with every look; `since_end_s` follows from `ended_at` at each decision."""
    num_submitted: int = 0
    """Number of allocations submitted by this launch."""
    ended_at: dict[AttemptKey, float] = field(default_factory=dict)
    """When this launcher saw attempts end, by its monotonic clock, since clocks of nodes may be wrong."""
    avoided_hosts: set[str] = field(default_factory=set)
    """Nodes that the latest submission did not use."""
    cancelled_at: float = -math.inf
    """When this launch last tried to cancel its allocations, by its monotonic clock."""
    claimed_names: set[str] = field(default_factory=set)
    """Allocations that agents own, even if they have not written anything yet."""
    recorded_ends: set[tuple[str, Start]] = field(default_factory=set)
    """Allocations whose end was recorded, each with its start, since a requeue starts it again."""
    adopted_names: set[str] = field(default_factory=set)
    """Allocations that this launch has seen alive; it recorded those of other launches as adopted."""
    held_s: dict[str, float] = field(default_factory=dict)
    """Allocation -> seconds for which it had held its nodes when the launcher last saw it."""
    unanswered_names: set[str] = field(default_factory=set)
    """Allocations of which the batch system has not said yet whether it took them."""

    def excuse(self, names: Iterable[str]) -> None:
        """Takes note that these allocations may end without any run."""
        self.launch = replace(self.launch, excused=self.launch.excused | {*names})


class AgentWatchdog:
    """Tells at each look of this launcher which agents still touch their journals, and which have stopped.

    A time stamp that changes is a sign of life, whatever clock made it. A pause of the launcher itself (a
    stuck file server, a sleeping laptop) says nothing about the agents, so only a short part of it counts.
    """

    def __init__(self, folder: SweepFolder, launcher_config: LauncherConfig) -> None:
        self._folder = folder
        self.patience_s = max(
            MISSED_TOUCHES * launcher_config.heartbeat_s, GRACES_UNTIL_SEEN * launcher_config.grace_s
        )
        """Seconds after which an agent that has not touched its journal counts as dead or frozen."""
        self._looks: dict[str, tuple[float, float, float]] = {}
        """Allocation -> its latest time stamp, the time of the latest look, and the seconds without a change."""
        self._reported_s: dict[str, float] = {}
        """Allocation -> seconds of silence that count no more, since they were reported, or it was not running."""
        self.freezes: dict[str, str] = {}
        """Allocation that was found frozen -> the message about it."""

    def observe(self, allocations: Iterable[AllocationState], running_names: Container[str]) -> None:
        """Reads the time stamps of the allocations' journals or, before they have any, of their claims.

        Args:
            running_names: allocations whose processes run; others may be suspended, so silence proves nothing.
        """
        paths_by_name = {allocation.name: self._touched_paths(allocation) for allocation in allocations}
        self._looks = {name: self._next_look(name, paths) for name, paths in paths_by_name.items() if paths}
        self._reported_s |= {name: self.silent_s(name) for name in self._looks if name not in running_names}

    def _touched_paths(self, allocation: AllocationState) -> list[Path]:
        if not allocation.agents:
            return [self._folder.claims / allocation.name]
        return [self._folder.journal / a.journal for a in allocation.agents if a.journal]

    def _next_look(self, name: str, paths: Iterable[Path]) -> tuple[float, float, float]:
        touched_at, now_s = max(map(mtime_s, paths)), time.monotonic()
        previous_touched_at, looked_at, silent_s = self._looks.get(name, (touched_at, now_s, 0.0))
        silent_s += min(now_s - looked_at, self.patience_s / MISSED_TOUCHES)
        return touched_at, now_s, silent_s if touched_at == previous_touched_at else 0.0

    def silent_s(self, name: str) -> float:
        """Seconds without a sign of life; infinite for an allocation that has no journal to show one."""
        return self._looks.get(name, (0.0, 0.0, math.inf))[2]

    def is_silent(self, name: str, more_s: float = 0.0) -> bool:
        """Whether an allocation has been silent for longer than `patience_s` and `more_s` together."""
        return self.silent_s(name) > self.patience_s + more_s

    def new_freeze(self, allocation: AllocationState) -> str | None:
        """Why this running allocation must be ended, once in each `patience_s`; None otherwise."""
        name = allocation.name
        silent_s = self.silent_s(name) if allocation.agents and name in self._looks else 0.0
        if silent_s < self._reported_s.get(name, 0.0):
            del self._reported_s[name]
        if silent_s - self._reported_s.get(name, 0.0) <= self.patience_s:
            return None
        self._reported_s[name] = silent_s
        self.freezes[name] = f"the agent on {allocation.agents[-1].host} was frozen for {silent_s:.0f} s"
        return self.freezes[name]


class EndRecorder:
    """Follows the allocations of a sweep for one launch, and records in the journal how they ended."""

    def __init__(self, sweep: OpenSweep, launcher: Launcher, memory: LaunchMemory, say: Say) -> None:
        """`say` is called with each message for the user."""
        self._sweep, self._launcher, self._memory, self._say = sweep, launcher, memory, say
        self._run_by_id = {run.run_id: run for run in sweep.plan.runs}
        self.watchdog = AgentWatchdog(sweep.folder, sweep.config.launcher)

    def look(self) -> tuple[JobsSeen, SweepState]:
        """The living allocations, and the state after the ends of all others were recorded."""
        # The journal is read after the launcher is asked: what ended in between has recorded its end there.
        state = self._sweep.state()
        visible_allocations = visible_to(self._launcher, state.allocations)
        started_names = {n for n, a in state.allocations.items() if a.agents} | self._memory.claimed_names
        jobs_seen = self._launcher.observe(visible_allocations)
        state = self._sweep.state()
        unended = open_allocations(state)
        self._memory.held_s |= jobs_seen.held_s
        alive = jobs_seen.alive & (unended.keys() | jobs_seen.queued)
        # Agents of this machine record their end before they have removed their files. Of a job that ended while Slurm
        # was asked, the answer does not say whether it has given its nodes back.
        on_cluster = self._launcher.origin["cluster"]
        holders = jobs_seen.alive - jobs_seen.queued if on_cluster else jobs_seen.running
        leavers = holders - unended.keys()
        jobs_seen = replace(
            jobs_seen, alive=alive, held_s=self._memory.held_s, leaving=jobs_seen.leaving | leavers
        )
        self.watchdog.observe(unended.values(), jobs_seen.running)
        self._end_frozen(jobs_seen, state)
        for name, end in sorted(jobs_seen.timed.items()):
            if state.allocations[name].ended is not None:
                self._record_job_end(state.allocations[name], end, state)
        for name in sorted(jobs_seen.alive - self._memory.adopted_names):
            self._memory.adopted_names.add(name)
            if state.allocations[name].submission[0] != self._sweep.journal.name:
                self._sweep.journal.write(Adopted(allocation=name, job=jobs_seen.jobs.get(name, {})))
        alive = jobs_seen.alive | self._record_ends(jobs_seen, state, visible_allocations, started_names)
        return replace(jobs_seen, alive=alive), self._sweep.state()

    def _end_frozen(self, jobs_seen: JobsSeen, state: SweepState) -> None:
        """Ends allocations whose leading agent is frozen, since they would last until their time limit."""
        for name in sorted(jobs_seen.alive & jobs_seen.running):
            if reason := self.watchdog.new_freeze(state.allocations[name]):
                self._say(f"{reason}: ending {name}")
                try:
                    self._launcher.end_frozen_job(name, jobs_seen.jobs[name])
                except ClusterError as error:  # a later look finds it frozen again
                    self._say(f"cannot end {name}: {error}; retrying")

    def _record_ends(
        self,
        jobs_seen: JobsSeen,
        state: SweepState,
        visible_names: Container[str],
        started_names: Container[str],
    ) -> frozenset[str]:
        """Records the ends of allocations that are not alive; returns those that may or may not be alive.

        Args:
            visible_names: allocations that the launcher was asked about.
            started_names: allocations whose agents had started before the launcher was asked.
        """
        unclear_names = set[str]()
        for name, allocation in sorted(state.allocations.items()):
            if name in jobs_seen.alive or (name, allocation.start) in self._memory.recorded_ends:
                continue
            end = jobs_seen.ended_jobs.get(name) if name in visible_names else self._abandoned_end(allocation)
            if end and name in self.watchdog.freezes:
                end = replace(end, status=Status.LOST, reason=self.watchdog.freezes[name], agent_gone=False)
            if allocation.ended is not None:
                self.record_end(allocation, None, state)
            elif end and name not in started_names and self._is_being_submitted(allocation):
                unclear_names.add(name)
            elif end and (self._is_dead(allocation, end) if name in started_names else self.give_up(name)):
                self.record_end(allocation, end, state)
            elif end or name not in visible_names:  # another user's job, or one submitted later
                unclear_names.add(name)
        return frozenset(unclear_names)

    def _is_being_submitted(self, allocation: AllocationState) -> bool:
        """Whether another launcher, which is alive, may still wait for the answer to the
        submission of an allocation.
        """
        sweep, launcher_name = self._sweep, allocation.submission[0]
        if allocation.job is not None or launcher_name == sweep.journal.name:
            return False
        if launcher_name:
            return lives(sweep.folder, launcher_name)
        return bool(living_launchers(sweep.folder, sweep.lease))

    def _is_dead(self, allocation: AllocationState, end: JobEnd) -> bool:
        """Whether an allocation whose agents had started is over; one that is not visible may still run.

        The launcher must be certain that it ended, or the agents must have stopped touching their journal.
        """
        if end.certain or self.watchdog.is_silent(allocation.name):
            return True
        note = f"{end.reason}, but the agents of {allocation.name} updated their journal recently"
        self._say(f"{note}; it counts as ended after {self.watchdog.patience_s:.0f} s of silence")
        return False

    def _abandoned_end(self, allocation: AllocationState) -> JobEnd | None:
        """The end of an allocation that this launcher cannot see; None while it may still be alive."""
        if allocation.ended is not None or sees(self._launcher.origin, allocation.by):
            return None
        origin = allocation.by
        user = f"{origin.get('user')} on {origin.get('cluster') or origin.get('host')}"
        # Processes, unlike jobs, do not wait in a queue. If they start nevertheless, they find our claim.
        has_journal = any(a.journal for a in allocation.agents)
        can_be_judged = has_journal or not (allocation.agents or origin.get("cluster"))
        if can_be_judged and self.watchdog.is_silent(allocation.name, allocation.limit_s):
            reason = f"the agents of {allocation.name}, of {user}, were silent for longer than its time limit"
            return JobEnd(reason=reason, certain=True)
        problem = f"{allocation.name} is a job of {user}: this launcher can neither end nor replace it"
        advice = "launch from a terminal without --yes, which can replace jobs that have not started"
        self._say(f"{problem}. If it no longer exists, {advice}")
        return None

    def withdraw(self, allocation_names: Iterable[str], reason: str) -> None:
        """Claims allocations that have not started and records their end, so that they can be replaced."""
        state = self._sweep.state()
        for name in allocation_names:
            if not state.allocations[name].agents and self.give_up(name):
                self.record_end(state.allocations[name], JobEnd(reason=reason), state)

    def record_refused(self, allocations: Collection[Allocation], reason: str) -> None:
        """Records that the batch system did not take allocations, and removes their folders.

        They say nothing about nodes and settings, so that a launch may have any number of them in a row.
        """
        for allocation in allocations:
            end_event = AllocationEnded(
                allocation=allocation.name, reason=reason, code=EndCode.REFUSED, source=BY_LAUNCHER
            )
            self._sweep.journal.write(end_event)
            self._memory.recorded_ends.add((allocation.name, Start()))
            shutil.rmtree(allocation.folder, ignore_errors=True)
        self._memory.excuse(allocation.name for allocation in allocations)

    def give_up(self, name: str) -> bool:
        """Claims an allocation that has not started, so that it never runs; False if its agents own it.

        If another launcher submits the allocation later, its agent finds this claim and runs nothing.
        """
        is_given_up = self._sweep.give_up(name)
        if not is_given_up:
            self._memory.claimed_names.add(name)
        return is_given_up

    def record_end(self, allocation: AllocationState, observed_end: JobEnd | None, state: SweepState) -> None:
        """Records that an allocation is over, and that the attempts it claimed and did not finish are lost.

        Args:
            observed_end: how the launcher saw it end; None if its agents recorded their end themselves.

        Raises:
            OSError: a claim cannot be read now; nothing was recorded.
        """
        name = allocation.name
        owned_keys = [key for key in allocation.tasks if self._is_owned(key, name, state)]
        end = observed_end or JobEnd(reason=f"the agents of {name} ended ({allocation.ended})")
        if end.never_started and not allocation.agents:
            _, log_line = telling_line(self._sweep.folder.allocations / name)
            end = replace(
                end, reason=f"{end.reason}; its log says: {log_line[:200]}" if log_line else end.reason
            )
            if not state.cancelled:
                self._record_unstarted(allocation, state, end)
        self._record_lost(owned_keys, state, name, end)
        if observed_end is not None:
            self._write_end(allocation, end, BY_LAUNCHER)
        self._memory.recorded_ends.add((name, allocation.start))  # last, since a write above may fail

    def _record_job_end(self, allocation: AllocationState, end: JobEnd, state: SweepState) -> None:
        """Records how Slurm ended the job of an allocation whose agents recorded its end.

        Agents that a signal ended do not know why. Where Slurm does,
        this becomes the end of the attempt that they ended.
        """
        if end.status in (Status.NODE_FAIL, Status.PREEMPTED):
            self._say(f"{end.reason} ({allocation.name})")
            attempts = [state.attempts[key] for key in allocation.tasks if key in state.attempts]
            owned_attempts = [attempt for attempt in attempts if attempt.allocation == allocation.name]
            stopped_attempts = [a for a in owned_attempts if a.result and a.result.cause == STOPPED]
            self._record_failed(stopped_attempts, allocation.name, end)
        self._write_end(allocation, end, self._sweep.config.launcher.source)

    def record_planned(self, allocation: Allocation) -> None:
        """Records the content of an allocation, before it is submitted or if only its files are known."""
        planned_event = AllocationPlanned(
            allocation=allocation.name, nodes=allocation.nodes, by=allocation.by, limit_s=allocation.limit_s,
            control=allocation.control, tasks=tuple(task.key for task in allocation.tasks),
            variant=job_options(allocation.tasks[0].spec.variant) if allocation.tasks else {},
            sweep_id=allocation.sweep_id, sweep=Path(allocation.sweep_dir).name,
        )  # fmt: skip
        self._sweep.journal.write(planned_event)

    def record_claimed(self, keys: Iterable[AttemptKey], state: SweepState) -> bool:
        """Records the ends of attempts that are claimed although no living allocation holds them.

        Only the allocation that claimed an attempt may run it. If the journal does not know that allocation,
        it is read from its files and followed from then on; if that fails, the attempt is recorded as lost.
        Returns whether any of the attempts was claimed.
        """
        is_any_claimed = False
        for key in keys:
            name = self._sweep.owner_of(str(key))
            if name is None:
                continue
            is_any_claimed, allocation = True, state.allocations.get(name)
            if allocation is not None and allocation.ended is None:
                continue  # the allocation's end has to be recorded first
            if allocation is None:
                try:
                    recorded_allocation = read_allocation(self._sweep.folder.allocations / name)
                except UltrabenchError as error:
                    if may_pass(error.__cause__ or error):
                        raise
                else:
                    if recorded_allocation.name == name:
                        self.record_planned(recorded_allocation)
                        continue
            reason = f"allocation {name} claimed this run and ended without a result"
            self._record_lost([key], state, name, JobEnd(reason=reason))
        return is_any_claimed

    def _is_owned(self, key: AttemptKey, name: str, state: SweepState) -> bool:
        """Whether an allocation claimed an attempt, by the journal or, if that does not say, by the claim."""
        attempt = state.attempts.get(key)
        if attempt is not None and attempt.allocation is not None:
            return attempt.allocation == name
        return self._sweep.owner_of(str(key)) == name

    def _record_unstarted(self, allocation: AllocationState, state: SweepState, end: JobEnd) -> None:
        """Records the first run of an allocation that started no agent as tried, so that others come before it."""
        first_key = next(iter(allocation.tasks), None)
        if first_key is None or first_key.run_id not in self._run_by_id or first_key in state.attempts:
            return
        result = RunResult(status=Status.LOST, cause=NOT_STARTED, reason=end.reason)
        self._write_failed(first_key, allocation.name, result)

    def record_unstartable(self, failures: Mapping[AttemptKey, str]) -> None:
        """Records attempts as failed whose variant cannot start, each with its reason."""
        for key, reason in failures.items():
            self._write_failed(key, None, RunResult(status=Status.CRASH, cause=NOT_STARTED, reason=reason))

    def _record_lost(self, keys: Collection[AttemptKey], state: SweepState, name: str, end: JobEnd) -> None:
        attempts = [state.attempts.get(key) or AttemptState(key=key) for key in keys]
        self._record_failed([attempt for attempt in attempts if attempt.result is None], name, end)

    def _record_failed(self, attempts: Iterable[AttemptState], name: str, end: JobEnd) -> None:
        hosts = end.failed_hosts
        for attempt in attempts:
            result = attempt.result or RunResult(status=end.status, hostnames=hosts)
            result = replace(
                result, status=end.status, reason=end.reason, cause=end.cause, suspect_hosts=hosts
            )
            self._write_failed(attempt.key, name, result)

    def _write_failed(self, key: AttemptKey, name: str | None, result: RunResult) -> None:
        source, run = self._sweep.config.launcher.source, self._run_by_id.get(key.run_id)
        spec = to_dict(run.spec) if run else {}
        self._sweep.journal.write(
            Failed(**key._asdict(), allocation=name, source=source, spec=spec, result=result)
        )

    def _write_end(self, allocation: AllocationState, end: JobEnd, source: str) -> None:
        end_event = AllocationEnded(
            allocation=allocation.name, job=allocation.start, reason=end.reason, source=source,
            held_s=end.held_s, avoid=end.failed_hosts, failed_on=() if allocation.agents else end.unstarted_hosts,
        )  # fmt: skip
        self._sweep.journal.write(end_event)


def open_allocations(state: SweepState) -> dict[str, AllocationState]:
    """The allocations that may have been submitted and whose end is not recorded."""
    return {n: a for n, a in sorted(state.allocations.items()) if a.ended is None}


def visible_to(launcher: Launcher, allocations: Allocations) -> dict[str, AllocationState]:
    """The allocations among `allocations` that a launcher can see and end; those of a copied folder are none of its."""
    return {n: a for n, a in allocations.items() if sees(launcher.origin, a.by) and not a.is_copied}


def live_allocations(launcher: Launcher, state: SweepState, patience_s: float) -> dict[str, AllocationState]:
    """The open allocations that may be alive: those that the launcher finds, and those that it cannot see.

    Args:
        patience_s: seconds to wait for an allocation of which it is not clear yet whether it is over.

    Raises:
        ClusterError: the batch system does not answer.
    """
    unended, deadline_s = open_allocations(state), time.monotonic() + patience_s
    visible_allocations = visible_to(launcher, unended)
    jobs_seen = launcher.observe(visible_allocations)
    while jobs_seen.alive - jobs_seen.running - jobs_seen.queued and time.monotonic() < deadline_s:
        time.sleep(launcher.look_pause_s)
        jobs_seen = launcher.observe(visible_allocations)
    return {n: a for n, a in unended.items() if n in jobs_seen.alive or n not in visible_allocations}


def interrupt(sweep: OpenSweep, launcher: Launcher) -> None:
    """Ends the allocations that this launcher can see and records it; the sweep can be continued.

    Those that have not started are given up first, so that a job that is being submitted now runs nothing.
    """
    recorder = EndRecorder(sweep, launcher, LaunchMemory(), lambda note: None)
    visible_allocations = visible_to(launcher, open_allocations(sweep.state()))
    for name, allocation in visible_allocations.items():
        if not allocation.agents:
            recorder.give_up(name)
    held_s = launcher.cancel(visible_allocations)
    state = sweep.state()
    for name in sorted(visible_allocations.keys() & open_allocations(state).keys()):
        end = JobEnd(reason=f"the agents of {name} were ended", held_s=held_s.get(name), certain=True)
        recorder.record_end(state.allocations[name], end, state)
