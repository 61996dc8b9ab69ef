"""The nodes of one allocation as one: what the leading agent tells them and hears from them."""

import time
from typing import Any

from ultrabench.agent.gathering import Gathering
from ultrabench.agent.link import Line, wait_readable
from ultrabench.agent.node import Node
from ultrabench.agent.port import free_port
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation
from ultrabench.run import Task

POLL_S = 0.05
EXIT_GRACE_S = 15.0
LOST_BEATS = 3


class Gang:
    """All agents of an allocation, this node's own included."""

    def __init__(
        self, allocation: Allocation, node: Node, peers: dict[int, Line], stop: StopRequest, address: str
    ) -> None:
        self._allocation = allocation
        self._node = node
        self._peers = peers
        self._stop = stop
        self._address = address
        self.facts = [node.facts(), *(peers[n].facts for n in sorted(peers))]
        self.hosts = [str(facts["host"]) for facts in self.facts]
        self.lost: str | None = None
        """Which node can be used no more, and why."""
        self.avoid: list[str] = []
        """Nodes that should not be used again."""
        self._ending_peer: str | None = None

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
        self._tell({"do": "kill"})
        left = self._node.kill()
        end = time.monotonic() + EXIT_GRACE_S
        while gathering.running and not self.lost and time.monotonic() < end:
            self.listen(gathering, POLL_S)
        if left:
            self.lost = f"{self._node.host}: processes {left} cannot be killed"
            self.avoid = [self._node.host]

    def finish(self, keep_all: bool) -> None:
        """Has all nodes save the logs of the run and forget it."""
        self._node.finish(keep_all=keep_all)
        self._tell({"do": "finish", "keep_all": keep_all})

    def listen(self, gathering: Gathering, seconds: float) -> None:
        """Takes in what all nodes say within `seconds`, and notices who has gone silent."""
        for line in wait_readable(list(self._peers.values()), seconds):
            for message in line.receive():
                self._ending_peer = message.get("ending", self._ending_peer)
                gathering.hear(message.get("news", []))
        gathering.hear(self._node.news())
        silence = LOST_BEATS * self._allocation.heartbeat_s
        for node, line in self._peers.items():
            if line.closed or time.monotonic() - line.heard > silence:
                self.lost = self.lost or f"the agent of node {node} ({self.hosts[node]}) is gone"

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._peers.values():
            line.send(message)
