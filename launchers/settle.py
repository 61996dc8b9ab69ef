"""Writes down how allocations ended: attempts that they claimed and did not finish are lost."""

from collections.abc import Collection, Iterable

from ultrabench.errors import UltrabenchError, may_pass
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.allocation import Allocation, read_allocation
from ultrabench.store.events import AllocationEnded, AllocationPlanned, Failed, Start
from ultrabench.store.jobs_seen import JobEnd
from ultrabench.store.state import AllocationState, SweepState


class Settler:
    """Writes for one launch of a sweep to the journal what became of allocations."""

    def __init__(self, sweep: OpenSweep, launcher: Launcher) -> None:
        self._sweep, self._launcher = sweep, launcher
        self._specs = {c.run_id: to_dict(c.spec) for c in sweep.plan.runs}
        self.claimed: set[str] = set()
        """Allocations that agents own, whether or not they have written anything."""
        self.settled: set[tuple[str, Start]] = set()

    def give_up(self, name: str) -> bool:
        """Claims an allocation that has not started, so that it never runs; False when its agents own it already.

        Another launcher may still be about to submit it, however long that takes: its agent finds this claim.
        """
        if not self._sweep.give_up(name):
            self.claimed.add(name)
            return False
        return True

    def settle(self, held: AllocationState, told: JobEnd | None, state: SweepState) -> None:
        """Writes down that an allocation is over, and that what it claimed and did not finish is lost.

        Args:
            told: how it ended by the launcher's word, when its agents said nothing.

        Raises:
            OSError: a claim cannot be read now; nothing was concluded.
        """
        name = held.name
        owned = [key for key in held.tasks if self._owned(key, name, state)]
        end = told or JobEnd(status=Status.LOST, reason=f"the agents of {name} ended ({held.ended})")
        self._lose(owned, state, name, end)
        if told is not None:
            self._tell_end(held, told.reason, told.elapsed_s)
        self.settled.add((name, held.start))  # only now: a disk may have refused what was to be written

    def tell_held(self, held: AllocationState, seconds: float) -> None:
        """Writes down for how many seconds an ended allocation held its nodes, by the word of the batch system."""
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
        """Whether some of these attempts, of which no living allocation is known, were claimed all the same.

        Who claims an attempt is the only one who may ever run it. An owner that the journal does not know is
        taken up from its files, and looked for from then on; otherwise the attempt is lost.
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
