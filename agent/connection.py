"""Agents of one allocation exchange JSON lines over TCP: the leader listens, the others connect."""

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ultrabench.errors import ClusterError
from ultrabench.processes import RunningClock
from ultrabench.store.folder import write_whole

Message = dict[str, Any]
Peers = dict[int, "Connection"]
"""Index of a node -> the connection to its agent."""

POLL_S = 0.05
"""Seconds for which an agent waits for messages before it looks at its ranks again."""
SEND_TIMEOUT_S = 5.0
"""Seconds to wait for the other side to read a message; then the connection counts as broken."""
MAX_HELLO_BYTES = 2**16
"""Longest message, in bytes, that is accepted from a stranger or from the leader, whose orders are short."""
MAX_MESSAGE_BYTES = 2**26
"""Longest message, in bytes, that is accepted from an agent that has sent its facts with the secret."""
MAX_STRANGERS = 256
"""Largest number of open connections that have not sent the secret; beyond it the oldest is closed."""


class Connection:
    """One TCP connection between two agents; each message is a JSON object on a line of its own."""

    def __init__(self, tcp_socket: socket.socket) -> None:
        self._socket = tcp_socket
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._unfinished_line = b""
        self.facts: dict[str, Any] = {}
        """What the agent on the other side reported about its node; empty for the leader and for strangers."""
        self.is_closed = False

    def fileno(self) -> int:
        """The file descriptor of the connection."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends one message; a broken connection is marked as closed."""
        try:
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            self._socket.setblocking(False)
        except OSError:
            self.is_closed = True

    def receive(self) -> list[Message]:
        """The complete messages that have arrived, without waiting; an unreadable message becomes {}."""
        try:
            chunk = self._socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        *lines, unfinished_line = (self._unfinished_line + chunk).split(b"\n")
        if not chunk or len(unfinished_line) > (MAX_MESSAGE_BYTES if self.facts else MAX_HELLO_BYTES):
            self.close()
            return []
        self._unfinished_line = unfinished_line
        return [_parse_message(line) for line in lines]

    def close(self) -> None:
        """Ends the connection."""
        self.is_closed = True
        self._socket.close()


def _parse_message(line: bytes) -> Message:
    with contextlib.suppress(RecursionError, ValueError):
        if isinstance(message := json.loads(line), dict):
            return message
    return {}


def wait_readable(connections: Iterable[Connection], timeout_s: float) -> list[Connection]:
    """The connections that have something to receive, after at most `timeout_s` seconds."""
    open_connections = [connection for connection in connections if not connection.is_closed]
    ready_fds = wait([connection.fileno() for connection in open_connections], timeout_s)
    return [connection for connection in open_connections if connection.fileno() in ready_fds]


class Inbox:
    """Waits for messages of the other agents, and counts the seconds for which this agent has run meanwhile.

    The time for which a suspended job or a slow disk stopped this agent is not silence of the others, and no
    limit of a run includes it.
    """

    def __init__(self, connections: Collection[Connection]) -> None:
        self._connections, self._clock = connections, RunningClock()
        self.agent_time_s = self._clock()
        """Seconds for which this agent had run when the last wait ended; all its limits are measured by them.

        The present time would be wrong, since this agent may have been stopped after the last wait.
        """
        self._last_heard_s = {id(connection): self.agent_time_s for connection in connections}

    def wait(self, timeout_s: float) -> list[tuple[Connection, Message]]:
        """The messages that arrive within `timeout_s` seconds, with their connections."""
        readable_connections = wait_readable(self._connections, timeout_s)
        self.agent_time_s = self._clock()
        self._last_heard_s |= {id(connection): self.agent_time_s for connection in readable_connections}
        return [(peer, message) for peer in readable_connections for message in peer.receive()]

    def silence_s(self, connection: Connection) -> float:
        """Seconds from the last message of a connection to the last wait."""
        return self.agent_time_s - self._last_heard_s[id(connection)]


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on an address of IPv4 or IPv6, such as fe80::7%eth0; port 0 stands for a free one."""
    address_family, *_, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(socket_address, family=address_family, backlog=128)


class Rendezvous:
    """The TCP server of the leader, to which other agents connect; its address is in a file."""

    def __init__(self, address_file: Path, host: str, secret: str) -> None:
        self._secret = secret.encode()
        self._server_socket = listening_socket(host)
        self._server_socket.setblocking(False)
        self._callers: list[Connection] = []
        """All open connections; those of agents have facts."""
        write_whole(address_file, json.dumps({"host": host, "port": self._server_socket.getsockname()[1]}))

    def wait_for_peers(self, num_nodes: int, timeout_s: float, beat: Callable[[], Any]) -> Peers:
        """The connections to nodes 1 to num_nodes-1; `beat` is called repeatedly while it waits.

        Anybody may connect, but is disconnected unless the first message has the secret; nobody who is
        slow or silent delays the others. When all nodes have connected, the server is closed.

        Raises:
            ClusterError: some nodes did not connect in time.
        """
        absentees, deadline_s = set(range(1, num_nodes)), time.monotonic() + timeout_s
        while absentees and time.monotonic() < deadline_s:
            beat()
            with contextlib.suppress(OSError):  # no other caller waits
                while True:
                    self._callers.append(Connection(self._server_socket.accept()[0]))
            strangers = [caller for caller in self._callers if not caller.facts]
            for stranger in strangers[:-MAX_STRANGERS]:
                stranger.close()
            for stranger in wait_readable(strangers, POLL_S):
                self._greet(stranger, absentees)
            self._callers = [caller for caller in self._callers if not caller.is_closed]
        self._server_socket.close()
        for caller in self._callers:
            if absentees or not caller.facts:
                caller.close()
        if absentees:
            raise ClusterError(f"agents of nodes {sorted(absentees)} did not connect within {timeout_s:g} s")
        return {caller.facts["node"]: caller for caller in self._callers if caller.facts}

    def _greet(self, stranger: Connection, absentees: set[int]) -> None:
        """Accepts a stranger whose first message shows that it is the agent of a missing node, or disconnects it.

        If two agents report the same node, the first one stays.
        """
        for message in stranger.receive()[:1]:
            facts, secret = message.get("facts", {}), str(message.get("secret")).encode(errors="replace")
            index = facts.get("node") if isinstance(facts, dict) else None
            if hmac.compare_digest(secret, self._secret) and type(index) is int and index in absentees:
                stranger.facts = facts
                absentees.remove(index)
            else:
                stranger.close()


def connect_to_leader(
    address_file: Path, facts: dict[str, Any], secret: str, timeout_s: float, leader_busy: Callable[[], bool]
) -> Connection:
    """A connection to the leader whose address is in `address_file`.

    Args:
        facts: what the leader needs to know about this node; `node` is its index.
        leader_busy: whether the leader cannot begin yet; the time-out begins when it can.

    Raises:
        ClusterError: the leader could not be reached in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if leader_busy():
            deadline_s = time.monotonic() + timeout_s
        # Until the leader listens, the file is missing or old, or the connection is refused.
        with contextlib.suppress(LookupError, OSError, TypeError, ValueError):
            address = json.loads(address_file.read_text())
            leader = Connection(socket.create_connection((address["host"], address["port"]), timeout=5.0))
            leader.send({"secret": secret, "facts": facts})
            return leader
        time.sleep(POLL_S)
    raise ClusterError(f"node {facts['node']} found no leader in {address_file} within {timeout_s:g} s")
