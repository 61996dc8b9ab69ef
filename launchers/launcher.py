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
        """Submits allocations of the same node count and time limit; returns the job of each allocation.

        Args:
            avoid: nodes that must not be used.
            say: called with a message about each failure that is tried again.

        Raises:
            ClusterError: the submission failed; `observe` finds out whether some were submitted all the same.
        """

    def observe(self, allocations: Mapping[str, AllocationState]) -> JobsSeen:
        """The present state of `allocations`; for ended ones, only whether their job was started again."""

    def cancel(
        self, allocations: Mapping[str, AllocationState], *, queued_only: bool = False
    ) -> dict[str, float]:
        """Ends allocations, with `queued_only` those that hold no nodes.

        Returns:
            Allocation -> seconds for which it held its nodes, for those that have surely ended; `observe` reports
            the others later.
        """

    def end_frozen(self, name: str, job: Job) -> None:
        """Ends one allocation, which runs as `job` and whose agent no longer reacts."""
