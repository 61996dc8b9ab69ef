"""A batch system in memory, as a reconciler sees one: nothing but what was accepted and what became of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.unit.launchers.small_tape import Tape
from ultrabench.errors import ClusterError
from ultrabench.result import Status
from ultrabench.store.allocation import Allocation
from ultrabench.store.jobs_seen import Job, JobEnd, JobLimits, JobsSeen, Origin
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
    """The Launcher of a reconciler, whose answers are steps; `jobs` are those of the world it was made for."""

    limits = JobLimits(max_jobs=2, max_nodes=2, max_array=2)
    look_pause_s = 0.0

    def __init__(
        self, jobs: dict[str, SmallJob], tape: Tape, room: int = 0, by: Origin = OURS, double: bool = False
    ) -> None:
        """`room`: jobs that it takes in all; `by`: whose it sees; `double`: a wrapper submits all of them twice."""
        self.jobs, self.tape, self.room, self.origin, self.double = jobs, tape, room, by, double

    def submit(
        self, allocations: Sequence[Allocation], avoid: Sequence[str], say: Callable[[str], None]
    ) -> dict[str, Job]:
        """Takes them; a launcher that dies now never learns of it, which is how answers get lost."""

        def take() -> dict[str, Job]:
            if len(self.jobs) + len(allocations) > self.room:
                raise ClusterError("no more jobs are taken")
            for suffix in ("", "+")[: 1 + self.double]:
                self.jobs |= {f"{a.name}{suffix}": SmallJob(a, f"{a.name}{suffix}") for a in allocations}
            return {a.name: {"job_id": a.name} for a in allocations}

        return self.tape.step(take, action="submits", wait=True)

    def observe(self, allocations: Mapping[str, AllocationState]) -> JobsSeen:
        """The worst a batch system may say in good faith.

        What is not submitted yet is called unknown at once: a launcher may sleep as long as it likes between
        the line in its journal and its submission.
        """
        has_agents = {name: bool(allocation.agents) for name, allocation in allocations.items()}

        def take() -> JobsSeen:
            # Of what was read before, a reconciler uses no more than this once it has looked.
            self.tape.latest["state"] = tuple(sorted(has_agents.items()))
            return self._seen(allocations)

        return self.tape.step(take, action="looks", kind="look")

    def _seen(self, allocations: Mapping[str, AllocationState]) -> JobsSeen:
        unended = {name for name, allocation in allocations.items() if allocation.ended is None}
        visible = [job for job in self.jobs.values() if job.allocation.by == self.origin]
        active: dict[str, SmallJob] = {}
        for job in visible:
            allocation = allocations.get(job.allocation.name)
            if allocation is not None and job.phase != "over" and allocation.start.job_id in ("", job.job_id):
                active.setdefault(allocation.name, job)
        queued = frozenset(n for n, job in active.items() if job.phase == "pending")
        submitted = {job.allocation.name for job in visible}
        ends = {
            n: Status.NODE_FAIL if n in submitted else Status.LOST for n in sorted(unended - active.keys())
        }
        return JobsSeen(
            alive=frozenset(unended & active.keys()) | queued,
            queued=queued,
            running=frozenset(active) - queued,
            # Time stamps stand for nothing in a world without clocks, so every end is certain.
            ended_jobs={n: JobEnd(status=s, reason="it is over", certain=True) for n, s in ends.items()},
            jobs={n: {"job_id": job.job_id} for n, job in active.items()},
        )
