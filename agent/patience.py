"""Waiting without falling silent: an agent shows that it lives while a disk does not answer."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, TypeVar

from ultrabench.errors import ClusterError, may_pass
from ultrabench.presence import show_presence

P = ParamSpec("P")
T = TypeVar("T")

DISK_PATIENCE_S = 60.0
"""So long a full, read-only or silent results folder is waited for before the allocation ends."""
TOUCH_S = 0.05


class Patience:
    """Of one agent; whatever it waits for, its `beat` goes on.

    What touches the results folder runs in a thread of its own, since a file server that is away
    holds the caller in the kernel. No such thread is left when a rank is started, as long as the
    server answers: forking is for processes with one thread.
    """

    def __init__(self, touch_every_s: float) -> None:
        self.beat: Callable[[], None] = lambda: None
        """Shows the other agents and the launcher that this one lives; may be called at any rate."""
        self._touch_every_s = touch_every_s
        self._touched = 0.0
        self._touching: threading.Thread | None = None

    def insist(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `act` returns, tried again for DISK_PATIENCE_S while the disk may be mended.

        Raises:
            ClusterError: it was not mended.
        """
        return self.within(DISK_PATIENCE_S, act, *args, **kwargs)

    def within(self, seconds: float, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same within so many seconds.

        Raises:
            ClusterError: the disk was not mended.
        """
        end, pause_s = time.monotonic() + seconds, 0.1
        while True:
            future: Future[T] = Future()
            thread = threading.Thread(target=_fulfil, args=(future, act, args, kwargs), daemon=True)
            thread.start()
            while thread.is_alive() and time.monotonic() < end:
                thread.join(TOUCH_S)
                self.beat()
            if not future.done():
                raise ClusterError(f"the results folder did not answer for {seconds:g} s")
            error = future.exception()
            if error is None or not may_pass(error):
                return future.result()
            if time.monotonic() + pause_s > end:
                raise ClusterError(f"{error}; waited {seconds:g} s") from error
            tell(f"{error}; trying again in {pause_s:g} s")
            self.wait(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    def wait(self, seconds: float) -> None:
        """Sleeps, and beats."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.beat()
            time.sleep(TOUCH_S)

    def touch(self, journal: Path) -> None:
        """Shows presence in the results folder, not too often, and never waits for it."""
        waited = time.monotonic() - self._touched > self._touch_every_s
        if waited and (self._touching is None or not self._touching.is_alive()):
            self._touched = time.monotonic()
            self._touching = threading.Thread(target=_touch, args=(journal,), daemon=True)
            self._touching.start()
            self._touching.join(TOUCH_S)


def tell(text: str) -> None:
    """A line for the job's log, which may lie on the very disk that is full; unbuffered, so that none stays."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _fulfil(
    future: Future[T], act: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    try:
        future.set_result(act(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)


def _touch(journal: Path) -> None:
    with contextlib.suppress(OSError):
        show_presence(journal)
