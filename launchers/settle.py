"""Looks at the allocations of a sweep and writes down how they ended: what they claimed and did not finish is lost."""

import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ultrabench.errors import ClusterError, UltrabenchError, may_pass
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.allocation import Allocation, read_allocation
from ultrabench.store.events import Adopted, AllocationEnded, AllocationPlanned, Failed, Start
from ultrabench.store.folder import SweepFolder
from ultrabench.store.heartbeat import MISSED, touched
from ultrabench.store.jobs_seen import JobEnd, JobsSeen, sees
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.config.launcher_config import LauncherConfig

LATE = 1.5
"""Number of grace periods after which a touch of a journal is surely visible on other hosts (NFS caches)."""


class AgentWatchdog:
    """Tells which agents touch their journals, and which have stopped."""

    def __init__(self, folder: SweepFolder, choice: LauncherConfig, outlives_us: bool) -> None:
        """`outlives_us` means that the agents are on other hosts."""
        self._folder = folder
        self.patience_s = max(MISSED * choice.heartbeat_s, LATE * choice.grace_s if outlives_us else 0.0)
        """Seconds without a touch after which an agent counts as dead or frozen."""
        self._silence = SilenceTimer(self.patience_s / MISSED)
        self._silent_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}
        """Allocation -> seconds for which it had been silent when it was last called frozen."""
        self.frozen: dict[str, str] = {}
        """Allocation that was found frozen -> what was found."""

    def observe(self, unended: Iterable[AllocationState], running: Container[str]) -> None:
        """Reads the time stamps of allocations: those of their journals or, before there are any, of their claims.

        Args:
            running: those whose processes run; the silence of others, such as suspended ones, proves nothing.
        """
        now = time.monotonic()
        paths = {held.name: self._paths(held) for held in unended}
        self._silent_s = {n: self._silence.observe(n, found, now) for n, found in paths.items() if found}
        self._told_s |= {n: silent_s for n, silent_s in self._silent_s.items() if n not in running}

    def _paths(self, held: AllocationState) -> list[Path]:
        if not held.agents:
            return [self._folder.claims / held.name]
        return [self._folder.journal / a.journal for a in held.agents if a.journal]

    def silent(self, name: str, more_s: float = 0.0) -> bool:
        """Whether an allocation shows no sign of life, or keeps no journal that could show one.

        Args:
            more_s: seconds beyond the usual patience.
        """
        return self._silent_s.get(name, float("inf")) > self.patience_s + more_s

    def frozen_now(self, held: AllocationState) -> str | None:
        """Why this running allocation has to be ended; None while it lives. It is said again after each `patience_s`."""
        silent_s = self._silent_s.get(held.name, 0.0) if held.agents else 0.0
        if silent_s < self._told_s.get(held.name, 0.0):
            del self._told_s[held.name]
        if silent_s - self._told_s.get(held.name, 0.0) <= self.patience_s:
            return None
        self._told_s[held.name] = silent_s
        self.frozen[held.name] = f"the agent on {held.agents[-1].host} did not move for {silent_s:.0f} s"
        return self.frozen[held.name]


class SilenceTimer:
    """Counts for how long the writers of journal files have not touched them, as far as somebody looked.

    A time stamp that changes is a sign of life, whatever clock made it. A pause of the launcher itself (a stuck
    file server, a sleeping laptop) says nothing about the agents, so it counts for a short time only.
    """

    def __init__(self, most_gap_s: float) -> None:
        """`most_gap_s` is the largest number of seconds between two looks that is counted in full."""
        self._most_gap_s = most_gap_s
        self._seen: dict[str, tuple[float, float, float]] = {}
        """Name -> latest time stamp, when it was looked at, and seconds without a change."""

    def observe(self, name: str, journals: list[Path], now: float) -> float:
        """Seconds that none of these files was touched; `now` is of a monotonic clock."""
        stamp = max((touched(path) for path in journals), default=0.0)
        held, looked, still_s = self._seen.get(name, (stamp, now, 0.0))
        still_s = still_s + min(now - looked, self._most_gap_s) if stamp == held else 0.0
        self._seen[name] = (stamp, now, still_s)
        return still_s


class Settler:
    """Follows the allocations of one launch of a sweep, and writes to its journal what became of them."""

    def __init__(
        self, sweep: OpenSweep, launcher: Launcher, say: Callable[[str], None] = lambda note: None
    ) -> None:
        """`say` is told what a person should know, each time it is found."""
        self._sweep, self._launcher, self._say = sweep, launcher, say
        self._specs = {c.run_id: to_dict(c.spec) for c in sweep.plan.runs}
        self.watchdog = AgentWatchdog(sweep.folder, sweep.config.launcher, launcher.outlives_us)
        self.claimed: set[str] = set()
        """Allocations that agents own, whether or not they have written anything."""
        self.settled: set[tuple[str, Start]] = set()
        """Allocations, and the start of each, whose end was written down."""
        self._adopted: set[str] = set()
        """Allocations of other launches that this one follows."""
        self._held_s: dict[str, float] = {}
        """Allocation -> seconds for which it had held its nodes when it was last seen."""

    def look(self) -> tuple[JobsSeen, SweepState]:
        """The allocations that live, and the state after the ends of all others were written down."""
        # The launcher is asked first and the journal read second: what ended in between has written its end.
        state = self._sweep.state()
        asked = visible(self._launcher, state.allocations)
        started = {n for n, held in state.allocations.items() if held.agents} | self.claimed
        seen = self._launcher.observe(asked)
        state = self._sweep.state()
        unended = open_allocations(state)
        self._held_s |= seen.held_s
        alive = frozenset(n for n in seen.alive if n in unended or n in seen.queued)
        seen = replace(seen, alive=alive, held_s=self._held_s)
        self.watchdog.observe(unended.values(), seen.running)
        self._end_frozen(seen, state)
        for name, seconds in sorted(seen.timed.items()):
            if state.allocations[name].ended is not None:
                self.tell_held(state.allocations[name], seconds)
        for name in sorted(seen.alive - self._adopted):
            self._adopted.add(name)
            if state.allocations[name].submission[0] != self._sweep.journal.name:
                self._sweep.journal.write(Adopted(allocation=name, job=seen.jobs.get(name, {})))
        alive = seen.alive | self._settle_the_rest(seen, state, asked, started)
        return replace(seen, alive=alive), self._sweep.state()

    def _end_frozen(self, seen: JobsSeen, state: SweepState) -> None:
        """Ends allocations whose leading agent shows no sign of life; otherwise they would last until their time limit."""
        for name in sorted(seen.alive & seen.running):
            if reason := self.watchdog.frozen_now(state.allocations[name]):
                self._say(f"{reason}: ending {name}")
                try:
                    self._launcher.end_frozen(name, seen.jobs[name])
                except ClusterError as error:  # it is found frozen again
                    self._say(f"cannot end {name}: {error}; trying again")

    def _settle_the_rest(
        self, seen: JobsSeen, state: SweepState, asked: Container[str], started: Container[str]
    ) -> frozenset[str]:
        """Writes down the ends of allocations that do not live; returns those of which nobody knows whether they live.

        Args:
            asked: allocations about which the launcher was asked.
            started: allocations whose agents had started before that.
        """
        unclear = set()
        for name, held in sorted(state.allocations.items()):
            if name in seen.alive or (name, held.start) in self.settled:
                continue
            end = seen.ended_jobs.get(name) if name in asked else self._abandoned(held)
            if end and name in self.watchdog.frozen:
                end = replace(end, status=Status.LOST, reason=self.watchdog.frozen[name])
            if held.ended is not None:
                self.settle(held, None, state)
            elif end and (self._is_dead(held, end) if name in started else self.give_up(name)):
                self.settle(held, end, state)
            elif end or name not in asked:  # another's job, or one submitted since the launcher was asked
                unclear.add(name)
        return frozenset(unclear)

    def _is_dead(self, held: AllocationState, end: JobEnd) -> bool:
        """Whether an allocation whose agents had started is over; one that cannot be seen may still run.

        The batch system has to say so, and the agents must have stopped touching their journal.
        """
        if end.certain or self.watchdog.silent(held.name):
            return True
        note = f"{end.reason}, but the agents of {held.name} have touched their journal: it is over when they"
        self._say(f"{note} have not for {self.watchdog.patience_s:.0f} s")
        return False

    def _abandoned(self, held: AllocationState) -> JobEnd | None:
        """The end of an allocation that this launcher cannot see, once nothing of it can be alive any more."""
        if held.ended is not None or sees(self._launcher.by, held.by):
            return None
        whose = f"{held.by.get('user')} on {held.by.get('cluster') or held.by.get('host')}"
        # Processes, unlike jobs, do not wait in a queue; should they start all the same, they find our claim.
        told = any(a.journal for a in held.agents) or not (held.agents or held.by.get("cluster"))
        if told and self.watchdog.silent(held.name, held.limit_s):
            reason = f"the agents of {held.name}, of {whose}, were silent for longer than its time limit"
            return JobEnd(status=Status.LOST, reason=reason, certain=True)
        self._say(
            f"{held.name} is a job of {whose}: it is watched, and neither ended nor replaced. If it is gone for "
            "good, launch from a terminal without --yes: jobs that have not started can then be replaced"
        )
        return None

    def take_over(self, names: Iterable[str]) -> None:
        """Claims allocations of others that have not started: they will run nothing, and can be replaced."""
        state = self._sweep.state()
        for name in names:
            if not state.allocations[name].agents and self.give_up(name):
                end = JobEnd(status=Status.LOST, reason=f"taken over by {self._launcher.by['user']}")
                self.settle(state.allocations[name], end, state)

    def give_up(self, name: str) -> bool:
        """Claims an allocation that has not started, so that it never runs; False when its agents own it already.

        Another launcher may still be about to submit it, however long that takes: its agent finds this claim.
        """
        given_up = self._sweep.give_up(name)
        if not given_up:
            self.claimed.add(name)
        return given_up

    def settle(self, held: AllocationState, told: JobEnd | None, state: SweepState) -> None:
        """Writes down that an allocation is over, and that what it claimed and did not finish is lost.

        Args:
            told: how the launcher saw it end; None when its agents wrote their end themselves.

        Raises:
            OSError: a claim cannot be read now; nothing was written.
        """
        name = held.name
        owned = [key for key in held.tasks if self._owned(key, name, state)]
        end = told or JobEnd(status=Status.LOST, reason=f"the agents of {name} ended ({held.ended})")
        self._lose(owned, state, name, end)
        if told is not None:
            self._tell_end(held, told.reason, told.elapsed_s)
        self.settled.add((name, held.start))  # only now: a disk may have refused what was to be written

    def tell_held(self, held: AllocationState, seconds: float) -> None:
        """Writes down for how many seconds an ended allocation held its nodes, as the batch system reports it."""
        self._tell_end(held, f"held for {seconds:.0f} s", seconds, source="slurm")

    def plan(self, allocation: Allocation) -> None:
        """Writes down what an allocation holds, before it is submitted or when only its files are known."""
        tasks = tuple(AttemptKey(t.run_id, t.repeat, t.attempt) for t in allocation.tasks)
        planned = AllocationPlanned(
            allocation=allocation.name, nodes=allocation.nodes, by=allocation.by, limit_s=allocation.limit_s,
            control=allocation.control, tasks=tasks,
        )  # fmt: skip
        self._sweep.journal.write(planned)

    def claimed_already(self, keys: Iterable[AttemptKey], state: SweepState) -> bool:
        """Whether some of these attempts were claimed, although no living allocation of them is known.

        Only the allocation that claimed an attempt may run it. If the journal does not know that allocation, it is
        read from its files and followed from then on; if that fails, the attempt is lost.
        """
        found = False
        for key in keys:
            name = self._sweep.owner_of(str(key))
            if name is None:
                continue
            found, held = True, state.allocations.get(name)
            if held is not None and held.ended is None:
                continue  # its end is settled first
            if held is None:
                try:
                    allocation = read_allocation(self._sweep.folder.allocations / name)
                except UltrabenchError as error:
                    if may_pass(error.__cause__ or error):
                        raise
                else:
                    if allocation.name == name:
                        self.plan(allocation)
                        continue
            reason = f"allocation {name} had claimed this run and ended without a result"
            self._lose([key], state, name, JobEnd(status=Status.LOST, reason=reason))
        return found

    def _owned(self, key: AttemptKey, name: str, state: SweepState) -> bool:
        """Whether an allocation claimed an attempt: the journal tells, and where it does not, the claim file."""
        attempt = state.attempts.get(key)
        if attempt is not None and attempt.allocation is not None:
            return attempt.allocation == name
        return self._sweep.owner_of(str(key)) == name

    def _lose(self, keys: Collection[AttemptKey], state: SweepState, name: str, end: JobEnd) -> None:
        for key in keys:
            attempt = state.attempts.get(key)
            if attempt is None or attempt.result is None:
                failed = Failed(
                    **key._asdict(), allocation=name,
                    source="slurm" if self._launcher.outlives_us else "launcher",
                    spec=self._specs.get(key.run_id, {}),
                    result=RunResult(status=end.status, reason=end.reason, cause=end.cause),
                )  # fmt: skip
                self._sweep.journal.write(failed)

    def _tell_end(
        self, held: AllocationState, reason: str, held_s: float | None, source: str = "launcher"
    ) -> None:
        end = AllocationEnded(
            allocation=held.name, restart=held.start.restart, job=held.start if held.start.job_id else None,
            reason=reason, source=source, held_s=held_s,
        )  # fmt: skip
        self._sweep.journal.write(end)


def open_allocations(state: SweepState) -> dict[str, AllocationState]:
    """Allocations that may have been submitted and have not said that they ended."""
    return {n: held for n, held in sorted(state.allocations.items()) if held.ended is None}


def visible(launcher: Launcher, allocations: Mapping[str, AllocationState]) -> dict[str, AllocationState]:
    """Those of the allocations that a launcher can see and end."""
    return {n: held for n, held in allocations.items() if sees(launcher.by, held.by)}


def interrupt(sweep: OpenSweep, launcher: Launcher) -> None:
    """Ends what this launcher can see, and writes its end down; the sweep can be continued."""
    settler = Settler(sweep, launcher)
    held_s = launcher.cancel(visible(launcher, open_allocations(sweep.state())))
    state = sweep.state()
    for name, held in visible(launcher, open_allocations(state)).items():
        if not held.agents:
            settler.give_up(name)  # one that is still starting finds the claim
        reason = f"the agents of {name} were ended"
        end = JobEnd(status=Status.LOST, reason=reason, elapsed_s=held_s.get(name), certain=True)
        settler.settle(held, end, state)
