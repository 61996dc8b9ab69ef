"""A batch system in memory, as a reconciler sees one: nothing but what was accepted and what became of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ultrabench.errors import ClusterError
from ultrabench.result import Status
from ultrabench.store.allocation import Allocation
from ultrabench.store.jobs_seen import Job, JobEnd, JobLimits, JobsSeen
from ultrabench.store.state import AllocationState

OURS = {"user": "a", "cluster": "small", "host": "login"}
OTHERS = {"user": "b", "cluster": "small", "host": "login"}


@dataclass(frozen=True, slots=True)
class SmallJob:
    """A job of a submitted allocation."""

    allocation: Allocation
    job_id: str
    phase: str = "pending"
    """pending, running or over."""
    restart: int = 0

    def requeued(self) -> "SmallJob":
        return replace(self, phase="pending", restart=self.restart + 1)


class SmallSlurm:
    """The Launcher of a reconciler; `jobs` are those of the world it was made for, by their id."""

    limits = JobLimits(max_jobs=2, max_nodes=2, max_array=2)
    rest_s = 0.0

    def __init__(
        self, jobs: dict[str, SmallJob], most: int = 99, by: dict[str, str] = OURS, double: bool = False
    ) -> None:
        """`most`: jobs that it takes in all; `by`: whose it sees; `double`: a wrapper submits all of them twice."""
        self.jobs, self.most, self.by, self.double = jobs, most, by, double

    def submit(
        self, allocations: Sequence[Allocation], avoid: Sequence[str], say: Callable[[str], None]
    ) -> dict[str, Job]:
        """Takes them; a launcher that dies now never learns of it, which is how answers get lost."""
        if len(self.jobs) + len(allocations) > self.most:
            raise ClusterError("no more jobs are taken")
        for again in ("", "+")[: 1 + self.double]:
            self.jobs |= {f"{a.name}{again}": SmallJob(a, f"{a.name}{again}") for a in allocations}
        return {a.name: {"job_id": a.name} for a in allocations}

    def observe(self, allocations: Mapping[str, AllocationState]) -> JobsSeen:
        """The worst a batch system may say in good faith.

        What is not submitted yet is called unknown at once: a launcher may sleep as long as it likes between
        the line in its journal and its submission.
        """
        # Time stamps stand for nothing in a world without clocks, so every end is certain.
        unended = {name for name, held in allocations.items() if held.ended is None}
        visible = [job for job in self.jobs.values() if job.allocation.by == self.by]
        active = {}
        for job in visible:
            held = allocations.get(job.allocation.name)
            if held is not None and job.phase != "over" and held.start.job_id in ("", job.job_id):
                active.setdefault(held.name, job)
        queued = {n for n, job in active.items() if job.phase == "pending"}
        known = {job.allocation.name for job in visible}
        gone = {
            n: JobEnd(
                status=Status.NODE_FAIL if n in known else Status.LOST, reason="it is over", certain=True
            )
            for n in sorted(unended - set(active))
        }
        return JobsSeen(
            alive=frozenset((unended & set(active)) | queued),
            queued=frozenset(queued),
            running=frozenset(set(active) - queued),
            ended_jobs=gone,
            jobs={n: {"job_id": job.job_id} for n, job in active.items()},
        )

    def cancel(self, allocations: Mapping[str, AllocationState], *, queued_only: bool = False) -> None:
        """Nobody cancels here."""
        raise AssertionError
