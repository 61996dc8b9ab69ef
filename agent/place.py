"""Where this agent runs: which node of which start of which job."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the launcher's environment says of this agent."""

    node: int
    """Index of the node in the allocation."""
    host: str
    job_id: str | None = None
    """Of Slurm, such as 123 or 123_4; None for local processes."""
    restart: int = 0
    """How often Slurm has started this job before."""
    array_task: str | None = None

    @property
    def job(self) -> dict[str, Any] | None:
        """The job as claims and results name it."""
        return None if self.job_id is None else {"job_id": self.job_id, "restart": self.restart}

    @property
    def meeting(self) -> str:
        """Name of the file in which the leader of this very start of the job gives its address."""
        return f"leader-{self.job_id}.{self.restart}.json" if self.job_id else "leader.json"

    def folder(self, argument: str) -> Path:
        """The allocation's folder: of a job array, the argument is what all of them share."""
        return Path(argument if self.array_task is None else f"{argument}.{self.array_task}")

    def address(self, one_host: bool) -> str:
        """Where this node can be reached by the others of the allocation.

        Some systems give a host's own name to its loopback device; then the address that Slurm
        started the job from is taken, which is that of the first node.
        """
        if one_host:
            return "127.0.0.1"
        try:
            own = socket.gethostbyname(self.host)
        except OSError:
            own = "127.0.0.1"
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", own) if own.startswith("127.") else own


def here(environ: Mapping[str, str], simulated: bool = False) -> Place:
    """The place that an environment describes: a task of Slurm's, of submitit's local jobs, or none."""
    job_id = environ.get("SLURM_JOB_ID")
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if "SUBMITIT_LOCAL_GLOBALID" in environ:  # started inside a job, but not by it
        node = int(environ["SUBMITIT_LOCAL_GLOBALID"])
        return Place(node=node, host=f"local-{node}" if simulated else _hostname())
    if job_id is None:
        return Place(node=0, host="local-0" if simulated else _hostname())
    return Place(
        node=int(environ.get("SLURM_NODEID", 0)),
        host=environ.get("SLURMD_NODENAME") or _hostname(),
        job_id=f"{array}_{task}" if array and task else job_id,
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        array_task=task,
    )


def _hostname() -> str:
    return socket.gethostname().split(".")[0]
