"""What a rank tells its agent: JSON lines in a node-local file, and a counter of micro-batches."""

import json
import math
import mmap
import os
import re
import struct
import time
from pathlib import Path
from typing import Any

PROGRESS_SUFFIX = ".progress"
"""The counter lies beside the report: 8 bytes, little-endian, in shared memory."""


class Report:
    """Writes one rank's report.

    A line is one JSON object with an `event` and, from us, the `time` in seconds since 1970: phase {name}, store {port}, environment {...},
    step {seconds, tokens, loss}, memory {allocated_bytes, reserved_bytes}, error {kind, message},
    done {...}. Programs that are not ours may write the same lines themselves.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the rank
        counter = os.open(f"{os.fspath(path)}{PROGRESS_SUFFIX}", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(counter, 8)
        self._counter = mmap.mmap(counter, 8)
        os.close(counter)
        self._microbatches = 0

    @classmethod
    def from_environment(cls) -> "Report":
        """The report of this rank, at ULTRABENCH_REPORT."""
        return cls(os.environ["ULTRABENCH_REPORT"])

    def write(self, event: str, **values: Any) -> None:
        """Appends one line, at once visible to the agent."""
        self._file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")
        self._file.flush()

    def phase(self, name: str) -> None:
        """Says what the rank does from now on."""
        self.write("phase", name=name)

    def microbatch(self) -> None:
        """Counts one more finished micro-batch (no system call)."""
        self._microbatches += 1
        struct.pack_into("<q", self._counter, 0, self._microbatches)


def read_progress(report: Path) -> int:
    """Micro-batches the rank that writes `report` has finished."""
    try:
        raw = Path(f"{report}{PROGRESS_SUFFIX}").read_bytes()
    except OSError:
        return 0
    return int(struct.unpack("<q", raw)[0]) if len(raw) == 8 else 0


class NewLines:
    """Follows a text file that somebody is writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[str]:
        """The whole lines written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


NUMBERS = {
    "step": ("seconds",),
    "memory": ("allocated_bytes", "reserved_bytes"),
    "store": ("port",),
    "done": ("hardware_flops_per_step",),
    "environment": ("omp_num_threads",),
}
"""Event -> fields that must be numbers; a program of the user may write anything."""


def parse_line(line: str) -> dict[str, Any] | None:
    """A line of a report; None when it is no JSON object with an `event`.

    Fields that should be finite numbers and are not are left out. A loss stays as it is: one that
    is not finite is news.
    """
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return None
    for name in NUMBERS.get(value["event"], ()):
        if not is_number(value.get(name)):
            value.pop(name, None)
    return value


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float."""
    return type(value) in (int, float) and math.isfinite(value)


def parse_log_line(line: str, pattern: re.Pattern[str]) -> dict[str, Any] | None:
    """The step that a line of a program's log tells by `pattern`, as a report line marked so."""
    match = pattern.search(line)
    if match is None:
        return None
    try:
        values = {k: float(v) for k, v in match.groupdict().items() if v is not None}
    except ValueError:
        return None
    return {"event": "step", "measured_by": "log", **values}
