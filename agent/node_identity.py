"""The node and the job of an agent, and which start of that job it is."""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ultrabench.agent.connection import listening_socket
from ultrabench.batch_system import batch_system_of
from ultrabench.record import to_dict
from ultrabench.store.events import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The node and the job of an agent, as the environment variables of its process describe them."""

    node_index: int
    """Index of the node in the allocation."""
    host: str
    job: Start | None = None
    """The start of the Slurm job that the agent runs in; None for local processes."""
    array_index: str | None = None
    """The index in the job array; None outside of arrays."""

    def owner_facts(self, allocation_name: str) -> dict[str, Any]:
        """The owner that claims record: the allocation, and the host and job that run it."""
        return {"allocation": allocation_name, "host": self.host, "job": self.job and to_dict(self.job)}

    @property
    def rendezvous_file(self) -> str:
        """Name of the file with the address of the leader, different for each start of the job."""
        return f"leader-{self.job.job_id}.{self.job.restart}.json" if self.job else "leader.json"

    def allocation_folder(self, base_path: str) -> Path:
        """The folder of the allocation; `base_path` is its path, without the index in a job array."""
        return Path(base_path if self.array_index is None else f"{base_path}.{self.array_index}")

    def address(self, on_one_host: bool) -> str:
        """The address at which the other nodes of the allocation reach this node.

        Among several addresses it is one on which this node can listen, IPv4 before IPv6. On some systems the
        host's own name leads only to loopback addresses. Then it is SLURM_LAUNCH_NODE_IPADDR, the address from
        which Slurm started the tasks: that of the first node.
        """
        loopback_addresses, addresses = ["127.0.0.1", "::1"], set[str]()
        if on_one_host:
            return min(loopback_addresses, key=_address_sort_key)
        with contextlib.suppress(OSError):
            sockaddrs = [info[4] for info in socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)]
            # For link-local addresses the result also has the zone, such as %eth0.
            addresses = {socket.getnameinfo(sockaddr, socket.NI_NUMERICHOST)[0] for sockaddr in sockaddrs}
        external_addresses = [address for address in addresses if not ip_address(address).is_loopback]
        if external_addresses:
            return min(external_addresses, key=_address_sort_key)
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or min(loopback_addresses, key=_address_sort_key)


def _address_sort_key(address: str) -> tuple[bool, bool, bool, str]:
    """Sort key of an address at which a node can be reached, the best first."""
    can_listen = False
    with contextlib.suppress(OSError), listening_socket(address):
        can_listen = True
    return not can_listen, ip_address(address).is_link_local, ":" in address, address


def identify_node(environ: Mapping[str, str], simulated: bool = False) -> NodeIdentity:
    """The node that environment variables describe: of a Slurm job, a process of submitit, or neither."""
    hostname = socket.gethostname().split(".")[0]
    # submitit sets this variable for its local processes, which may run inside a Slurm job.
    local_index = environ.get("SUBMITIT_LOCAL_GLOBALID")
    if local_index is not None or batch_system_of(environ) is None:
        node_index = int(local_index or 0)
        return NodeIdentity(node_index=node_index, host=f"local-{node_index}" if simulated else hostname)
    array_id, array_index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array_id}_{array_index}" if array_id and array_index else environ["SLURM_JOB_ID"]
    return NodeIdentity(
        node_index=int(environ.get("SLURM_NODEID", 0)),
        host=environ.get("SLURMD_NODENAME") or hostname,
        job=Start(job_id=job_id, restart=int(environ.get("SLURM_RESTART_COUNT") or 0)),
        array_index=array_index,
    )
