"""The interface of launchers, which submit, observe and end allocations."""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ultrabench.processes import FIRST_PID_NAMESPACE, own_name, pid_namespace
from ultrabench.store.allocation import Allocation
from ultrabench.store.jobs_seen import Job, JobLimits, JobsSeen, Origin
from ultrabench.store.state import AllocationState


def own_origin(cluster: str = "") -> Origin:
    """This user, cluster and host; without a cluster, the host of a container includes its PID namespace."""
    host = socket.gethostname().split(".")[0]
    if not cluster and (namespace := pid_namespace()) != FIRST_PID_NAMESPACE:
        host += f":{namespace}"
    return {"user": own_name(), "cluster": cluster, "host": host}


Say = Callable[[str], None]
"""Shows the user one line."""
Allocations = Mapping[str, AllocationState]
"""Name of an allocation -> what the journal says about it."""


class NotTakenError(Exception):
    """The batch system did not take allocations, but may take them later; it never leaves `launchers`."""

    def __init__(
        self,
        waits_for: str,
        complaint: str,
        *,
        may_exist: bool = False,
        is_known: bool = True,
        fewer_may_fit: bool = False,
    ) -> None:
        super().__init__(complaint)
        self.waits_for = waits_for
        """What has to change, in words that begin a sentence."""
        self.complaint = complaint
        """What was submitted, and the words of the batch system."""
        self.may_exist = may_exist
        """Whether the jobs may exist nevertheless; `observe` finds them, or reports their end."""
        self.is_known = is_known
        """Whether refusals of this kind are known to pass."""
        self.fewer_may_fit = fewer_may_fit
        """Whether the batch system may take a part of the allocations now."""


class Launcher(Protocol):
    """Runs allocations as local processes or as Slurm jobs."""

    limits: JobLimits
    """How many jobs and nodes a launch may hold or queue for at the same time."""
    origin: Origin
    """The user and the place of this launcher, which sees and ends only allocations of that user there."""
    look_pause_s: float
    """Seconds between two looks at the journal."""

    def submit(self, allocations: Sequence[Allocation], bad_hosts: Sequence[str], say: Say) -> dict[str, Job]:
        """Submits allocations with the same node count and time limit; returns the job of each allocation.

        Args:
            bad_hosts: nodes that should not be used, the surest first.
            say: called with messages for the user.

        Raises:
            NotTakenError: the batch system takes no such jobs now.
            ConfigError: the batch system refuses such jobs for ever.
            ClusterError: the submission failed; `observe` finds the jobs that were submitted nevertheless.
        """

    def observe(self, allocations: Allocations) -> JobsSeen:
        """The present state of `allocations`; for ended ones, only whether Slurm started their job again."""

    def cancel(self, allocations: Allocations, *, queued_only: bool = False) -> dict[str, float]:
        """Ends allocations; with `queued_only` it ends only those that hold no nodes.

        Returns:
            Allocation -> seconds for which it held its nodes, for the allocations that have certainly ended;
            `observe` reports the others later.
        """

    def end_frozen_job(self, allocation_name: str, job: Job) -> None:
        """Ends an allocation that runs as `job` and whose agent no longer responds."""
