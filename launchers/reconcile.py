"""Runs an open sweep to its end: observes, asks `decide` what to do, does it, and observes again."""

import functools
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ultrabench.errors import ClusterError, SweepFolderError, may_pass
from ultrabench.launchers.allocate import allocations, shapes
from ultrabench.launchers.launcher import Launcher, Say
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.settle import Settler, visible
from ultrabench.run import AttemptKey
from ultrabench.store.events import Submitted, Submitting
from ultrabench.store.folder import SIGN_OF_LIFE_S
from ultrabench.store.jobs_seen import JobsSeen
from ultrabench.store.state import SweepState
from ultrabench.sweep.running.attempts import Launch
from ultrabench.sweep.running.decide import Actions, DeadEnd, decide
from ultrabench.sweep.running.price import PlannedJob

DISK_PATIENCE_S = 300.0
"""Seconds to keep retrying a full, read-only or unresponsive results folder."""
DISK_PAUSE_S = 2.0
"""Seconds between two tries to use such a results folder."""
CANCEL_S = 10.0
"""Seconds between two attempts to cancel jobs."""
DECISION_S = 5.0
"""Seconds until `decide` is asked again if nothing has changed, since some decisions depend on the time."""

Show = Callable[[SweepState, frozenset[str]], None]


class Reconciler:
    """Follows one launch of a sweep."""

    def __init__(self, sweep: OpenSweep, launcher: Launcher, show: Show, say: Say) -> None:
        """`show` gets the state and the living allocations in every round, `say` messages for the user."""
        self.sweep, self.launcher = sweep, launcher
        self.show, self.say = show, say
        self.limits = replace(launcher.limits, max_gpu_hours=sweep.max_gpu_hours)
        self.stopped: str | None = None
        """Why the launch ended before all runs were done; None if it did not."""
        self.over_budget = False
        """Whether the launch ended because the next job costs more than what is left of the budget."""
        self.submitted = 0
        """Number of allocations submitted by this launch."""
        self._say_once = functools.cache(say)
        self.settler = Settler(sweep, launcher, self._say_once)
        self._cancelled_at = -CANCEL_S
        self._touched = 0.0
        """When this launch last showed other launches that it is alive."""
        attempts = sweep.state().attempts
        self._begun = frozenset(attempts)
        """Attempts that began before this launch."""
        self._old = frozenset(key for key, attempt in attempts.items() if attempt.result is not None)
        """Attempts that ended before this launch."""
        self._excused = frozenset[str]()
        """Allocations that already existed when the sweep was paused or cancelled."""
        self._ended_at: dict[AttemptKey, float] = {}
        """When this launcher saw attempts end, by its monotonic clock, since clocks of nodes may be wrong."""
        self._avoided = set[str]()
        """Nodes that the latest submission did not use."""
        self._decided: tuple[float, object, Actions] | None = None
        """The time of the latest decision, the observations it rests on, and the decided actions."""

    def run(self) -> SweepState:
        """Continues until nothing is left to do, or somebody stops the sweep; returns the last state.

        Raises:
            ClusterError: allocations end again and again without running anything.
        """
        failing_since = math.inf
        while True:
            try:
                state, busy = self.once()
            except (OSError, SweepFolderError) as error:
                failing_since = min(failing_since, time.monotonic())
                self._wait_for_disk(error, failing_since)
                continue
            failing_since = math.inf
            if not busy:
                return state
            time.sleep(self.launcher.rest_s)

    def once(self) -> tuple[SweepState, bool]:
        """Observes, decides and acts once; returns the state and whether there is anything to wait for.

        Raises:
            ClusterError: allocations end again and again without running what was asked for.
        """
        if time.monotonic() - self._touched > SIGN_OF_LIFE_S:
            self._touched = time.monotonic()
            os.utime(self.sweep.journal.path)  # it shows other launchers that this one is alive
        seen, state = self.settler.look()
        self.show(state, seen.alive)
        actions = self._decide(state, seen)
        for note in (*seen.notes, *self._other_commits(state), *actions.notes):
            self._say_once(note)
        busy = self._act(actions, state, seen)
        return state, busy or (bool(seen.leaving & seen.running) and not state.cancelled)

    def _decide(self, state: SweepState, seen: JobsSeen) -> Actions:
        """What to do now; it is decided again after a change, and otherwise every DECISION_S."""
        now = time.monotonic()
        if state.paused or state.cancelled:
            self._excused |= state.allocations.keys()
        for key, attempt in state.attempts.items():
            if attempt.result is not None and key not in self._old:
                self._ended_at.setdefault(key, now)
        ground = (self.sweep.known.num_lines, seen.alive)
        if self._decided and self._decided[1] == ground and now - self._decided[0] < DECISION_S:
            return self._decided[2]
        launch = Launch(
            name=self.sweep.journal.name,
            by=self.launcher.by,
            accepts=self.sweep.accepts,
            old=self._old,
            begun=self._begun,
            ended_s={key: now - at for key, at in self._ended_at.items()},
            excused=self._excused,
        )
        actions = decide(self.sweep.plan, state, seen, self.limits, launch, time.time())
        self._decided = (now, ground, actions)
        return actions

    def _act(self, actions: Actions, state: SweepState, seen: JobsSeen) -> bool:
        """Carries out the decided actions; returns whether there is anything to wait for."""
        self.stopped, self.over_budget = actions.stopped, actions.over_budget
        if actions.dead_end:
            raise ClusterError(self._told_of(actions.dead_end))
        if actions.end_jobs:
            return self._cancel(state, seen)
        if actions.submit:
            self._submit(actions, state)
        return bool(seen.alive) or (actions.wait and self.stopped is None)

    def _cancel(self, state: SweepState, seen: JobsSeen) -> bool:
        """Cancels the allocations that this launcher can see, every CANCEL_S; returns whether any live."""
        mine = visible(self.launcher, {name: state.allocations[name] for name in seen.alive})
        if mine and time.monotonic() - self._cancelled_at >= CANCEL_S:
            self._cancelled_at = time.monotonic()
            try:
                self.launcher.cancel(mine)
            except ClusterError as error:
                self._say_once(f"cannot cancel: {error}; trying again until it is done")
        return bool(mine)

    def _submit(self, actions: Actions, state: SweepState) -> None:
        """Submits jobs, unless the training program changed or some of their attempts are already claimed."""
        launched, now = self.sweep.kernel_digest, self.sweep.config.kernel.digest()
        if launched != now:
            change = f"the training program changed under the sweep (kernel_digest {launched} -> {now})"
            self.stopped = f"{change}; launch again to go on with the new one"
            return
        if self.settler.settle_claimed((a.key for job in actions.submit for a in job.attempts), state):
            return  # the next rounds first settle the claimed attempts
        for node, why in actions.avoid.items():
            self._say_once(f"{node} is not used again: {why}")
        for node in sorted(self._avoided - actions.avoid.keys()):
            self.say(f"{node} is used again: the runs that pointed at it fail in the same way on other nodes")
        self._avoided = {*actions.avoid}
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
            self.settler.record_planned(allocation)
            journal.write(Submitting(allocation=allocation.name, token=token))
        try:
            submitted = self.launcher.submit(made, avoid, self.say)
        except ClusterError as error:
            # A launcher that cannot see jobs of this cluster would wait for these for ever.
            self.settler.withdraw((allocation.name for allocation in made), f"not submitted: {error}")
            raise
        self.submitted += len(made)
        for name, job in submitted.items():
            journal.write(Submitted(allocation=name, job=job))

    def _other_commits(self, state: SweepState) -> list[str]:
        """A message for each node that runs another commit than this launcher."""
        own = self.sweep.git_commit
        nodes = [n for a in state.allocations.values() for n in a.preflight.get("nodes") or ()]
        others = {(n["host"], c) for n in nodes if own and (c := n.get("git_commit")) and c != own}
        return [f"{host} runs commit {c[:12]}, this launcher {own[:12]}" for host, c in sorted(others) if own]

    def _told_of(self, dead_end: DeadEnd) -> str:
        """The message that says why the launch gives up, with the last line of a job's log."""
        log, said = _last_said(self.sweep.folder.allocations / dead_end.latest.name)
        why = f"{dead_end.latest.ended}{f'; its log ends: {said[:200]}' if said else ''}"
        told = f"{dead_end.number} allocations in a row ended without running {dead_end.what} ({why})"
        return f"{told}; see {log}, then launch again"

    def _wait_for_disk(self, error: OSError | SweepFolderError, failing_since: float) -> None:
        """Pauses while the results folder is unusable; raises if that cannot pass or lasts too long.

        Args:
            failing_since: since when it has been unusable, by the monotonic clock.
        """
        self.sweep.folder.require_present()
        cause = error.__cause__ if isinstance(error, SweepFolderError) else error
        if not may_pass(error) and not (cause and may_pass(cause)):
            raise error
        if time.monotonic() - failing_since > DISK_PATIENCE_S:
            waited = f"{error}; waited {DISK_PATIENCE_S / 60:g} minutes"
            raise ClusterError(f"{waited}; what runs goes on: mend it, then launch again") from error
        self._say_once(f"cannot use {self.sweep.folder.path} ({cause}); trying again, jobs go on")
        time.sleep(DISK_PAUSE_S)


def _last_said(folder: Path) -> tuple[Path, str]:
    """The first log of an allocation's agents that is not empty, and its last line.

    On this machine submitit keeps one log for each node.
    """
    logs = [log for pattern in ("job.log", "submitit/*.err") for log in sorted(folder.glob(pattern))]
    for log in logs:
        lines = [line.strip() for line in log.read_text(errors="replace").split("\n") if line.strip()]
        if lines:
            return log, lines[-1]
    return (logs or [folder])[0], ""
