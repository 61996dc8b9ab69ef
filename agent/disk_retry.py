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
BEAT_S = 0.05
"""Seconds between two calls of `beat`; it decides itself how often it really sends a heartbeat."""


class DiskRetry:
    """Access of one agent to the results folder; `beat` is called while the agent waits for the disk.

    Each access runs in a thread of its own, since a file server that does not answer blocks its
    caller inside Linux.
    """

    def __init__(self, touch_every_s: float) -> None:
        self.journal: Path | None = None
        """The journal of this agent; None if it has none, because another one leads."""
        self.tell: Callable[[], Any] = lambda: None
        """Tells the other agents that this one is alive."""
        self._touch_every_s = touch_every_s
        self._touched = 0.0
        self._touching: Future[None] | None = None

    def retry(
        self, act: Callable[[], T], seconds: float = DISK_RETRY_S, subject: str = "the results folder"
    ) -> T:
        """What `act` returns; it is repeated for `seconds` while the disk fails in a way that may pass.

        Args:
            subject: the folder or the work that a message names if there is no answer.

        Raises:
            ClusterError: the disk kept failing.
        """
        ran_s, pause_s = RunningClock(), 0.1
        while True:
            answer = _in_thread(act)
            while wait([answer], BEAT_S).not_done and ran_s() < seconds:
                self.beat()
            if not answer.done():
                raise ClusterError(f"{subject} did not answer for {seconds:g} s")
            error = answer.exception()
            if error is None or not may_pass(error):
                return answer.result()
            if ran_s() + pause_s > seconds:
                raise ClusterError(f"{error}; retried for {seconds:g} s") from error
            log_line(f"{error}; retrying in {pause_s:g} s")
            for _ in range(round(pause_s / BEAT_S)):
                self.beat()
                time.sleep(BEAT_S)
                ran_s()
            pause_s = min(2 * pause_s, 5.0)

    def beat(self) -> None:
        """Shows the other agents and the launcher that this agent is alive; it may be called at any rate.

        It does so only if it is time to, by a message and by touching the journal. A slow disk is not waited for.
        """
        if time.monotonic() - self._touched <= self._touch_every_s:
            return
        self._touched = time.monotonic()
        if self.journal and (self._touching is None or self._touching.done()):
            self._touching = _in_thread(partial(os.utime, self.journal))
            wait([self._touching], BEAT_S)
        self.tell()


def log_line(text: str) -> None:
    """Writes a line to the job's log; it never fails, since the log may be on the same full disk."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _in_thread(act: Callable[[], T]) -> Future[T]:
    """What `act` returns or raises in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future
