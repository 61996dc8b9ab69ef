"""A batch system in memory, as a follower sees one: nothing but what was accepted and what became of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ultrabench.allocation import Allocation
from ultrabench.errors import ClusterError
from ultrabench.launchers.launcher import Gone, Job, Sighting
from ultrabench.result import Status
from ultrabench.state import AllocationState


@dataclass(frozen=True, slots=True)
class SmallJob:
    """A submitted allocation."""

    allocation: Allocation
    phase: str = "pending"
    """pending, running or over."""
    restart: int = 0

    def requeued(self) -> "SmallJob":
        return replace(self, phase="pending", restart=self.restart + 1)


class SmallSlurm:
    """The Launcher of a follower; `jobs` are those of the world it was made for."""

    max_jobs, max_nodes, max_array, max_limit_s = 2, 2, 2, float("inf")
    outlives_us, rest_s = True, 0.0

    def __init__(self, jobs: dict[str, SmallJob], most: int = 99) -> None:
        """`most`: jobs that it takes in all."""
        self.jobs, self.most = jobs, most

    def submit(
        self, allocations: Sequence[Allocation], avoid: Sequence[str], say: Callable[[str], None]
    ) -> dict[str, Job]:
        """Takes them; a launcher that dies now never learns of it, which is how answers get lost."""
        if len(self.jobs) + len(allocations) > self.most:
            raise ClusterError("no more jobs are taken")
        self.jobs |= {a.name: SmallJob(a) for a in allocations}
        return {a.name: {"job_id": a.name} for a in allocations}

    def look(self, allocations: Mapping[str, AllocationState]) -> Sighting:
        """The worst a batch system may say in good faith.

        What is not submitted yet is called unknown at once: a launcher may sleep as long as it likes between
        the line in its journal and its submission.
        """
        unended = {name for name, held in allocations.items() if held.ended is None}
        active = {n for n, job in self.jobs.items() if job.phase != "over" and n in allocations}
        queued = {n for n in active if self.jobs[n].phase == "pending"}
        gone = {
            n: Gone(status=Status.NODE_FAIL if n in self.jobs else Status.LOST, reason="it is over")
            for n in sorted(unended - active)
        }
        return Sighting(
            alive=frozenset((unended & active) | queued),
            queued=frozenset(queued),
            running=frozenset(active - queued),
            gone=gone,
            jobs={n: {"job_id": n} for n in active},
        )

    def cancel(self, allocations: Mapping[str, AllocationState], *, queued_only: bool = False) -> None:
        """Nobody cancels here."""
        raise AssertionError
