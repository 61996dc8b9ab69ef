"""Agents meet on a port that anybody may call: strangers are disconnected and delay nobody."""

import json
import socket
import threading
import time
from contextlib import closing

import pytest

from tests.patience import slowness
from ultrabench.agent.connection import HELLO_BYTES, Rendezvous, connect_to_leader, wait_readable
from ultrabench.errors import ClusterError

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
