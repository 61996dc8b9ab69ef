"""Where agents of one allocation are, how they meet, and what they tell each other.

Strangers on their port are disconnected and delay nobody; nonsense or an exception ends the allocation,
and blames no node.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import patience
from tests.patience import slowness
from tests.unit.agent.one_node import allocation, task
from ultrabench.agent.__main__ import follow
from ultrabench.agent.agent_group import AgentGroup, StopRequest, free_port
from ultrabench.agent.connection import (
    MAX_HELLO_BYTES,
    Connection,
    Rendezvous,
    connect_to_leader,
    wait_readable,
)
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.node_identity import NodeIdentity, identify_node
from ultrabench.agent.ranks.node import Node
from ultrabench.errors import ClusterError
from ultrabench.result import RunResult, Status
from ultrabench.store.allocation import END_REQUEST
from ultrabench.store.events import Start

SECRET = "0123456789abcdef"


def hello(node, secret=SECRET, **changes):
    facts = {"node": node, "host": f"n{node}"}
    return json.dumps({"secret": secret, "facts": facts, **changes}).encode() + b"\n"


def connected(file, node):
    return connect_to_leader(file, {"node": node, "host": f"n{node}"}, SECRET, 60.0, lambda: False)


class Leader:
    """A leader that waits for nodes 1 and 2."""

    def __init__(self, folder, timeout_s=30.0):
        self.file, self.beats = folder / "leader.json", []
        rendezvous = Rendezvous(self.file, "127.0.0.1", SECRET)
        self.peers = ThreadPoolExecutor(1).submit(rendezvous.wait_for_peers, 3, timeout_s, self.beat)

    def beat(self):
        self.beats.append(time.monotonic())

    def call(self, *parts):
        connection = socket.create_connection(("127.0.0.1", json.loads(self.file.read_text())["port"]))
        for part in parts:
            connection.sendall(part)
            time.sleep(0.2)
        return connection


STRANGERS = {
    "silent": b"", "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "null": b"null\n", "list": b"[1]\n",
    "bytes": bytes(range(256)) + b"\n", "nested": b"[" * 50_000 + b"\n", "endless": b"x" * (4 * MAX_HELLO_BYTES),
    "wrong secret": hello(1, "guess"), "no secret": hello(1, None), "strange secret": hello(1, "\ud800"),
    "no facts": json.dumps({"secret": SECRET, "facts": 7}).encode() + b"\n", "no node": hello("1"),
    "node 0": hello(0), "node 9": hello(9), "node true": hello(True), "half": hello(1)[:20],
}  # fmt: skip


def test_strangers_delay_nobody(tmp_path):
    leader = Leader(tmp_path)
    strangers = [leader.call(words) for words in STRANGERS.values()]
    assert not leader.peers.done()
    agents = [connected(leader.file, n) for n in (1, 2)]
    peers = leader.peers.result(60.0)
    assert {n: peer.facts["host"] for n, peer in peers.items()} == {1: "n1", 2: "n2"}
    assert max(b - a for a, b in zip(leader.beats, leader.beats[1:], strict=False)) < 4.0 * slowness()
    for connection in (*strangers, *agents, *peers.values()):
        connection.close()


def test_a_hello_may_come_in_pieces_and_the_first_of_a_node_stays(tmp_path):
    leader = Leader(tmp_path)
    words = hello(1, mark="first")
    with (
        closing(leader.call(words[:5], words[5:30], words[30:])) as first,
        closing(leader.call(hello(1, mark="second"))) as second,
        closing(leader.call(hello(2))),
        closing(leader.peers.result(60.0)[1]) as peer,
        closing(leader.peers.result()[2]),
    ):
        second.settimeout(10.0)
        assert second.recv(1) == b""
        first.sendall(b'{"rank_events": []}\nnot json\n[]\n{"ending": "bye"}\n')
        assert wait_readable([peer], 10.0) == [peer]
        assert peer.receive() == [{"rank_events": []}, {}, {}, {"ending": "bye"}]
        assert peer.receive() == []
        assert not peer.is_closed
    with pytest.raises(ConnectionRefusedError):  # all have come
        leader.call()


def test_who_does_not_come_is_named(tmp_path):
    leader = Leader(tmp_path, timeout_s=0.5)
    with (
        closing(leader.call(hello(2))),
        pytest.raises(ClusterError, match=r"^agents of nodes \[1\] did not connect within 0.5 s$"),
    ):
        leader.peers.result(60.0)


HERE = socket.gethostname().split(".")[0]
JOB = {"SLURM_JOB_ID": "60", "SLURM_NODEID": "1", "SLURMD_NODENAME": "gpu02"}
ARRAY = {**JOB, "SLURM_ARRAY_JOB_ID": "57", "SLURM_ARRAY_TASK_ID": "0"}
LOCAL = {"SUBMITIT_LOCAL_GLOBALID": "1"}


def on_gpu02(job_id, restart=0, **words):
    return NodeIdentity(node_index=1, host="gpu02", job=Start(job_id=job_id, restart=restart), **words)


@pytest.mark.parametrize(
    ("environ", "simulated", "expected", "file"),
    [
        ({}, True, NodeIdentity(node_index=0, host="local-0"), "leader.json"),
        ({**ARRAY, "SLURM_RESTART_COUNT": "1"}, False, on_gpu02("57_0", 1, array_index="0"), "leader-57_0.1.json"),
        ({**JOB, "SLURM_RESTART_COUNT": ""}, False, on_gpu02("60"), "leader-60.0.json"),
        ({"SLURM_JOB_ID": "60", "SLURMD_NODENAME": ""}, False,
         NodeIdentity(node_index=0, host=HERE, job=Start(job_id="60")), "leader-60.0.json"),
        (LOCAL, False, NodeIdentity(node_index=1, host=HERE), "leader.json"),
        ({**ARRAY, **LOCAL}, True, NodeIdentity(node_index=1, host="local-1"), "leader.json"),
    ],
)  # fmt: skip
def test_where_an_agent_is(environ, simulated, expected, file):
    identity = identify_node(environ, simulated)
    assert (identity, identity.rendezvous_file) == (expected, file)
    index = f".{expected.array_index}" if expected.array_index else ""
    assert identity.allocation_folder("/s/allocations/n1-a.0") == Path(f"/s/allocations/n1-a.0{index}")


STARTS = st.tuples(st.integers(1, 99), st.none() | st.integers(0, 9), st.integers(0, 3))


@given(first=STARTS, second=STARTS)
def test_starts_that_differ_have_files_of_their_own(first, second):
    """Agents of a requeued job, or of another element, never read the address of the others' leader."""

    def of(array, task, restart):
        words = {"SLURM_JOB_ID": f"{array}", "SLURM_RESTART_COUNT": f"{restart}"}
        ids = {} if task is None else {"SLURM_ARRAY_JOB_ID": f"{array}", "SLURM_ARRAY_TASK_ID": f"{task}"}
        return identify_node(words | ids)

    assert (of(*first).rendezvous_file == of(*second).rendezvous_file) == (first == second)


@pytest.mark.parametrize(
    ("host", "one_host", "variable", "address"),
    [
        ("anything", True, "10.0.0.9", "127.0.0.1"),
        ("localhost", False, "10.0.0.9", "10.0.0.9"),
        ("localhost", False, None, "127.0.0.1"),
        ("no.such.host.invalid", False, "10.0.0.9", "10.0.0.9"),
        ("192.0.2.7", False, "10.0.0.9", "192.0.2.7"),
        ("2001:db8::7", False, "10.0.0.9", "2001:db8::7"),
        ("::1", False, "2001:db8::9", "2001:db8::9"),
        ("fe80::7%lo", False, None, "fe80::7%lo"),
    ],
)
def test_the_address_others_can_reach(monkeypatch, host, one_host, variable, address):
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    if variable:
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", variable)
    assert NodeIdentity(node_index=0, host=host).address(one_host) == address


@pytest.fixture
def ipv6():
    """The loopback address of IPv6."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return "::1"
    pytest.skip("this machine has no IPv6 loopback address")


def test_agents_meet_on_an_address_of_ipv6(tmp_path, ipv6):
    file = tmp_path / "leader.json"
    rendezvous = Rendezvous(file, ipv6, SECRET)
    with ThreadPoolExecutor(1) as pool:
        peers = pool.submit(rendezvous.wait_for_peers, 2, 30.0, lambda: None)
        connection = connected(file, 1)
        assert peers.result()[1].facts["host"] == "n1"
        connection.close()
        peers.result()[1].close()
    assert free_port(ipv6)


ONLY_IPV6 = """
import sys
from pathlib import Path
from ultrabench.agent.agent_group import free_port
from ultrabench.agent.connection import Rendezvous
from ultrabench.agent.node_identity import NodeIdentity
for one_host in (True, False):
    address = NodeIdentity(node_index=0, host="fd00:db8::7").address(one_host)
    Rendezvous(Path(sys.argv[1]) / "leader.json", address, "secret")
    print(address, free_port(address) > 0)
"""


def test_a_node_without_ipv4_listens(tmp_path, ipv6):
    up = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && ip -6 addr add fd00:db8::7/64 dev lo nodad"
    words = ["unshare", "-rn", "sh", "-c", f'{up} || exit 77; exec "$@"', "sh"]
    process = patience.run([*words, sys.executable, "-c", ONLY_IPV6, str(tmp_path)], 60)
    if process.returncode == 77 or "unshare" in process.stderr:
        pytest.skip(f"a network without IPv4 cannot be made here: {process.stderr.strip()[-200:]}")
    assert process.stdout.splitlines() == ["::1 True", "fd00:db8::7 True"], process.stderr


def test_a_port_is_none_that_the_system_gives_away():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port("127.0.0.1") for _ in range(30)}
    assert all(port < first_given for port in ports)
    assert len(ports) > 20


@pytest.fixture
def node(tmp_path):
    two = replace(allocation(tmp_path, task("x.py", "cpu")), nodes=2)
    leading = Node(two, NodeIdentity(node_index=0, host="local-0"))
    yield leading
    leading._fork_server.stop()
    leading._health_reader.close()
    shutil.rmtree(leading.scratch)


@pytest.fixture
def stop():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield StopRequest()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("local", "asked_for", "who"),
    [
        (True, True, "the user, by Ctrl-C in the launch"), (False, True, "SIGTERM (scancel, preemption"),
        (True, False, "a SIGTERM that no launcher sent, but the program, an administrator or a shutdown"),
    ],
)  # fmt: skip
def test_the_reason_of_a_stop_says_who_ends_the_processes(stop, tmp_path, monkeypatch, local, asked_for, who):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if asked_for:
        (tmp_path / END_REQUEST).touch()
    request = StopRequest(tmp_path if local else None)  # the fixture restores the handlers
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.reason.startswith(f"the allocation was ended by {who}")


@pytest.fixture
def pair():
    """The connection to the other agent, and the socket of that agent."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as far_end,
        closing(Connection(server.accept()[0])) as line,
    ):
        line.facts = {"node": 1, "host": "local-1"}
        yield line, far_end


@pytest.fixture
def group(node, stop, pair):
    """The leader's view of two nodes."""
    return AgentGroup(node, {"node": 0, "host": "local-0"}, {1: pair[0]}, stop)


@pytest.mark.parametrize(
    "message",
    [{"cleaned": 7}, {"cleaned": {"left": None}}, {"rank_events": 7}, {"rank_events": [7]},
        {"rank_events": [{"rank": 99, "line": {}}]},
     {"cleaned": {"left": None, "sm_clocks_hz": ["x"], "slowdowns": []}}, {"rank_events": [{}]}],
)  # fmt: skip
def test_a_peer_that_speaks_nonsense_ends_the_allocation_or_the_run(group, pair, message):
    pair[1].sendall(json.dumps(message).encode() + b"\n")
    group.listen(5.0)
    assert group.progress.fault or "node 1 (local-1) sent an invalid message" in str(group.end_reason)
    assert (group.outage, group.hosts_to_avoid) == (None, [])


def test_an_agent_that_fails_says_so_before_it_leaves(node, stop, pair):
    line, far_end = pair
    far_end.sendall(b'{"do": "start", "task_index": 99, "address": "127.0.0.1", "port": 0}\n')
    with pytest.raises(IndexError):
        follow(node, line, stop)
    messages = [json.loads(text) for text in far_end.recv(2**16).splitlines()]
    reason = "the agent of local-0 failed: IndexError: tuple index out of range"
    assert messages[-1] == {"ending": reason, "left": True}


def test_an_agent_that_failed_and_left_gives_its_node_no_blame(group, pair):
    pair[1].sendall(b'{"ending": "the agent of local-1 failed: KeyError", "left": true}\n')
    pair[1].close()
    group.listen(5.0)
    group.end_ranks()
    group.listen(0.1)
    assert (group.outage, group.hosts_to_avoid) == (None, [])
    stopped = RunResult(status=Status.CANCELLED, reason=group.end_reason)
    ended = classify(group.progress, task("x.py", "cpu"), stopped, group.outage)
    assert (ended.status, ended.suspect_hosts) == (Status.CANCELLED, ())


def test_a_follower_leaves_when_its_leader_is_gone(node, stop, pair):
    line, far_end = pair
    far_end.close()
    with pytest.raises(ClusterError, match="the leading agent is gone"):
        follow(node, line, stop)
