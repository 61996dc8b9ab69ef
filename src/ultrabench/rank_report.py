"""Reports of a rank to its agent: JSON lines in a node-local file, and its progress in shared memory."""

import errno
import json
import math
import mmap
import os
import re
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
_PROGRESS_STRUCT = struct.Struct("@qqq")

MAX_LINE_BYTES = 2**19
"""Bytes of a report or a log that are read at once; a line longer than this is skipped."""
MAX_SKIPPED_CHUNKS = 128
"""Largest number of chunks of `max_bytes` bytes of a longer line that are skipped in one call."""
MIN_STEP_S, MAX_STEP_S = 1e-9, 1e7
"""Shortest and longest step time in seconds that counts as a measurement."""
MAX_COUNT = 2.0**60
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

    Each line is one JSON object with an `event`. This class adds the `time` in seconds since 1970. FIELDS lists the
    events and the fields of each. A program of the user may write the same lines itself. With stack_dump a process
    promises to write its Python stacks beside the report on SIGUSR1, and its last collectives on SIGUSR2.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the rank
        progress_fd = os.open(f"{self.path}{PROGRESS_SUFFIX}", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(progress_fd, _PROGRESS_STRUCT.size)
        # Each number is written at once, so the thread that counts and the one that steps need no lock.
        self._progress = memoryview(mmap.mmap(progress_fd, _PROGRESS_STRUCT.size)).cast("q")
        os.close(progress_fd)

    @classmethod
    def from_environment(cls) -> "Report":
        """The report of this rank, at the path in the variable ULTRABENCH_REPORT.

        Ranks that a starter has made inherit the path for the first rank of their node; theirs is beside it.
        """
        path, rank = Path(os.environ["ULTRABENCH_REPORT"]), os.environ.get("RANK")
        is_of_rank = rank is not None and re.fullmatch(r"rank\d+\.report", path.name)
        return cls(path.with_name(f"rank{rank}.report") if is_of_rank else path)

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

    def enter_part(self, part_index: int, step: int) -> None:
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
    extra_flags = os.O_NONBLOCK | os.O_NOCTTY
    with open(path, "rb", 0, opener=lambda name, flags: os.open(name, flags | extra_flags)) as file:
        file_stat = os.fstat(file.fileno())
        if not stat.S_ISREG(file_stat.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        # A buffer of `max_bytes` bytes may be far too large, and files of /proc have no size.
        return os.pread(file.fileno(), min(max_bytes, max(file_stat.st_size - start, 4096)), start)


def read_or_nothing(path: str | os.PathLike[str], start: int, max_bytes: int) -> bytes:
    """What `read_regular` returns; empty when the file is not regular or not readable."""
    try:
        return read_regular(path, start, max_bytes)
    except OSError:
        return b""


def read_progress(report: Path) -> Progress:
    """The progress of the rank that writes `report`; no progress when its record is missing or invalid."""
    progress_bytes = read_or_nothing(f"{report}{PROGRESS_SUFFIX}", 0, _PROGRESS_STRUCT.size + 1)
    if len(progress_bytes) != _PROGRESS_STRUCT.size or min(_PROGRESS_STRUCT.unpack(progress_bytes)) < 0:
        return Progress()
    microbatches, step, part_index = _PROGRESS_STRUCT.unpack(progress_bytes)
    part = STEP_PARTS[part_index] if part_index in range(3) else STEP_PARTS[0]
    return Progress(microbatches=microbatches, step=step, part=part)


class NewLines:
    """Reads the new lines of a file that another process writes, and skips lines longer than `max_bytes` bytes."""

    def __init__(self, path: Path, max_bytes: int = MAX_LINE_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.has_more = False
        """Whether there may be more in the file than the last call has read."""
        self.num_skipped = 0
        """Number of lines that were skipped because they are too long."""
        self.num_lines = 0
        """Number of lines that were read or skipped."""
        self._offset = 0
        self._is_skipping = False
        """Whether the next byte to read is inside a line that is skipped."""

    def read(self) -> list[str]:
        """The whole lines after those of the last call; none of a file that is not regular or not readable."""
        return self.read_bytes(read_or_nothing).decode(errors="replace").splitlines()

    def read_bytes(self, read: Callable[[Path, int, int], bytes] = read_regular) -> bytes:
        """The whole lines after those of the last call, at most `max_bytes` bytes of them, without the last newline.

        Raises:
            OSError: `read`, which reads a part of the file, raises it.
        """
        for _ in range(MAX_SKIPPED_CHUNKS):
            chunk = read(self.path, self._offset, self.max_bytes)
            self.has_more = len(chunk) == self.max_bytes
            line_bytes, newline, _ = chunk.rpartition(b"\n")
            if newline or not self.has_more:
                break
            self._offset += len(chunk)
            self.num_skipped += not self._is_skipping
            self._is_skipping = True
        self._offset += len(line_bytes) + len(newline)
        self.num_lines += line_bytes.count(b"\n") + len(newline)
        if self._is_skipping and newline:
            self._is_skipping = False
            line_bytes = line_bytes.partition(b"\n")[2]
        return line_bytes


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def to_float(value: Any) -> float | None:
    """The value as a float; None when it is no finite number that a float can hold."""
    return float(value) if is_number(value) else None


def _to_count(value: Any) -> int | None:
    """The value as a count or a number of bytes; None when it is no number from 0 to MAX_COUNT."""
    return int(value) if is_number(value) and 0 <= value <= MAX_COUNT else None


def _to_text(max_chars: int, value: Any) -> str:
    """The value as a text; beyond `max_chars` characters its middle is cut out."""
    text = str(value)
    shortened = text if len(text) <= max_chars else f"{text[: max_chars // 2]}...{text[-max_chars // 2 :]}"
    return shortened.encode(errors="replace").decode()  # replaces halves of surrogate pairs


def _to_variables(value: Any) -> dict[str, str] | None:
    """The value as texts by name, such as environment variables; None when it is no JSON object."""
    return {_long_text(k): _long_text(v) for k, v in value.items()} if isinstance(value, dict) else None


def _to_loss(value: Any) -> float | None:
    """The loss as a float; None when it is no number. Infinity and NaN are kept, since they are a finding."""
    if type(value) not in (int, float):
        return None
    return float(value) if isinstance(value, float) or is_number(value) else math.inf


_short_text, _long_text = partial(_to_text, 200), partial(_to_text, 2**14)
_BYTE_FIELDS = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "torch_bytes", "data_bytes")
_BYTE_CONVERTERS: dict[str, Callable[[Any], Any]] = dict.fromkeys((*_BYTE_FIELDS, "limit_bytes"), _to_count)
CHECKPOINT_NUMBERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("save_s", "load_s", "async_blocking_s", "async_s", "async_lost_steps"), to_float),
    "bytes": _to_count,
}
"""Field of the event checkpoint -> function as in FIELDS; result columns have the same names after `checkpoint_`."""
FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "phase": {"name": _short_text, "time": to_float},
    "step": {
        "step": _to_count, "seconds": to_float, "loss": _to_loss, "gradient_norm": to_float, "measured": bool,
        "gas": _to_count, "whole_gas": _to_count, "turn": _to_count,
    },
    "memory": {**_BYTE_CONVERTERS, "allocator_retries": _to_count},
    "ran": {"options": _to_variables},
    "digest": {"device": _short_text, "setup": _long_text, "parts": _to_variables, "second": _to_variables},
    "store": {"port": lambda value: _to_count(value) if is_number(value) and 0 < value < 2**16 else None},
    "environment": {
        **dict.fromkeys(("gpu_name", "torch_version", "cuda_version", "nccl_version", "driver_version"), _short_text),
        "gpus": _to_count, "omp_num_threads": _to_count, "variables": _to_variables,
    },
    "error": {"kind": _short_text, "message": _long_text, "traceback": _long_text, **_BYTE_CONVERTERS},
    "done": {"stopped": _short_text, "hardware_flops_per_step": to_float, "graphs": _to_count},
    "stack_dump": {"pid": _to_count},
    "checkpoint": {**CHECKPOINT_NUMBERS, "message": _long_text},
}  # fmt: skip
"""Event -> field that is used -> function that turns any value into a valid one of bounded size, or None."""


def parse_line(line: str) -> dict[str, Any] | None:
    """The content of a line of a report; None when it is no JSON object with an `event`.

    Programs may write anything, so unused fields and values of the wrong type are left out. The result has a
    `fault` when the seconds of a step are no number, or when the line is nested too deeply to be read.
    """
    try:
        line_values = json.loads(line)
        if isinstance(line_values, dict) and isinstance(line_values.get("event"), str):
            return checked_line(line_values)
    except json.JSONDecodeError:
        return None
    except (RecursionError, ValueError) as error:
        return {"event": "unreadable", "fault": f"an unreadable line: {error}"}
    return None


def checked_line(values: dict[str, Any]) -> dict[str, Any]:
    """The used fields of a line of a report, and a `fault` when the seconds of a step are wrong."""
    event = values["event"]
    if event == "probe":  # only our own kernel writes it, and `device_rates.summary` checks its values
        canonical_json(values)
        return values
    fields: dict[str, Any] = {"event": _short_text(event)}
    for name, to_valid in FIELDS.get(event, {}).items():
        if values.get(name) is not None and (valid_value := to_valid(values[name])) is not None:
            fields[name] = valid_value
    seconds = values.get("seconds")
    if event == "step" and seconds is not None and not MIN_STEP_S <= fields.get("seconds", 0.0) <= MAX_STEP_S:
        fields.pop("seconds", None)
        fields["fault"] = f"step seconds={seconds!r:.60}: not a number of seconds"
    return fields
