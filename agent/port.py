"""A free port for programs that want MASTER_PORT before they start."""

import contextlib
import random
import socket
from pathlib import Path

TRIES = 50
LOWEST = 10_240


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago, outside the range from which the system gives ports itself.

    Until the program binds it, no connection of another process is given this port. Ranks of the embedded
    kernel do not need it: their rank 0 binds port 0 and says what it got.
    """
    try:
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_given = 0
    own = range(LOWEST, first_given)
    for port in random.sample(own, min(TRIES, len(own))):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
