"""One agent: `python -P -m ultrabench.agent ALLOCATION_FOLDER`, once on every node."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from ultrabench.agent.follow import follow
from ultrabench.agent.gang import Gang
from ultrabench.agent.lead import Leader
from ultrabench.agent.link import Meeting, call_leader
from ultrabench.agent.node import Node
from ultrabench.agent.place import Place, here
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation, read_allocation
from ultrabench.errors import ClusterError
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.processes import become_subreaper, clean_up_after_the_dead, start_time

MEETING_PATIENCE_S = 120.0


def main() -> int:
    """Meets the other agents and leads or follows; 0 when the allocation ended in order."""
    place = here(os.environ)
    folder = place.folder(sys.argv[1])
    allocation = read_allocation(folder)
    if place.job_id is None:
        place = replace(place, host=here(os.environ, allocation.simulated).host)
    stop = StopRequest()
    become_subreaper()
    # What earlier agents of this host left behind when they were killed.
    clean_up_after_the_dead()
    secret = (folder / "secret").read_text()
    node = Node(allocation, place)
    node.warm_up()
    try:
        if place.node == 0:
            lead(allocation, node, place, secret, stop)
        else:
            leader = call_leader(folder / place.meeting, node.facts(), secret, MEETING_PATIENCE_S)
            follow(allocation, node, leader, stop)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        node.close()
    return 0


def lead(allocation: Allocation, node: Node, place: Place, secret: str, stop: StopRequest) -> None:
    """Node 0: gathers the others, runs the tasks, says why it ended."""
    started = time.monotonic()
    address = place.address(allocation.simulated or allocation.nodes == 1)
    journal = JournalWriter(SweepFolder(Path(allocation.sweep_dir)).journal, "agent")
    me = {"node": place.node, "host": place.host, "pid": os.getpid(), "start_time": start_time(os.getpid())}
    name = {"allocation": allocation.name, "restart": place.restart}
    journal.write("allocation_started", **name, agent=me | {"job": place.job})
    reason, avoid = "crashed", list[str]()
    try:
        meeting = Meeting(allocation.folder / place.meeting, address, secret)
        peers = meeting.gather(allocation.nodes, MEETING_PATIENCE_S)
        gang = Gang(allocation, node, peers, stop, address)
        reason = Leader(allocation, node, place, gang, journal).run()
        avoid = gang.avoid
        for line in peers.values():
            line.send({"do": "end"})
    except ClusterError as error:
        reason = str(error)
        raise
    finally:
        node.close()
        elapsed_s = time.monotonic() - started
        journal.write(
            "allocation_ended", **name, reason=reason, source="agent", elapsed_s=elapsed_s, avoid=avoid
        )
        # Its address and its secret are of no use to anybody now.
        (allocation.folder / place.meeting).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
