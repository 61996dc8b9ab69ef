"""One check server for all parity tests: torch is imported once, ranks are forked."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ultrabench.kernel.check_spec import SERVER_COMMAND, SINGLE_THREADED, CheckResult, CheckSpec
from ultrabench.record import from_dict, to_dict


class Server:
    """A process that answers each CheckSpec line with a JSON line."""

    def __init__(self, command: Sequence[str] = SERVER_COMMAND) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SINGLE_THREADED},
        )
        self.pid = self._process.pid

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        # The end of its input ends the server.
        self._process.communicate()

    def ask(self, spec: CheckSpec) -> Any:
        """The JSON value that answers `spec`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(to_dict(spec)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def check(self, spec: CheckSpec) -> CheckResult:
        """The answer of a check server."""
        return from_dict(CheckResult, self.ask(spec))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A running check server."""
    with Server() as running:
        yield running
