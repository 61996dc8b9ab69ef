"""Settles allocations that are over: what they claimed and did not finish is lost, and what they held is told."""

from collections.abc import Collection, Iterable

from ultrabench.allocation import Allocation, read_allocation
from ultrabench.claim import give_up, owner_of
from ultrabench.errors import ClusterError, UltrabenchError, may_pass
from ultrabench.jobs_seen import JobEnd
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.state import AllocationState, AttemptKey, Start, SweepState

MOST_BARREN = 3
"""Allocations in a row that may end without having claimed a run."""
MOST_FRUITLESS = 3
"""The sweep stops after this many times max_jobs allocations in a row in which no requested run was claimed."""
ON_REQUEST = ("the sweep is paused", "outside the window")
"""Ends of allocations that need not have claimed anything, though not for ever: clocks of nodes may differ."""


class Settler:
    """Concludes for one launch of a sweep what became of allocations, and stops it when they lead nowhere.

    The number of allocations is bounded by the plan: each that runs something ends an attempt that was asked
    for, attempts are bounded by the retry policy, and of the others no more than `most_fruitless` follow each
    other.
    """

    def __init__(self, sweep: OpenSweep, launcher: Launcher) -> None:
        self._sweep, self._launcher = sweep, launcher
        self._claims = sweep.folder.claims
        self._specs = {c.run_id: to_dict(c.spec) for c in sweep.plan.runs}
        self.most_fruitless = MOST_FRUITLESS * max(1, launcher.max_jobs)
        self.mine: set[str] = set()
        """Allocations of this launch."""
        self.asked: set[AttemptKey] = set()
        """Attempts that this launch wanted; the further control runs of allocations are not among them."""
        self.claimed: set[str] = set()
        """Allocations that agents own, whether or not they have written anything."""
        self.settled: set[tuple[str, Start]] = set()
        self._barren = self._fruitless = 0

    def give_up(self, name: str) -> bool:
        """Sees to it that an allocation which never ran never will; False when agents own it after all.

        Another launcher may still be about to submit it, however long that takes: its agent finds this claim.
        """
        if not give_up(self._claims, name):
            self.claimed.add(name)
            return False
        return True

    def settle(self, held: AllocationState, gone: JobEnd | None, state: SweepState) -> None:
        """Settles an allocation that is over.

        Args:
            gone: how it ended by the launcher's word, when its agents said nothing.

        Raises:
            ClusterError: allocations end again and again without running what was asked for.
            OSError: a claim cannot be read now; nothing was concluded.
        """
        name = held.name
        owned = [key for key in held.tasks if self._owned(key, name, state)]
        end = gone or JobEnd(status=Status.LOST, reason=f"the agents of {name} ended ({held.ended})")
        self._lose(owned, state, name, end)
        if gone is not None:
            self._tell_end(held, gone.reason, gone.elapsed_s)
        self.settled.add((name, held.start))  # only now: a disk may have refused what was to be written
        reason = held.ended or end.reason
        if name in self.mine and not (state.paused or state.cancelled):
            self._count(name, owned, reason)

    def tell_held(self, held: AllocationState, seconds: float) -> None:
        """Writes down for how long the batch system says that an ended allocation had its nodes."""
        self._tell_end(held, f"held for {seconds:.0f} s", seconds, source="slurm")

    def plan(self, allocation: Allocation) -> None:
        """Tells of an allocation, before it is submitted or when only its files are known."""
        self._sweep.journal.write(
            "allocation_planned", allocation=allocation.name, nodes=allocation.nodes, by=allocation.by,
            limit_s=allocation.limit_s, control=allocation.control,
            tasks=[[t.run_id, t.repeat, t.attempt] for t in allocation.tasks],
        )  # fmt: skip

    def claimed_already(self, keys: Iterable[AttemptKey], state: SweepState) -> bool:
        """Whether some of these attempts, which nobody alive is known to have, were claimed all the same.

        Who claims an attempt is the only one who may ever run it. An owner that the journal does not know is
        taken up from its files, and looked for from then on; otherwise the attempt is lost.
        """
        found = False
        for key in keys:
            name = owner_of(self._claims, str(key))
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
        """Whether an allocation claimed an attempt, by the journal or, if that says nothing, by the claim."""
        attempt = state.attempts.get(key)
        if attempt is not None and attempt.allocation is not None:
            return attempt.allocation == name
        return owner_of(self._claims, str(key)) == name

    def _lose(self, keys: Collection[AttemptKey], state: SweepState, name: str, end: JobEnd) -> None:
        for key in keys:
            attempt = state.attempts.get(key)
            if attempt is None or attempt.result is None:
                self._sweep.journal.write(
                    "failed", run_id=key.run_id, repeat=key.repeat, attempt=key.attempt, allocation=name,
                    source="slurm" if self._launcher.outlives_us else "launcher",
                    spec=self._specs.get(key.run_id),
                    result=to_dict(RunResult(status=end.status, reason=end.reason, cause=end.cause)),
                )  # fmt: skip

    def _tell_end(
        self, held: AllocationState, reason: str, held_s: float | None, source: str = "launcher"
    ) -> None:
        job_id, restart = held.start
        self._sweep.journal.write(
            "allocation_ended", allocation=held.name, restart=restart, reason=reason, held_s=held_s,
            job={"job_id": job_id, "restart": restart} if job_id else None, source=source,
        )  # fmt: skip

    def _count(self, name: str, owned: Collection[AttemptKey], reason: str) -> None:
        """Stops the sweep when allocations go on without bringing any result nearer."""
        if not reason.startswith(ON_REQUEST):
            self._barren = 0 if owned else self._barren + 1
        self._fruitless = 0 if self.asked & {*owned} else self._fruitless + 1
        if self._barren < MOST_BARREN and self._fruitless < self.most_fruitless:
            return
        log = self._sweep.folder.allocations / name / "job.log"
        lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
        said = [line.strip() for line in lines if line.strip()][-1:]
        number, what = self._barren, "anything"
        if number < MOST_BARREN:
            number, what = self._fruitless, "any run that was asked for but control layouts"
        raise ClusterError(
            f"{number} allocations in a row ended without running {what} ({reason}"
            f"{f'; its log ends: {said[0][:200]}' if said else ''}); see {log}, then launch again"
        )
