"""How an agent reads the health of its node: another process reads, which may hang without harm."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ultrabench.agent.ranks.gpus import VisibleGpu
from ultrabench.node_health import NumberByPlace, Reading

FIRST_READING_LIMIT_S = 10.0
"""Seconds for the first reading, in which the driver may have to start."""
LATER_READING_LIMIT_S = 2.0
"""Seconds for each further reading."""
ROOT = Path("/")


class HealthReader:
    """Reads the health of this node, for the first time as soon as it is made; `read` waits for the answer."""

    def __init__(self, gpus: Sequence[VisibleGpu], root: Path = ROOT) -> None:
        """`root` is the folder with dev, proc and sys."""
        command = [sys.executable, "-P", "-m", "ultrabench.agent.health_sources"]
        command += [str(root), tempfile.gettempdir(), json.dumps(gpus)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._request_reading(FIRST_READING_LIMIT_S)

    @property
    def is_open(self) -> bool:
        """Whether it can read again: it was not closed, and has answered in time."""
        return self._child.stdout is not None and not self._child.stdout.closed

    def _request_reading(self, limit_s: float) -> None:
        self._deadline_s = time.monotonic() + limit_s
        with contextlib.suppress(OSError, ValueError):  # the process has ended, or the pipe was closed
            assert self._child.stdin is not None
            self._child.stdin.write(b"\n")

    def read_again(self) -> Reading:
        """A further reading, in at most LATER_READING_LIMIT_S seconds."""
        self._request_reading(LATER_READING_LIMIT_S)
        return self.read()

    def read(self) -> Reading:
        """The reading that was requested last; it lacks what was not read in time, and then nothing more is read."""
        pipe, output = self._child.stdout, b""
        assert pipe is not None
        while self.is_open and not output.endswith(b"\n\n"):
            remaining_s = max(0.0, self._deadline_s - time.monotonic())
            chunk = os.read(pipe.fileno(), 2**16) if select.select([pipe], [], [], remaining_s)[0] else b""
            if not chunk:
                self.close()
            output += chunk
        numbers_by_check = dict[str, NumberByPlace]()
        for line in filter(None, output.splitlines()):
            with contextlib.suppress(ValueError):  # the last line of an answer that was cut short
                numbers_by_check |= json.loads(line)
        return Reading(time.monotonic(), numbers_by_check)

    def close(self) -> None:
        """Ends the process; one that hangs inside Linux is left."""
        self._child.kill()
        for pipe in filter(None, (self._child.stdin, self._child.stdout)):
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=1.0)
