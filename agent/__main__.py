"""One agent: `python -P -m ultrabench.agent ALLOCATION_FOLDER`, on every node; one leads, others follow."""

import contextlib
import errno
import os
import sys
import time
from functools import partial

from ultrabench.agent.agent_group import MAX_MISSED_BEATS, AgentGroup, StopRequest
from ultrabench.agent.connection import POLL_S, Connection, Inbox, Rendezvous, connect_to_leader
from ultrabench.agent.disk_retry import log_line
from ultrabench.agent.lead import Leader, owns
from ultrabench.agent.node_identity import identify_node
from ultrabench.agent.ranks.node import FileCleanup, Node, NodeAfterRun
from ultrabench.errors import ClusterError, UltrabenchError
from ultrabench.machine_lock import MachineLock, holder
from ultrabench.processes import become_subreaper, clean_up_after_the_dead, start_time
from ultrabench.record import to_dict
from ultrabench.store.allocation import Allocation, read_allocation
from ultrabench.store.events import BY_AGENT, AllocationEnded, AllocationStarted, Ending, LeadingAgent, Start
from ultrabench.store.journal import JournalWriter

RENDEZVOUS_TIMEOUT_S = 120.0
"""Seconds that the agents of an allocation wait for each other at the start."""
LOCK_POLL_S = 0.2
"""Seconds between two attempts to take the lock of this machine."""
REPLY_KEYS = {NodeAfterRun: "cleaned", FileCleanup: "finished"}
"""Type of a node's answer to an order -> the key of the message that sends it to the leader."""
END_EVENT_RETRY_S = 10.0
"""Seconds to retry writing the end of the allocation to the journal."""


def follow(node: Node, leader: Connection, stop_request: StopRequest) -> None:
    """Carries out the orders of the leader until the allocation ends.

    Raises:
        ClusterError: the leader is gone, or has been silent for MAX_MISSED_BEATS heartbeats.
    """
    node.disk.send_heartbeat = partial(leader.send, {"do": "beat"})
    patience_s = RENDEZVOUS_TIMEOUT_S  # before its first message the leader waits for the other nodes
    inbox = Inbox([leader])
    try:
        while not leader.is_closed:
            if stop_request.reason:
                leader.send({"ending": stop_request.reason})
                stop_request.reason = None
            for _, message in inbox.wait(POLL_S):
                patience_s = MAX_MISSED_BEATS * node.allocation.heartbeat_s
                if message.get("do") == "end":
                    return
                answer = node.obey(message)
                if answer is not None:
                    leader.send({REPLY_KEYS[type(answer)]: to_dict(answer)})
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
    allocation_folder = identify_node(os.environ).allocation_folder(sys.argv[1])
    allocation = read_allocation(allocation_folder)
    identity = identify_node(os.environ, allocation.simulated)
    stop_request = StopRequest(None if allocation.by.get("cluster") else allocation_folder)
    become_subreaper()
    # Earlier agents of this host that were killed may have left processes and folders behind.
    clean_up_after_the_dead()
    secret = (allocation_folder / "secret").read_text()
    node = Node(allocation, identity)
    is_local = not allocation.by.get("cluster")
    try:
        if identity.node_index == 0:
            lock = take_machine(allocation, stop_request) if is_local else None
            return lead(node, secret, stop_request) if lock or not is_local else 1
        rendezvous_file = allocation_folder / identity.rendezvous_file
        leader_busy = partial(is_machine_taken, allocation.name, stop_request) if is_local else lambda: False
        leader = connect_to_leader(
            rendezvous_file, node.own_facts(), secret, RENDEZVOUS_TIMEOUT_S, leader_busy
        )
        follow(node, leader, stop_request)
    finally:
        node.close()
        node.remove_scratch()
    return 0


def take_machine(allocation: Allocation, stop_request: StopRequest) -> MachineLock | None:
    """Waits until no other local allocation measures on this machine; None if this one is asked to end meanwhile."""
    while not stop_request.reason:
        with contextlib.suppress(OSError):
            return MachineLock(allocation.sweep_dir, allocation.name)
        time.sleep(LOCK_POLL_S)
    log_line(stop_request.reason)
    return None


def is_machine_taken(allocation_name: str, stop_request: StopRequest) -> bool:
    """Whether an allocation other than this one measures on this machine.

    Raises:
        ClusterError: this agent is asked to end.
    """
    if stop_request.reason:
        raise ClusterError(stop_request.reason)
    lock_holder = holder()
    return lock_holder is not None and lock_holder.allocation != allocation_name


def lead(node: Node, secret: str, stop_request: StopRequest) -> int:
    """Leads the allocation on node 0; returns the exit code, which is 1 when a node was lost.

    A job that does not own the allocation, because it was submitted twice or was given up, writes nothing
    into the journal and also returns 1; srun then ends the agents of its other nodes.
    """
    started_s, pid, name = time.monotonic(), os.getpid(), node.allocation.name
    identity, disk = node.identity, node.disk
    job_start = identity.job or Start()
    rendezvous_file = node.allocation.folder / identity.rendezvous_file
    if not disk.retry(partial(owns, node.folder.claims, name, identity.owner_facts(name))):
        log_line(f"{name} belongs to another job, or was given up before it started; this job runs nothing")
        return 1
    journal = JournalWriter(node.folder.journal, "agent")
    disk.journal_path = journal.path
    leading_agent = LeadingAgent(
        host=identity.host, pid=pid, start_time=start_time(pid), job=job_start, journal=journal.path.name
    )
    disk.retry(partial(journal.write, AllocationStarted(allocation=name, agent=leading_agent)))
    ending, hosts_to_avoid = Ending("crashed"), list[str]()
    try:
        rendezvous = disk.retry(partial(Rendezvous, rendezvous_file, node.address, secret))
        peers = rendezvous.wait_for_peers(node.allocation.nodes, RENDEZVOUS_TIMEOUT_S, disk.beat)
        group = AgentGroup(node, disk.retry(node.own_facts), peers, stop_request)
        hosts_to_avoid = group.hosts_to_avoid
        ending = Leader(node, group, journal).run()
        group.dismiss()
        return int(group.outage is not None)
    except Exception as error:
        is_own_error = isinstance(error, UltrabenchError)
        ending = Ending(str(error) if is_own_error else f"crashed: {type(error).__name__}: {error}")
        raise
    finally:
        node.close()
        end_event = AllocationEnded(
            allocation=name, job=job_start, **ending._asdict(), source=BY_AGENT,
            elapsed_s=time.monotonic() - started_s, avoid=tuple(hosts_to_avoid),
        )  # fmt: skip
        try:
            disk.retry(partial(journal.write, end_event), END_EVENT_RETRY_S)
            rendezvous_file.unlink(missing_ok=True)  # nobody needs the address any more
        except (ClusterError, OSError) as error:
            log_line(f"{error}; this allocation ended: {ending.reason}")


if __name__ == "__main__":
    sys.exit(main())
