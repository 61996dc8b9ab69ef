"""A following agent: does what the leader says with the ranks of its node."""

import time
from typing import Any

from ultrabench.agent.link import Line, wait_readable
from ultrabench.agent.node import Node
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation

POLL_S = 0.05


def follow(allocation: Allocation, node: Node, leader: Line, stop: StopRequest) -> None:
    """Works for the leader until it says so, goes away, or this agent is told to stop."""
    said = time.monotonic()
    told = False
    while not leader.closed:
        if stop.reason and not told:
            told = True
            leader.send({"ending": stop.reason})
        for line in wait_readable([leader], POLL_S):
            for message in line.receive():
                if message.get("do") == "end":
                    return
                _obey(allocation, node, message)
        news = node.news()
        if news or time.monotonic() - said > allocation.heartbeat_s / 2:
            leader.send({"news": news})
            said = time.monotonic()


def _obey(allocation: Allocation, node: Node, message: dict[str, Any]) -> None:
    do = message.get("do")
    if do == "start":
        node.start(allocation.task(message["task"]), message["address"], message["port"])
    elif do == "store":
        node.tell_port(message["port"])
    elif do == "kill":
        node.kill()
    elif do == "finish":
        node.finish(keep_all=message["keep_all"])
