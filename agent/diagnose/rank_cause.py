"""Why one rank failed, from its exit code and the record of its log.

An uncaught exception, a fatal line of a library or a fatal signal decides; warnings, errors of loggers, and exceptions
after which the program went on do not.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from ultrabench.agent.diagnose.families import cause_of_failure, cause_of_lines, cause_of_signal
from ultrabench.agent.diagnose.log_lines import (
    LineKind,
    Prefixes,
    is_note,
    is_warning,
    line_kind,
    quoted,
    split_lines,
)
from ultrabench.agent.diagnose.log_record import Failure, FailureKind, LogRecord, record_of
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME, Cause, may_follow
from ultrabench.result import Status

SHELL_SIGNAL_BASE = 128
"""A shell, and every program like it, ends with this number plus the signal that ended its child."""
MAX_LINES_AFTER = 8
"""Lines of progress after a failure up to which the program seems to have ended with it."""
MAX_LINES_AFTER_UNCAUGHT = 20
"""As MAX_LINES_AFTER, for exit code 1, with which an uncaught exception ends Python.

The lines are those of other processes that write to the log, and what C libraries had in their buffers. Python has none
(PYTHONUNBUFFERED), so that more lines mean that the program caught the exception.
"""
MAX_LINES_BEFORE_EXIT = 3
"""As MAX_LINES_AFTER, for exit codes other than 1, which a program that has caught its exception may choose."""
NEGATED_SIGNALS = frozenset({
    signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM,
})  # fmt: skip
"""Signals of a child that a launcher in Python, such as that of DeepSpeed, hands on as 256 minus the signal."""
MAX_GAP_LINES = 20
"""Lines of progress between a failure and a consequence of it, such as the error of a peer that shares the log."""
MAX_PLAIN_LINES_AFTER = 3
"""As MAX_LINES_AFTER, for a line that is neither an exception nor a fatal line of a library."""
_LAUNCHER_LINE = re.compile(r"\bexitcode\b|exits with return code|exited on signal")
"""Lines in which launchers name the ends of all their processes."""
_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):.*?exitcode *: (-?\d+)", re.DOTALL)
_CHILD_ENDED = re.compile(r"[\w.]*(?:ChildFailedError|ProcessExitedException)\b")
"""Exceptions by which launchers say no more than that one of their processes failed."""
_OUTER_SIGNALS = frozenset(CAUSE_BY_NAME["killed"].signals)
"""Signals that come from outside; of them a log knows nothing."""


class RankCause(NamedTuple):
    """Why a rank failed."""

    cause: Cause
    line: str
    """The line that shows it."""
    failure: Failure | None = None
    """The failure in its log that shows it; None if only its exit does."""

    @property
    def may_follow(self) -> bool:
        """Whether the failure of another process, or of another rank, may have caused this one."""
        return may_follow(self.cause, self.line)


def signal_of(code: int) -> int | None:
    """The signal for which an exit code stands: -11, 139 and 245 are SIGSEGV; None if it stands for none."""
    number = -code if code < 0 else code - SHELL_SIGNAL_BASE
    if 256 - code in NEGATED_SIGNALS:
        number = 256 - code
    return number if 0 < number < signal.SIGRTMIN or (code < 0 and number) else None


def cause_of_rank(code: int, record: LogRecord) -> RankCause:
    """Why a rank failed that ended with this code other than 0, and that ultrabench did not kill."""
    number = signal_of(code)
    if number is None:
        by_log, by_child = _cause_by_log(code, record), _cause_of_child(record)
        # Where ranks share a log, the peers of a rank that a signal ended write errors of connections.
        if by_log and by_log.may_follow and by_child and _is_first_death(by_child, record):
            return by_child
        return by_log or by_child or _cause_of_closing(record) or _unknown(code, record)
    cause, signal_text = cause_of_signal(number), _signal_text(code, number)
    if number in _OUTER_SIGNALS:
        return RankCause(cause, f"{signal_text}: {last_line(record.tail)}")
    by_log = _cause_by_log(code, record)
    # A library that aborts says why; a word about a connection before it does not.
    if by_log is None and number == signal.SIGABRT:
        by_closing = _cause_of_closing(record)
        by_log = by_closing if by_closing and by_closing.cause.status != Status.COMM_ERROR else None
    if by_log is None:
        return RankCause(cause, f"{signal_text}: {last_line(record.tail)}")
    return (
        by_log
        if by_log.cause.name != "abort"
        else RankCause(cause, f"{signal_text}: {by_log.line}", by_log.failure)
    )


def cause_of_killed(record: LogRecord) -> RankCause | None:
    """Why a rank failed that ultrabench killed afterwards; None unless its log ends with its failure.

    A rank may fail and then hang, since libraries wait for peers.
    """
    roots = _candidates(record, MAX_LINES_AFTER)
    return _root(roots, record) if roots and not _lines_to_end(record, roots[-1]) > MAX_LINES_AFTER else None


def cause_of_error(text: str, message: str) -> RankCause:
    """Why a rank failed that reported its error itself.

    Args:
        text: the traceback and the message.
        message: the message, `Type: text`.
    """
    record = record_of(text)
    lines = [line for failure in record.failures[-2:] for line in failure.lines] + message.splitlines()
    failure = record.failures[-1] if record.failures else None
    cause, _ = cause_of_lines(lines) or (CAUSE_BY_NAME["exception"], "")
    return RankCause(cause, quoted(message), failure)


def _signal_text(code: int, number: int) -> str:
    name = {int(s): s.name for s in signal.Signals}.get(number, f"signal {number}")
    if code < 0:
        return f"killed by {name}, which ultrabench did not send"
    return f"exited with code {code}, so {name} ended a child"


def _unknown(code: int, record: LogRecord) -> RankCause:
    line = f"exited with code {code}: {last_line(record.tail)}"
    return RankCause(CAUSE_BY_NAME["exit_code"], line)


def _lines_to_end(record: LogRecord, failure: Failure) -> int:
    """Lines of progress from a failure to the end of the log."""
    index = next(n for n, other in enumerate(record.failures) if other is failure)
    return sum(later.lines_after for later in record.failures[index:])


def _candidates(record: LogRecord, max_lines_after: float) -> list[Failure]:
    """The failures that may have ended the program, in their order.

    Args:
        max_lines_after: lines of progress that may follow an exception with a traceback.
    """
    candidates, lines_after = list[Failure](), 0
    for failure in reversed(record.failures):
        lines_after += failure.lines_after
        limit: float = max_lines_after
        if failure.kind is FailureKind.FATAL:
            limit = float("inf")
        elif failure.kind is FailureKind.BARE:
            limit = min(max_lines_after, MAX_LINES_AFTER)
        is_decisive = failure.kind not in (FailureKind.SIGNAL, FailureKind.LAUNCHER, FailureKind.DRIVER)
        if is_decisive and lines_after <= limit:
            candidates.append(failure)
    return candidates[::-1]


def _cause_by_log(code: int, record: LogRecord) -> RankCause | None:
    """What the log shows as the cause of this exit code; None if nothing in it is decisive."""
    number = signal_of(code)
    max_lines_after = MAX_LINES_BEFORE_EXIT if number is None else 0
    if code == 1:
        max_lines_after = MAX_LINES_AFTER_UNCAUGHT
    candidates = _candidates(record, max_lines_after)
    while candidates and candidates[-1].kind is FailureKind.THREAD and _has_main_failure(candidates):
        candidates.pop()  # a thread that fails after the exception that ends the program
    if all(candidate.kind is FailureKind.THREAD for candidate in candidates):
        candidates = [c for c in candidates if _lines_to_end(record, c) <= MAX_LINES_AFTER or code == 1]
    root = _root(candidates, record)
    if root is None:
        return None
    if number is not None and root.cause.status == Status.COMM_ERROR and not _aborts(root, record, number):
        return None
    return root


def _aborts(root: RankCause, record: LogRecord, number: int) -> bool:
    """Whether an error of communication ended a process that a signal ended: a library wrote it and aborted at once.

    A library may also abort behind an exception, but a segmentation fault behind one is another fault.
    """
    if root.failure is None:
        return False
    is_fatal_line = root.failure.kind is FailureKind.FATAL
    return number == signal.SIGABRT or (is_fatal_line and not _lines_to_end(record, root.failure))


def _has_main_failure(candidates: Sequence[Failure]) -> bool:
    return any(candidate.kind is not FailureKind.THREAD for candidate in candidates)


def _root(candidates: Sequence[Failure], record: LogRecord) -> RankCause | None:
    """The earliest of the last failures that caused the others."""
    if not candidates:
        return _driver_cause(record, None)
    causes = [RankCause(*cause_of_failure(failure), failure) for failure in candidates]
    episode = [causes[-1]]
    for earlier in reversed(causes[:-1]):
        gap_lines = _gap_lines(record, earlier.failure, episode[0].failure)
        may_follow = all(later.may_follow for later in episode)
        if gap_lines and not (may_follow and gap_lines <= MAX_GAP_LINES):
            break
        episode.insert(0, earlier)
    if driver_cause := _driver_cause(record, episode[0].failure):
        return driver_cause
    hardware = next((c for c in episode if c.cause.status == Status.NODE_FAIL), None)
    first_fault = next((n for n, c in enumerate(episode) if not c.may_follow), None)
    timeout = next((n for n, c in enumerate(episode) if c.cause.name == "nccl_timeout"), None)
    if hardware:
        return hardware
    if first_fault is None:
        return episode[0]
    # What a rank shows after its communication was given up follows from that.
    return episode[timeout] if timeout is not None and timeout < first_fault else episode[first_fault]


def _gap_lines(record: LogRecord, earlier: Failure | None, later: Failure | None) -> int:
    """Lines of progress between two failures."""
    assert earlier is not None
    assert later is not None
    return _lines_to_end(record, earlier) - _lines_to_end(record, later)


def _driver_cause(record: LogRecord, first: Failure | None) -> RankCause | None:
    """The failed GPU that a line of the driver shows, if it was written shortly before or after the last failures."""
    for failure in (f for f in record.failures if f.kind is FailureKind.DRIVER):
        cause, line = cause_of_failure(failure)
        lines_to_end = _lines_to_end(record, failure)
        gap_lines = lines_to_end if first is None else abs(lines_to_end - _lines_to_end(record, first))
        limit = MAX_LINES_AFTER if first is None else MAX_GAP_LINES
        if cause.status == Status.NODE_FAIL and min(gap_lines, lines_to_end) <= limit:
            return RankCause(cause, line, failure)
    return None


def _cause_of_child(record: LogRecord) -> RankCause | None:
    """The cause that a shell or a launcher reports of one of its processes; None if none does."""
    failures = [f for f in record.failures if f.kind is FailureKind.SIGNAL]
    # A launcher ends the other processes by SIGTERM, after the first one has failed.
    failures = [f for f in failures if f.signal != signal.SIGTERM or not _LAUNCHER_LINE.search(f.lines[0])]
    if first_match := _FIRST_FAILURE.search(record.tail):
        first_signal = signal_of(int(first_match[1]))
        failures = [f for f in failures if f.signal == first_signal or not _LAUNCHER_LINE.search(f.lines[0])]
    launchers = [f for f in record.failures if f.kind is FailureKind.LAUNCHER]
    for failure in (*failures[:1], *launchers[:1]):
        cause, line = cause_of_failure(failure)
        is_unknown = failure.kind is FailureKind.LAUNCHER and cause.name == "exception"
        if is_unknown and _CHILD_ENDED.match(line):
            cause = CAUSE_BY_NAME["exit_code"]
        return RankCause(cause, line, failure)
    return None


def _is_first_death(by_child: RankCause, record: LogRecord) -> bool:
    """Whether a launcher names the process that a signal ended as the first one that failed."""
    first_match = _FIRST_FAILURE.search(record.tail)
    is_signal = by_child.failure is not None and by_child.failure.kind is FailureKind.SIGNAL
    return is_signal and first_match is not None and signal_of(int(first_match[1])) is not None


def _cause_of_closing(record: LogRecord) -> RankCause | None:
    """The cause that the last lines of the log show without an exception; None if they show none."""
    prefixes, lines_after = Prefixes(), 0
    for line in reversed(split_lines(record.tail)):
        text = prefixes.split(line)[1].strip()
        kind = line_kind(text) if text == line.strip() or not line[:1].isspace() else LineKind.STACK
        cause_and_line = cause_of_lines([text]) if kind in (LineKind.PROGRESS, LineKind.NOTE) else None
        if cause_and_line and not is_warning(text):
            is_memory, is_logged = cause_and_line[0].status == Status.OOM, is_note(text)
            limit = MAX_LINES_AFTER if is_memory else MAX_PLAIN_LINES_AFTER
            if cause_and_line[0].status == Status.COMM_ERROR:
                limit = -1 if is_logged else 0
            elif is_logged:
                limit = MAX_PLAIN_LINES_AFTER if is_memory else 0
            if lines_after <= limit:
                return RankCause(*cause_and_line)
        lines_after += kind is LineKind.PROGRESS
        if lines_after > MAX_LINES_AFTER:
            return None
    return None


def last_line(text: str) -> str:
    """The last line of a log that is not part of a stack."""
    lines = split_lines(text)
    prefixes = Prefixes()
    pairs = [(line, line_kind(prefixes.split(line)[1])) for line in lines]
    telling_lines = [line for line, kind in pairs if kind in (LineKind.PROGRESS, LineKind.NOTE)]
    telling_lines = telling_lines or [line for line, kind in pairs if kind is not LineKind.BLANK]
    return quoted(prefixes.split(telling_lines[-1])[1]) if telling_lines else "(empty log)"
