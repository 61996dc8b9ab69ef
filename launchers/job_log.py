"""The log of a job: which of its lines says why the job failed."""

import re
from pathlib import Path

from ultrabench.batch_system import LOG_WRITERS, TASK_ENDS
from ultrabench.store.allocation import JOB_LOG

MAX_LOG_BYTES = 2**20
"""Bytes of the beginning of a log that are read; what made a job fail before its first run is there."""

_END_REPORT = re.compile(rf"(?:{LOG_WRITERS}|mpirun): (?:error: )?(?:{TASK_ENDS})")
"""With these lines the batch system reports that a task ended, or ends the others."""
_ERROR = re.compile(
    r"\b(?:error|fatal|failed|failure|cannot|can't|could ?n[o']t|unable|not found|no "
    r"such|denied|refused|invalid|unknown"
    r"|undefined|missing|exceeded|no space|not permitted|unauthorized|timed out|exception|segmentation "
    r"fault|out of memory)"
    r"|\w(?:Error|Exception)\b",
    re.IGNORECASE,
)
_WARNING = re.compile(r"\bwarn(?:ing)?s?\b|\bdeprecat", re.IGNORECASE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):$")
_TASK_PREFIX = re.compile(r"^\d+: (?=\S|  )")  # srun --label


def telling_line(folder: Path) -> tuple[Path, str]:
    """The log of an allocation's agents that says why they failed, and the first line that does.

    Without such a line it is the last line that the batch system did not write; empty if the logs are.
    On this machine submitit keeps one log for each node.
    """
    log_paths = [path for pattern in (JOB_LOG, "submitit/*.err") for path in sorted(folder.glob(pattern))]
    lines_by_path = {path: _lines_of(path) for path in log_paths}
    for path, lines in lines_by_path.items():
        if error_line := next(filter(_is_error, lines), None):
            return path, error_line
    for path, lines in lines_by_path.items():
        if lines:
            return path, next((line for line in reversed(lines) if not _END_REPORT.match(line)), lines[-1])
    return (log_paths or [folder])[0], ""


def _lines_of(path: Path) -> list[str]:
    """The lines of a log that are not empty, without the frames of tracebacks that end with an exception."""
    with path.open("rb") as file:
        text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    lines, frames = list[str](), list[str]()
    is_traceback = False
    for line in (_TASK_PREFIX.sub("", line, count=1) for line in text.splitlines() if line.strip()):
        if _TRACEBACK.search(line):
            is_traceback, frames = True, []
        elif is_traceback and line[0].isspace():
            frames.append(line.strip())
        else:
            is_traceback, frames = False, []
            lines.append(line.strip())
    return lines + frames


def _is_error(line: str) -> bool:
    return bool(_ERROR.search(line)) and not _WARNING.search(line) and not _END_REPORT.match(line)
