"""The interface of launchers: they submit allocations, see what became of them, and end them."""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ultrabench.processes import own_name, pid_namespace
from ultrabench.store.allocation import Allocation
from ultrabench.store.jobs_seen import Job, JobLimits, JobsSeen, Origin
from ultrabench.store.state import AllocationState


def origin(cluster: str = "") -> Origin:
    """This user on this host. Local processes also belong to a PID namespace, which the host then names."""
    host = socket.gethostname().split(".")[0]
    if not cluster and (namespace := pid_namespace()) != _FIRST_NAMESPACE:
        host += f":{namespace}"
    return {"user": own_name(), "cluster": cluster, "host": host}


_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the PID namespace of a host outside all containers (PROC_PID_INIT_INO of Linux)."""


class Launcher(Protocol):
    """Runs allocations as local processes or as Slurm jobs."""

    limits: JobLimits
    """How much a launch may have in flight."""
    outlives_us: bool
    """Whether allocations go on after Ctrl-C."""
    by: Origin
    """Who submits, and where: it can see and end the allocations of that user in that place."""
    rest_s: float
    """Seconds between two looks at the journal."""

    def submit(
        self, allocations: Sequence[Allocation], avoid: Sequence[str], say: Callable[[str], None]
    ) -> dict[str, Job]:
        """Submits allocations that are alike in nodes and time limit; returns where each will be found.

        Args:
            avoid: nodes that must not be used.
            say: told of what goes wrong and is tried again.

        Raises:
            ClusterError: it cannot be done; whether some were submitted is for `observe` to find out.
        """

    def observe(self, allocations: Mapping[str, AllocationState]) -> JobsSeen:
        """What became of `allocations`; of those that have ended, only whether they live again."""

    def cancel(
        self, allocations: Mapping[str, AllocationState], *, queued_only: bool = False
    ) -> dict[str, float]:
        """Ends allocations, with `queued_only` those that hold no nodes.

        Returns:
            Seconds that those which have surely ended had held their nodes; the others `observe` will tell.
        """

    def end_frozen(self, name: str, job: Job) -> None:
        """Ends one allocation, which runs as `job` and whose agent does not react to anything."""
