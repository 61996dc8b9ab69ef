"""One server for all parity tests: torch is imported once, ranks are forked."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ultrabench.agent.ranks.fork_server import ForkServer
from ultrabench.kernel.requests import SINGLE_THREADED, CheckResult, CheckSpec
from ultrabench.record import from_dict, to_dict

ROOT = Path(__file__).parents[2]


class Server:
    """The process of server.py, which answers questions."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.parity.server"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **SINGLE_THREADED}, cwd=ROOT,
        )  # fmt: skip
        self.pid = self._process.pid

    def close(self) -> None:
        # The end of its input ends the server.
        self._process.communicate()

    def ask(self, what: str, spec: CheckSpec | str, fault: str | None = None) -> Any:
        """The JSON value that answers a question about `spec`, such as its check, counts, costs or dry costs.

        To `call` something, `spec` is the full name of a function without arguments.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = {"ask": what, "spec": spec if isinstance(spec, str) else to_dict(spec), "fault": fault}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def check(self, spec: CheckSpec, fault: str | None = None) -> CheckResult:
        """Whether a layout trains as one process does; with `fault`, one of planted.py."""
        return from_dict(CheckResult, self.ask("check", spec, fault))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A running server."""
    running = Server()
    yield running
    running.close()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server of an agent, whose ranks obey FLIP of corrupted.py."""
    log = tmp_path_factory.mktemp("forks") / "log"
    running = ForkServer(log, {**os.environ, "PYTHONPATH": str(ROOT)}, "tests.parity.corrupted")
    yield running
    running.stop()
