"""What a launcher may submit, and what it has seen of its jobs: which live, and how the others ended."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ultrabench.result import Status

Job = dict[str, Any]
"""How to find an allocation: {host, pid, start_time} locally, {job_id, name} on Slurm."""

Origin = dict[str, str]
"""Who submits allocations and where from: {user, cluster, host}; cluster is empty for local processes."""


def same_place(own: Origin, by: Mapping[str, str]) -> bool:
    """Whether allocations of `by` run where those of `own` do; an empty `by` counts as here."""
    name = "cluster" if own["cluster"] else "host"
    return not by or (by.get(name) == own[name] and by.get("cluster") == own["cluster"])


def sees(own: Origin, by: Mapping[str, str]) -> bool:
    """Whether a launcher of `own` sees the allocations of `by`: the same user, on the same cluster or host."""
    return not by or (same_place(own, by) and by.get("user") == own["user"])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """How much a launch may have in flight and use."""

    max_jobs: int
    """Largest number of allocations queued or running."""
    max_nodes: int = sys.maxsize
    """Largest number of nodes of all of them together."""
    max_array: int = 1
    """Largest number of allocations of one submission."""
    max_limit_s: float = math.inf
    """Longest wall-clock limit of one allocation."""
    max_gpu_hours: float | None = None
    """Budget of the sweep in GPU hours; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How an allocation ended, as the batch system or the local launcher tells."""

    status: Status
    """Status of the attempts that it had claimed and did not finish."""
    reason: str
    elapsed_s: float | None = None
    """Seconds for which it held its nodes; None where nobody knows."""
    certain: bool = False
    """True when the processes themselves were found gone; False when only a batch system says so."""

    @property
    def cause(self) -> str | None:
        """Cause of the failure where the status leaves no doubt, else None."""
        causes = {Status.OOM: "host_oom", Status.PREEMPTED: "preempted", Status.NODE_FAIL: "node_failure"}
        return causes.get(self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSeen:
    """What a launcher has seen of its allocations."""

    alive: frozenset[str] = frozenset()
    """Allocations that are queued or running, or not known to be over."""
    queued: frozenset[str] = frozenset()
    """Living allocations that surely hold no nodes."""
    running: frozenset[str] = frozenset()
    """Living allocations whose processes run, so that their agents should touch their journals."""
    leaving: frozenset[str] = frozenset()
    """Allocations that have ended by the word of their agents, but still hold their nodes."""
    ended_jobs: dict[str, JobEnd] = field(default_factory=dict)
    """Allocation -> how it ended."""
    held_s: dict[str, float] = field(default_factory=dict)
    """Running allocation -> seconds for which it has held its nodes, setup included."""
    timed: dict[str, float] = field(default_factory=dict)
    """Ended allocation -> seconds for which it held its nodes, where the journal does not say so yet."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Allocation -> the job in which it was found."""
    notes: tuple[str, ...] = ()
    """What a person should know or do: why jobs wait, what does not answer."""
