"""All agents of one allocation, as the leading agent deals with them: its orders and their messages."""

import contextlib
import os
import random
import signal
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import FrameType
from typing import Any

from ultrabench.agent.connection import POLL_S, Inbox, Message, Peers, listening_socket
from ultrabench.agent.diagnose.addresses import AddressBook
from ultrabench.agent.diagnose.outcome import Outage
from ultrabench.agent.disk_retry import log_line
from ultrabench.agent.ranks.node import CLEANING_S, LOGS_RETRY_S, FileCleanup, Node, NodeAfterRun
from ultrabench.agent.ranks.rank_progress import NO_EVIDENCE, AttemptProgress
from ultrabench.batch_system import batch_system_of
from ultrabench.rank_report import CHECKPOINT_PHASE, read_or_nothing
from ultrabench.record import from_dict, to_dict
from ultrabench.result import AGENT_GONE
from ultrabench.run import Task
from ultrabench.store.allocation import END_REQUEST

EXIT_GRACE_S = 25.0
"""Seconds to wait for all nodes to be clean; a node that cannot be cleaned reports it in less time."""
EVIDENCE_TIMEOUT_S = 15.0
"""Seconds to wait for the evidence of a hang; a node collects it in less time."""
MAX_MISSED_BEATS = 3
"""Number of heartbeats that an agent may miss before it counts as gone."""
DISMISS_GRACE_S = 2.0
"""Seconds for the other agents to clean up after a node was lost, before the batch system ends the job."""
MAX_PORT_TRIES = 50
"""Largest number of random ports that are tried."""
LOWEST_PORT = 10_240
"""Lowest port that is given to a program; lower ones often belong to services."""


class StopRequest:
    """Records SIGTERM, SIGINT or SIGUSR2, by which the batch system or the user asks the allocation to end."""

    def __init__(self, local_folder: Path | None = None) -> None:
        """`local_folder` is that of a local allocation; None for a job of a batch system."""
        self.reason: str | None = None
        """Why the allocation has to end; None while nobody asks for it."""
        self._local_folder = local_folder
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(signal_number, self._record)

    def _record(self, signal_number: int, frame: FrameType | None) -> None:
        sender_text = signal.Signals(signal_number).name
        batch_system = None if self._local_folder else batch_system_of(os.environ)
        if batch_system and signal_number in batch_system.reason_by_signal:
            sender_text += f" ({batch_system.reason_by_signal[signal_number]})"
        if self._local_folder and signal_number == signal.SIGTERM:
            sender_text = "a SIGTERM that no launcher sent, but the program, an administrator or a shutdown"
            if (self._local_folder / END_REQUEST).exists():
                sender_text = "the user, by Ctrl-C in the launch or by ultrabench sweep cancel"
        self.add_reason(f"the allocation was ended by {sender_text}")

    def add_reason(self, reason: str) -> None:
        """Notes a reason to end the allocation; the first one stays."""
        self.reason = self.reason or reason


class AgentGroup:
    """All agents of an allocation, including the agent of this node."""

    def __init__(self, node: Node, own_facts: Message, peers: Peers, stop_request: StopRequest) -> None:
        """`own_facts` describes this node."""
        self._node = node
        self._peers = peers
        self._stop_request = stop_request
        all_facts = [own_facts, *(peers[n].facts for n in sorted(peers))]
        self.node_facts = [{k: v for k, v in facts.items() if k != "addresses"} for facts in all_facts]
        """The facts about each node that the journal keeps."""
        self.hosts = [str(facts["host"]) for facts in self.node_facts]
        addresses = ((str(facts["host"]), facts.get("addresses") or ()) for facts in all_facts)
        self._address_book = AddressBook(self.hosts, dict(addresses))
        self._inbox = Inbox(peers.values())
        self.progress = AttemptProgress(
            len(self.hosts), self.hosts, self._inbox.agent_time_s, self._address_book
        )
        """The progress of the attempt that was started last."""
        self.outage: Outage | None = None
        """Which node can no longer be used, and why; None while all can."""
        self.hosts_to_avoid: list[str] = []
        """Hosts that later jobs should not use."""
        self._leavers: set[int] = set()
        """Indices of nodes whose agents have failed and said so; the nodes are not to blame."""
        self._node_states: dict[int, NodeAfterRun] = {}
        """Index of a node -> its state after the last run, for nodes that have reported it."""
        self._cleanups: dict[int, FileCleanup] = {}
        """Index of a node -> how the removal of the last run's files went there, for nodes that have reported it."""
        node.disk.send_heartbeat = partial(self._send, {"do": "beat"})

    @property
    def end_reason(self) -> str | None:
        """Why this allocation has to end now; None while it may continue."""
        return self._stop_request.reason or (self.outage and self.outage.reason)

    def start(self, task: Task, index: int) -> None:
        """Orders all nodes to start their ranks of `task`, which has number `index` in the allocation."""
        address = self._node.address
        self.progress = AttemptProgress(
            task.spec.layout.world_size, self.hosts, self.listen(0.0), self._address_book,
            starts_ranks=task.starts_ranks,
        )  # fmt: skip
        port = 0 if task.forked else free_port(address)
        departure = task.slice and task.slice.departure and to_dict(task.slice.departure)
        gas = task.part_start.gas if task.part_start else None
        self.order("start", task_index=index, address=address, port=port, departure=departure, gas=gas)

    def order(self, method_name: str, **arguments: Any) -> Any:
        """Sends an order to all nodes (see `Node.obey`); returns the answer of this node."""
        self._send({"do": method_name, **arguments})
        return self._node.obey({"do": method_name, **arguments})

    def end_ranks(self) -> None:
        """Kills all processes of the run on all nodes; a node that is not clean afterwards is lost."""
        for rank in self.progress.running_ranks:
            rank.killed_by_us = True
        self._node_states = {0: self.order("kill")}
        deadline_s = self.listen(0.0) + EXIT_GRACE_S
        while self._awaits_nodes():
            if self.listen(POLL_S) > deadline_s or self.outage or self._leavers:
                break
        for index, host in enumerate(self.hosts):
            if index in self._node_states and (health := self._node_states[index].health):
                self.node_facts[index]["health"] = health
            complaint = self._node_states[index].complaint if index in self._node_states else None
            if complaint and self.progress.ranks[0].phase == CHECKPOINT_PHASE:
                # A file system that does not answer blocks its callers inside Linux, on all nodes alike.
                self._stop_request.add_reason(f"{host} is still saving a checkpoint: {complaint}")
            elif complaint and index not in self._leavers:
                self.give_up(host, complaint)
            elif index not in self._node_states and index not in self._leavers:
                reason = f"{host} is unusable: it did not report the end of its clean-up"
                self.outage = self.outage or Outage(host, reason, AGENT_GONE)

    def _awaits_nodes(self) -> bool:
        """Whether some ranks have not ended, some logs of failed ranks were not read, or some nodes are not clean."""
        has_all_nodes = len(self._node_states.keys() | self._leavers) >= len(self.hosts)
        return bool(self.progress.running_ranks) or self.progress.has_unread_logs or not has_all_nodes

    def finish(self, keep_all: bool) -> None:
        """Has all nodes keep logs and remove the files of the run, and waits for them, before the next run begins.

        The allocation ends if a node does not finish in time: a slow file system is no fault of the node. A node
        that has too little space for another run is lost.
        """
        self._cleanups = {0: self.order("finish", keep_all=keep_all)}
        deadline_s = self.listen(0.0) + 2 * LOGS_RETRY_S + CLEANING_S
        while len(self._cleanups.keys() | self._leavers) < len(self.hosts) and not self.outage:
            if self.listen(POLL_S) > deadline_s:
                break
        for n, host in enumerate(self.hosts):
            problem = f"{host} did not clean up after a run in time"
            cleanup = self._cleanups.get(n) or FileCleanup(problem=problem, is_stuck=n not in self._leavers)
            if cleanup.problem:
                log_line(cleanup.problem)
                if cleanup.is_stuck and not self.outage:
                    self._stop_request.add_reason(cleanup.problem)
            if cleanup.space_shortage:
                self.give_up(host, cleanup.space_shortage)

    def give_up(self, host: str, complaint: str) -> None:
        """Notes that a node itself has reported why it cannot be used any more; later jobs avoid it."""
        self.outage = self.outage or Outage(host, f"{host} is unusable: {complaint}")
        self.hosts_to_avoid.append(host)

    def dismiss(self) -> None:
        """Orders all agents to end; if a node is lost, waits until the others have cleaned up."""
        self._send({"do": "end"})
        end_s, connections = self._inbox.agent_time_s + DISMISS_GRACE_S, self._peers.values()
        while self.outage and self._inbox.agent_time_s < end_s and not all(c.is_closed for c in connections):
            self._inbox.wait(POLL_S)

    def examine(self) -> None:
        """Orders all nodes to examine the ranks that still run; waits at most EVIDENCE_TIMEOUT_S for the evidence."""
        for rank in self.progress.ranks:
            rank.evidence = NO_EVIDENCE
        self.order("collect_hang_evidence")
        deadline_s = self.listen(0.0) + EVIDENCE_TIMEOUT_S
        while any(rank.evidence is NO_EVIDENCE for rank in self.progress.running_ranks):
            if self.listen(POLL_S) > deadline_s or self.end_reason:
                return

    def abort_for_stacks(self) -> None:
        """Orders all nodes to end the ranks without a known stack in the way that shows it, before they are killed."""
        ranks = [rank for rank in self.progress.running_ranks if not rank.evidence["stack"]]
        for rank in self.progress.running_ranks:
            rank.killed_by_us, rank.was_aborted = True, rank in ranks
        self.order("abort_for_stacks", ranks=[rank.number for rank in ranks])
        deadline_s = self.listen(0.0) + EVIDENCE_TIMEOUT_S
        while not all("aborted" in rank.evidence for rank in ranks) and not self.end_reason:
            if self.listen(POLL_S) > deadline_s:
                return

    @property
    def compiler_locks(self) -> list[str]:
        """Paths of the locks of compilers that the nodes have found after the last run, each once."""
        return [*dict.fromkeys(path for node in self._node_states.values() for path in node.compiler_locks)]

    def measured_fields(self) -> dict[str, Any]:
        """The fields of a RunResult that the nodes have measured during the steps of the last run."""
        node_states = self._node_states.values()
        clocks_hz = [clock_hz for node in node_states for clock_hz in node.sm_clocks_hz]
        powers_w = [power_w for node in node_states for power_w in node.powers_w]
        slowdowns = {text for node in node_states for text in node.slowdowns}
        foreign_processes = {text for node in node_states for text in node.foreign_processes}
        return {
            "sm_clock_hz": median(clocks_hz) if clocks_hz else None,
            "throttled": ", ".join(sorted(slowdowns)) or None,
            "power_w_mean": mean(powers_w) if powers_w else None,
            "foreign_load": self._foreign_core_share(),
            "foreign_gpu_processes": ", ".join(sorted(foreign_processes)) or None,
        }

    def _foreign_core_share(self) -> float | None:
        """The share of a node's cores that other programs used, the largest of all nodes; None where it is unknown.

        All simulated nodes are on one host, whose load includes that of each of them.
        """
        shares = [node.core_shares for node in self._node_states.values() if node.core_shares is not None]
        foreign_shares = [used_share - own_share for used_share, own_share in shares]
        if self._node.allocation.simulated:
            has_all_nodes = len(shares) == len(self.hosts)
            foreign_shares = [shares[0][0] - sum(own for _, own in shares)] if has_all_nodes else []
        return max(0.0, *foreign_shares) if foreign_shares else None

    def listen(self, timeout_s: float) -> float:
        """Receives what the nodes send within `timeout_s` seconds, and notes which nodes have gone silent.

        Returns the seconds for which this agent had run when the wait ended. All limits are measured by them, since
        this agent may be stopped after the wait, and then cannot hear the nodes.
        """
        self._node.disk.beat()
        for peer, message in self._inbox.wait(timeout_s):
            self._handle(int(peer.facts["node"]), message)
        self.progress.add(self._node.rank_events(), self._inbox.agent_time_s)
        limit_s = MAX_MISSED_BEATS * self._node.allocation.heartbeat_s
        for n, peer in self._peers.items():
            if n not in self._leavers and (peer.is_closed or self._inbox.silence_s(peer) > limit_s):
                reason = f"the agent of node {n} ({self.hosts[n]}) is gone"
                self.outage = self.outage or Outage(self.hosts[n], reason, AGENT_GONE)
        return self._inbox.agent_time_s

    def _handle(self, node_index: int, message: Message) -> None:
        """Handles a message of the agent of a node; an invalid one ends the allocation."""
        try:
            if "cleaned" in message:
                self._node_states[node_index] = from_dict(NodeAfterRun, message["cleaned"])
            if "finished" in message:
                self._cleanups[node_index] = from_dict(FileCleanup, message["finished"])
            if "ending" in message:
                self._stop_request.add_reason(str(message["ending"]))
                self._leavers |= {node_index} if message.get("left") else set()
            self.progress.add(message.get("rank_events", []), self._inbox.agent_time_s)
        except Exception as error:  # the message may hold anything
            sender_text = f"the agent of node {node_index} ({self.hosts[node_index]})"
            error_text = f"an invalid message: {type(error).__name__}: {error}"
            self._stop_request.add_reason(f"{sender_text} sent {error_text}")

    def _send(self, message: Message) -> None:
        for peer in self._peers.values():
            peer.send(message)


def free_port(host: str) -> int:
    """A port of `host` that is free now, for programs that need MASTER_PORT before they start.

    It is outside the range from which the system takes ports for connections, so that it stays free
    until the program binds it. The embedded kernel does not need it: its rank 0 binds port 0 and
    reports which port it got.
    """
    first_ephemeral_port, *_ = read_or_nothing("/proc/sys/net/ipv4/ip_local_port_range", 0, 64).split() or [
        b"0"
    ]
    candidate_ports = range(LOWEST_PORT, int(first_ephemeral_port))
    for port in random.sample(candidate_ports, min(MAX_PORT_TRIES, len(candidate_ports))):
        with contextlib.suppress(OSError), listening_socket(host, port):
            return port
    with listening_socket(host) as server_socket:
        return int(server_socket.getsockname()[1])
