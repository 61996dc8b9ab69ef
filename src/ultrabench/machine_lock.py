"""The lock of this machine, which one local allocation holds while it measures, whoever started it."""

import contextlib
import json
import os
import socket
import struct
import threading
from dataclasses import dataclass

from ultrabench.processes import user_name
from ultrabench.record import values_of

LOCK_VARIABLE = "ULTRABENCH_MACHINE"
"""Variable that names a part of this machine with a lock of its own, such as one of two sets of cores."""
ANSWER_TIMEOUT_S = 1.0
"""Seconds to wait for the holder of the lock to say who it is."""
MAX_ANSWER_BYTES = 4096
"""Largest answer of the holder that is read."""
_CREDENTIALS = struct.Struct("3i")
"""Pid, user id and group id of the process at the other end of a socket (struct ucred of Linux)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds the lock of this machine."""

    sweep: str = ""
    """Folder of the sweep; empty where it is unknown."""
    allocation: str = ""
    user: str = ""

    def __str__(self) -> str:
        """The holder as messages name it."""
        allocation_text = f" (allocation {self.allocation})" if self.allocation else ""
        sweep_text = self.sweep or "an unnamed sweep"
        return f"{sweep_text} of {self.user}{allocation_text}"


def _address() -> str:
    """An abstract address of Linux: it needs no file, all users share it, and it is free when its process ends."""
    return f"\0ultrabench-{os.environ.get(LOCK_VARIABLE, 'machine')}"


class MachineLock:
    """The lock, held until this process ends."""

    def __init__(self, sweep: str, allocation: str) -> None:
        """Takes the lock.

        Raises:
            OSError: another process holds it.
        """
        self._server_socket = socket.socket(socket.AF_UNIX)
        try:
            self._server_socket.bind(_address())
        except OSError:
            self._server_socket.close()
            raise
        self._server_socket.listen()
        answer_bytes = json.dumps(values_of(Holder(sweep=sweep, allocation=allocation))).encode()
        threading.Thread(target=self._answer_callers, args=(answer_bytes,), daemon=True).start()

    def _answer_callers(self, answer_bytes: bytes) -> None:
        """Sends the holder of the lock, as JSON, to every process that connects."""
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self._server_socket.accept()
                with connection:
                    connection.sendall(answer_bytes)


def holder() -> Holder | None:
    """Who holds the lock of this machine; None if it is free."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_TIMEOUT_S)
        try:
            client.connect(_address())
        except OSError:
            return None
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = user_name(_CREDENTIALS.unpack(credentials)[1])
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            answer = json.loads(client.recv(MAX_ANSWER_BYTES))
            return Holder(sweep=str(answer["sweep"]), allocation=str(answer["allocation"]), user=user)
        return Holder(user=user)
