"""Where agents are, and how they meet: strangers on their port are disconnected and delay nobody."""

import json
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import slowness
from ultrabench.agent.agent_group import free_port
from ultrabench.agent.connection import HELLO_BYTES, Rendezvous, connect_to_leader, wait_readable
from ultrabench.agent.node_identity import NodeIdentity, identify_node
from ultrabench.errors import ClusterError
from ultrabench.store.events import Start

SECRET = "0123456789abcdef"


def hello(node, secret=SECRET, **more):
    facts = {"node": node, "host": f"n{node}"}
    return json.dumps({"secret": secret, "facts": facts, **more}).encode() + b"\n"


class Leader(threading.Thread):
    """A leader that waits for its peers."""

    def __init__(self, folder, nodes=3, timeout_s=30.0):
        super().__init__(daemon=True)
        self.file, self.nodes, self.timeout_s = folder / "leader.json", nodes, timeout_s
        self.beats, self.peers, self.error = [], {}, None
        self.rendezvous = Rendezvous(self.file, "127.0.0.1", SECRET)
        self.start()

    def run(self):
        def beat():
            self.beats.append(time.monotonic())

        try:
            self.peers = self.rendezvous.wait_for_peers(self.nodes, self.timeout_s, beat)
        except ClusterError as error:
            self.error = error

    def call(self, *parts):
        connection = socket.create_connection(("127.0.0.1", json.loads(self.file.read_text())["port"]))
        for part in parts:
            connection.sendall(part)
            time.sleep(0.2)
        return connection


STRANGERS = {
    "silent": b"", "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "null": b"null\n", "list": b"[1]\n",
    "bytes": bytes(range(256)) + b"\n", "nested": b"[" * 50_000 + b"\n", "endless": b"x" * (4 * HELLO_BYTES),
    "wrong secret": hello(1, "guess"), "no secret": hello(1, None), "strange secret": hello(1, "\ud800"),
    "no facts": json.dumps({"secret": SECRET, "facts": 7}).encode() + b"\n", "no node": hello("1"),
    "node 0": hello(0), "node 9": hello(9), "node true": hello(True), "half": hello(1)[:20],
}  # fmt: skip


def test_strangers_delay_nobody(tmp_path):
    leader = Leader(tmp_path)
    strangers = [leader.call(words) for words in STRANGERS.values()]
    assert leader.is_alive()
    peers = [connect_to_leader(leader.file, {"node": n, "host": f"n{n}"}, SECRET, 60.0) for n in (1, 2)]
    leader.join(60.0)
    assert {n: peer.facts["host"] for n, peer in sorted(leader.peers.items())} == {1: "n1", 2: "n2"}
    assert max(b - a for a, b in zip(leader.beats, leader.beats[1:], strict=False)) < 4.0 * slowness()
    for connection in (*strangers, *peers, *leader.peers.values()):
        connection.close()


def test_a_hello_may_come_in_pieces_and_the_first_of_a_node_stays(tmp_path):
    leader = Leader(tmp_path)
    words = hello(1, mark="first")
    with (
        closing(leader.call(words[:5], words[5:30], words[30:])) as first,
        closing(leader.call(hello(1, mark="second"))) as second,
        closing(leader.call(hello(2))),
    ):
        leader.join(60.0)
        assert sorted(leader.peers) == [1, 2]
        second.settimeout(10.0)
        assert second.recv(1) == b""
        first.sendall(b'{"rank_events": []}\nnot json\n[]\n{"ending": "bye"}\n')
        peer = leader.peers[1]
        assert wait_readable([peer], 10.0) == [peer]
        assert peer.receive() == [{"rank_events": []}, {}, {}, {"ending": "bye"}]
        assert peer.receive() == []
        assert not peer.closed
    with pytest.raises(ConnectionRefusedError):  # all have come
        leader.call()
    for peer in leader.peers.values():
        peer.close()


def test_who_does_not_come_is_named(tmp_path):
    leader = Leader(tmp_path, timeout_s=0.5)
    with closing(leader.call(hello(2))):
        leader.join(60.0)
    assert str(leader.error) == "agents of nodes [1] did not connect within 0.5 s"


HERE = socket.gethostname().split(".")[0]
JOB = {"SLURM_JOB_ID": "60", "SLURM_NODEID": "1", "SLURMD_NODENAME": "gpu02"}
ARRAY = {**JOB, "SLURM_ARRAY_JOB_ID": "57", "SLURM_ARRAY_TASK_ID": "3"}
LOCAL = {"SUBMITIT_LOCAL_GLOBALID": "1"}


def identity(**words):
    return NodeIdentity(**{"node": 0, "host": HERE, **words})


@pytest.mark.parametrize(
    ("environ", "simulated", "expected"),
    [
        ({}, True, identity(host="local-0")),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "0"}, False, identity(node=1, host="gpu02", job=Start(job_id="57_0"), array_task="0")),
        ({**JOB, "SLURM_RESTART_COUNT": "2"}, False, identity(node=1, host="gpu02", job=Start(job_id="60", restart=2))),
        ({**JOB, "SLURM_RESTART_COUNT": ""}, False, identity(node=1, host="gpu02", job=Start(job_id="60"))),
        ({"SLURM_JOB_ID": "60"}, False, identity(job=Start(job_id="60"))),
        ({**JOB, "SLURMD_NODENAME": ""}, False, identity(node=1, job=Start(job_id="60"))),
        (LOCAL, False, identity(node=1)),
        ({**ARRAY, **LOCAL}, True, identity(node=1, host="local-1")),
    ],
)  # fmt: skip
def test_where_an_agent_is(environ, simulated, expected):
    assert identify_node(environ, simulated) == expected


@pytest.mark.parametrize(
    ("environ", "job", "file", "folder"),
    [
        ({}, None, "leader.json", "/s/allocations/n1-a.0"),
        (LOCAL, None, "leader.json", "/s/allocations/n1-a.0"),
        (JOB, Start(job_id="60", restart=0), "leader-60.0.json", "/s/allocations/n1-a.0"),
        ({**ARRAY, "SLURM_RESTART_COUNT": "1"}, Start(job_id="57_3", restart=1), "leader-57_3.1.json",
         "/s/allocations/n1-a.0.3"),
    ],
)  # fmt: skip
def test_what_follows_from_it(environ, job, file, folder):
    found = identify_node(environ)
    assert (found.job, found.rendezvous_file) == (job, file)
    assert found.folder("/s/allocations/n1-a.0") == Path(folder)


STARTS = st.tuples(st.integers(1, 99), st.none() | st.integers(0, 9), st.integers(0, 3))


@given(first=STARTS, second=STARTS)
def test_starts_that_differ_have_files_of_their_own(first, second):
    """Agents of a requeued job, or of another element, never read the address of the others' leader."""

    def of(array, task, restart):
        words = {"SLURM_JOB_ID": f"{array}", "SLURM_RESTART_COUNT": f"{restart}"}
        more = {} if task is None else {"SLURM_ARRAY_JOB_ID": f"{array}", "SLURM_ARRAY_TASK_ID": f"{task}"}
        return identify_node(words | more)

    assert (of(*first).rendezvous_file == of(*second).rendezvous_file) == (first == second)


@pytest.mark.parametrize(
    ("host", "one_host", "variable", "address"),
    [
        ("anything", True, "10.0.0.9", "127.0.0.1"),
        ("localhost", False, "10.0.0.9", "10.0.0.9"),
        ("localhost", False, None, "127.0.0.1"),
        ("no.such.host.invalid", False, "10.0.0.9", "10.0.0.9"),
        ("192.0.2.7", False, "10.0.0.9", "192.0.2.7"),
    ],
)
def test_the_address_others_can_reach(monkeypatch, host, one_host, variable, address):
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    if variable:
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", variable)
    assert identity(host=host).address(one_host) == address


def test_a_port_is_none_that_the_system_gives_away():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port("127.0.0.1") for _ in range(30)}
    assert all(port < first_given for port in ports)
    assert len(ports) > 20
