"""Takes an open sweep to its end: reconcile, decide, submit, wait, again."""

import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ultrabench.allocation import Allocation
from ultrabench.claim import owner_of
from ultrabench.errors import ClusterError
from ultrabench.launchers.local import LocalLauncher
from ultrabench.launchers.prepare import OpenSweep, rank_threads
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import Task
from ultrabench.state import SweepState
from ultrabench.sweep.decide import Todo, decide
from ultrabench.sweep.pack import pack, run_limit_s
from ultrabench.sweep.progress import gpu_hours

POLL_S = 0.3
GRACE_S = 3.0
"""An allocation is gone when no process of it was seen for this long."""
MOST_BARREN = 3
"""Allocations in a row that may end without having claimed a run."""


class Follower:
    """One launch of a sweep."""

    def __init__(
        self,
        sweep: OpenSweep,
        launcher: LocalLauncher,
        show: Callable[[SweepState, frozenset[str]], None],
        max_gpu_hours: float | None = None,
    ) -> None:
        """`show` is called at every look with the state and the living allocations."""
        self.sweep = sweep
        self.launcher = launcher
        self.show = show
        self.max_gpu_hours = max_gpu_hours
        self.stopped: str | None = None
        """Why it ended before everything was done."""
        self._missing: dict[str, float] = {}
        self._audited: set[str] = set()
        self._mine: set[str] = set()
        self._adopted: set[str] = set()
        self._specs = {c.spec.run_id: to_dict(c.spec) for c in self.sweep.plan.runs}
        self._barren = 0

    def run(self) -> SweepState:
        """Until nothing is left to do or the sweep is cancelled; gives the last state.

        Raises:
            ClusterError: allocations end again and again without running anything.
        """
        while True:
            alive, state = self.look()
            self.show(state, alive)
            if state.cancelled:
                self.stopped = "cancelled"
                return state
            decision = decide(
                self.sweep.plan.runs, state, alive,
                repeats=self.sweep.config.repeats, accepts=self.sweep.accepts,
            )  # fmt: skip
            busy = alive or self._missing
            if decision.over and not busy:
                return state
            if decision.todo and len(alive) + len(self._missing) < self.launcher.max_in_flight:
                if not self._submit(decision.todo, state):
                    return state
                continue
            time.sleep(POLL_S)

    def look(self) -> tuple[frozenset[str], SweepState]:
        """The living allocations and the state, after burying the dead."""
        # Processes first, journal second: what ended in between has written its last words.
        unended = open_allocations(self.sweep.state())
        alive = self.launcher.alive(self.sweep.folder.allocations / name for name in unended)
        for name in alive - self._mine - self._adopted:
            self._adopted.add(name)
            self.sweep.journal.write("adopted", allocation=name, job={"host": socket.gethostname()})
        state = self.sweep.state()
        now = time.monotonic()
        unended = open_allocations(state)
        self._missing = {n: self._missing.get(n, now) for n in unended if n not in alive}
        for name in sorted(state.allocations):
            vanished = now - self._missing.get(name, now) > GRACE_S
            if name not in self._audited and (name not in unended or vanished):
                self._audit(name, state, vanished)
        return alive, self.sweep.state()

    def bury_all(self) -> None:
        """Ends every open allocation at once; call it when their processes are known to be gone."""
        state = self.sweep.state()
        for name in open_allocations(state):
            self._audit(name, state, True)

    def _audit(self, name: str, state: SweepState, vanished: bool) -> None:
        """Settles an allocation that is over: what it claimed and did not finish is lost."""
        self._audited.add(name)
        self._missing.pop(name, None)
        if vanished:
            self.launcher.clean()
        held = state.allocations[name]
        owned = [k for k in held.tasks if owner_of(self.sweep.folder.claims, str(k)) == name]
        for key in owned:
            attempt = state.attempts.get(key)
            if attempt is None or attempt.result is None:
                lost = RunResult(status=Status.LOST, reason=f"the agents of {name} vanished")
                self.sweep.journal.write(
                    "failed", run_id=key.run_id, repeat=key.repeat, attempt=key.attempt,
                    allocation=name, source="launcher", spec=self._specs.get(key.run_id),
                    result=to_dict(lost),
                )  # fmt: skip
        if vanished:
            self.sweep.journal.write("allocation_ended", allocation=name, reason="vanished")
        if name in self._mine:
            self._barren = 0 if owned else self._barren + 1
            if self._barren >= MOST_BARREN:
                folder = self.sweep.folder.allocations / name
                raise ClusterError(
                    f"{self._barren} allocations in a row ended without running anything "
                    f"({held.ended or 'vanished'}); see {folder}/submitit/"
                )

    def _submit(self, todo: tuple[Todo, ...], state: SweepState) -> bool:
        """Submits the first group of attempts; False when the budget does not allow it."""
        config, steps = self.sweep.config, self.sweep.plan.steps
        group = pack(todo, config, steps)[0]
        price = sum(t.candidate.gpu_hours(steps) for t in group)
        if self.max_gpu_hours is not None:
            useful, wasted = gpu_hours(state)
            used = useful + sum(wasted.values())
            if used + price > self.max_gpu_hours:
                self.stopped = (
                    f"the next allocation would take {used:.3g} used GPU hours to {used + price:.3g}, "
                    f"over --max-gpu-hours {self.max_gpu_hours:g}"
                )
                return False
        allocation = self._allocation(group)
        allocation.write()
        journal, name = self.sweep.journal, allocation.name
        self._mine.add(name)
        journal.write(
            "allocation_planned", allocation=name, nodes=allocation.nodes, limit_s=allocation.limit_s,
            tasks=[list(t.key) for t in group],
        )  # fmt: skip
        journal.write("submitting", allocation=name, token=uuid.uuid4().hex)
        journal.write("submitted", allocation=name, job=self.launcher.submit(allocation))
        return True

    def _allocation(self, group: tuple[Todo, ...]) -> Allocation:
        config, environment = self.sweep.config, self.sweep.environment
        steps = self.sweep.plan.steps
        tasks = tuple(
            Task(
                run_id=t.key.run_id,
                repeat=t.key.repeat,
                attempt=t.key.attempt,
                spec=t.candidate.spec,
                measure=config.measure,
                device=config.hardware.device,
                rank_mem_bytes=config.hardware.rank_mem_bytes,
                gpu_names=config.hardware.accelerator.reported_as,
                predicted_step_time_s=t.candidate.prediction.step_time_s,
                limit_s=run_limit_s(t, config, steps),
            )
            for t in group
        )
        nodes = group[0].candidate.nodes
        return Allocation(
            name=f"n{nodes}-{uuid.uuid4().hex[:8]}",
            sweep_dir=str(self.sweep.folder.path),
            work_dir=str(Path.cwd()),
            nodes=nodes,
            gpus_per_node=config.hardware.gpus_per_node,
            simulated=config.hardware.simulated,
            threads=rank_threads(config, nodes, int(environment.get("cores") or 1)),
            heartbeat_s=config.launcher.heartbeat_s,
            limit_s=120.0 + sum(t.limit_s for t in tasks),
            kernel_digest=config.kernel.digest(),
            tasks=tasks,
        )


def open_allocations(state: SweepState) -> list[str]:
    """Allocations that may have been submitted and have not said that they ended."""
    return sorted(n for n, a in state.allocations.items() if a.ended is None)


def interrupt(sweep: OpenSweep, launcher: LocalLauncher) -> None:
    """Ends what runs on this machine and settles it; the sweep can be continued."""
    for name in open_allocations(sweep.state()):
        launcher.kill(sweep.folder.allocations / name)
    Follower(sweep, launcher, lambda state, alive: None).bury_all()
