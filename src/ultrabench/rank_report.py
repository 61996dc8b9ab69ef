"""Reports of a rank to its agent: JSON lines in a node-local file, and its progress in shared memory."""

import errno
import json
import math
import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ultrabench.record import canonical_json

PROGRESS_SUFFIX = ".progress"
"""Suffix of the memory-mapped file beside the report with the progress: three native 64-bit integers."""
STACKS_SUFFIX = ".stacks"
"""Suffix of the file beside the report that holds the Python stacks of a rank that was asked for them."""
COLLECTIVES_SUFFIX = ".collectives"
"""Suffix of the file beside the report that holds the last collectives of a rank, as JSON."""

TRACE_PHASE = "profile"
"""Name of the phase in which a rank is traced, and of the folder beside the report for the trace."""

CHECKPOINT_PHASE = "checkpoint"
"""Name of the phase in which a rank saves and loads its state; all else is reported before it."""

STEP_PARTS = ("data", "forward_backward", "optimizer")
"""Parts of a step, in order."""
_RECORD = struct.Struct("@qqq")

LINE_BYTES = 2**19
"""Bytes of a report or a log that are read at once; a longer line is skipped."""
SKIPPED_PARTS = 128
"""Largest number of parts of a longer line that are skipped in one call."""
MIN_STEP_S, MAX_STEP_S = 1e-9, 1e7
"""Shortest and longest step time in seconds that counts as a measurement."""
MAX_NUMBER = 2.0**60
"""Largest number that is accepted as a count or as a number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank has come."""

    microbatches: int = 0
    """Micro-batches that have finished on the device."""
    step: int = 0
    """Number of the step that the rank is in; 0 before the first step."""
    part: str = STEP_PARTS[0]
    """The part of that step that the rank has begun; its GPU may be some micro-batches behind."""


class Report:
    """Writes the report of one rank.

    Each line is one JSON object with an `event`. This class adds the `time` in seconds since 1970. The events
    are phase {name}, store {port}, environment {...}, step {seconds, tokens, loss, gradient_norm},
    ran {options}, memory {allocated_bytes, reserved_bytes, allocator_retries}, error {kind, message}, done {...}, stack_dump {pid}
    and checkpoint {save_s, load_s, async_blocking_s, async_s, async_lost_steps, bytes}, or {message} where it failed.
    A program of the user may write the same lines itself. With stack_dump a process promises to write its
    Python stacks beside the report on SIGUSR1, and its last collectives on SIGUSR2.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the rank
        progress_fd = os.open(f"{self.path}{PROGRESS_SUFFIX}", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(progress_fd, _RECORD.size)
        # Each number is written at once, so the thread that counts and the one that steps need no lock.
        self._progress = memoryview(mmap.mmap(progress_fd, _RECORD.size)).cast("q")
        os.close(progress_fd)

    @classmethod
    def from_environment(cls) -> "Report":
        """The report of this rank, at the path in the variable ULTRABENCH_REPORT."""
        return cls(os.environ["ULTRABENCH_REPORT"])

    def write(self, event: str, **values: Any) -> None:
        """Appends one line, which the agent can read at once."""
        self._file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")
        self._file.flush()

    def phase(self, name: str) -> None:
        """Reports the phase that the rank begins."""
        self.write("phase", name=name)

    def microbatch(self) -> None:
        """Counts one more finished micro-batch, without a system call."""
        self._progress[0] += 1

    def enter(self, part_index: int, step: int) -> None:
        """Records which part of which step the rank begins, as an index of STEP_PARTS, without a system call."""
        self._progress[1] = step
        self._progress[2] = part_index


def read_regular(path: str | os.PathLike[str], start: int, max_bytes: int) -> bytes:
    """At most `max_bytes` bytes of a regular file from byte `start` on.

    Anything may be in the place of the file. A pipe without a writer does not block the reader, and an endless
    device does not fill its memory.

    Raises:
        OSError: the file is not regular, or cannot be read.
    """
    flags = os.O_NONBLOCK | os.O_NOCTTY
    with open(path, "rb", 0, opener=lambda name, default_flags: os.open(name, default_flags | flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        # A buffer of `max_bytes` bytes may be far too large, and files of /proc have no size.
        return os.pread(file.fileno(), min(max_bytes, max(status.st_size - start, 4096)), start)


def read_part(path: str | os.PathLike[str], start: int, max_bytes: int) -> bytes:
    """What `read_regular` returns; empty when the file is not regular or not readable."""
    try:
        return read_regular(path, start, max_bytes)
    except OSError:
        return b""


def read_progress(report: Path) -> Progress:
    """The progress of the rank that writes `report`; no progress when its record is missing or invalid."""
    raw = read_part(f"{report}{PROGRESS_SUFFIX}", 0, _RECORD.size + 1)
    if len(raw) != _RECORD.size or min(_RECORD.unpack(raw)) < 0:
        return Progress()
    microbatches, step, part = _RECORD.unpack(raw)
    return Progress(
        microbatches=microbatches, step=step, part=STEP_PARTS[part] if part in range(3) else STEP_PARTS[0]
    )


class NewLines:
    """Reads the new lines of a file that another process writes, and skips lines longer than `max_bytes` bytes."""

    def __init__(self, path: Path, max_bytes: int = LINE_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.has_more = False
        """Whether there may be more in the file than the last call has read."""
        self.num_skipped = 0
        """Number of lines that were skipped because they are too long."""
        self.num_lines = 0
        """Number of lines that were read or skipped."""
        self._offset = 0
        self._skipping = False
        """Whether the next byte to read is inside a line that is skipped."""

    def read(self) -> list[str]:
        """The whole lines after those of the last call; none of a file that is not regular or not readable."""
        return self.read_bytes(read_part).decode(errors="replace").splitlines()

    def read_bytes(self, read: Callable[[Path, int, int], bytes] = read_regular) -> bytes:
        """The whole lines after those of the last call, at most `max_bytes` bytes of them, without the last newline.

        Raises:
            OSError: `read`, which reads a part of the file, raises it.
        """
        for _ in range(SKIPPED_PARTS):
            data = read(self.path, self._offset, self.max_bytes)
            self.has_more = len(data) == self.max_bytes
            lines, newline, _ = data.rpartition(b"\n")
            if newline or not self.has_more:
                break
            self._offset += len(data)
            self.num_skipped += not self._skipping
            self._skipping = True
        self._offset += len(lines) + len(newline)
        self.num_lines += lines.count(b"\n") + len(newline)
        if self._skipping and newline:
            self._skipping = False
            lines = lines.partition(b"\n")[2]
        return lines


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def number(value: Any) -> float | None:
    """The value as a float; None when it is no finite number that a float can hold."""
    return float(value) if is_number(value) else None


def _count(value: Any) -> int | None:
    return int(value) if is_number(value) and 0 <= value <= MAX_NUMBER else None


def _text(max_chars: int, value: Any) -> str:
    """The value as a text; beyond `max_chars` characters its middle is cut out."""
    text = str(value)
    shortened = text if len(text) <= max_chars else f"{text[: max_chars // 2]}...{text[-max_chars // 2 :]}"
    return shortened.encode(errors="replace").decode()  # replaces halves of surrogate pairs


def _variables(value: Any) -> dict[str, str] | None:
    return {_LONG_TEXT(k): _LONG_TEXT(v) for k, v in value.items()} if isinstance(value, dict) else None


def _loss(value: Any) -> float | None:
    """The loss as a float; None when it is no number. Infinity and NaN are kept, since they are a finding."""
    if type(value) not in (int, float):
        return None
    return float(value) if isinstance(value, float) or is_number(value) else math.inf


_SHORT_TEXT, _LONG_TEXT = partial(_text, 200), partial(_text, 2**14)
_BYTE_FIELDS = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "torch_bytes", "data_bytes")
_COUNT_OF_BYTES: dict[str, Callable[[Any], Any]] = dict.fromkeys((*_BYTE_FIELDS, "limit_bytes"), _count)
CHECKPOINT_NUMBERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("save_s", "load_s", "async_blocking_s", "async_s", "async_lost_steps"), number), "bytes": _count,
}  # fmt: skip
"""What the event checkpoint has; the results have the same names after `checkpoint_`."""
FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "phase": {"name": _SHORT_TEXT, "time": number},
    "step": {"step": _count, "seconds": number, "loss": _loss, "gradient_norm": number, "measured": bool},
    "memory": {**_COUNT_OF_BYTES, "allocator_retries": _count},
    "ran": {"options": _variables},
    "store": {"port": lambda value: _count(value) if is_number(value) and 0 < value < 2**16 else None},
    "environment": {
        **dict.fromkeys(("gpu_name", "torch_version", "cuda_version", "nccl_version", "driver_version"), _SHORT_TEXT),
        "gpus": _count, "omp_num_threads": _count, "variables": _variables,
    },
    "error": {"kind": _SHORT_TEXT, "message": _LONG_TEXT, "traceback": _LONG_TEXT, **_COUNT_OF_BYTES},
    "done": {"stopped": _SHORT_TEXT, "hardware_flops_per_step": number, "graphs": _count},
    "stack_dump": {"pid": _count},
    "checkpoint": {**CHECKPOINT_NUMBERS, "message": _LONG_TEXT},
}  # fmt: skip
"""Event -> field that is used -> function that turns any value into a valid one of bounded size, or None."""


def parse_line(line: str) -> dict[str, Any] | None:
    """The content of a line of a report; None when it is no JSON object with an `event`.

    Programs may write anything, so unused fields and values of the wrong type are left out. The result has a
    `fault` when the seconds of a step are no number, or when the line is nested too deeply to be read.
    """
    try:
        value = json.loads(line)
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            return checked(value)
    except json.JSONDecodeError:
        return None
    except (RecursionError, ValueError) as error:
        return {"event": "unreadable", "fault": f"an unreadable line: {error}"}
    return None


def checked(value: dict[str, Any]) -> dict[str, Any]:
    """The used fields of a line of a report, and a `fault` when the seconds of a step are wrong."""
    event = value["event"]
    if event == "probe":  # only our own kernel writes it, and `device_rates.summary` checks its values
        canonical_json(value)
        return value
    line: dict[str, Any] = {"event": _SHORT_TEXT(event)}
    for name, to_valid in FIELDS.get(event, {}).items():
        if value.get(name) is not None and (field := to_valid(value[name])) is not None:
            line[name] = field
    seconds = value.get("seconds")
    if event == "step" and seconds is not None and not MIN_STEP_S <= line.get("seconds", 0.0) <= MAX_STEP_S:
        line.pop("seconds", None)
        line["fault"] = f"step seconds={seconds!r:.60}: not a number of seconds"
    return line
