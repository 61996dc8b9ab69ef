"""What agents of one allocation tell each other: nonsense or an exception ends it, and blames no node."""

import json
import os
import shutil
import signal
import socket
import time
from contextlib import closing
from dataclasses import replace

import pytest

from tests.unit.agent.one_node import allocation, task
from ultrabench.agent.__main__ import follow
from ultrabench.agent.agent_group import AgentGroup, StopRequest
from ultrabench.agent.connection import Connection
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks.node import Node
from ultrabench.errors import ClusterError
from ultrabench.result import RunResult, Status


@pytest.fixture
def node(tmp_path):
    two = replace(allocation(tmp_path, task("x.py", "cpu")), nodes=2)
    made = Node(two, NodeIdentity(node=0, host="local-0"))
    yield made
    made._server.stop()
    shutil.rmtree(made.scratch)


@pytest.fixture(autouse=True)
def stop():
    held = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    yield StopRequest()
    for number, handler in held.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("local", "who"), [(True, "the user: Ctrl-C in the launch"), (False, "SIGTERM")])
def test_the_reason_of_a_stop_says_who_ends_processes_of_this_machine(local, who):
    asked = StopRequest(local)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.reason.startswith(f"the allocation was ended by {who}")


@pytest.fixture
def pair():
    """The connection to the other agent, and the socket of that agent."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as there,
        closing(Connection(server.accept()[0])) as line,
    ):
        line.facts = {"node": 1, "host": "local-1"}
        yield line, there


@pytest.fixture
def group(node, stop, pair):
    """The leader's view of two nodes."""
    return AgentGroup(node, {"node": 0, "host": "local-0"}, {1: pair[0]}, stop)


@pytest.mark.parametrize(
    "message",
    [{"cleaned": 7}, {"cleaned": {"left": None}}, {"rank_events": 7}, {"rank_events": [7]}, {"rank_events": [{"rank": 99, "line": {}}]},
     {"cleaned": {"left": None, "sm_clocks_hz": ["x"], "slowdowns": []}}, {"rank_events": [{}]}],
)  # fmt: skip
def test_a_peer_that_speaks_nonsense_ends_the_allocation_or_the_run(group, pair, message):
    pair[1].sendall(json.dumps(message).encode() + b"\n")
    group.listen(5.0)
    assert group.progress.fault or "node 1 (local-1) sent an invalid message" in str(group.interrupted)
    assert (group.lost, group.avoid) == (None, [])


def test_an_agent_that_fails_says_so_before_it_leaves(node, stop, pair):
    line, there = pair
    there.sendall(b'{"do": "start", "index": 99, "address": "127.0.0.1", "port": 0}\n')
    with pytest.raises(IndexError):
        follow(node, line, stop)
    said = [json.loads(text) for text in there.recv(2**16).splitlines()]
    told = "the agent of local-0 failed: IndexError: tuple index out of range"
    assert said[-1] == {"ending": told, "left": True}


def test_an_agent_that_failed_and_left_gives_its_node_no_blame(group, pair):
    pair[1].sendall(b'{"ending": "the agent of local-1 failed: KeyError", "left": true}\n')
    pair[1].close()
    group.listen(5.0)
    group.end_ranks()
    group.listen(0.1)
    assert (group.lost, group.avoid) == (None, [])
    stopped = RunResult(status=Status.CANCELLED, reason=group.interrupted)
    ended = classify(group.progress, task("x.py", "cpu"), stopped, group.lost)
    assert (ended.status, ended.suspect_hosts) == (Status.CANCELLED, ())


@pytest.fixture
def stopped_s(node, monkeypatch):
    """Seconds for which this agent was stopped: 1000 each time that it looks after its ranks."""
    seconds, run_on = [], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: run_on() + sum(seconds))
    monkeypatch.setattr(node, "rank_events", lambda: seconds.append(1000.0) or [])
    return seconds


def test_a_leader_that_was_stopped_after_its_wait_blames_nobody(group, stopped_s):
    waited = group.listen(0.0)
    assert group.listen(0.0) - waited > 999.0
    assert (len(stopped_s), group.interrupted) == (2, None)


def test_a_follower_that_was_stopped_after_its_wait_waits_for_its_leader(node, stop, pair, stopped_s):
    line, there = pair
    there.close()
    with pytest.raises(ClusterError, match="the leading agent is gone"):
        follow(node, line, stop)
    assert stopped_s == [1000.0]
