"""Counts micro-batches when the device has finished them, and not when they are launched."""

import threading
from collections import deque
from collections.abc import Callable

import torch

POLL_S = 0.02
"""Seconds between two looks at the events of the device."""


def device_progress(device: torch.device, count: Callable[[], None]) -> Callable[[], None]:
    """A function to call after each launch of a micro-batch; it calls `count` when the device has finished it.

    A CPU has finished at once. On a GPU an event is recorded, and another thread watches for it, since the
    training thread could launch nothing while it waits.
    """
    if device.type != "cuda":
        return count
    pending, pause = deque[torch.cuda.Event](), threading.Event()

    def launched() -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        pending.append(event)

    def poll() -> None:
        torch.cuda.set_device(device)  # the thread would begin a context on GPU 0, which takes memory there
        while not pause.wait(POLL_S):
            while pending and pending[0].query():  # type: ignore[no-untyped-call]
                pending.popleft()
                count()

    threading.Thread(target=poll, daemon=True).start()
    return launched
