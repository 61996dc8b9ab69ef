"""Counts micro-batches when the device has finished them, and not when they are launched."""

import threading
from collections import deque
from collections.abc import Callable

import torch

POLL_S = 0.02


class DeviceProgress:
    """Is called after each launch of a micro-batch, and calls `count` when the device has finished it.

    A CPU has finished at once. On a GPU an event is recorded, and another thread watches for it, since the
    training thread could launch nothing while it waits.
    """

    def __init__(self, device: torch.device, count: Callable[[], None]) -> None:
        self._count = count
        self._pending: deque[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._pending = deque()
            threading.Thread(target=self._poll, args=(self._pending,), daemon=True).start()

    def __call__(self) -> None:
        """Counts one micro-batch as soon as the device has finished it."""
        if self._pending is None:
            self._count()
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append(event)

    def _poll(self, pending: "deque[torch.cuda.Event]") -> None:
        pause = threading.Event()
        while not pause.wait(POLL_S):
            while pending and pending[0].query():  # type: ignore[no-untyped-call]
                pending.popleft()
                self._count()
