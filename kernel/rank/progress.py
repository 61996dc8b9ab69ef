"""Counts micro-batches when the device has finished them, and not when they are launched."""

import threading
from collections import deque
from collections.abc import Callable

import torch

from ultrabench.kernel.device import kind_of

POLL_S = 0.02
"""Seconds between two looks at the events of the device."""


def device_progress(device: torch.device, count_microbatch: Callable[[], None]) -> Callable[[], None]:
    """A function to call after each launch of a micro-batch; it calls `count_microbatch` when the
    device has finished it.

    A CPU has finished at once. On a GPU an event is recorded, and another thread watches for it, since the
    training thread could launch nothing while it waits.
    """
    if not kind_of(device).has_gpus:
        return count_microbatch
    unfinished_events, poll_pause = deque[torch.cuda.Event](), threading.Event()

    def record_launch() -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        unfinished_events.append(event)

    def count_finished() -> None:
        torch.cuda.set_device(device)  # the thread would begin a context on GPU 0, which takes memory there
        while not poll_pause.wait(POLL_S):
            while unfinished_events and unfinished_events[0].query():  # type: ignore[no-untyped-call]
                unfinished_events.popleft()
                count_microbatch()

    threading.Thread(target=count_finished, daemon=True).start()
    return record_launch
