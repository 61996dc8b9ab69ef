"""Agents of one allocation talk in JSON lines over TCP: the leader listens, the others call."""

import contextlib
import hmac
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

POLL_S = 0.05
MEETING_PATIENCE_S = 120.0
"""So long the agents of an allocation wait for one another."""


SEND_S = 5.0
"""How long the other side may leave a message untaken."""
HELLO_BYTES = 2**16
"""Longest message of somebody who has not shown the secret yet."""
MESSAGE_BYTES = 2**26
"""Longest message of an agent."""
STRANGERS = 256
"""Connections at a time that have not shown the secret; of more, the oldest is closed."""


class Line:
    """One connection; messages are JSON objects, one a line."""

    def __init__(self, connection: socket.socket, most: int = MESSAGE_BYTES) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._pending = b""
        self.most = most
        """Bytes of a message beyond which the connection is closed."""
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
            self._socket.settimeout(SEND_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            self._socket.setblocking(False)
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """The whole messages that have arrived, empty ones for what cannot be understood.

        It never waits: where nothing has arrived there are none.
        """
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        if not data or len(rest) > self.most:
            self.close()
            return []
        self.heard = time.monotonic()
        self._pending = rest
        return [_message(line) for line in whole.split(b"\n")] if newline else []

    def excuse(self, away_s: float) -> None:
        """Leaves time out of the other side's silence in which nobody here listened."""
        self.heard = min(time.monotonic(), self.heard + away_s)

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self._socket.close()


def _message(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (RecursionError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


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
        self._secret = secret.encode()
        self._server = socket.create_server((host, 0), backlog=128)
        self._server.setblocking(False)
        self._strangers: list[Line] = []
        address = {"host": host, "port": self._server.getsockname()[1]}
        write_whole(file, json.dumps(address))

    def gather(
        self, nodes: int, patience_s: float, beat: Callable[[], None] = lambda: None
    ) -> dict[int, Line]:
        """The connections of nodes 1 .. nodes-1; `beat` is called while they are waited for.

        Anybody may connect. Who does not begin with the secret is sent away, and nobody is waited
        for alone. When all have come, the server is closed.

        Raises:
            ClusterError: some did not come in time.
        """
        lines: dict[int, Line] = {}
        end = time.monotonic() + patience_s
        while len(lines) < nodes - 1 and time.monotonic() < end:
            beat()
            self._accept()
            for line in wait_readable(self._strangers, POLL_S):
                node = self._node_of(line, nodes)
                # Of two that call themselves the same node, the first stays.
                if node is not None and node not in lines:
                    line.most = MESSAGE_BYTES
                    lines[node] = line
                    self._strangers.remove(line)
                elif node is not None:
                    line.close()
            self._strangers = [line for line in self._strangers if not line.closed]
        self._server.close()
        missing = sorted(set(range(1, nodes)) - set(lines))
        for line in (*self._strangers, *(lines.values() if missing else ())):
            line.close()
        if missing:
            raise ClusterError(f"agents of nodes {missing} did not come within {patience_s:g} s")
        return lines

    def _accept(self) -> None:
        """Lets in who has called, which shows within POLL_S also where nobody else is connected."""
        with contextlib.suppress(OSError):
            while True:
                self._strangers.append(Line(self._server.accept()[0], HELLO_BYTES))
                if len(self._strangers) > STRANGERS:
                    self._strangers.pop(0).close()

    def _node_of(self, line: Line, nodes: int) -> int | None:
        """The node that a stranger has proved to be; who has said anything else is sent away."""
        said = line.receive()
        facts = said[0].get("facts") if said else None
        secret = str(said[0].get("secret")).encode(errors="replace") if said else b""
        if isinstance(facts, dict) and hmac.compare_digest(secret, self._secret):
            node = facts.get("node")
            if type(node) is int and 0 < node < nodes:
                line.facts = facts
                return node
        if said:
            line.close()
        return None


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
        except (LookupError, OSError, TypeError, ValueError):
            time.sleep(0.05)
            continue
        line = Line(connection)
        line.send({"secret": secret, "facts": facts})
        return line
    raise ClusterError(f"node {facts['node']} found no leader in {file} within {patience_s:g} s")
