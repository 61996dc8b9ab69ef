"""One agent: `python -P -m ultrabench.agent ALLOCATION_FOLDER`, once on every node."""

import os
import sys
from pathlib import Path

from ultrabench.agent.follow import follow
from ultrabench.agent.lead import Leader
from ultrabench.agent.link import Meeting, call_leader
from ultrabench.agent.node import Node
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation, read_allocation
from ultrabench.errors import ClusterError
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.processes import become_subreaper, clean_up_after_the_dead, start_time

MEETING_PATIENCE_S = 120.0


def node_index() -> int:
    """Which node of the allocation this is, from the launcher's environment."""
    return int(os.environ.get("SUBMITIT_LOCAL_GLOBALID") or os.environ.get("SLURM_NODEID") or 0)


def main() -> int:
    """Meets the other agents and leads or follows; 0 when the allocation ended in order."""
    folder = Path(sys.argv[1])
    allocation = read_allocation(folder)
    stop = StopRequest()
    become_subreaper()
    # What earlier agents of this host left behind when they were killed.
    clean_up_after_the_dead()
    secret = (folder / "secret").read_text()
    node = Node(allocation, node_index())
    node.warm_up()
    try:
        if node.index == 0:
            lead(allocation, node, secret, stop)
        else:
            leader = call_leader(folder, node.index, node.host, secret, MEETING_PATIENCE_S)
            follow(allocation, node, leader, stop)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        node.close()
    return 0


def lead(allocation: Allocation, node: Node, secret: str, stop: StopRequest) -> None:
    """Node 0: gathers the others, runs the tasks, says why it ended."""
    address = "127.0.0.1" if allocation.simulated or allocation.nodes == 1 else node.host
    journal = JournalWriter(SweepFolder(Path(allocation.sweep_dir)).journal, "agent")
    me = {"node": node.index, "host": node.host, "pid": os.getpid(), "start_time": start_time(os.getpid())}
    journal.write("allocation_started", allocation=allocation.name, agent=me)
    reason = "crashed"
    try:
        meeting = Meeting(allocation.folder, address, secret)
        peers = meeting.gather(allocation.nodes, MEETING_PATIENCE_S)
        leader = Leader(allocation, node, peers, journal, stop, address)
        reason = leader.run()
        for line in peers.values():
            line.send({"do": "end"})
    except ClusterError as error:
        reason = str(error)
        raise
    finally:
        node.close()
        journal.write("allocation_ended", allocation=allocation.name, reason=reason)


if __name__ == "__main__":
    sys.exit(main())
