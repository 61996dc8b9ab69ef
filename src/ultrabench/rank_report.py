"""What a rank tells its agent: JSON lines in a node-local file, and where it is in shared memory."""

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
from pathlib import Path
from typing import Any

from ultrabench.record import canonical_json

PROGRESS_SUFFIX = ".progress"
"""The progress lies beside the report, in shared memory: three native 64-bit integers."""
STACKS_SUFFIX = ".stacks"
"""Beside the report: the Python stacks of a rank that was asked for them."""
COLLECTIVES_SUFFIX = ".collectives"
"""Beside the report: the last collectives of a rank that was asked for them, as JSON."""

PROFILE = "profile"
"""The phase in which ranks look inside themselves, and the folder beside the report for what they see."""

PARTS = ("data", "forward_backward", "optimizer")
"""Parts of a step, in order."""
_RECORD = struct.Struct("@qqq")

LINE_BYTES = 2**19
"""Longest line of a report or a log that is read, and how much of it is read at once."""
SKIPPED_PARTS = 128
"""How many parts of a longer line are passed over in one call."""
STEP_S = (1e-9, 1e7)
"""Shortest and longest step, in seconds, that is taken for a measurement."""
MOST = 2.0**60
"""Largest count, number of bytes or of operations that is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank has come."""

    microbatches: int = 0
    """Micro-batches that have finished on the device."""
    step: int = 0
    """The step it is in; 0 before the first."""
    part: str = PARTS[0]
    """What it has begun of that step; a GPU may be some micro-batches behind."""


class Report:
    """Writes one rank's report.

    A line is one JSON object with an `event` and, from us, the `time` in seconds since 1970: phase {name}, store {port}, environment {...},
    step {seconds, tokens, loss}, memory {allocated_bytes, reserved_bytes}, error {kind, message},
    done {...}, stack_dump {pid}. Programs that are not ours may write the same lines themselves.
    With stack_dump a process promises to write its Python stacks beside the report on SIGUSR1, and its
    last collectives on SIGUSR2.
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
        """Reports the phase that the rank begins."""
        self.write("phase", name=name)

    def microbatch(self) -> None:
        """Counts one more finished micro-batch (no system call)."""
        self._microbatches += 1
        self._progress[0] = self._microbatches

    def enter(self, part: int, step: int) -> None:
        """Says which of PARTS of which step the rank begins (no system call)."""
        self._progress[1] = step
        self._progress[2] = part


def read_part(path: str | os.PathLike[str], start: int, most: int) -> bytes:
    """At most `most` bytes of a file from byte `start` on; empty where it cannot be read.

    A rank may have put anything in the place of its file: a pipe that nobody writes to does not
    hold up the reader, nor does an endless device fill its memory.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(file, most, start) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(file)


def read_progress(report: Path) -> Progress:
    """How far the rank that writes `report` has come; nothing where it keeps no record of numbers >= 0."""
    raw = read_part(f"{report}{PROGRESS_SUFFIX}", 0, _RECORD.size + 1)
    if len(raw) != _RECORD.size or min(_RECORD.unpack(raw)) < 0:
        return Progress()
    microbatches, step, part = _RECORD.unpack(raw)
    return Progress(microbatches=microbatches, step=step, part=PARTS[part] if part in range(3) else PARTS[0])


class NewLines:
    """Follows a text file that somebody is writing; lines longer than LINE_BYTES are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        """The file goes on after what the last call has read."""
        self._offset = 0
        self._skipping = False
        """The file is read in the middle of a line that is left out."""

    def read(self) -> list[str]:
        """The next whole lines since the last call, LINE_BYTES of them at most."""
        for _ in range(SKIPPED_PARTS):
            data = read_part(self.path, self._offset, LINE_BYTES)
            self.behind = len(data) == LINE_BYTES
            whole, newline, _ = data.rpartition(b"\n")
            if newline or not self.behind:
                break
            self._offset += len(data)
            self._skipping = True
        self._offset += len(whole) + len(newline)
        if self._skipping and newline:
            self._skipping = False
            whole = whole.partition(b"\n")[2]
        return whole.decode(errors="replace").splitlines()


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _count(value: Any) -> int | None:
    return int(value) if is_number(value) and 0 <= value <= MOST else None


def _text(most: int) -> Callable[[Any], str]:
    """Makes a text of anything, of which both ends are kept where it has more than `most` characters."""

    def text(value: Any) -> str:
        whole = str(value)
        kept = whole if len(whole) <= most else f"{whole[: most // 2]}...{whole[-most // 2 :]}"
        return kept.encode(errors="replace").decode()  # without halves of surrogate pairs

    return text


def _variables(value: Any) -> dict[str, str] | None:
    return {_WORDS(k): _WORDS(v) for k, v in value.items()} if isinstance(value, dict) else None


def _loss(value: Any) -> float | None:
    """A loss that is not finite stays, since that is news; one that no float can hold is infinite."""
    if type(value) not in (int, float):
        return None
    return float(value) if isinstance(value, float) or is_number(value) else math.inf


_NAME, _WORDS = _text(200), _text(2**14)
_BYTES: dict[str, Callable[[Any], Any]] = dict.fromkeys(("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "torch_bytes",
                        "data_bytes", "limit_bytes"), _count)  # fmt: skip
FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "phase": {"name": _NAME, "time": _number},
    "step": {"step": _count, "seconds": _number, "loss": _loss, "measured": bool},
    "memory": _BYTES,
    "store": {"port": lambda value: _count(value) if is_number(value) and 0 < value < 2**16 else None},
    "environment": {
        **dict.fromkeys(("gpu_name", "torch_version", "cuda_version", "nccl_version", "driver_version"), _NAME),
        "gpus": _count, "omp_num_threads": _count, "variables": _variables,
    },
    "error": {"kind": _NAME, "message": _WORDS, "traceback": _WORDS, **_BYTES},
    "done": {"stopped": _NAME, "hardware_flops_per_step": _number},
    "stack_dump": {"pid": _count},
}  # fmt: skip
"""Event -> its fields that are used, with what makes a value of bounded size of anything, or None."""


def parse_line(line: str) -> dict[str, Any] | None:
    """A line of a report; None when it is no JSON object with an `event`.

    This is the guard against what programs may write: fields that nobody uses, and values that are
    not what their field says, are left out. Where a step has no number of seconds, or a line is
    nested too deeply to be read, the line has a `fault` that says so.
    """
    try:
        value = json.loads(line)
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            return checked(value)
    except json.JSONDecodeError:
        return None
    except (RecursionError, ValueError) as error:
        return {"event": "unreadable", "fault": f"a line that cannot be read: {error}"}
    return None


def checked(value: dict[str, Any]) -> dict[str, Any]:
    """What is used of a line of a report, or its `fault`."""
    event = value["event"]
    if event == "probe":  # of our own kernel only, and read with care by `preflight.summary`
        canonical_json(value)
        return value
    line: dict[str, Any] = {"event": _NAME(event)}
    for name, made in FIELDS.get(event, {}).items():
        given = value.get(name)
        read = None if given is None else made(given)
        if read is not None:
            line[name] = read
    seconds = value.get("seconds")
    if event == "step" and seconds is not None and not STEP_S[0] <= line.get("seconds", 0.0) <= STEP_S[1]:
        line.pop("seconds", None)
        line["fault"] = f"step seconds={seconds!r:.60}: not a number of seconds"
    return line


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
    return {"measured_by": "log", **checked({"event": "step", **values})}
