"""Agents of one allocation talk in JSON lines over TCP: the leader listens, the others call."""

import json
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultrabench.errors import ClusterError
from ultrabench.folder import write_whole

Message = dict[str, Any]

MEETING_PATIENCE_S = 120.0
"""So long the agents of an allocation wait for one another."""


class Line:
    """One connection; messages are JSON objects, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(20.0)
        self._pending = b""
        self.facts: dict[str, Any] = {}
        """What the other side said of its node."""
        self.closed = False
        self.heard = time.monotonic()
        """When the other side last said anything."""

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends one message; a broken connection is marked closed."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """The whole messages that have arrived; call it when the connection is readable."""
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        self.heard = time.monotonic()
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest
        return [json.loads(line) for line in whole.split(b"\n")] if newline else []

    def excuse(self, away_s: float) -> None:
        """Leaves time out of the other side's silence in which nobody here listened."""
        self.heard = min(time.monotonic(), self.heard + away_s)

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self._socket.close()


def wait_readable(lines: list[Line], seconds: float) -> list[Line]:
    """The connections with something to receive, after at most `seconds`."""
    open_lines = [line for line in lines if not line.closed]
    if not open_lines:
        time.sleep(seconds)
        return []
    with selectors.DefaultSelector() as selector:
        for line in open_lines:
            selector.register(line, selectors.EVENT_READ, line)
        return [key.data for key, _ in selector.select(seconds)]


class Meeting:
    """The leader's side: a server whose address lies in a file of the allocation's folder."""

    def __init__(self, file: Path, host: str, secret: str) -> None:
        self._secret = secret
        self._server = socket.create_server((host, 0), backlog=128)
        self._server.settimeout(0.2)
        address = {"host": host, "port": self._server.getsockname()[1]}
        write_whole(file, json.dumps(address))

    def gather(
        self, nodes: int, patience_s: float, beat: Callable[[], None] = lambda: None
    ) -> dict[int, Line]:
        """The connections of nodes 1 .. nodes-1; `beat` is called while they are waited for.

        Raises:
            ClusterError: some did not come in time.
        """
        lines: dict[int, Line] = {}
        end = time.monotonic() + patience_s
        while len(lines) < nodes - 1:
            beat()
            if time.monotonic() > end:
                missing = sorted(set(range(1, nodes)) - set(lines))
                raise ClusterError(f"agents of nodes {missing} did not come within {patience_s:g} s")
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            line = Line(connection)
            hello = next(iter(line.receive()), {})
            facts = hello.get("facts")
            if hello.get("secret") == self._secret and isinstance(facts, dict):
                line.facts = facts
                lines[int(facts["node"])] = line
            else:
                line.close()
        return lines


def call_leader(file: Path, facts: dict[str, Any], secret: str, patience_s: float) -> Line:
    """A connection to the leader whose address lies in `file`.

    Args:
        facts: what the leader has to know of this node; `node` is its index.

    Raises:
        ClusterError: it could not be reached in time.
    """
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            address = json.loads(file.read_text())
            connection = socket.create_connection((address["host"], address["port"]), timeout=5.0)
        except (OSError, ValueError):
            time.sleep(0.05)
            continue
        line = Line(connection)
        line.send({"secret": secret, "facts": facts})
        return line
    raise ClusterError(f"node {facts['node']} found no leader in {file} within {patience_s:g} s")
