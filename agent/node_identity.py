"""On which node an agent runs, of which job, and in which start of that job."""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ultrabench.agent.connection import listen
from ultrabench.record import to_dict
from ultrabench.store.events import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The node and the job of an agent, as the environment variables of its process describe them."""

    node: int
    """Index of the node in the allocation."""
    host: str
    job: Start | None = None
    """The start of the Slurm job that the agent runs in; None for local processes."""
    array_task: str | None = None
    """The index in the job array; None outside of arrays."""

    def owner(self, allocation: str) -> dict[str, Any]:
        """The owner that claims record: the allocation, and the host and job that run it."""
        return {"allocation": allocation, "host": self.host, "job": self.job and to_dict(self.job)}

    @property
    def rendezvous_file(self) -> str:
        """Name of the file with the address of the leader, different for each start of the job."""
        return f"leader-{self.job.job_id}.{self.job.restart}.json" if self.job else "leader.json"

    def folder(self, argument: str) -> Path:
        """The folder of the allocation; `argument` is its path, without the index in a job array."""
        return Path(argument if self.array_task is None else f"{argument}.{self.array_task}")

    def address(self, one_host: bool) -> str:
        """The address at which the other nodes of the allocation reach this node.

        Of several addresses it is one on which this node can listen, IPv4 before IPv6. Some systems give a
        host's own name only to its loopback device. Then this is SLURM_LAUNCH_NODE_IPADDR, the address from
        which Slurm started the tasks: that of the first node.
        """
        loopback, resolved = ["127.0.0.1", "::1"], set[str]()
        if one_host:
            return min(loopback, key=_preference)
        with contextlib.suppress(OSError):
            sockaddrs = [info[4] for info in socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)]
            # Of link-local addresses this also gives the zone, such as %eth0.
            resolved = {socket.getnameinfo(sockaddr, socket.NI_NUMERICHOST)[0] for sockaddr in sockaddrs}
        outside = [address for address in resolved if not ip_address(address).is_loopback]
        launch_node = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        return min(outside, key=_preference) if outside else launch_node or min(loopback, key=_preference)


def _preference(address: str) -> tuple[bool, bool, bool, str]:
    """Sort key of an address at which a node can be reached, the best first."""
    usable = False
    with contextlib.suppress(OSError), listen(address):
        usable = True
    return not usable, ip_address(address).is_link_local, ":" in address, address


def identify_node(environ: Mapping[str, str], simulated: bool = False) -> NodeIdentity:
    """The node that environment variables describe: of a Slurm job, a process of submitit, or neither."""
    hostname = socket.gethostname().split(".")[0]
    # submitit sets this for its local processes, which may have been started inside a Slurm job.
    local = environ.get("SUBMITIT_LOCAL_GLOBALID")
    if local is not None or "SLURM_JOB_ID" not in environ:
        node = int(local or 0)
        return NodeIdentity(node=node, host=f"local-{node}" if simulated else hostname)
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]
    return NodeIdentity(
        node=int(environ.get("SLURM_NODEID", 0)),
        host=environ.get("SLURMD_NODENAME") or hostname,
        job=Start(job_id=job_id, restart=int(environ.get("SLURM_RESTART_COUNT") or 0)),
        array_task=task,
    )
