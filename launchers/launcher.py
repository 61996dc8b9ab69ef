"""What a follower needs of a launcher: submit allocations, see what became of them, end them."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ultrabench.allocation import Allocation
from ultrabench.processes import own_name, pid_namespace
from ultrabench.result import Status
from ultrabench.state import AllocationState

Job = dict[str, Any]
"""How to find an allocation: {host, pid, start_time} locally, {job_id, name} on Slurm."""


Origin = dict[str, str]
"""Who submits allocations and where from: {user, cluster, host}; cluster is empty for local processes."""


def origin(cluster: str = "") -> Origin:
    """This user on this host. Local processes also belong to a PID namespace, which the host then names."""
    host = socket.gethostname().split(".")[0]
    if not cluster and (namespace := pid_namespace()) != _FIRST_NAMESPACE:
        host += f":{namespace}"
    return {"user": own_name(), "cluster": cluster, "host": host}


def same_place(own: Origin, by: Mapping[str, str]) -> bool:
    """Whether allocations of `by` run where those of `own` do; what does not tell where counts as here."""
    name = "cluster" if own["cluster"] else "host"
    return not by or (by.get(name) == own[name] and by.get("cluster") == own["cluster"])


def sees(own: Origin, by: Mapping[str, str]) -> bool:
    """Whether a launcher of `own` sees the allocations of `by`: the same user, on the same cluster or host."""
    return not by or (same_place(own, by) and by.get("user") == own["user"])


_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the PID namespace of a host outside all containers (PROC_PID_INIT_INO of Linux)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
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
class Sighting:
    """What became of allocations."""

    alive: frozenset[str] = frozenset()
    """Queued or running, or not known to be over."""
    queued: frozenset[str] = frozenset()
    """Those of them that surely hold no nodes."""
    running: frozenset[str] = frozenset()
    """Those of them whose processes run, so that their agents should show signs of life."""
    leaving: frozenset[str] = frozenset()
    """Ended by the word of their agents, but still on their nodes."""
    gone: dict[str, Gone] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which those that run have held their nodes, setup included."""
    timed: dict[str, float] = field(default_factory=dict)
    """Seconds that ended allocations held their nodes, where the journal does not say so yet."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Where the living were found."""
    notes: tuple[str, ...] = ()
    """What a person should know or do: why jobs wait, what does not answer."""


class Launcher(Protocol):
    """Local processes or Slurm jobs."""

    max_jobs: int
    """Allocations queued or running at most."""
    max_nodes: int
    """Nodes of all of them at most."""
    max_array: int
    """Allocations of one submission at most."""
    max_limit_s: float
    """Wall-clock limit of one at most."""
    outlives_us: bool
    """Allocations go on after Ctrl-C."""
    by: Origin
    """Whose allocations it can see and end."""
    rest_s: float
    """Between two looks at the journal."""

    def submit(
        self, allocations: Sequence[Allocation], avoid: Sequence[str], say: Callable[[str], None]
    ) -> dict[str, Job]:
        """Submits allocations of one shape at once; where each will be found.

        Args:
            avoid: nodes that must not be used.
            say: told of what goes wrong and is tried again.

        Raises:
            ClusterError: it cannot be done; whether some were submitted is for `look` to find out.
        """

    def look(self, allocations: Mapping[str, AllocationState]) -> Sighting:
        """What became of `allocations` (of those that have ended, only what lives again)."""

    def cancel(self, allocations: Mapping[str, AllocationState], *, queued_only: bool = False) -> None:
        """Ends allocations; those that run only if asked to."""

    def held_s(self, held: AllocationState) -> float | None:
        """Seconds for which an allocation whose agents were killed had its nodes; None where others will tell."""

    def end_frozen(self, name: str, job: Job) -> None:
        """Ends this one allocation, found as `job`, whose agent does not react to anything."""
