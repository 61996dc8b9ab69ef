"""How far each part of `make test` has come, a line for every tenth of its tests: `pytest -p tests.progress`.

Pytest's own report goes to standard output, which `make test` keeps in a file until the part ends, since several parts
run at once. These lines go to standard error.
"""

import os
import sys
import time

import pytest

STEP_PERCENT = 10
STANDARD_ERROR = os.fdopen(os.dup(sys.__stderr__.fileno()), "w", buffering=1)
"""As it was before pytest captured it."""


class PartProgress:
    """Counts the tests of one part, and prints a line whenever another tenth of them has ended."""

    def __init__(self, part: str, total: int) -> None:
        self.part = part
        self.total = total
        self.done = 0
        self.failed = 0
        self.began_at = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        if report.when == "teardown":
            percent_before = self.percent
            self.done += 1
            if self.percent // STEP_PERCENT > percent_before // STEP_PERCENT:
                self.print()

    @property
    def percent(self) -> int:
        return 100 * self.done // self.total

    def print(self) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.began_at), 60)
        STANDARD_ERROR.write(
            f"{self.part:18} {self.percent:3} %  {self.done:5,} of {self.total:5,} tests"
            f"  {minutes:2} min {seconds:2} s  {self.failed} failed\n"
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:
        part = os.environ.get("PART", "tests")
        session.config.pluginmanager.register(PartProgress(part, len(session.items)))
