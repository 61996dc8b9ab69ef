"""What a rank tells its agent: JSON lines in a node-local file, and where it is in shared memory."""

import json
import math
import mmap
import os
import re
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRESS_SUFFIX = ".progress"
"""The progress lies beside the report, in shared memory: three native 64-bit integers."""
STACKS_SUFFIX = ".stacks"
"""Beside the report: the Python stacks of a rank that was asked for them."""
COLLECTIVES_SUFFIX = ".collectives"
"""Beside the report: the last collectives of a rank that was asked for them, as JSON."""

PROFILE = "profile"
"""The phase in which ranks look inside themselves, and the folder beside the report for what they see."""

PARTS = ("data", "forward_backward", "optimizer")
"""Of a step, in order."""
_RECORD = struct.Struct("@qqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank has come."""

    microbatches: int = 0
    """Finished on the device."""
    step: int = 0
    """The step it is in; 0 before the first."""
    part: str = PARTS[0]
    """What it has begun of that step; a GPU may be some micro-batches behind."""


class Report:
    """Writes one rank's report.

    A line is one JSON object with an `event` and, from us, the `time` in seconds since 1970: phase {name}, store {port}, environment {...},
    step {seconds, tokens, loss}, memory {allocated_bytes, reserved_bytes}, error {kind, message},
    done {...}, witness {pid}. Programs that are not ours may write the same lines themselves; a
    witness promises that SIGUSR1 has it write its Python stacks beside the report, and SIGUSR2 its
    last collectives.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the rank
        record = os.open(f"{self.path}{PROGRESS_SUFFIX}", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(record, _RECORD.size)
        # Each number is written whole, so that the thread that counts and the one that steps need no lock.
        self._progress = memoryview(mmap.mmap(record, _RECORD.size)).cast("q")
        os.close(record)
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
        self._progress[0] = self._microbatches

    def enter(self, part: int, step: int) -> None:
        """Says which of PARTS of which step the rank begins (no system call)."""
        self._progress[1] = step
        self._progress[2] = part


def read_progress(report: Path) -> Progress:
    """How far the rank that writes `report` has come; nothing where it keeps no record."""
    try:
        raw = Path(f"{report}{PROGRESS_SUFFIX}").read_bytes()
    except OSError:
        return Progress()
    if len(raw) != _RECORD.size:
        return Progress()
    microbatches, step, part = _RECORD.unpack(raw)
    return Progress(microbatches=microbatches, step=step, part=PARTS[part] if part in range(3) else PARTS[0])


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


def parse_log_line(line: str, pattern: re.Pattern[str], tokens_per_gpu: float) -> dict[str, Any] | None:
    """The step that a line of a program's log tells by `pattern`, as a report line marked so.

    Groups are those of `kernel_choice.STEP_TIMES` and loss; a step takes `tokens_per_gpu` tokens a GPU.
    """
    match = pattern.search(line)
    if match is None:
        return None
    try:
        values = {k: float(v.replace(",", "")) for k, v in match.groupdict().items() if v is not None}
        if "milliseconds" in values:
            values["seconds"] = values.pop("milliseconds") / 1000
        if "tokens_per_s_per_gpu" in values:
            values["seconds"] = tokens_per_gpu / values.pop("tokens_per_s_per_gpu")
    except (ValueError, ZeroDivisionError):
        return None
    return {"event": "step", "measured_by": "log", **values}
