"""Repeats failed accesses to the results folder, while the agent keeps showing that it is alive."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ultrabench.errors import ClusterError, may_pass
from ultrabench.store.heartbeat import show_presence

P = ParamSpec("P")
T = TypeVar("T")

DISK_RETRY_S = 60.0
"""Seconds to keep retrying a full, read-only or unresponsive results folder before the allocation ends."""
BEAT_S = 0.05
"""Seconds between two calls of `beat`; it decides itself how often it really sends a heartbeat."""


class DiskRetry:
    """Access of one agent to the results folder; `beat` is called while the agent waits for the disk.

    Each access runs in a thread of its own, since a file server that does not answer blocks its
    caller inside Linux.
    """

    def __init__(self, touch_every_s: float) -> None:
        self.beat: Callable[[], Any] = lambda: None
        """Shows the other agents and the launcher that this agent is alive; it may be called at any rate."""
        self._touch_every_s = touch_every_s
        self._touched = 0.0
        self._touching: threading.Thread | None = None

    def retry(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `act` returns; it is repeated for DISK_RETRY_S while the disk fails in a way that may pass.

        Raises:
            ClusterError: the disk kept failing.
        """
        return self.retry_for(DISK_RETRY_S, act, *args, **kwargs)

    def retry_for(self, seconds: float, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does what `retry` does, for `seconds` instead of DISK_RETRY_S.

        Raises:
            ClusterError: the disk kept failing.
        """
        end, pause_s = time.monotonic() + seconds, 0.1
        while True:
            future: Future[T] = Future()
            call = partial(act, *args, **kwargs)
            thread = threading.Thread(target=_fulfil, args=(future, call), daemon=True)
            thread.start()
            while thread.is_alive() and time.monotonic() < end:
                thread.join(BEAT_S)
                self.beat()
            if not future.done():
                raise ClusterError(f"the results folder did not answer for {seconds:g} s")
            error = future.exception()
            if error is None or not may_pass(error):
                return future.result()
            if time.monotonic() + pause_s > end:
                raise ClusterError(f"{error}; waited {seconds:g} s") from error
            log_line(f"{error}; trying again in {pause_s:g} s")
            again = time.monotonic() + pause_s
            while time.monotonic() < again:
                self.beat()
                time.sleep(BEAT_S)
            pause_s = min(2 * pause_s, 5.0)

    def touch(self, journal: Path) -> bool:
        """Touches the journal if it is time to; returns whether it was. A slow disk is not waited for."""
        if time.monotonic() - self._touched <= self._touch_every_s:
            return False
        self._touched = time.monotonic()
        if self._touching is None or not self._touching.is_alive():
            self._touching = threading.Thread(target=_touch, args=(journal,), daemon=True)
            self._touching.start()
            self._touching.join(BEAT_S)
        return True


def log_line(text: str) -> None:
    """Writes a line to the job's log; it never fails, since the log may be on the same full disk."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _touch(journal: Path) -> None:
    with contextlib.suppress(OSError):
        show_presence(journal)
