"""Repeats failed accesses to the results folder, while the agent keeps showing that it is alive."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ultrabench.errors import ClusterError, may_pass
from ultrabench.processes import RunningClock

T = TypeVar("T")

DISK_RETRY_S = 60.0
"""Seconds to keep retrying a full, read-only or unresponsive results folder before the allocation ends."""
BEAT_CALL_INTERVAL_S = 0.05
"""Seconds between two calls of `beat`, which sends a heartbeat only when one is due."""


class DiskRetry:
    """Access of one agent to the results folder; `beat` is called while the agent waits for the disk.

    Each access runs in a thread of its own, since a file server that does not answer blocks its
    caller inside Linux.
    """

    def __init__(self, touch_interval_s: float) -> None:
        self.journal_path: Path | None = None
        """The journal of this agent; None if another agent leads, which writes the journal."""
        self.send_heartbeat: Callable[[], Any] = lambda: None
        """Tells the other agents that this one is alive."""
        self._touch_interval_s = touch_interval_s
        self._last_touch_s = 0.0
        self._touch_future: Future[None] | None = None

    def retry(
        self,
        action: Callable[[], T],
        limit_s: float = DISK_RETRY_S,
        subject: str = "the results folder",
        free_space: Callable[[], Any] | None = None,
    ) -> T:
        """What `action` returns; it is repeated for `limit_s` seconds while the disk fails in a way that may pass.

        Args:
            subject: the folder or the work that a message names if there is no answer.
            free_space: called once after the first failure, before anybody waits.

        Raises:
            ClusterError: the disk kept failing.
        """
        clock, pause_s = RunningClock(), 0.1
        while True:
            future = _run_in_thread(action)
            while wait([future], BEAT_CALL_INTERVAL_S).not_done and clock() < limit_s:
                self.beat()
            if not future.done():
                raise ClusterError(f"{subject} did not answer for {limit_s:g} s")
            error = future.exception()
            if error is None or not may_pass(error):
                return future.result()
            if free_space is not None:
                free_space()
                clock, free_space = RunningClock(), None
                continue
            if clock() + pause_s > limit_s:
                raise ClusterError(f"{error}; retried for {limit_s:g} s") from error
            log_line(f"{error}; retrying in {pause_s:g} s")
            for _ in range(round(pause_s / BEAT_CALL_INTERVAL_S)):
                self.beat()
                time.sleep(BEAT_CALL_INTERVAL_S)
                clock()
            pause_s = min(2 * pause_s, 5.0)

    def beat(self) -> None:
        """Shows the other agents and the launcher that this agent is alive; it may be called at any rate.

        It sends a message and touches the journal, but only when a heartbeat is due. It does not wait for a slow disk.
        """
        if time.monotonic() - self._last_touch_s <= self._touch_interval_s:
            return
        self._last_touch_s = time.monotonic()
        if self.journal_path and (self._touch_future is None or self._touch_future.done()):
            self._touch_future = _run_in_thread(partial(os.utime, self.journal_path))
            wait([self._touch_future], BEAT_CALL_INTERVAL_S)
        self.send_heartbeat()


def log_line(text: str) -> None:
    """Writes a line to the job's log; it never fails, since the log may be on the same full disk."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _run_in_thread(action: Callable[[], T]) -> Future[T]:
    """What `action` returns or raises in another thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future
