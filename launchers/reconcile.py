"""Takes an open sweep to its end: reconcile, decide, submit, wait, again."""

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from ultrabench.errors import ClusterError, SweepFolderError, may_pass
from ultrabench.jobs_seen import JobEnd, JobsSeen
from ultrabench.launchers.agent_watchdog import AgentWatchdog
from ultrabench.launchers.allocate import allocations, shapes
from ultrabench.launchers.launcher import Launcher, same_place, sees
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.settle import Settler
from ultrabench.presence import SIGN_OF_LIFE_S, show_presence
from ultrabench.result import Status
from ultrabench.state import AllocationState, SweepState
from ultrabench.sweep.decide import Decision
from ultrabench.sweep.price import Draft, committed_gpu_hours, drafts
from ultrabench.sweep.retry_policy import excluded
from ultrabench.window import inside

DISK_PATIENCE_S = 300.0
"""Seconds to keep retrying a full, read-only or unresponsive results folder."""
DISK_PAUSE_S = 2.0
CANCEL_S = 10.0
"""Between two tries to cancel jobs that are to end."""

Show = Callable[[SweepState, frozenset[str]], None]


class Reconciler:
    """One launch of a sweep."""

    def __init__(
        self,
        sweep: OpenSweep,
        launcher: Launcher,
        show: Show,
        max_gpu_hours: float | None = None,
        say: Callable[[str], None] = lambda note: None,
    ) -> None:
        """`show` is called at every look with the state and the living allocations, `say` with news."""
        self.sweep = sweep
        self.launcher = launcher
        self.show = show
        self.say = say
        self.max_gpu_hours = max_gpu_hours
        self.stopped: str | None = None
        """Why it ended before everything was done."""
        self.over_budget = False
        """Whether an allocation was too expensive for what is left of the budget."""
        self.submitted = 0
        """Allocations submitted by this launch."""
        self._settler = Settler(sweep, launcher)
        self._told: set[str] = set()
        self._adopted: set[str] = set()
        self._held_s: dict[str, float] = {}
        """Allocation -> seconds that it has held its nodes, by the latest look."""
        self._gone_since: dict[str, float] = {}
        """Allocation -> when the batch system first called it over though its agents were not silent yet."""
        self._cancelled_at = -CANCEL_S
        self._touched = 0.0
        self._failing_since: float | None = None
        self._leaving = frozenset[str]()
        self._watchdog = AgentWatchdog(sweep.folder, sweep.config.launcher, launcher.outlives_us)
        attempts = self.sweep.state().attempts.items()
        self._old = frozenset(key for key, attempt in attempts if attempt.result is not None)
        """Attempts that ended before this launch."""

    def run(self) -> SweepState:
        """Until nothing is left to do, or somebody stops the sweep; gives the last state.

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
        """Gives whoever can mend the disk some minutes; what was to be done is decided anew after that."""
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
        self._tell((f"cannot use {self.sweep.folder.path} ({cause}); trying again, jobs go on",))
        time.sleep(DISK_PAUSE_S)

    def once(self) -> tuple[SweepState, bool]:
        """Looks, decides and submits; gives the state and whether there is anything to wait for."""
        self._sign_of_life()
        seen, state = self.observe()
        self.show(state, seen.alive)
        self._tell((*seen.notes, *self._other_commits(state)))
        self.stopped = None
        if state.cancelled:
            self.stopped = "cancelled"
            return state, self._cancel(seen, state)
        decision = self.sweep.next_step(seen.alive, self._old)
        if decision.broken:
            self.stopped = decision.broken
            return state, self._cancel(seen, state)
        if not decision.todo:
            return state, bool(seen.alive) or not decision.over
        self.stopped = self._may_not_submit(state)
        if self.stopped is None:
            self._submit(decision, state, seen)
        return state, bool(seen.alive) or self.stopped is None

    def observe(self) -> tuple[JobsSeen, SweepState]:
        """What lives and the state, after the dead were settled."""
        # The launcher's word first, the journal second: what ended in between has written its end.
        state = self.sweep.state()
        known = self.mine(state, state.allocations)
        started = {n for n, held in state.allocations.items() if held.agents} | self._settler.claimed
        asked = set(known)
        seen = self.launcher.observe(known)
        state = self.sweep.state()
        revived = {n for n in seen.queued if n in state.allocations and state.allocations[n].ended}
        unended = set(open_allocations(state))
        seen = replace(seen, alive=seen.alive & (unended | revived))
        self._leaving = seen.leaving
        self._watchdog.observe((state.allocations[name] for name in sorted(unended)), seen.running)
        self._end_frozen(seen, state)
        self._take_times(seen, state)
        for name in sorted(seen.alive - self._settler.mine - self._adopted):
            self._adopted.add(name)
            self.sweep.journal.write("adopted", allocation=name, job=seen.jobs.get(name, {}))
        for name, held in sorted(state.allocations.items()):
            if name in seen.alive or (name, held.start) in self._settler.settled:
                continue
            gone = seen.ended_jobs.get(name) if name in asked else self._abandoned(held)
            if gone and name in self._watchdog.frozen:
                gone = replace(gone, status=Status.LOST, reason=self._watchdog.frozen[name])
            if held.ended is not None:
                self._settler.settle(held, None, state)
            elif gone and (self._is_dead(held, gone) if name in started else self._settler.give_up(name)):
                self._settler.settle(held, gone, state)
            elif gone or name not in asked:  # others' jobs, and what is on its way since the launcher looked
                seen = replace(seen, alive=seen.alive | {name})
        return seen, self.sweep.state()

    def _is_dead(self, held: AllocationState, gone: JobEnd) -> bool:
        """Whether an allocation whose agents had started is over: what is not visible need not be dead.

        The batch system has to say so, and the agents must have stopped touching their journal.
        """
        if gone.certain or self._watchdog.silent(held.name):
            return True
        since = self._gone_since.setdefault(held.name, time.monotonic())
        if time.monotonic() - since > self._watchdog.patience_s:
            self._tell((f"{gone.reason}, but the agents of {held.name} touch their journal: they live",))
        return False

    def _abandoned(self, held: AllocationState) -> JobEnd | None:
        """The end of an allocation that is not ours to look for, once nothing of it can be alive any more."""
        if held.ended is not None or sees(self.launcher.by, held.by):
            return None
        whose = f"{held.by.get('user')} on {held.by.get('cluster') or held.by.get('host')}"
        # Processes, unlike jobs, do not wait in a queue; should they start all the same, they find our claim.
        told = any(a.get("journal") for a in held.agents) or not (held.agents or held.by.get("cluster"))
        if told and self._watchdog.silent(held.name, held.limit_s):
            reason = f"the agents of {held.name}, of {whose}, were silent for longer than its time limit"
            return JobEnd(status=Status.LOST, reason=reason, certain=True)
        self._tell(
            (
                f"{held.name} is a job of {whose}: it is watched, and neither ended nor replaced. If it is gone for "
                "good, launch from a terminal without --yes: jobs that have not started can then be replaced",
            )
        )
        return None

    def take_over(self, names: Iterable[str]) -> None:
        """Has allocations of others that have not started run nothing, so that they can be replaced."""
        state = self.sweep.state()
        for name in names:
            if not state.allocations[name].agents and self._settler.give_up(name):
                gone = JobEnd(status=Status.LOST, reason=f"taken over by {self.launcher.by['user']}")
                self._settler.settle(state.allocations[name], gone, state)

    def _end_frozen(self, seen: JobsSeen, state: SweepState) -> None:
        """Ends allocations whose leading agent shows no sign of life: nothing else would, but their limit."""
        for name in sorted(seen.alive & seen.running):
            if reason := self._watchdog.frozen_now(state.allocations[name]):
                self._tell((f"{reason}: ending {name}",))
                try:
                    self.launcher.end_frozen(name, seen.jobs[name])
                except ClusterError as error:  # it is found frozen again
                    self._tell((f"cannot end {name}: {error}; trying again",))

    def _take_times(self, seen: JobsSeen, state: SweepState) -> None:
        """Notes for how long the batch system says that nodes are and were held."""
        self._held_s |= seen.held_s
        for name, seconds in sorted(seen.timed.items()):
            if state.allocations[name].ended is not None:
                self._settler.tell_held(state.allocations[name], seconds)

    def _cancel(self, seen: JobsSeen, state: SweepState) -> bool:
        """Ends what this launcher can see, tried again until it is done; whether something is left."""
        mine = self.mine(state, seen.alive)
        if mine and time.monotonic() - self._cancelled_at >= CANCEL_S:
            self._cancelled_at = time.monotonic()
            try:
                self.launcher.cancel(mine)
            except ClusterError as error:
                self._tell((f"cannot cancel: {error}; trying again until it is done",))
        return bool(mine)

    def settle_all(self) -> None:
        """Ends every open allocation at once; call it when their processes are known to be gone."""
        state = self.sweep.state()
        for name, held in self.mine(state, open_allocations(state)).items():
            if not held.agents:
                self._settler.give_up(name)  # one that is still starting finds the claim
            reason, held_s = f"the agents of {name} were ended", self.launcher.held_s(held)
            gone = JobEnd(status=Status.LOST, reason=reason, elapsed_s=held_s, certain=True)
            self._settler.settle(held, gone, state)

    def mine(self, state: SweepState, names: Iterable[str]) -> dict[str, AllocationState]:
        """Those that this launcher can see and end."""
        found = {name: state.allocations[name] for name in sorted(names)}
        return {name: held for name, held in found.items() if sees(self.launcher.by, held.by)}

    def _may_not_submit(self, state: SweepState) -> str | None:
        """Why nothing is submitted now, whatever is left to do."""
        config = self.sweep.config
        if state.paused:
            return f"paused; go on with: ultrabench sweep resume {self.sweep.folder.word}"
        if config.kernel.digest() != self.sweep.kernel_digest:
            return (
                f"the training program changed under the sweep (kernel_digest {self.sweep.kernel_digest} -> "
                f"{config.kernel.digest()}); launch again to go on with the new one"
            )
        return None

    def _submit(self, decision: Decision, state: SweepState, seen: JobsSeen) -> None:
        """Submits as many allocations as may be in flight and the budget holds."""
        config, launcher = self.sweep.config, self.launcher
        if not inside(config.launcher.window, time.time()):
            self._tell((f"outside the window {config.launcher.window}: nothing is submitted",))
            return
        # Refilled when half of them are gone, so that submissions come in arrays and not one by one.
        here = [a for n in seen.alive if same_place(launcher.by, (a := state.allocations[n]).by)]
        if len(here) > launcher.max_jobs // 2:
            return
        room = launcher.max_jobs - len(here)
        free = launcher.max_nodes - sum(held.nodes for held in here)
        used = committed_gpu_hours(self.sweep.plan, state, sorted(seen.alive), self._held_s)
        chosen: list[Draft] = []
        for draft in drafts(
            self.sweep.plan, decision.todo, state,
            max_limit_s=launcher.max_limit_s, untried=decision.untried, held_s=self._held_s,
        ):  # fmt: skip
            if len(chosen) >= room or draft.nodes > free:
                break
            if self.max_gpu_hours is not None and used + draft.gpu_hours > self.max_gpu_hours:
                self.over_budget = True
                self.stopped = (
                    f"the next job would take {used:.3g} used GPU hours to {used + draft.gpu_hours:.3g}, over the "
                    f"{self.max_gpu_hours:.3g} that may be used"
                )
                break
            chosen.append(draft)
            free -= draft.nodes
            used += draft.gpu_hours
        if self._settler.claimed_already((t.key for draft in chosen for t in draft.group), state):
            return  # what these are is settled first
        self._settler.asked |= {t.key for t in decision.todo}
        avoid = excluded(state, config.retry)
        self._tell(f"{node} is not used again: {why}" for node, why in avoid.items())
        for array in shapes(chosen, launcher.max_array):
            self._submit_array(array, sorted(avoid))
        if chosen:
            self.stopped = None

    def _submit_array(self, array: list[Draft], avoid: list[str]) -> None:
        made, journal = allocations(self.sweep, array, self.launcher.by), self.sweep.journal
        token = uuid.uuid4().hex
        for allocation in made:
            allocation.write()
            self._settler.mine.add(allocation.name)
            self._settler.plan(allocation)
            journal.write("submitting", allocation=allocation.name, token=token)
        jobs = self.launcher.submit(made, avoid, self.say)
        self.submitted += len(made)
        for name, job in jobs.items():
            journal.write("submitted", allocation=name, job=job)

    def _other_commits(self, state: SweepState) -> list[str]:
        """Nodes that run another commit than this launcher, with the same training program."""
        own = self.sweep.git_commit
        nodes = [n for a in state.allocations.values() for n in a.preflight.get("nodes") or ()]
        others = {(n["host"], c) for n in nodes if own and (c := n.get("git_commit")) and c != own}
        return [f"{host} runs commit {c[:12]}, this launcher {own[:12]}" for host, c in sorted(others) if own]

    def _tell(self, notes: Iterable[str]) -> None:
        """Says what is new, once."""
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                self.say(note)

    def _sign_of_life(self) -> None:
        if time.monotonic() - self._touched > SIGN_OF_LIFE_S:
            self._touched = time.monotonic()
            show_presence(self.sweep.journal.path)


def open_allocations(state: SweepState) -> list[str]:
    """Allocations that may have been submitted and have not said that they ended."""
    return sorted(n for n, a in state.allocations.items() if a.ended is None)


def interrupt(sweep: OpenSweep, launcher: Launcher) -> None:
    """Ends what runs on this machine and settles it; the sweep can be continued."""
    reconciler = Reconciler(sweep, launcher, lambda state, alive: None)
    state = sweep.state()
    launcher.cancel(reconciler.mine(state, open_allocations(state)))
    reconciler.settle_all()
