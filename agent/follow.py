"""A following agent: it carries out the orders of the leader for the ranks of its node."""

import time
from typing import Any

from ultrabench.agent.agent_group import LOST_BEATS, StopRequest
from ultrabench.agent.connection import POLL_S, RENDEZVOUS_TIMEOUT_S, Connection, Listener
from ultrabench.agent.disk_retry import log_line
from ultrabench.agent.ranks.node import Node
from ultrabench.errors import ClusterError


def follow(node: Node, leader: Connection, stop: StopRequest) -> None:
    """Carries out the orders of the leader until the allocation ends.

    Raises:
        ClusterError: the leader is gone, or has been silent for LOST_BEATS heartbeats.
    """
    try:
        _work(node, leader, stop)
    except Exception as error:
        # Without this message the leader would believe that the node is broken.
        reason = f"the agent of {node.identity.host} failed: {type(error).__name__}: {error}"
        leader.send({"ending": reason, "left": True})
        raise


def _work(node: Node, leader: Connection, stop: StopRequest) -> None:
    heartbeat_s, sent_at = node.allocation.heartbeat_s, time.monotonic()
    stop_sent = heard = False

    def send(rank_events: list[dict[str, Any]]) -> None:
        nonlocal sent_at
        if rank_events or time.monotonic() - sent_at > heartbeat_s / 2:
            leader.send({"rank_events": rank_events})
            sent_at = time.monotonic()

    node.disk.beat = lambda: send([])
    listener = Listener([leader])
    while not leader.closed:
        if stop.reason and not stop_sent:
            stop_sent = True
            leader.send({"ending": stop.reason})
        readable, _ = listener.wait(POLL_S)
        for message in leader.receive() if readable else ():
            heard = True
            if message.get("do") == "end":
                return
            answer = node.obey(message)
            if message.get("do") == "kill":
                leader.send({"cleaned": answer})
            elif answer:
                log_line(answer)
        send(node.rank_events())
        silence = time.monotonic() - leader.last_heard
        # Before its first message the leader waits for the other nodes.
        if silence > (LOST_BEATS * heartbeat_s if heard else RENDEZVOUS_TIMEOUT_S):
            raise ClusterError(f"the leading agent has been silent for {silence:.1f} s")
        listener.end_round()
    raise ClusterError("the leading agent is gone")
