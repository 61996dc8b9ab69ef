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

VARIABLE = "ULTRABENCH_MACHINE"
"""Variable that names a part of this machine with a lock of its own, such as one of two sets of cores."""
ANSWER_TIMEOUT_S = 1.0
"""Seconds to wait for the holder of the lock to say who it is."""
ANSWER_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")


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
    return f"\0ultrabench-{os.environ.get(VARIABLE, 'machine')}"


class MachineLock:
    """The lock, held until this process ends."""

    def __init__(self, sweep: str, allocation: str) -> None:
        """Takes the lock.

        Raises:
            OSError: another process holds it.
        """
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(_address())
        except OSError:
            self._server.close()
            raise
        self._server.listen()
        answer = json.dumps(values_of(Holder(sweep=sweep, allocation=allocation))).encode()
        threading.Thread(target=self._tell, args=(answer,), daemon=True).start()

    def _tell(self, answer: bytes) -> None:
        """Tells everybody who asks who holds the lock."""
        while True:
            with contextlib.suppress(OSError):
                caller, _ = self._server.accept()
                with caller:
                    caller.sendall(answer)


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
            answer = json.loads(client.recv(ANSWER_BYTES))
            return Holder(sweep=str(answer["sweep"]), allocation=str(answer["allocation"]), user=user)
        return Holder(user=user)
