"""The limits of a launcher, and what it has seen of its jobs: which are alive, and how the others ended."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ultrabench.result import AGENT_GONE, NODE_FAILURE, Status

Job = dict[str, Any]
"""The job of an allocation: {host} locally, {job_id, name} on Slurm."""

Origin = dict[str, str]
"""Who submits allocations and where from: {user, cluster, host}; cluster is empty for local processes."""


def is_same_site(viewer: Origin, origin: Mapping[str, str]) -> bool:
    """Whether allocations of `origin` run on the same cluster or host as those of `viewer`, or `origin` is empty."""
    key = "cluster" if viewer["cluster"] else "host"
    return not origin or (origin.get(key) == viewer[key] and origin.get("cluster") == viewer["cluster"])


def sees(viewer: Origin, origin: Mapping[str, str]) -> bool:
    """Whether a launcher of `viewer` can see the allocations of `origin`: same user, and same cluster or host."""
    return not origin or (is_same_site(viewer, origin) and origin.get("user") == viewer["user"])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """The limits of a launch on its jobs, nodes and GPU hours."""

    max_jobs: int
    """Largest number of allocations that are queued, running or still hold their nodes."""
    max_nodes: int = sys.maxsize
    """Largest number of nodes of all these allocations together."""
    max_array: int = 1
    """Largest number of allocations in one submission."""
    max_limit_s: float = math.inf
    """Longest wall-clock limit of one allocation."""
    max_gpu_hours: float | None = None
    """Budget of the sweep in GPU hours; None means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How an allocation ended, as the batch system or the local launcher reports."""

    status: Status = Status.LOST
    """Status of the attempts that the allocation had claimed and did not finish."""
    reason: str
    held_s: float | None = None
    """Seconds for which the allocation held its nodes; None when unknown."""
    certain: bool = False
    """Whether its processes were found to be gone; False when only the batch system reports the end."""
    agent_gone: bool = False
    """Whether the leading agent failed without a report, so that the run may have ended it."""
    failed_hosts: tuple[str, ...] = ()
    """The hosts that failed, as the batch system reports."""
    unstarted_hosts: tuple[str, ...] = ()
    """The hosts of a job that failed before an agent wrote a line, or those of them that its log names."""
    never_started: bool = False
    """Whether an allocation without agents failed, so that its first run counts as tried."""

    @property
    def cause(self) -> str | None:
        """Cause of the failure when it follows from how the allocation ended, else None."""
        if self.agent_gone:
            return AGENT_GONE
        causes = {Status.OOM: "host_oom", Status.PREEMPTED: "preempted", Status.NODE_FAIL: NODE_FAILURE}
        return causes.get(self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSeen:
    """What a launcher has seen of its allocations."""

    alive: frozenset[str] = frozenset()
    """Allocations that are queued or running, or are not known to be over."""
    queued: frozenset[str] = frozenset()
    """Living allocations that surely hold no nodes yet."""
    running: frozenset[str] = frozenset()
    """Allocations whose processes run, so that agents that have not ended should touch their journals."""
    leaving: frozenset[str] = frozenset()
    """Allocations that still hold their nodes although their agents have reported the end, such as in an epilog."""
    ended_jobs: dict[str, JobEnd] = field(default_factory=dict)
    """Allocation -> how it ended."""
    held_s: dict[str, float] = field(default_factory=dict)
    """Running allocation -> seconds for which it has held its nodes, setup included."""
    timed: dict[str, JobEnd] = field(default_factory=dict)
    """Allocation whose agents recorded its end -> how its job ended, if the journal does not hold its `held_s` yet."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Allocation -> the job in which it was found."""
    notes: tuple[str, ...] = ()
    """Messages for the user, such as why jobs wait or what does not answer."""
