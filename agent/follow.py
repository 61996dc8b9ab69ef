"""A following agent: does what the leader says with the ranks of its node."""

import time
from typing import Any

from ultrabench.agent.attention import Attention
from ultrabench.agent.gang import LOST_BEATS
from ultrabench.agent.link import MEETING_PATIENCE_S, Line, wait_readable
from ultrabench.agent.node import Node
from ultrabench.agent.patience import tell
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation
from ultrabench.errors import ClusterError

POLL_S = 0.05


def follow(allocation: Allocation, node: Node, leader: Line, stop: StopRequest) -> None:
    """Works for the leader until it says so.

    Raises:
        ClusterError: the leader went away, or has been silent for three heartbeats.
    """
    try:
        _work(allocation, node, leader, stop)
    except Exception as error:
        # Else the leader would take this node for a broken one.
        told = f"the agent of {node.host} failed: {type(error).__name__}: {error}"
        leader.send({"ending": told, "left": True})
        raise


def _work(allocation: Allocation, node: Node, leader: Line, stop: StopRequest) -> None:
    said = time.monotonic()
    told = heard = False

    def tell(news: list[dict[str, Any]]) -> None:
        nonlocal said
        if news or time.monotonic() - said > allocation.heartbeat_s / 2:
            leader.send({"news": news})
            said = time.monotonic()

    node.patience.beat = lambda: tell([])
    attention = Attention()
    while not leader.closed:
        if stop.reason and not told:
            told = True
            leader.send({"ending": stop.reason})
        readable = wait_readable([leader], POLL_S)
        leader.excuse(attention.absence_s(POLL_S))
        for line in readable:
            for message in line.receive():
                heard = True
                if message.get("do") == "end":
                    return
                _obey(allocation, node, leader, message)
        tell(node.news())
        silence = time.monotonic() - leader.heard
        # Before its first word the leader waits for other nodes and looks at its own.
        if silence > (LOST_BEATS * allocation.heartbeat_s if heard else MEETING_PATIENCE_S):
            raise ClusterError(f"the leading agent has said nothing for {silence:.1f} s")
        attention.rest()
    raise ClusterError("the leading agent is gone")


def _obey(allocation: Allocation, node: Node, leader: Line, message: dict[str, Any]) -> None:
    do = message.get("do")
    if do == "start":
        node.start(allocation.task(message["task"]), message["address"], message["port"])
    elif do == "store":
        node.tell_port(message["port"])
    elif do == "kill":
        leader.send({"cleaned": node.kill()})
    elif do == "examine":
        node.examine()
    elif do == "finish":
        problem = node.finish(keep_all=message["keep_all"])
        if problem:
            tell(problem)
