"""Takes an open sweep to its end: looks, asks `decide` what to do, does it, and looks again."""

import time
import uuid
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ultrabench.errors import ClusterError, SweepFolderError, may_pass
from ultrabench.launchers.agent_watchdog import AgentWatchdog
from ultrabench.launchers.allocate import allocations, shapes
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.settle import Settler
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import Adopted, Submitted, Submitting
from ultrabench.store.heartbeat import SIGN_OF_LIFE_S, show_presence
from ultrabench.store.jobs_seen import JobEnd, JobsSeen, sees
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.decide import Actions, DeadEnd, Launch, decide
from ultrabench.sweep.price import PlannedJob

DISK_PATIENCE_S = 300.0
"""Seconds to keep retrying a full, read-only or unresponsive results folder."""
DISK_PAUSE_S = 2.0
CANCEL_S = 10.0
"""Seconds between two tries to cancel jobs that are to end."""
DECISION_S = 5.0
"""Seconds after which a decision is taken anew though nothing has changed: some things change by the clock alone."""

Show = Callable[[SweepState, frozenset[str]], None]


class Reconciler:
    """Follows one launch of a sweep."""

    def __init__(
        self,
        sweep: OpenSweep,
        launcher: Launcher,
        show: Show,
        max_gpu_hours: float | None = None,
        say: Callable[[str], None] = lambda note: None,
    ) -> None:
        """`show` is called at every look with the state and the living allocations, `say` with what is new."""
        self.sweep, self.launcher = sweep, launcher
        self.show, self.say = show, say
        self.limits = replace(launcher.limits, max_gpu_hours=max_gpu_hours)
        self.stopped: str | None = None
        """Why it ended before everything was done."""
        self.over_budget = False
        """Whether it ended because the next job was too expensive for what is left of the budget."""
        self.submitted = 0
        """Number of allocations submitted by this launch."""
        self._settler = Settler(sweep, launcher)
        self._watchdog = AgentWatchdog(sweep.folder, sweep.config.launcher, launcher.outlives_us)
        self._said: set[str] = set()
        self._adopted: set[str] = set()
        self._held_s: dict[str, float] = {}
        """Allocation -> seconds for which it has held its nodes, when it was last seen."""
        self._cancelled_at = -CANCEL_S
        self._touched = 0.0
        self._failing_since: float | None = None
        self._leaving = frozenset[str]()
        attempts = self.sweep.state().attempts.items()
        self._old = frozenset(key for key, attempt in attempts if attempt.result is not None)
        """Attempts that ended before this launch."""
        self._ended_at: dict[AttemptKey, float] = {}
        """When this launcher saw attempts end, by its monotonic clock: clocks of nodes may differ by hours."""
        self._excused = frozenset[str]()
        """Allocations that were there when the sweep was paused or cancelled."""
        self._decided: tuple[float, object, Actions] | None = None
        """When the latest decision was taken, what for, and what it was."""

    def run(self) -> SweepState:
        """Goes on until nothing is left to do, or somebody stops the sweep; gives the last state.

        Raises:
            ClusterError: allocations end again and again without running anything.
        """
        while True:
            try:
                state, busy = self.once()
            except (OSError, SweepFolderError) as error:
                self._wait_for_disk(error)
                continue
            self._failing_since = None
            if not busy and (state.cancelled or not self._leaving):
                return state
            time.sleep(self.launcher.rest_s)

    def _wait_for_disk(self, error: OSError | SweepFolderError) -> None:
        """Waits some minutes for somebody to mend the disk; after that, what to do is decided anew."""
        self.sweep.folder.require_present()
        cause = error if isinstance(error, OSError) else error.__cause__
        if not may_pass(error) and not (cause and may_pass(cause)):
            raise error
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since > DISK_PATIENCE_S:
            raise ClusterError(
                f"{error}; waited {DISK_PATIENCE_S / 60:g} minutes; what runs goes on: mend it, then launch again"
            ) from error
        self._say_once(f"cannot use {self.sweep.folder.path} ({cause}); trying again, jobs go on")
        time.sleep(DISK_PAUSE_S)

    def once(self) -> tuple[SweepState, bool]:
        """Looks, decides and acts once; gives the state and whether there is anything to wait for.

        Raises:
            ClusterError: allocations end again and again without running what was asked for.
        """
        if time.monotonic() - self._touched > SIGN_OF_LIFE_S:
            self._touched = time.monotonic()
            show_presence(self.sweep.journal.path)
        seen, state = self.observe()
        self.show(state, seen.alive)
        actions = self._decide(state, seen)
        self._say_once(*seen.notes, *self._other_commits(state), *actions.notes)
        self.stopped, self.over_budget = actions.stopped, actions.over_budget
        if actions.dead_end:
            raise ClusterError(self._told_of(actions.dead_end))
        if actions.end_jobs:
            return state, self._cancel(seen, state)
        if actions.submit:
            self._submit(actions, state)
        return state, bool(seen.alive) or (actions.wait and self.stopped is None)

    def _decide(self, state: SweepState, seen: JobsSeen) -> Actions:
        """What to do now; decided anew when the journal or what lives has changed, else every 5 s."""
        now = time.monotonic()
        if state.paused or state.cancelled:
            self._excused |= state.allocations.keys()
        for key, attempt in state.attempts.items():
            if attempt.result is not None and key not in self._old:
                self._ended_at.setdefault(key, now)
        ground = (self.sweep.known.heard, seen.alive)
        if self._decided and self._decided[1] == ground and now - self._decided[0] < DECISION_S:
            return self._decided[2]
        launch = Launch(
            name=self.sweep.journal.name, by=self.launcher.by, accepts=self.sweep.accepts, old=self._old,
            ended_s={key: now - at for key, at in self._ended_at.items()}, excused=self._excused,
        )  # fmt: skip
        actions = decide(self.sweep.plan, state, seen, self.limits, launch, time.time())
        self._decided = (now, ground, actions)
        return actions

    def observe(self) -> tuple[JobsSeen, SweepState]:
        """The allocations that live, and the state after the ends of all others were written down."""
        # The launcher is asked first and the journal read second: what ended in between has written its end.
        state = self.sweep.state()
        known = visible(self.launcher, state, state.allocations)
        started = {n for n, held in state.allocations.items() if held.agents} | self._settler.claimed
        seen = self.launcher.observe(known)
        state = self.sweep.state()
        revived = {n for n in seen.queued if n in state.allocations and state.allocations[n].ended}
        unended = set(open_allocations(state))
        self._held_s |= seen.held_s
        seen = replace(seen, alive=seen.alive & (unended | revived), held_s=self._held_s)
        self._leaving = seen.leaving
        self._watchdog.observe((state.allocations[name] for name in sorted(unended)), seen.running)
        self._end_frozen(seen, state)
        for name, seconds in sorted(seen.timed.items()):
            if state.allocations[name].ended is not None:
                self._settler.tell_held(state.allocations[name], seconds)
        own = self.sweep.journal.name
        for name in sorted(seen.alive - self._adopted):
            self._adopted.add(name)
            if state.allocations[name].submission[0] != own:
                self.sweep.journal.write(Adopted(allocation=name, job=seen.jobs.get(name, {})))
        alive = seen.alive | self._settle_the_rest(seen, state, known, started)
        return replace(seen, alive=alive), self.sweep.state()

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
            if name in seen.alive or (name, held.start) in self._settler.settled:
                continue
            end = seen.ended_jobs.get(name) if name in asked else self._abandoned(held)
            if end and name in self._watchdog.frozen:
                end = replace(end, status=Status.LOST, reason=self._watchdog.frozen[name])
            if held.ended is not None:
                self._settler.settle(held, None, state)
            elif end and (self._is_dead(held, end) if name in started else self._settler.give_up(name)):
                self._settler.settle(held, end, state)
            elif end or name not in asked:  # another's job, or one submitted since the launcher was asked
                unclear.add(name)
        return frozenset(unclear)

    def _is_dead(self, held: AllocationState, end: JobEnd) -> bool:
        """Whether an allocation whose agents had started is over; one that cannot be seen may still run.

        The batch system has to say so, and the agents must have stopped touching their journal.
        """
        if end.certain or self._watchdog.silent(held.name):
            return True
        wait_s = self._watchdog.patience_s
        note = f"{end.reason}, but the agents of {held.name} have touched their journal: it is over when they"
        self._say_once(f"{note} have not for {wait_s:.0f} s")
        return False

    def _abandoned(self, held: AllocationState) -> JobEnd | None:
        """The end of an allocation that this launcher cannot see, once nothing of it can be alive any more."""
        if held.ended is not None or sees(self.launcher.by, held.by):
            return None
        whose = f"{held.by.get('user')} on {held.by.get('cluster') or held.by.get('host')}"
        # Processes, unlike jobs, do not wait in a queue; should they start all the same, they find our claim.
        told = any(a.journal for a in held.agents) or not (held.agents or held.by.get("cluster"))
        if told and self._watchdog.silent(held.name, held.limit_s):
            reason = f"the agents of {held.name}, of {whose}, were silent for longer than its time limit"
            return JobEnd(status=Status.LOST, reason=reason, certain=True)
        self._say_once(
            f"{held.name} is a job of {whose}: it is watched, and neither ended nor replaced. If it is gone for "
            "good, launch from a terminal without --yes: jobs that have not started can then be replaced"
        )
        return None

    def take_over(self, names: Iterable[str]) -> None:
        """Claims allocations of others that have not started: they will run nothing, and can be replaced."""
        state = self.sweep.state()
        for name in names:
            if not state.allocations[name].agents and self._settler.give_up(name):
                end = JobEnd(status=Status.LOST, reason=f"taken over by {self.launcher.by['user']}")
                self._settler.settle(state.allocations[name], end, state)

    def _end_frozen(self, seen: JobsSeen, state: SweepState) -> None:
        """Ends allocations whose leading agent shows no sign of life; otherwise they would last until their time limit."""
        for name in sorted(seen.alive & seen.running):
            if reason := self._watchdog.frozen_now(state.allocations[name]):
                self._say_once(f"{reason}: ending {name}")
                try:
                    self.launcher.end_frozen(name, seen.jobs[name])
                except ClusterError as error:  # it is found frozen again
                    self._say_once(f"cannot end {name}: {error}; trying again")

    def _cancel(self, seen: JobsSeen, state: SweepState) -> bool:
        """Ends what this launcher can see, again every CANCEL_S; returns whether something is left."""
        mine = visible(self.launcher, state, seen.alive)
        if mine and time.monotonic() - self._cancelled_at >= CANCEL_S:
            self._cancelled_at = time.monotonic()
            try:
                self.launcher.cancel(mine)
            except ClusterError as error:
                self._say_once(f"cannot cancel: {error}; trying again until it is done")
        return bool(mine)

    def _submit(self, actions: Actions, state: SweepState) -> None:
        """Submits jobs, unless the program has changed or somebody has claimed what they are to run."""
        launched, now = self.sweep.kernel_digest, self.sweep.config.kernel.digest()
        if launched != now:
            self.stopped = (
                f"the training program changed under the sweep (kernel_digest {launched} -> {now}); launch again to "
                "go on with the new one"
            )
            return
        if self._settler.claimed_already((a.key for job in actions.submit for a in job.attempts), state):
            return  # what has been claimed is settled first
        self._say_once(*(f"{node} is not used again: {why}" for node, why in actions.avoid.items()))
        for array in shapes(actions.submit, self.limits.max_array):
            self._submit_array(array, sorted(actions.avoid))

    def _submit_array(self, jobs: Sequence[PlannedJob], avoid: list[str]) -> None:
        sweep, journal = self.sweep, self.sweep.journal
        token = uuid.uuid4().hex
        made = allocations(
            sweep.plan, sweep.folder, jobs, token=token, by=self.launcher.by, kernel_digest=sweep.kernel_digest,
            git_commit=sweep.git_commit, cores=sweep.environment.get("cores"),
        )  # fmt: skip
        for allocation in made:
            allocation.write()
            self._settler.plan(allocation)
            journal.write(Submitting(allocation=allocation.name, token=token))
        submitted = self.launcher.submit(made, avoid, self.say)
        self.submitted += len(made)
        for name, job in submitted.items():
            journal.write(Submitted(allocation=name, job=job))

    def _other_commits(self, state: SweepState) -> list[str]:
        """A note for each node that runs another commit than this launcher."""
        own = self.sweep.git_commit
        nodes = [n for a in state.allocations.values() for n in a.preflight.get("nodes") or ()]
        others = {(n["host"], c) for n in nodes if own and (c := n.get("git_commit")) and c != own}
        return [f"{host} runs commit {c[:12]}, this launcher {own[:12]}" for host, c in sorted(others) if own]

    def _told_of(self, dead_end: DeadEnd) -> str:
        """Why the launch gives up, with the last line of a job's log."""
        log, said = _last_said(self.sweep.folder.allocations / dead_end.allocation)
        return (
            f"{dead_end.number} allocations in a row ended without running {dead_end.what} ({dead_end.reason}"
            f"{f'; its log ends: {said[:200]}' if said else ''}); see {log}, then launch again"
        )

    def _say_once(self, *notes: str) -> None:
        """Says what was not said before."""
        for note in notes:
            if note not in self._said:
                self._said.add(note)
                self.say(note)


def open_allocations(state: SweepState) -> list[str]:
    """Allocations that may have been submitted and have not said that they ended."""
    return sorted(n for n, a in state.allocations.items() if a.ended is None)


def visible(launcher: Launcher, state: SweepState, names: Iterable[str]) -> dict[str, AllocationState]:
    """Those allocations that a launcher can see and end."""
    found = {name: state.allocations[name] for name in sorted(names)}
    return {name: held for name, held in found.items() if sees(launcher.by, held.by)}


def interrupt(sweep: OpenSweep, launcher: Launcher) -> None:
    """Ends what this launcher can see, and writes its end down; the sweep can be continued."""
    state, settler = sweep.state(), Settler(sweep, launcher)
    held_s = launcher.cancel(visible(launcher, state, open_allocations(state)))
    state = sweep.state()
    for name, held in visible(launcher, state, open_allocations(state)).items():
        if not held.agents:
            settler.give_up(name)  # one that is still starting finds the claim
        reason = f"the agents of {name} were ended"
        end = JobEnd(status=Status.LOST, reason=reason, elapsed_s=held_s.get(name), certain=True)
        settler.settle(held, end, state)


def _last_said(folder: Path) -> tuple[Path, str]:
    """The first log of an allocation's agents that says anything, and its last line; on this machine
    submitit keeps one log for each node."""
    logs = [log for pattern in ("job.log", "submitit/*.err") for log in sorted(folder.glob(pattern))]
    for log in logs:
        lines = [line.strip() for line in log.read_text(errors="replace").split("\n") if line.strip()]
        if lines:
            return log, lines[-1]
    return (logs or [folder])[0], ""
