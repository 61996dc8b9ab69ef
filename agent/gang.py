"""The nodes of one allocation as one: what the leading agent tells them and hears from them."""

import time
from pathlib import Path
from statistics import median
from typing import Any

from ultrabench.agent.attention import Attention
from ultrabench.agent.gathering import Gathering
from ultrabench.agent.link import Line, wait_readable
from ultrabench.agent.node import Cleaned, Node
from ultrabench.agent.port import free_port
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation
from ultrabench.run import Task

POLL_S = 0.05
EXIT_GRACE_S = 25.0
"""Longer than a node takes to find out that it cannot be cleaned."""
AUTOPSY_S = 15.0
"""Longer than a node takes to look at its ranks."""
LOST_BEATS = 3
DISMISS_S = 2.0


class Gang:
    """All agents of an allocation, this node's own included."""

    def __init__(
        self, allocation: Allocation, node: Node, facts: dict[str, Any], peers: dict[int, Line],
        stop: StopRequest, address: str, journal: Path,
    ) -> None:  # fmt: skip
        """`facts` are those of this node; `journal` is touched, so that launchers see that this agent lives."""
        self._allocation = allocation
        self._node = node
        self._peers = peers
        self._stop = stop
        self._address = address
        self.facts = [facts, *(peers[n].facts for n in sorted(peers))]
        self.hosts = [str(facts["host"]) for facts in self.facts]
        self.lost: str | None = None
        """Which node can be used no more, and why."""
        self.avoid: list[str] = []
        """Nodes that should not be used again."""
        self._ending_peer: str | None = None
        self._left: set[int] = set()
        """Nodes whose agent has said why it fails, which is nothing that their node did."""
        self._journal = journal
        self._beaten = 0.0
        self._attention = Attention()
        self._cleaned: dict[int, Cleaned] = {}
        node.patience.beat = self._beat

    @property
    def interrupted(self) -> str | None:
        """Why this allocation has to end now."""
        return self._stop.reason or self._ending_peer or self.lost

    def start(self, task: Task, index: int) -> Gathering:
        """Has all nodes start their ranks of `task`, which they know by `index`."""
        port = 0 if task.forked else free_port(self._address)
        gathering = Gathering(task.spec.layout.world_size)
        self._tell({"do": "start", "task": index, "address": self._address, "port": port})
        self._node.start(task, self._address, port)
        return gathering

    def tell_port(self, port: int) -> None:
        """Passes the port of rank 0's store on to all nodes."""
        self._node.tell_port(port)
        self._tell({"do": "store", "port": port})

    def end_ranks(self, gathering: Gathering) -> None:
        """Kills what is left on all nodes and waits for every exit."""
        for rank in gathering.running:
            gathering.ranks[rank].killed_by_us = True
        self._cleaned.clear()
        self._tell({"do": "kill"})
        self._cleaned[0] = self._node.kill()
        end = time.monotonic() + EXIT_GRACE_S
        while gathering.running or len(self._cleaned.keys() | self._left) < len(self.hosts):
            self.listen(gathering, POLL_S)
            if self.lost or self._left or time.monotonic() > end:
                break
        for node, host in enumerate(self.hosts):
            if node in self._left:
                continue
            left = self._cleaned.get(node, {"left": "it does not say that it is clean"})["left"]
            if left and (node in self._cleaned or not self.lost):
                self.lost = f"{host} is given up: {left}"
                self.avoid.append(host)

    def dismiss(self) -> None:
        """Sends all agents home; those that live clean up before a lost node has Slurm end the job."""
        self._tell({"do": "end"})
        end = time.monotonic() + DISMISS_S
        while self.lost and time.monotonic() < end and not all(p.closed for p in self._peers.values()):
            for line in wait_readable(list(self._peers.values()), POLL_S):
                line.receive()

    def autopsy(self, gathering: Gathering) -> None:
        """Has all nodes look at the ranks that still run, in bounded time, before these are killed."""
        self._tell({"do": "examine"})
        self._node.examine()
        end = time.monotonic() + AUTOPSY_S
        while any(gathering.ranks[rank].found is None for rank in gathering.running):
            self.listen(gathering, POLL_S)
            if time.monotonic() > end or self.interrupted:
                break

    def clocks(self) -> tuple[float | None, str | None]:
        """Median SM clock (Hz) over all GPUs while the last run made steps, and what slowed them."""
        told = self._cleaned.values()
        clocks = [clock for cleaned in told for clock in cleaned["sm_clocks_hz"]]
        slowed = sorted({text for cleaned in told for text in cleaned["slowdowns"]})
        return (median(clocks) if clocks else None), (", ".join(slowed) or None)

    def finish(self, keep_all: bool) -> str | None:
        """Has all nodes save the logs of the run and forget it; says why this node could not."""
        self._tell({"do": "finish", "keep_all": keep_all})
        return self._node.finish(keep_all=keep_all)

    def listen(self, gathering: Gathering, seconds: float) -> None:
        """Takes in what all nodes say within `seconds`, and notices who has gone silent."""
        self._beat()
        readable = wait_readable(list(self._peers.values()), seconds)
        away = self._attention.absence_s(seconds)
        gathering.excuse(away)
        for line in self._peers.values():
            line.excuse(away)
        for line in readable:
            for message in line.receive():
                self._take(int(line.facts["node"]), message, gathering)
        gathering.hear(self._node.news())
        silence = LOST_BEATS * self._allocation.heartbeat_s
        for node, line in self._peers.items():
            if node not in self._left and (line.closed or time.monotonic() - line.heard > silence):
                self.lost = self.lost or f"the agent of node {node} ({self.hosts[node]}) is gone"
        self._attention.rest()

    def _take(self, node: int, message: dict[str, Any], gathering: Gathering) -> None:
        """Takes in what the agent of a node says; one that speaks nonsense ends the allocation."""
        try:
            if "cleaned" in message:
                told = message["cleaned"]
                clocks = [float(clock) for clock in told["sm_clocks_hz"]]
                slowdowns = [str(text) for text in told["slowdowns"]]
                self._cleaned[node] = {"left": told["left"], "sm_clocks_hz": clocks, "slowdowns": slowdowns}
            if "ending" in message:
                self._ending_peer = str(message["ending"])
                self._left |= {node} if message.get("left") else set()
            gathering.hear(message.get("news", []))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            whose = f"the agent of node {node} ({self.hosts[node]})"
            self._ending_peer = f"{whose} said what cannot be understood: {type(error).__name__}: {error}"

    def _beat(self) -> None:
        """Shows the other agents and the launcher, often enough, that this one is not frozen."""
        if time.monotonic() - self._beaten > self._allocation.heartbeat_s / 2:
            self._beaten = time.monotonic()
            self._tell({"do": "beat"})
            self._node.patience.touch(self._journal)

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._peers.values():
            line.send(message)
