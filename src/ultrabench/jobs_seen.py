"""What a launcher has seen of its jobs: which live, how the others ended, and how long they held their nodes."""

from dataclasses import dataclass, field
from typing import Any

from ultrabench.result import Status

Job = dict[str, Any]
"""How to find an allocation: {host, pid, start_time} locally, {job_id, name} on Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """An allocation is over, by the word of whoever ran it."""

    status: Status
    """Of attempts it had claimed and did not finish."""
    reason: str
    elapsed_s: float | None = None
    """How long it held its nodes; None where nobody knows."""
    certain: bool = False
    """True when the processes themselves were found gone; False when only a batch system says so."""

    @property
    def cause(self) -> str | None:
        """What failed, where the status leaves no doubt."""
        causes = {Status.OOM: "host_oom", Status.PREEMPTED: "preempted", Status.NODE_FAIL: "node_failure"}
        return causes.get(self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSeen:
    """What became of allocations."""

    alive: frozenset[str] = frozenset()
    """Queued or running, or not known to be over."""
    queued: frozenset[str] = frozenset()
    """Those of them that surely hold no nodes."""
    running: frozenset[str] = frozenset()
    """Those of them whose processes run, so that their agents should show signs of life."""
    leaving: frozenset[str] = frozenset()
    """Ended by the word of their agents, but still on their nodes."""
    ended_jobs: dict[str, JobEnd] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which those that run have held their nodes, setup included."""
    timed: dict[str, float] = field(default_factory=dict)
    """Seconds that ended allocations held their nodes, where the journal does not say so yet."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Where the living were found."""
    notes: tuple[str, ...] = ()
    """What a person should know or do: why jobs wait, what does not answer."""
