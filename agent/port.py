"""A free port for programs that want MASTER_PORT before they start."""

import socket


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago.

    Ranks of the embedded kernel do not need it: their rank 0 binds port 0 and says what it got.
    """
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
