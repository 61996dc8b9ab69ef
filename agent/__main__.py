"""One agent: `python -P -m ultrabench.agent ALLOCATION_FOLDER`, on every node; one leads, others follow."""

import contextlib
import errno
import os
import sys
import time
from functools import partial

from ultrabench.agent.agent_group import LOST_BEATS, AgentGroup, StopRequest
from ultrabench.agent.connection import POLL_S, Connection, Inbox, Rendezvous, connect_to_leader
from ultrabench.agent.disk_retry import log_line
from ultrabench.agent.lead import Leader, owns
from ultrabench.agent.node_identity import identify_node
from ultrabench.agent.ranks.node import Cleaned, Finished, Node
from ultrabench.errors import ClusterError, UltrabenchError
from ultrabench.machine_lock import MachineLock, holder
from ultrabench.processes import become_subreaper, clean_up_after_the_dead, start_time
from ultrabench.record import to_dict
from ultrabench.store.allocation import Allocation, read_allocation
from ultrabench.store.events import AllocationEnded, AllocationStarted, Ending, LeadingAgent, Start
from ultrabench.store.journal import JournalWriter

RENDEZVOUS_TIMEOUT_S = 120.0
"""Seconds that the agents of an allocation wait for each other at the start."""
LOCK_POLL_S = 0.2
"""Seconds between two attempts to take the lock of this machine."""
REPLIES = {Cleaned: "cleaned", Finished: "finished"}
"""Type of a node's answer to an order -> the key of the message that sends it to the leader."""
LAST_RETRY_S = 10.0
"""Seconds to retry writing the end of the allocation to the journal."""


def follow(node: Node, leader: Connection, stop: StopRequest) -> None:
    """Carries out the orders of the leader until the allocation ends.

    Raises:
        ClusterError: the leader is gone, or has been silent for LOST_BEATS heartbeats.
    """
    node.disk.send_heartbeat = partial(leader.send, {"do": "beat"})
    patience_s = RENDEZVOUS_TIMEOUT_S  # before its first message the leader waits for the other nodes
    inbox = Inbox([leader])
    try:
        while not leader.is_closed:
            if stop.reason:
                leader.send({"ending": stop.reason})
                stop.reason = None
            for _, message in inbox.wait(POLL_S):
                patience_s = LOST_BEATS * node.allocation.heartbeat_s
                if message.get("do") == "end":
                    return
                answer = node.obey(message)
                if answer is not None:
                    leader.send({REPLIES[type(answer)]: to_dict(answer)})
            node.disk.beat()
            if rank_events := node.rank_events():
                leader.send({"rank_events": rank_events})
            if (silence_s := inbox.silence_s(leader)) > patience_s:
                raise ClusterError(f"the leading agent has been silent for {silence_s:.1f} s")
        raise ClusterError("the leading agent is gone")
    except Exception as error:
        # Without this message the leader would believe that the node is broken.
        reason = f"the agent of {node.identity.host} failed: {type(error).__name__}: {error}"
        leader.send({"ending": reason, "left": True})
        raise


def main() -> int:
    """Runs the agent of this node; returns the exit code. An error is printed as a line in the job's log."""
    try:
        return take_part()
    except UltrabenchError as error:
        log_line(str(error))
        return error.exit_code
    except OSError as error:
        disk_is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space on that disk" if disk_is_full else "was the results folder moved?"
        log_line(f"cannot use {error.filename or 'a file'}: {error.strerror}; {advice}")
        return ClusterError.exit_code


def take_part() -> int:
    """Leads on node 0, follows on the others; returns 0 when the allocation ended as it should."""
    folder = identify_node(os.environ).folder(sys.argv[1])
    allocation = read_allocation(folder)
    identity = identify_node(os.environ, allocation.simulated)
    stop = StopRequest(None if allocation.by.get("cluster") else folder)
    become_subreaper()
    # Earlier agents of this host that were killed may have left processes and folders behind.
    clean_up_after_the_dead()
    secret = (folder / "secret").read_text()
    node = Node(allocation, identity)
    is_local = not allocation.by.get("cluster")
    try:
        if identity.node == 0:
            lock = take_machine(allocation, stop) if is_local else None
            return lead(node, secret, stop) if lock or not is_local else 1
        rendezvous_file = folder / identity.rendezvous_file
        leader_waits = partial(held_by_another, allocation.name, stop) if is_local else lambda: False
        facts = node.facts()
        leader = connect_to_leader(rendezvous_file, facts, secret, RENDEZVOUS_TIMEOUT_S, leader_waits)
        follow(node, leader, stop)
    finally:
        node.close()
        node.remove_scratch()
    return 0


def take_machine(allocation: Allocation, stop: StopRequest) -> MachineLock | None:
    """Waits until no other local allocation measures on this machine; None if this one is asked to end meanwhile."""
    while not stop.reason:
        with contextlib.suppress(OSError):
            return MachineLock(allocation.sweep_dir, allocation.name)
        time.sleep(LOCK_POLL_S)
    log_line(stop.reason)
    return None


def held_by_another(allocation: str, stop: StopRequest) -> bool:
    """Whether an allocation other than this one measures on this machine.

    Raises:
        ClusterError: this agent is asked to end.
    """
    if stop.reason:
        raise ClusterError(stop.reason)
    holding_allocation = holder()
    return holding_allocation is not None and holding_allocation.allocation != allocation


def lead(node: Node, secret: str, stop: StopRequest) -> int:
    """Leads the allocation on node 0; returns the exit code, which is 1 when a node was lost.

    A job that does not own the allocation, because it was submitted twice or was given up, writes nothing
    into the journal and also returns 1; srun then ends the agents of its other nodes.
    """
    started_s, pid, name = time.monotonic(), os.getpid(), node.allocation.name
    identity, disk = node.identity, node.disk
    job = identity.job or Start()
    rendezvous_file = node.allocation.folder / identity.rendezvous_file
    if not disk.retry(partial(owns, node.folder.claims, name, identity.owner(name))):
        log_line(f"{name} belongs to another job, or was given up before it started; this job runs nothing")
        return 1
    journal = JournalWriter(node.folder.journal, "agent")
    disk.journal = journal.path
    agent = LeadingAgent(
        host=identity.host, pid=pid, start_time=start_time(pid), job=job, journal=journal.path.name
    )
    disk.retry(partial(journal.write, AllocationStarted(allocation=name, agent=agent)))
    ending, hosts_to_avoid = Ending("crashed"), list[str]()
    try:
        rendezvous = disk.retry(partial(Rendezvous, rendezvous_file, node.address, secret))
        peers = rendezvous.wait_for_peers(node.allocation.nodes, RENDEZVOUS_TIMEOUT_S, disk.beat)
        group = AgentGroup(node, disk.retry(node.facts), peers, stop)
        hosts_to_avoid = group.avoid
        ending = Leader(node, group, journal).run()
        group.dismiss()
        return int(group.outage is not None)
    except Exception as error:
        is_explained = isinstance(error, UltrabenchError)
        ending = Ending(str(error) if is_explained else f"crashed: {type(error).__name__}: {error}")
        raise
    finally:
        node.close()
        elapsed_s = time.monotonic() - started_s
        end_event = AllocationEnded(
            allocation=name,
            job=job,
            **ending._asdict(),
            source="agent",
            elapsed_s=elapsed_s,
            avoid=tuple(hosts_to_avoid),
        )
        try:
            disk.retry(partial(journal.write, end_event), LAST_RETRY_S)
            rendezvous_file.unlink(missing_ok=True)  # nobody needs the address any more
        except (ClusterError, OSError) as error:
            log_line(f"{error}; this allocation ended: {ending.reason}")


if __name__ == "__main__":
    sys.exit(main())
