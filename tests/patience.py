"""How long tests wait: seconds of an idle machine, of which a loaded or slow one gets more."""

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

SPINS = 1_000_000
SPIN_S = 0.03
"""Wall-clock seconds of so many turns of an empty loop on an idle core of 2023."""
MOST = 20.0
"""A machine this many times slower than that one is waited for no longer."""


def slowness() -> float:
    """How many times as long work takes now as on an idle machine, at least 1.

    It is the larger one of the processes that want a core over the cores there are, as a mean of the last
    minute, and of what a short loop took over what it takes on an idle core.
    """
    begun = time.perf_counter()
    for _ in range(SPINS):
        pass
    spin_s = time.perf_counter() - begun
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(MOST, max(1.0, load, spin_s / SPIN_S))


class Deadline:
    """A point in time that moves away while the machine proves slow; it is measured only once it is due."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._slowness, self._begun = seconds, 1.0, time.monotonic()

    def over(self) -> bool:
        """Whether an idle machine would have had so many seconds."""
        if self.left_s() <= 0:
            self._slowness = max(self._slowness, slowness())
        return self.left_s() <= 0

    def left_s(self) -> float:
        """Seconds until it has to be asked again."""
        return self._begun + self._seconds * self._slowness - time.monotonic()


def wait_until(
    what: Callable[[], object], seconds: float, told: Callable[[], str] = lambda: "in vain"
) -> None:
    """Returns once `what` holds; fails with what `told` says."""
    deadline = Deadline(seconds)
    while not what():
        assert not deadline.over(), f"waited {seconds:g} s of an idle machine: {told()}"
        time.sleep(0.05)


class Process(subprocess.Popen[str]):
    """A process whose output is waited for in seconds of an idle machine."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> Any:
        """Everything that it writes, as of any other process."""
        deadline = Deadline(float("inf") if timeout is None else timeout)
        while True:
            try:
                return super().communicate(input, None if timeout is None else max(0.0, deadline.left_s()))
            except subprocess.TimeoutExpired:
                if deadline.over():
                    raise


def run(words: list[str], seconds: float = 240, **more: Any) -> subprocess.CompletedProcess[str]:
    """What a command says until it ends, both outputs apart; one that does not end in time is killed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Process(words, **{**pipes, **more}) as process:
        try:
            output, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, said)
