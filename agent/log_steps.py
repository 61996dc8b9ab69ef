"""Steps of a program that only logs, read from rank 0's log by the user's pattern."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LogSteps:
    """Follows a log; each line that matches is a step."""

    def __init__(self, path: Path, pattern: str) -> None:
        self._path = path
        self._pattern = re.compile(pattern)
        self._offset = 0

    def new_steps(self) -> Iterator[dict[str, Any]]:
        """The steps logged since the last call, as report lines marked `measured_by: log`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            match = self._pattern.search(line)
            if match:
                values = match.groupdict()
                step = {"event": "step", "measured_by": "log"}
                try:
                    yield step | {k: float(v) for k, v in values.items() if v is not None}
                except ValueError:
                    continue
