"""What a reconciler needs of a launcher: submit allocations, see what became of them, end them."""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ultrabench.allocation import Allocation
from ultrabench.jobs_seen import Job, JobsSeen
from ultrabench.processes import own_name, pid_namespace
from ultrabench.state import AllocationState

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

    def observe(self, allocations: Mapping[str, AllocationState]) -> JobsSeen:
        """What became of `allocations` (of those that have ended, only what lives again)."""

    def cancel(self, allocations: Mapping[str, AllocationState], *, queued_only: bool = False) -> None:
        """Ends allocations; those that run only if asked to."""

    def held_s(self, held: AllocationState) -> float | None:
        """Seconds for which an allocation whose agents were killed had its nodes; None where others will tell."""

    def end_frozen(self, name: str, job: Job) -> None:
        """Ends this one allocation, found as `job`, whose agent does not react to anything."""
