"""Follows the allocations of a sweep and records how they ended; attempts they did not finish are lost."""

import math
import time
from collections.abc import Collection, Container, Iterable
from dataclasses import replace
from pathlib import Path

from ultrabench.errors import ClusterError, UltrabenchError, may_pass
from ultrabench.launchers.launcher import Allocations, Launcher, Say
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.allocation import Allocation, read_allocation
from ultrabench.store.events import Adopted, AllocationEnded, AllocationPlanned, Failed, Start
from ultrabench.store.folder import MISSED_TOUCHES, SweepFolder, touched
from ultrabench.store.jobs_seen import JobEnd, JobsSeen, sees
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.config.sweep_config import LauncherConfig

SEEN_AFTER_GRACES = 1.5
"""Number of grace periods after which other hosts see that a journal was touched, despite NFS caches."""


class AgentWatchdog:
    """Tells at each look of this launcher which agents still touch their journals, and which have stopped.

    A time stamp that changes is a sign of life, whatever clock made it. A pause of the launcher itself (a
    stuck file server, a sleeping laptop) says nothing about the agents, so only a short part of it counts.
    """

    def __init__(self, folder: SweepFolder, choice: LauncherConfig) -> None:
        self._folder = folder
        self.patience_s = max(MISSED_TOUCHES * choice.heartbeat_s, SEEN_AFTER_GRACES * choice.grace_s)
        """Seconds after which an agent that has not touched its journal counts as dead or frozen."""
        self._seen: dict[str, tuple[float, float, float]] = {}
        """Allocation -> its latest time stamp, the time of the latest look, and the seconds without a change."""
        self._told_s: dict[str, float] = {}
        """Allocation -> seconds of silence that count no more, since they were reported, or it was not running."""
        self.frozen: dict[str, str] = {}
        """Allocation that was found frozen -> the message about it."""

    def observe(self, unended: Iterable[AllocationState], running: Container[str]) -> None:
        """Reads the time stamps of the allocations' journals or, before they have any, of their claims.

        Args:
            running: allocations whose processes run; others may be suspended, so silence proves nothing.
        """
        paths = {held.name: self._paths(held) for held in unended}
        self._seen = {name: self._look(name, found) for name, found in paths.items() if found}
        self._told_s |= {name: self.silent_s(name) for name in self._seen if name not in running}

    def _paths(self, held: AllocationState) -> list[Path]:
        if not held.agents:
            return [self._folder.claims / held.name]
        return [self._folder.journal / a.journal for a in held.agents if a.journal]

    def _look(self, name: str, paths: Iterable[Path]) -> tuple[float, float, float]:
        stamp, now = max(map(touched, paths)), time.monotonic()
        before, looked, silent_s = self._seen.get(name, (stamp, now, 0.0))
        silent_s += min(now - looked, self.patience_s / MISSED_TOUCHES)
        return stamp, now, silent_s if stamp == before else 0.0

    def silent_s(self, name: str) -> float:
        """Seconds without a sign of life; infinite for an allocation that has no journal to show one."""
        return self._seen.get(name, (0.0, 0.0, math.inf))[2]

    def silent(self, name: str, more_s: float = 0.0) -> bool:
        """Whether an allocation has been silent for longer than `patience_s` and `more_s` together."""
        return self.silent_s(name) > self.patience_s + more_s

    def frozen_now(self, held: AllocationState) -> str | None:
        """Why this running allocation must be ended, once in each `patience_s`; None otherwise."""
        silent_s = self.silent_s(held.name) if held.agents and held.name in self._seen else 0.0
        if silent_s < self._told_s.get(held.name, 0.0):
            del self._told_s[held.name]
        if silent_s - self._told_s.get(held.name, 0.0) <= self.patience_s:
            return None
        self._told_s[held.name] = silent_s
        self.frozen[held.name] = f"the agent on {held.agents[-1].host} did not move for {silent_s:.0f} s"
        return self.frozen[held.name]


class Settler:
    """Follows the allocations of a sweep for one launch, and records in the journal how they ended."""

    def __init__(self, sweep: OpenSweep, launcher: Launcher, say: Say = lambda note: None) -> None:
        """`say` is called with each message for the user."""
        self._sweep, self._launcher, self._say = sweep, launcher, say
        self._runs = {run.run_id: run for run in sweep.plan.runs}
        self.watchdog = AgentWatchdog(sweep.folder, sweep.config.launcher)
        self.claimed: set[str] = set()
        """Allocations that agents own, even if they have not written anything yet."""
        self.settled: set[tuple[str, Start]] = set()
        """Allocations whose end was recorded, each with its start, since a requeue starts it again."""
        self._adopted: set[str] = set()
        """Allocations that this launch has seen alive; it recorded those of other launches as adopted."""
        self._held_s: dict[str, float] = {}
        """Allocation -> seconds for which it had held its nodes when the launcher last saw it."""

    def look(self) -> tuple[JobsSeen, SweepState]:
        """The living allocations, and the state after the ends of all others were recorded."""
        # The journal is read after the launcher is asked: what ended in between has recorded its end there.
        state = self._sweep.state()
        asked = visible(self._launcher, state.allocations)
        started = {n for n, held in state.allocations.items() if held.agents} | self.claimed
        seen = self._launcher.observe(asked)
        state = self._sweep.state()
        unended = open_allocations(state)
        self._held_s |= seen.held_s
        alive = seen.alive & (unended.keys() | seen.queued)
        # Agents of this machine record their end before they have removed their files.
        leaving = frozenset() if self._launcher.by["cluster"] else seen.running - unended.keys()
        seen = replace(seen, alive=alive, held_s=self._held_s, leaving=seen.leaving | leaving)
        self.watchdog.observe(unended.values(), seen.running)
        self._end_frozen(seen, state)
        for name, seconds in sorted(seen.timed.items()):
            if state.allocations[name].ended is not None:
                self._tell_end(state.allocations[name], f"held for {seconds:.0f} s", seconds, "slurm")
        for name in sorted(seen.alive - self._adopted):
            self._adopted.add(name)
            if state.allocations[name].submission[0] != self._sweep.journal.name:
                self._sweep.journal.write(Adopted(allocation=name, job=seen.jobs.get(name, {})))
        alive = seen.alive | self._settle_the_rest(seen, state, asked, started)
        return replace(seen, alive=alive), self._sweep.state()

    def _end_frozen(self, seen: JobsSeen, state: SweepState) -> None:
        """Ends allocations whose leading agent is frozen, since they would last until their time limit."""
        for name in sorted(seen.alive & seen.running):
            if reason := self.watchdog.frozen_now(state.allocations[name]):
                self._say(f"{reason}: ending {name}")
                try:
                    self._launcher.end_frozen(name, seen.jobs[name])
                except ClusterError as error:  # a later look finds it frozen again
                    self._say(f"cannot end {name}: {error}; trying again")

    def _settle_the_rest(
        self, seen: JobsSeen, state: SweepState, asked: Container[str], started: Container[str]
    ) -> frozenset[str]:
        """Records the ends of allocations that are not alive; returns those that may or may not be alive.

        Args:
            asked: allocations that the launcher was asked about.
            started: allocations whose agents had started before the launcher was asked.
        """
        unclear = set[str]()
        for name, held in sorted(state.allocations.items()):
            if name in seen.alive or (name, held.start) in self.settled:
                continue
            end = seen.ended_jobs.get(name) if name in asked else self._abandoned(held)
            if end and name in self.watchdog.frozen:
                end = replace(end, status=Status.LOST, reason=self.watchdog.frozen[name], agent_gone=False)
            if held.ended is not None:
                self.settle(held, None, state)
            elif end and (self._is_dead(held, end) if name in started else self.give_up(name)):
                self.settle(held, end, state)
            elif end or name not in asked:  # another user's job, or one submitted later
                unclear.add(name)
        return frozenset(unclear)

    def _is_dead(self, held: AllocationState, end: JobEnd) -> bool:
        """Whether an allocation whose agents had started is over; one that is not visible may still run.

        The launcher must be certain that it ended, or the agents must have stopped touching their journal.
        """
        if end.certain or self.watchdog.silent(held.name):
            return True
        note = f"{end.reason}, but the agents of {held.name} touched their journal lately"
        self._say(f"{note}; it counts as over after {self.watchdog.patience_s:.0f} s of silence")
        return False

    def _abandoned(self, held: AllocationState) -> JobEnd | None:
        """The end of an allocation that this launcher cannot see; None while it may still be alive."""
        if held.ended is not None or sees(self._launcher.by, held.by):
            return None
        whose = f"{held.by.get('user')} on {held.by.get('cluster') or held.by.get('host')}"
        # Processes, unlike jobs, do not wait in a queue. If they start nevertheless, they find our claim.
        told = any(a.journal for a in held.agents) or not (held.agents or held.by.get("cluster"))
        if told and self.watchdog.silent(held.name, held.limit_s):
            reason = f"the agents of {held.name}, of {whose}, were silent for longer than its time limit"
            return JobEnd(reason=reason, certain=True)
        watched = f"{held.name} is a job of {whose}: it is watched, and neither ended nor replaced"
        advice = "launch from a terminal without --yes: jobs that have not started can then be replaced"
        self._say(f"{watched}. If it is gone for good, {advice}")
        return None

    def withdraw(self, names: Iterable[str], reason: str) -> None:
        """Claims allocations that have not started and records their end, so that they can be replaced."""
        state = self._sweep.state()
        for name in names:
            if not state.allocations[name].agents and self.give_up(name):
                self.settle(state.allocations[name], JobEnd(reason=reason), state)

    def give_up(self, name: str) -> bool:
        """Claims an allocation that has not started, so that it never runs; False if its agents own it.

        If another launcher submits the allocation later, its agent finds this claim and runs nothing.
        """
        given_up = self._sweep.give_up(name)
        if not given_up:
            self.claimed.add(name)
        return given_up

    def settle(self, held: AllocationState, told: JobEnd | None, state: SweepState) -> None:
        """Records that an allocation is over, and that the attempts it claimed and did not finish are lost.

        Args:
            told: how the launcher saw it end; None if its agents recorded their end themselves.

        Raises:
            OSError: a claim cannot be read now; nothing was recorded.
        """
        name = held.name
        owned = [key for key in held.tasks if self._owned(key, name, state)]
        end = told or JobEnd(reason=f"the agents of {name} ended ({held.ended})")
        self._lose(owned, state, name, end)
        if told is not None:
            self._tell_end(held, told.reason, told.held_s, "launcher")
        self.settled.add((name, held.start))  # last, since the writes above may have failed

    def record_planned(self, allocation: Allocation) -> None:
        """Records the content of an allocation, before it is submitted or if only its files are known."""
        planned = AllocationPlanned(
            allocation=allocation.name, nodes=allocation.nodes, by=allocation.by, limit_s=allocation.limit_s,
            control=allocation.control, tasks=tuple(task.key for task in allocation.tasks),
        )  # fmt: skip
        self._sweep.journal.write(planned)

    def settle_claimed(self, keys: Iterable[AttemptKey], state: SweepState) -> bool:
        """Settles those of the attempts that are claimed although no living allocation holds them.

        Only the allocation that claimed an attempt may run it. If the journal does not know that allocation,
        it is read from its files and followed from then on; if that fails, the attempt is recorded as lost.
        Returns whether any of the attempts was claimed.
        """
        found = False
        for key in keys:
            name = self._sweep.owner_of(str(key))
            if name is None:
                continue
            found, held = True, state.allocations.get(name)
            if held is not None and held.ended is None:
                continue  # the allocation has to be settled first
            if held is None:
                try:
                    allocation = read_allocation(self._sweep.folder.allocations / name)
                except UltrabenchError as error:
                    if may_pass(error.__cause__ or error):
                        raise
                else:
                    if allocation.name == name:
                        self.record_planned(allocation)
                        continue
            reason = f"allocation {name} had claimed this run and ended without a result"
            self._lose([key], state, name, JobEnd(reason=reason))
        return found

    def _owned(self, key: AttemptKey, name: str, state: SweepState) -> bool:
        """Whether an allocation claimed an attempt, by the journal or, if that does not say, by the claim."""
        attempt = state.attempts.get(key)
        if attempt is not None and attempt.allocation is not None:
            return attempt.allocation == name
        return self._sweep.owner_of(str(key)) == name

    def _lose(self, keys: Collection[AttemptKey], state: SweepState, name: str, end: JobEnd) -> None:
        source = "slurm" if self._launcher.by["cluster"] else "launcher"
        result = RunResult(status=end.status, reason=end.reason, cause=end.cause)
        for key in keys:
            attempt, run = state.attempts.get(key), self._runs.get(key.run_id)
            if attempt is None or attempt.result is None:
                spec = to_dict(run.spec) if run else {}
                failed = Failed(**key._asdict(), allocation=name, source=source, spec=spec, result=result)
                self._sweep.journal.write(failed)

    def _tell_end(self, held: AllocationState, reason: str, held_s: float | None, source: str) -> None:
        self._sweep.journal.write(
            AllocationEnded(allocation=held.name, job=held.start, reason=reason, source=source, held_s=held_s)
        )


def open_allocations(state: SweepState) -> dict[str, AllocationState]:
    """The allocations that may have been submitted and whose end is not recorded."""
    return {n: held for n, held in sorted(state.allocations.items()) if held.ended is None}


def visible(launcher: Launcher, allocations: Allocations) -> dict[str, AllocationState]:
    """The allocations among `allocations` that a launcher can see and end."""
    return {n: held for n, held in allocations.items() if sees(launcher.by, held.by)}


def interrupt(sweep: OpenSweep, launcher: Launcher) -> None:
    """Ends the allocations that this launcher can see and records it; the sweep can be continued.

    Those that have not started are given up first, so that a job that is being submitted now runs nothing.
    """
    settler = Settler(sweep, launcher)
    mine = visible(launcher, open_allocations(sweep.state()))
    for name, held in mine.items():
        if not held.agents:
            settler.give_up(name)
    held_s = launcher.cancel(mine)
    state = sweep.state()
    for name in sorted(mine.keys() & open_allocations(state).keys()):
        end = JobEnd(reason=f"the agents of {name} were ended", held_s=held_s.get(name), certain=True)
        settler.settle(state.allocations[name], end, state)
