"""What a log tells about failures, in a record that is small enough to send: `LogParser` makes it line by line.

The record keeps every failure that the log shows, in order, with what followed it. It decides nothing:
a traceback may be that of a caught exception. `rank_cause.py` decides, from the record and the exit code.
"""

import re
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from ultrabench.agent.diagnose.log_lines import (
    CHAIN_TEXTS,
    TRACEBACK_TEXT,
    LineKind,
    Prefixes,
    is_logged,
    is_note,
    line_kind,
    split_lines,
    time_of,
    without_dumps,
)
from ultrabench.batch_system import SIGNAL_WRITERS
from ultrabench.xid import XidClass, xid_of

TAIL_BYTES = 8192
"""Bytes of the end of a log that its record keeps."""
NUM_FIRST, NUM_LAST = 16, 48
"""Failures of a log that its record keeps: the first and the last ones."""
MAX_FAILURE_LINES = 16
"""Largest number of lines of one failure that are kept."""
MAX_KEPT_CHARS = 1200
"""Longest line of a failure, in characters, that is kept; the message of torch about memory has about 700."""
MAX_FRAMES = 24
"""Largest number of innermost frames of a failure that are kept."""
MESSAGE_LINES = 3
"""Lines that may follow `Last error:` of NCCL or an exception with an empty first line, and belong to it."""
NUM_WARNINGS = 4
"""Warnings of NCCL before a failure that are kept."""
WRAP_COLUMNS = 79
"""Columns after which rich continues a message on the next line."""


class FailureKind(StrEnum):
    """What a failure in a log is."""

    EXCEPTION = "exception"
    """An exception with a traceback; whether it was caught, its text does not say."""
    BARE = "bare"
    """A line that looks like an exception, without a traceback."""
    THREAD = "thread"
    """An exception that ended a thread, or a process that Python's multiprocessing started."""
    FATAL = "fatal"
    """A line with which a library ends the process."""
    LAUNCHER = "launcher"
    """An exception with which a launcher reports that one of its processes failed."""
    SIGNAL = "signal"
    """A line in which a shell, a launcher or Python's faulthandler names the signal that ended a process."""
    DRIVER = "driver"
    """A line of the GPU's driver, copied from the log of the kernel."""


@dataclass(slots=True, kw_only=True)
class Failure:
    """A failure that a log shows."""

    kind: FailureKind
    lines: list[str] = field(default_factory=list)
    """The lines that say what failed, without stacks: exceptions that led to each other,
    and the lines of their messages."""
    frames: list[str] = field(default_factory=list)
    """The innermost frames, as Python writes them."""
    lines_after: int = 0
    """Lines of progress between it and the next failure, or the end of the log."""
    time_s: float | None = None
    """When it was written, in seconds since the year began, by the node's clock; None if its first line has no time."""
    warnings: list[str] = field(default_factory=list)
    """What NCCL warned of shortly before, which may name peers."""
    signal: int | None = None
    """The signal that a line of kind SIGNAL names."""


@dataclass(slots=True, kw_only=True)
class LogRecord:
    """The failures that a log shows, in their order, and its end."""

    failures: list[Failure] = field(default_factory=list)
    tail: str = ""
    """The last TAIL_BYTES, without the stacks of dumps."""


_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Failure)\b(?::|$)")
_PYTHON_FRAME = re.compile(r'\s*(?:\| )*(?:> )?(File "[^"]+", line \d+, in \S+)')
_RICH_FRAME = re.compile(r"[\u2502|] (/\S+?)\s*:(\d+) in (\S+)")
_BOX = "\u2502\u256d\u2570\u2503\u250f\u2517"
_GROUP_MARK = re.compile(r"\s*(?:\+-[+-]*|\|)(?: |$)")  # before each line of an exception group
_EXCEPTION_GROUP = re.compile(r"(?:\w+\.)*\w*ExceptionGroup: .*\(\d+ sub-exceptions?\)")
_TABLE_TRACEBACK = re.compile(r"(\s+)traceback *: Traceback ")  # torchrun, of a program with @record
_IGNORED_HEAD = re.compile(
    r"Exception ignored |Error in atexit\._run_exitfuncs|Error in sys\.excepthook|--- Logging error ---"
    r"|Task exception was never retrieved|Exception ignored in atexit"
)
_THREAD_HEAD = re.compile(r"Exception in thread |Process \S+:$")
_LAUNCHER_TYPES = (
    "ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError", "SignalException",
    "BrokenProcessPool", "RayTaskError", "WorkerCrashedError",
)  # fmt: skip
_LAUNCHER = re.compile(rf"[\w.]*(?:{'|'.join(_LAUNCHER_TYPES)})\b")
_NCCL_MESSAGE = re.compile(r"NCCL [Ee]rror|nccl\w+Error")
_NCCL_LINE = re.compile(r"nccl[A-Z]\w+: |Last error:")
_NCCL_WARNING = "NCCL WARN"
_MORE_MESSAGE = re.compile(r"raised:$|\bin DataLoader worker process|\breplica \d+ on device")
_FATAL_LINES = (
    (
        "ProcessGroupNCCL",
        r"(?:^|\])\[[EF]\d*[ \]].*(?:[Ww]atchdog|[Hh]eartbeat monitor|taking the entire process down)",
    ),
    (None, r"^\[F\d*[ \]]|^F\d{4} "),  # glog
    ("terminate called", r"^terminate called"),
    ("libc++abi: ", r"^libc\+\+abi: "),
    (None, r"^\s*what\(\):  "),  # behind `terminate called`
    ("Fatal Python error: ", r"^Fatal Python error: "),
    ("free(): ", r"^(?:\S+: )?free\(\): "),
    ("alloc(): ", r"^(?:\S+: )?(?:malloc|realloc)\(\): "),
    ("munmap_chunk(): ", r"^(?:\S+: )?munmap_chunk\(\): "),
    ("double free or corruption", r"double free or corruption"),
    ("corrupted size vs", r"corrupted size vs"),
    ("corrupted double-linked", r"corrupted double-linked"),
    ("stack smashing detected", r"stack smashing detected"),
    ("Assertion `", r"(?:: |^)Assertion `.*' failed"),
    ("Assertion '", r"(?:: |^)Assertion '.*' failed"),
    ("Memory access fault by GPU", r"Memory access fault by GPU"),
    ("HW Exception by GPU", r"HW Exception by GPU"),
    ("aborting with error : HSA_STATUS", r"aborting with error : HSA_STATUS"),
    ("kill event", r"Detected \d+ oom.kill event"),
    ("Out of memory: Killed process", r"Out of memory: Killed process"),
    ("error while loading shared libraries", r"error while loading shared libraries"),
    ("symbol lookup error", r"symbol lookup error"),
    ("Caught signal ", r"\bCaught signal \d+ \("),
)
"""Lines with which libraries end a process: a text that each of them has,
None if it has none of its own, and the pattern."""
_FATAL = re.compile("|".join(pattern for _, pattern in _FATAL_LINES))
_SIGNAL_BY_WORDS = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Killed": signal.SIGKILL,
    "Bus error": signal.SIGBUS, "Floating point exception": signal.SIGFPE, "Illegal instruction": signal.SIGILL,
    "Terminated": signal.SIGTERM,
}  # fmt: skip
"""How the C library and Python's faulthandler name the signals that end programs."""
_SIGNAL_WORDS = "|".join(_SIGNAL_BY_WORDS)
_SIGNAL_LINES = (
    re.compile(rf"(?::|^) *(?:line \d+: +)?\d+ ({_SIGNAL_WORDS})\b"),  # bash, of a child
    re.compile(rf"^({_SIGNAL_WORDS})(?: \(core dumped\))?$"),  # a shell, of its program
    re.compile(rf"^Fatal Python error: ({_SIGNAL_WORDS})"),
    re.compile(rf"^(?:{SIGNAL_WRITERS}).*: ({_SIGNAL_WORDS})"),
    re.compile(r"exitcode *: -(\d+)\b"),  # torchrun
    re.compile(r"failed \(exitcode: -(\d+)\)"),
    re.compile(r"exits with return code = -(\d+)\b"),  # deepspeed
    re.compile(r"exited on signal (\d+)\b"),  # mpirun
    re.compile(r"terminated with signal (SIG[A-Z0-9]+)"),  # torch.multiprocessing
    re.compile(r"<Signals\.(SIG[A-Z0-9]+)"),  # subprocess
    re.compile(r"\bCaught signal (\d+) \("),  # UCX
)
_SIGNAL_HINTS = ("exit", "ignal", *(words[1:7] for words in _SIGNAL_BY_WORDS))
"""Parts of words of which every line of _SIGNAL_LINES has one."""
_DRIVER_TEXT = re.compile(
    r"NVRM: .*(?:fallen off the bus|uncorrectable|GPU is lost)|uncorrectable hardware error"
)
_DRIVER_WORDS = ("NVRM: ", "Xid (", "uncorrectable hardware error")
WORDS = (
    TRACEBACK_TEXT.removeprefix("("), "(core dumped)", *_DRIVER_WORDS, *(word for word, _ in _FATAL_LINES if word),
)  # fmt: skip
"""Texts of which every failure has one that may stand anywhere in a log; those that count only at its end have none."""


class _Process:
    """What the parser remembers of one of the processes that write the log, which have different prefixes."""

    def __init__(self) -> None:
        self.block: Failure | None = None
        """The failure whose traceback or message continues."""
        self.has_message = False
        """Whether the message of the block has begun, so that its traceback is over."""
        self.is_rich = False
        self.indent = ""
        """What stands before each line of the block in the table of a launcher."""
        self.is_ignored = False
        """Whether Python itself ignores the exception of the block."""
        self.message_budget = 0
        """How many more lines may belong to the message."""
        self.marker = FailureKind.EXCEPTION
        """The kind of the next traceback."""
        self.next_is_ignored = False
        self.is_chained = False
        """Whether the next traceback continues the block."""
        self.previous_block: Failure | None = None


class LogParser:
    """Makes the record of a log from its lines, or from excerpts of it."""

    def __init__(self) -> None:
        self._prefixes = Prefixes()
        self._processes = dict[str, _Process]()
        self._failures = list[Failure]()
        self._warnings = deque[str](maxlen=NUM_WARNINGS)
        self._line = ""
        """The current line with its prefix."""

    def feed(self, lines: Iterable[str]) -> None:
        """Takes the next lines."""
        for line in lines:
            self._line = line
            prefix, text = self._prefixes.split(line)
            if len(self._processes) > 512:
                self._processes.clear()
            process = self._processes.get(prefix)
            if process is None:
                process = self._processes[prefix] = _Process()
            self._take(process, text.rstrip())

    def skip(self, num_lines: int, sample: Sequence[str]) -> None:
        """Takes note of lines that are left out, because none of them looks like a failure.

        Args:
            sample: some of these lines, which show how many of them are progress.
        """
        kinds = [line_kind(self._prefixes.split(line)[1]) for line in sample]
        self._count(round(num_lines * kinds.count(LineKind.PROGRESS) / max(1, len(kinds))))
        self._processes.clear()

    def record(self, tail: str) -> LogRecord:
        """The record of all lines; `tail` is the end of the log."""
        failures = self._failures
        if len(failures) > NUM_FIRST + NUM_LAST:
            failures = failures[:NUM_FIRST] + failures[-NUM_LAST:]
        for failure in failures:
            failure.lines = [line.replace("\n", " ") for line in failure.lines]
        return LogRecord(failures=failures, tail=tail)

    def _count(self, num_lines: int) -> None:
        if self._failures:
            self._failures[-1].lines_after += num_lines
        if len(self._failures) > 8 * (NUM_FIRST + NUM_LAST):
            del self._failures[NUM_FIRST:-NUM_LAST]

    def _take(self, process: _Process, text: str) -> None:
        if process.block is not None:
            if process.has_message:
                if self._continues_message(process, text):
                    return
            elif self._continues_traceback(process, text):
                return
        if not text:
            return
        if TRACEBACK_TEXT in text and self._begins_traceback(process, text):
            return
        if any(text.startswith(chain_text) for chain_text in CHAIN_TEXTS):
            process.is_chained = process.previous_block is not None
            return
        if _IGNORED_HEAD.match(text):
            process.next_is_ignored = True
            return
        if _THREAD_HEAD.match(text):
            process.marker = FailureKind.THREAD
            return
        if self._is_failure_line(process, text):
            return
        if line_kind(text) is LineKind.PROGRESS:
            process.marker, process.next_is_ignored, process.is_chained = FailureKind.EXCEPTION, False, False
            self._warnings.clear()
            self._count(1)
        elif _NCCL_WARNING in text:
            self._warnings.append(text.strip()[:MAX_KEPT_CHARS])

    def _begins_traceback(self, process: _Process, text: str) -> bool:
        if is_logged(text):  # a logger shows an exception that was caught
            return False
        previous_lines = process.previous_block.lines if process.previous_block is not None else []
        is_in_group = bool(_GROUP_MARK.match(text)) and any(map(_EXCEPTION_GROUP.match, previous_lines))
        is_named = "Original Traceback" in text or "Traceback of" in text
        is_chained = process.is_chained or is_in_group or is_named
        if is_chained and process.previous_block is not None:
            process.block, process.has_message = process.previous_block, False
        else:
            process.block, process.has_message = Failure(kind=process.marker), False
            process.is_ignored = process.next_is_ignored
        table_match = _TABLE_TRACEBACK.match(text)
        process.indent = table_match[1] if table_match else ""
        process.is_rich = any(mark in text for mark in _BOX) or text.startswith(("+-", "+ "))
        process.marker, process.next_is_ignored, process.is_chained = FailureKind.EXCEPTION, False, False
        return True

    def _continues_traceback(self, process: _Process, text: str) -> bool:
        """Takes a line after the beginning of a traceback: a frame, or the exception, with which the message begins."""
        block = process.block
        assert block is not None
        text = self._without_marks(process, text)
        if frame := _PYTHON_FRAME.match(text) or _RICH_FRAME.match(text):
            is_rich = frame.re is _RICH_FRAME
            block.frames.append('File "{}", line {}, in {}'.format(*frame.groups()) if is_rich else frame[1])
            del block.frames[:-MAX_FRAMES]
            return True
        kind = line_kind(text)
        if kind in (LineKind.STACK, LineKind.BLANK):
            return True
        is_exception = _EXCEPTION.match(text) is not None
        is_other_line = is_logged(text) or kind is LineKind.NOISE or xid_of(text) or _DRIVER_TEXT.search(text)
        if (is_other_line and not is_exception) or TRACEBACK_TEXT in text:
            return False
        process.has_message, process.previous_block = True, block
        process.message_budget = MESSAGE_LINES if text.endswith(":") else 0
        is_new = not block.lines
        self._add_line(block, text)
        if is_new and _LAUNCHER.match(text):
            block.kind = FailureKind.LAUNCHER
            self._add_signal(text)
        if is_new and not process.is_ignored:
            self._append(block)
        return True

    def _continues_message(self, process: _Process, text: str) -> bool:
        """Takes a line that may belong to the message of a failure; if it does not, the block is over."""
        block = process.block
        assert block is not None
        text = self._without_marks(process, text)
        if "Original Traceback" in text or "Traceback of" in text:
            return False
        previous_line = block.lines[-1] if block.lines else ""
        is_nccl = any(map(_NCCL_MESSAGE.search, block.lines))
        may_warn = is_nccl and process.message_budget > 0
        if len(block.lines) < MAX_FAILURE_LINES and _may_be_message(text, may_warn=may_warn):
            num_columns = len(previous_line.rpartition("\n")[2]) + len(text.partition(" ")[0])
            is_exception = block.kind is not FailureKind.FATAL and _EXCEPTION.match(text) is not None
            if process.is_rich and num_columns > WRAP_COLUMNS - 1:
                block.lines[-1] = f"{previous_line}\n{text}"[:MAX_KEPT_CHARS]
                return True
            if is_nccl and _NCCL_LINE.match(text):
                self._add_line(block, text)
                process.message_budget = MESSAGE_LINES if text.startswith("Last error:") else 0
                return True
            if process.message_budget > 0 or is_exception or _MORE_MESSAGE.search(previous_line):
                self._add_line(block, text)
                process.message_budget -= 1
                return True
        if (
            text
            and line_kind(text) is LineKind.NOISE
            and not _FATAL.search(text)
            and _signal_match(text) is None
        ):
            return True
        process.block, process.is_rich = None, False
        return False

    @staticmethod
    def _without_marks(process: _Process, text: str) -> str:
        """A line of a block without the marks of an exception group and the indent of a launcher's table."""
        text = text.removeprefix(process.indent)
        return _GROUP_MARK.sub("", text) if _GROUP_MARK.match(text) else text

    def _is_failure_line(self, process: _Process, text: str) -> bool:
        """Takes a line that shows a failure by itself; False if it does not."""
        is_exception = _EXCEPTION.match(text) is not None  # its message may quote a line of the driver
        xid = None if is_exception else xid_of(text)
        is_of_driver = xid is not None and xid.xid_class is not XidClass.INFORMATIONAL
        if is_of_driver or (not is_exception and _DRIVER_TEXT.search(text)):
            self._add_or_join(FailureKind.DRIVER, text)
            return True
        if self._add_signal(text):
            return True
        if xid is None and _FATAL.search(text):
            block = self._add_or_join(FailureKind.FATAL, text)
            # A library puts the rank before the first line of its message only.
            for writer in (process, self._processes.setdefault("", _Process())):
                if writer is process or writer.block is None:
                    writer.block, writer.has_message = block, True
                    writer.message_budget, writer.is_rich, writer.indent = 0, False, ""
            return True
        if is_exception:
            if process.next_is_ignored:
                process.next_is_ignored = False
                return True
            is_of_launcher = _LAUNCHER.match(text) is not None
            block = Failure(kind=FailureKind.LAUNCHER if is_of_launcher else FailureKind.BARE)
            self._add_line(block, text)
            self._append(block)
            process.indent = ""
            process.block, process.has_message, process.previous_block = block, True, block
            process.message_budget, process.is_rich = MESSAGE_LINES if text.endswith(":") else 0, False
            return True
        return False

    def _add_signal(self, text: str) -> bool:
        """Adds the signal that a line names, if it names one."""
        match = _signal_match(text)
        if match is None:
            return False
        words = match[1]
        number = int(words) if words.isdigit() else _SIGNAL_BY_WORDS.get(words)
        if number is None and words in signal.Signals.__members__:
            number = signal.Signals[words]
        if number is None:
            return False
        failure = Failure(kind=FailureKind.SIGNAL, signal=int(number))
        self._add_line(failure, text)
        self._append(failure)
        return True

    def _add_or_join(self, kind: FailureKind, text: str) -> Failure:
        """Adds a line to the failure of this kind that it follows directly, or else a new failure; returns it."""
        last = self._failures[-1] if self._failures else None
        if last is not None and last.kind is kind and not last.lines_after:
            self._add_line(last, text)
            return last
        failure = Failure(kind=kind)
        self._add_line(failure, text)
        self._append(failure)
        return failure

    def _append(self, failure: Failure) -> None:
        failure.time_s, failure.warnings = time_of(self._line), [*self._warnings]
        self._failures.append(failure)

    @staticmethod
    def _add_line(failure: Failure, text: str) -> None:
        if len(failure.lines) < MAX_FAILURE_LINES:
            failure.lines.append(text.strip()[:MAX_KEPT_CHARS])


def _may_be_message(text: str, *, may_warn: bool) -> bool:
    """Whether a line may belong to the message that it follows: it is no stack, and nothing that begins anew.

    Args:
        may_warn: whether the message may quote a warning of NCCL.
    """
    if line_kind(text) not in (LineKind.PROGRESS, LineKind.NOTE) or text.startswith(CHAIN_TEXTS):
        return False
    begins_anew = TRACEBACK_TEXT in text or _FATAL.search(text) or _IGNORED_HEAD.match(text) or xid_of(text)
    return not begins_anew and (not is_note(text) or (may_warn and _NCCL_WARNING in text))


def _signal_match(text: str) -> re.Match[str] | None:
    """Where a line names the signal that ended a process."""
    if not any(hint in text for hint in _SIGNAL_HINTS):  # most lines end here
        return None
    return next(filter(None, (pattern.search(text) for pattern in _SIGNAL_LINES)), None)


def tail_of(lines: Sequence[str]) -> str:
    """The last TAIL_BYTES of these lines, without the stacks of dumps."""
    text = "\n".join(without_dumps([*lines]))
    return text.encode()[-TAIL_BYTES:].decode(errors="replace")


@lru_cache(maxsize=256)
def record_of(text: str) -> LogRecord:
    """The record of a text, such as the end of a log, or an error that a rank reported."""
    parser, lines = LogParser(), split_lines(text)
    parser.feed(lines)
    return parser.record(tail_of(lines))
