"""One agent: `python -P -m ultrabench.agent ALLOCATION_FOLDER`, once on every node."""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from ultrabench.agent.follow import follow
from ultrabench.agent.gang import Gang
from ultrabench.agent.lead import Leader, owns
from ultrabench.agent.link import MEETING_PATIENCE_S, Meeting, call_leader
from ultrabench.agent.node import Node
from ultrabench.agent.patience import tell
from ultrabench.agent.place import Place, here
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation, read_allocation
from ultrabench.errors import ClusterError, UltrabenchError
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.processes import become_subreaper, clean_up_after_the_dead, start_time

LAST_WORD_S = 10.0
"""So long a disk is waited for that does not take the news that the allocation ended."""


def main() -> int:
    """Takes part in an allocation; what goes wrong outside of it is one line in the job's log."""
    try:
        return take_part(here(os.environ))
    except UltrabenchError as error:
        tell(str(error))
        return error.exit_code
    except OSError as error:
        tell(f"cannot use {error.filename or 'a file'}: {error.strerror}; was the results folder moved?")
        return ClusterError.exit_code


def take_part(place: Place) -> int:
    """Leads or follows on this node; 0 when the allocation ended in order."""
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
            return lead(allocation, node, place, secret, stop)
        leader = call_leader(folder / place.meeting, node.facts(), secret, MEETING_PATIENCE_S)
        follow(allocation, node, leader, stop)
    finally:
        node.close()
    return 0


def lead(allocation: Allocation, node: Node, place: Place, secret: str, stop: StopRequest) -> int:
    """Node 0: gathers the others, runs the tasks, says why it ended; 1 when a node was lost.

    A job that does not own the allocation, because it was submitted twice or given up, leaves without a
    word in the journal, also with 1, at which srun ends the agents of its other nodes.
    """
    started = time.monotonic()
    address = place.address(allocation.simulated or allocation.nodes == 1)
    folder = SweepFolder(Path(allocation.sweep_dir))
    patience, pid = node.patience, os.getpid()
    me = {"allocation": allocation.name, "host": place.host, "job": place.job}
    if not patience.insist(owns, folder.claims, allocation.name, me):
        tell(f"{allocation.name} belongs to another job, or was given up before it ran: nothing is run here")
        return 1
    journal = JournalWriter(folder.journal, "agent")
    patience.beat = partial(patience.touch, journal.path)
    name = {"allocation": allocation.name, "restart": place.restart}
    agent = {"node": place.node, "host": place.host, "pid": pid, "start_time": start_time(pid)}
    agent |= {"job": place.job, "journal": journal.path.name}
    patience.insist(journal.write, "allocation_started", **name, agent=agent)
    reason, avoid = "crashed", list[str]()
    try:
        meeting = patience.insist(Meeting, allocation.folder / place.meeting, address, secret)
        peers = meeting.gather(allocation.nodes, MEETING_PATIENCE_S, patience.beat)
        gang = Gang(allocation, node, patience.insist(node.facts), peers, stop, address, journal.path)
        avoid = gang.avoid
        reason = Leader(allocation, node, place, gang, journal, me).run()
        gang.dismiss()
        return int(gang.lost is not None)
    except UltrabenchError as error:
        reason = str(error)
        raise
    except Exception as error:
        reason = f"crashed: {type(error).__name__}: {error}"
        raise
    finally:
        node.close()
        elapsed_s = time.monotonic() - started
        end = {"reason": reason, "source": "agent", "elapsed_s": elapsed_s, "avoid": avoid, "job": place.job}
        try:
            patience.within(LAST_WORD_S, journal.write, "allocation_ended", **name, **end)
            # Its address and its secret are of no use to anybody now.
            (allocation.folder / place.meeting).unlink(missing_ok=True)
        except (ClusterError, OSError) as error:
            tell(f"{error}; this allocation ended: {reason}")


if __name__ == "__main__":
    sys.exit(main())
