"""Decides how long tests wait: they give seconds for an idle machine, and a loaded or slow one gets more."""

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

SPINS = 1_000_000
SPIN_S = 0.03
"""Wall-clock seconds that the empty loop of `slowness` takes on an idle core of 2023."""
MOST = 20.0
"""Largest slowness that counts; tests wait no longer for machines that are even slower."""


def slowness() -> float:
    """How many times longer work takes now than on an idle machine, at least 1.

    It is the larger of two ratios: the mean number of processes that wanted a core in the last minute to the
    number of cores, and the time of a short loop to its time on an idle core.
    """
    begun = time.perf_counter()
    for _ in range(SPINS):
        pass
    spin_s = time.perf_counter() - begun
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(MOST, max(1.0, load, spin_s / SPIN_S))


class Deadline:
    """A deadline that is extended if the machine is slow; slowness is measured only when it is due."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._slowness, self._begun = seconds, 1.0, time.monotonic()

    def over(self) -> bool:
        """Whether the deadline has passed, for the slowness of this machine."""
        if self.left_s() <= 0:
            self._slowness = max(self._slowness, slowness())
        return self.left_s() <= 0

    def left_s(self) -> float:
        """Seconds until the deadline has to be checked again."""
        return self._begun + self._seconds * self._slowness - time.monotonic()


def wait_until(
    ready: Callable[[], object],
    seconds: float,
    message: Callable[[], str] = lambda: "in vain",
    rest_s: float = 0.05,
) -> None:
    """Waits until `ready`, asked every `rest_s` seconds, holds; fails after the deadline with what `message` gives."""
    deadline = Deadline(seconds)
    while not ready():
        assert not deadline.over(), f"waited {seconds:g} s of an idle machine: {message()}"
        time.sleep(rest_s)


class Process(subprocess.Popen[str]):
    """A process whose time-outs are in seconds of an idle machine."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> Any:
        """Both outputs of the process, as of `subprocess.Popen`."""
        deadline = Deadline(float("inf") if timeout is None else timeout)
        while True:
            try:
                return super().communicate(input, None if timeout is None else max(0.0, deadline.left_s()))
            except subprocess.TimeoutExpired:
                if deadline.over():
                    raise


def run(words: list[str], seconds: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns both outputs; it is killed if it does not end in time."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Process(words, **{**pipes, **options}) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)
