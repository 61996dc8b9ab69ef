"""One server for all parity tests: torch is imported once, ranks are forked."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from ultrabench.agent.ranks.fork_server import ForkServer
from ultrabench.kernel.requests import SINGLE_THREAD_ENV

ROOT = Path(__file__).parents[2]


class Server:
    """The process of server.py, which answers questions."""

    fault: str | None = None
    """Name of a fault of planted.py that the process that answers has."""

    def __init__(self) -> None:
        self._link, theirs = Pipe()
        program = f"from tests.parity.server import serve; serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-c", program), env={**os.environ, **SINGLE_THREAD_ENV}, cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.pid = self._process.pid

    def close(self) -> None:
        # The end of the link ends the server.
        self._link.close()
        self._process.wait()

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function of a module returns in a process that may compute, or the text of its error."""
        self._link.send((self.fault, function, args))
        return self._link.recv()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A running server."""
    running = Server()
    yield running
    running.close()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server of an agent, whose ranks are those of corrupted.py."""
    log = tmp_path_factory.mktemp("forks") / "log"
    running = ForkServer(log, {**os.environ, "PYTHONPATH": str(ROOT)}, "tests.parity.corrupted")
    yield running
    running.stop()
