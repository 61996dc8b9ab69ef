"""Takes an open sweep to its end: reconcile, decide, submit, wait, again."""

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from ultrabench.claim import give_up, owner_of
from ultrabench.errors import ClusterError, SweepFolderError, may_pass
from ultrabench.launchers.allocate import Draft, allocations, committed_gpu_hours, drafts, shapes
from ultrabench.launchers.launcher import Gone, Launcher, Sighting
from ultrabench.launchers.prepare import OpenSweep
from ultrabench.launchers.vigil import Vigil
from ultrabench.presence import SIGN_OF_LIFE_S, show_presence
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.state import AllocationState, SweepState
from ultrabench.sweep.decide import Decision
from ultrabench.sweep.retry_policy import excluded
from ultrabench.window import inside

MOST_BARREN = 3
"""Allocations in a row that may end without having claimed a run."""
DISK_PATIENCE_S = 300.0
"""So long a full, read-only or silent results folder is waited for."""
DISK_PAUSE_S = 2.0
ORDERLY = ("all tasks done", "the sweep is paused", "outside the window")
"""Ends of allocations that need not have claimed anything."""

Show = Callable[[SweepState, frozenset[str]], None]


class Follower:
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
        self.submitted = 0
        """Allocations submitted by this launch."""
        self._told: set[str] = set()
        self._audited: set[tuple[str, int]] = set()
        self._mine: set[str] = set()
        self._adopted: set[str] = set()
        self._specs = {c.run_id: to_dict(c.spec) for c in self.sweep.plan.runs}
        self._barren = 0
        self._touched = 0.0
        self._failing_since: float | None = None
        self._leaving = frozenset[str]()
        self._vigil = Vigil(sweep.folder.journal, sweep.config.launcher, launcher.outlives_us)
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
        sight, state = self.look()
        self.show(state, sight.alive)
        self._tell((*sight.notes, *self._other_commits(state)))
        self.stopped = None
        if state.cancelled:
            self.stopped = "cancelled"
            return state, False
        decision = self.sweep.next_step(sight.alive, self._old)
        if decision.broken:
            self.stopped = decision.broken
            self.launcher.cancel({n: state.allocations[n] for n in sight.alive})
            return state, bool(sight.alive)
        if not decision.todo:
            return state, bool(sight.alive) or not decision.over
        self.stopped = self._may_not_submit(state)
        if self.stopped is None:
            self._submit(decision, state, sight)
        return state, bool(sight.alive) or self.stopped is None

    def look(self) -> tuple[Sighting, SweepState]:
        """What lives and the state, after burying the dead."""
        # The launcher's word first, the journal second: what ended in between has written its end.
        known = self.sweep.state().allocations
        asked, started = set(known), {name for name, held in known.items() if held.agents}
        sight = self.launcher.look(known)
        state = self.sweep.state()
        revived = {n for n in sight.queued if n in state.allocations and state.allocations[n].ended}
        open_now = set(open_allocations(state)) | revived
        sight = replace(sight, alive=sight.alive & open_now)
        self._leaving = sight.leaving
        self._end_frozen(sight, state)
        for name in sorted(sight.alive - self._mine - self._adopted):
            self._adopted.add(name)
            self.sweep.journal.write("adopted", allocation=name, job=sight.jobs.get(name, {}))
        for name, held in sorted(state.allocations.items()):
            if name in sight.alive or (name, held.restart) in self._audited:
                continue
            gone = name in sight.gone and (name in started or self._give_up(name))
            if held.ended is not None or gone:
                self._audit(held, None if held.ended is not None else sight.gone[name], state)
            elif name in sight.gone or name not in asked:  # on its way since the launcher looked
                sight = replace(sight, alive=sight.alive | {name})
        return sight, self.sweep.state()

    def _give_up(self, name: str) -> bool:
        """Sees to it that an allocation which never ran never will; False when it runs after all.

        Another launcher may still be about to submit it, however long that takes: its agent finds this claim.
        """
        claims = self.sweep.folder.claims
        return give_up(claims, name) or owner_of(claims, name) != name

    def _end_frozen(self, sight: Sighting, state: SweepState) -> None:
        """Ends allocations whose leading agent shows no sign of life: nothing else would, but their limit."""
        for name in sorted(sight.alive & sight.running):
            if reason := self._vigil.look(state.allocations[name]):
                self._tell((f"{reason}: ending {name}",))
                self.launcher.end_frozen(name, sight.jobs[name])

    def bury_all(self) -> None:
        """Ends every open allocation at once; call it when their processes are known to be gone."""
        state = self.sweep.state()
        for name in open_allocations(state):
            gone = Gone(status=Status.LOST, reason=f"the agents of {name} were ended")
            self._audit(state.allocations[name], gone, state)

    def _audit(self, held: AllocationState, gone: Gone | None, state: SweepState) -> None:
        """Settles an allocation that is over: what it claimed and did not finish is lost.

        Args:
            gone: how it ended by the launcher's word, when its agents said nothing.
        """
        name = held.name
        if gone is not None and name in self._vigil.frozen:
            gone = replace(gone, status=Status.LOST, reason=self._vigil.frozen[name])
        owned = [k for k in held.tasks if owner_of(self.sweep.folder.claims, str(k)) == name]
        end = gone or Gone(status=Status.LOST, reason=f"the agents of {name} ended ({held.ended})")
        for key in owned:
            attempt = state.attempts.get(key)
            if attempt is None or attempt.result is None:
                self.sweep.journal.write(
                    "failed", run_id=key.run_id, repeat=key.repeat, attempt=key.attempt, allocation=name,
                    source="slurm" if self.launcher.outlives_us else "launcher",
                    spec=self._specs.get(key.run_id),
                    result=to_dict(RunResult(status=end.status, reason=end.reason, cause=end.cause)),
                )  # fmt: skip
        if gone is not None:
            self.sweep.journal.write(
                "allocation_ended", allocation=name, restart=held.restart, reason=gone.reason,
                elapsed_s=gone.elapsed_s, source="launcher",
            )  # fmt: skip
        self._audited.add((name, held.restart))  # only now: a disk may have refused what was to be written
        reason = held.ended or end.reason
        if name in self._mine and not (state.paused or reason.startswith(ORDERLY)):
            self._count_barren(name, bool(owned), reason)

    def _count_barren(self, name: str, ran: bool, reason: str) -> None:
        self._barren = 0 if ran else self._barren + 1
        if self._barren >= MOST_BARREN:
            log = self.sweep.folder.allocations / name / "job.log"
            lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
            said = [line.strip() for line in lines if line.strip()][-1:]
            raise ClusterError(
                f"{self._barren} allocations in a row ended without running anything ({reason}"
                f"{f'; its log ends: {said[0][:200]}' if said else ''}); see {log}, then launch again"
            )

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

    def _submit(self, decision: Decision, state: SweepState, sight: Sighting) -> None:
        """Submits as many allocations as may be in flight and the budget holds."""
        config, launcher = self.sweep.config, self.launcher
        if not inside(config.launcher.window, time.time()):
            self._tell((f"outside the window {config.launcher.window}: nothing is submitted",))
            return
        # Refilled when half of them are gone, so that submissions come in arrays and not one by one.
        if len(sight.alive) > launcher.max_jobs // 2:
            return
        room = launcher.max_jobs - len(sight.alive)
        free = launcher.max_nodes - sum(state.allocations[n].nodes for n in sight.alive)
        used = committed_gpu_hours(self.sweep.plan, state, sorted(sight.alive))
        chosen: list[Draft] = []
        for draft in drafts(self.sweep, decision, state, launcher.max_limit_s):
            if len(chosen) >= room or draft.nodes > free:
                break
            if self.max_gpu_hours is not None and used + draft.gpu_hours > self.max_gpu_hours:
                self.stopped = (
                    f"the next allocation would take {used:.3g} used GPU hours to {used + draft.gpu_hours:.3g}, "
                    f"over --max-gpu-hours {self.max_gpu_hours:g}"
                )
                break
            chosen.append(draft)
            free -= draft.nodes
            used += draft.gpu_hours
        avoid = excluded(state, config.retry)
        self._tell(f"{node} is not used again: {why}" for node, why in avoid.items())
        for array in shapes(chosen, launcher.max_array):
            self._submit_array(array, sorted(avoid))
        if chosen:
            self.stopped = None

    def _submit_array(self, array: list[Draft], avoid: list[str]) -> None:
        made, journal = allocations(self.sweep, array), self.sweep.journal
        token = uuid.uuid4().hex
        for allocation in made:
            allocation.write()
            self._mine.add(allocation.name)
            journal.write(
                "allocation_planned", allocation=allocation.name, nodes=allocation.nodes,
                limit_s=allocation.limit_s, control=allocation.control,
                tasks=[[t.run_id, t.repeat, t.attempt] for t in allocation.tasks],
            )  # fmt: skip
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
    state = sweep.state()
    launcher.cancel({name: state.allocations[name] for name in open_allocations(state)})
    Follower(sweep, launcher, lambda state, alive: None).bury_all()
