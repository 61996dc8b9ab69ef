"""How each rank failed, by its report, its exit code and its log."""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME, Cause, cause_by_text, last_line, quoted
from ultrabench.agent.ranks.rank_progress import SURE_STATES, RankProgress
from ultrabench.record import content_id
from ultrabench.result import Status

MIN_OWN_SHARE = 0.95
"""Share of a GPU's memory that must be free when the run begins, and free or used by the run when it runs out."""
MIN_TORCH_SHARE = 0.85
"""Share in place of MIN_OWN_SHARE where only the memory of torch is known, without the CUDA context and NCCL."""
VAGUE_CAUSES = frozenset({"exit_code", "bus_error", "signal", "abort"})
"""Causes that the log does not explain further; a full disk explains them, and why the log is silent."""
MIN_USED_LIMIT_SHARE = 0.9
"""Share of its limit that a CPU rank must have used; below 1, because a rank frees memory before it reports."""
NUM_FRAMES = 3
"""Number of innermost frames that count in a fingerprint; those of installed packages do not count."""

INVALID_CAUSES = {"non_finite": "non_finite_loss", "replicas": "replicas_differ", "option": "option_ignored"}
"""Kind of an error of our own kernel -> the cause that makes the run invalid."""
_BYTES_PER_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE_REGEX = r"([\d.]+) (bytes|[KMG]iB)"
_SIZE_PATTERNS = {
    # torch 2, c10/cuda/CUDACachingAllocator.cpp; the second of each pair is the text of torch 1.
    "total": (f"total capacity of {_SIZE_REGEX}", f"{_SIZE_REGEX} total capacity"),
    "free": (f"of which {_SIZE_REGEX} is free", f"{_SIZE_REGEX} free"),
    "process": (f"this process has {_SIZE_REGEX} memory in use",),
    "torch": (f"{_SIZE_REGEX} reserved in total",),
}
_FRAME_LINE = re.compile(r'^\s*(?:\[rank\d+\]:\s*)?File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)
_PACKAGE_PATH = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")
_VOLATILE_PATTERNS = (
    (re.compile(r"(?:/[\w.+@-]+)+/"), ""),  # folders; the name of the file stays
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)[0-9a-f]{6,}\b", re.IGNORECASE), "#"),
    (re.compile(r"\b\d+(?:[.:]\d+)+\b|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b"), "#"),
    (re.compile(r"# ?(?:bytes|[KMG]i?B)\b"), "#"),
    (re.compile(r"\s+"), " "),
)


class Finding(NamedTuple):
    """How one rank failed."""

    rank: RankProgress
    cause: Cause
    line: str
    """The line of the rank's error or log that shows the failure."""
    is_certain: bool = False
    """Whether the rank itself or Linux reported the failure; then it counts, whoever ended the rank."""

    @property
    def sort_key(self) -> tuple[int, float, int, int]:
        """The sort key: roots before consequences, then by the time when the leader learned of the failure."""
        cause_index = list(CAUSE_BY_NAME).index(self.cause.name)
        return self.cause.tier, self.rank.failed_at_s or 0.0, cause_index, self.rank.number


def findings(ranks: Sequence[RankProgress]) -> list[Finding]:
    """One finding for each rank that failed, the likeliest root first."""
    rank_findings = [finding for rank in ranks if (finding := _finding(rank))]
    early_ranks = [rank for rank in ranks if rank.ended_well and not rank.done_line]
    # If most ranks have ended well, the other ranks will follow; one that is stopped or dead explains why they do not.
    explains_hang = any(rank.evidence["state"] in SURE_STATES for rank in ranks)
    for rank in early_ranks if len(early_ranks) <= len(ranks) / 2 and not explains_hang else ():
        line = f"exited with code 0 in phase {rank.phase} while other ranks kept running"
        rank_findings.append(Finding(rank=rank, cause=CAUSE_BY_NAME["exited_early"], line=line))
    return sorted(rank_findings, key=lambda finding: finding.sort_key)


def _finding(rank: RankProgress) -> Finding | None:
    if rank.ended_well or (not rank.error_line and rank.code is None):
        return None
    ended_by_us = rank.killed_by_us and rank.code == -signal.SIGKILL
    if rank.error_line:
        cause_and_line: tuple[Cause, str] | None = _cause_by_error(rank)
    elif rank.oom_killed:
        cause_and_line = CAUSE_BY_NAME["host_oom"], "killed by Linux because the host ran out of memory"
    elif ended_by_us:
        # A rank may fail and then hang, since libraries wait for peers; only a final traceback counts then.
        cause_and_line = cause_by_text(rank.tail, only_uncaught=True)
    else:
        cause_and_line = cause_by_exit(rank)
    if cause_and_line is None:
        return None
    cause, line = cause_and_line
    if rank.full_folder_text and cause.name in VAGUE_CAUSES:
        cause, line = CAUSE_BY_NAME["disk_full"], rank.full_folder_text
    is_certain = bool(rank.error_line) or rank.oom_killed or (cause.status == Status.OOM and not ended_by_us)
    if cause.name == "cuda_oom" and has_filled_gpu(rank) is False:
        cause = CAUSE_BY_NAME["foreign_memory"]
    return Finding(rank=rank, cause=cause, line=line, is_certain=is_certain)


def _cause_by_error(rank: RankProgress) -> tuple[Cause, str]:
    """The cause of an error that the rank reported; its text may be more exact than its kind."""
    kind, message = rank.error_line.get("kind"), rank.error_line.get("message") or "(no message)"
    cause, _ = cause_by_text(rank.last_text) or (CAUSE_BY_NAME["exception"], "")
    if kind in INVALID_CAUSES:
        cause = CAUSE_BY_NAME[INVALID_CAUSES[kind]]
    elif kind == "oom" and cause.status != Status.OOM:
        cause = CAUSE_BY_NAME["cpu_oom"]
    elif kind == "comm" and cause.name == "exception":
        cause = CAUSE_BY_NAME["connection_error"]
    return cause, quoted(message)


def cause_by_exit(rank: RankProgress) -> tuple[Cause, str]:
    """The cause by the exit code, or by the log if that is more exact."""
    code, final_line, cause_and_line = rank.code or 0, last_line(rank.tail), cause_by_text(rank.tail)
    if code > 0:
        return cause_and_line or (CAUSE_BY_NAME["exit_code"], f"exited with code {code}: {final_line}")
    cause = next((c for c in CAUSE_BY_NAME.values() if -code in c.signals), CAUSE_BY_NAME["signal"])
    # A library that aborts prints why, and a rank that lost a peer may die in any way.
    lost_peer = cause.name == "segfault" and cause_and_line and cause_and_line[0].status == Status.COMM_ERROR
    if cause_and_line and (cause.name == "abort" or lost_peer):
        return cause_and_line
    signal_name = {int(s): s.name for s in signal.Signals}.get(-code, f"signal {-code}")
    return cause, f"killed by {signal_name}, which ultrabench did not send: {final_line}"


def has_filled_gpu(rank: RankProgress) -> bool | None:
    """Whether the run itself filled the GPU: False if other processes held memory, None if unknown.

    It follows from the allocator's message, from free_bytes and total_bytes, which the rank reported when the
    run began, and from free_bytes, total_bytes and torch_bytes, which it reported when it ran out.
    """
    memory, error, last_text = rank.memory_report, rank.error_line, rank.last_text
    bytes_of = {kind: _size_bytes(last_text, patterns) for kind, patterns in _SIZE_PATTERNS.items()}
    free_share_at_start = _own_share(memory.get("free_bytes"), 0.0, memory.get("total_bytes"))
    if free_share_at_start is not None and free_share_at_start < MIN_OWN_SHARE:
        return False
    process_share = _own_share(bytes_of["process"], bytes_of["free"], bytes_of["total"])
    if process_share is not None:
        return process_share >= MIN_OWN_SHARE
    reported_share = _own_share(error.get("torch_bytes"), error.get("free_bytes"), error.get("total_bytes"))
    torch_share = _own_share(bytes_of["torch"], bytes_of["free"], bytes_of["total"]) or reported_share
    return (torch_share or 0.0) >= (MIN_OWN_SHARE if free_share_at_start is None else MIN_TORCH_SHARE) or None


def has_reached_limit(rank: RankProgress) -> bool | None:
    """Whether a CPU rank reached the limit that was set for it; None if unknown.

    It follows from limit_bytes, which the rank reported when the limit was set, from data_bytes, which were in
    use when it ran out, if they are known, and from the allocator's message.
    """
    limit_bytes, used_bytes = rank.memory_report.get("limit_bytes"), rank.error_line.get("data_bytes")
    request_match = re.search(r"you tried to allocate (\d+) bytes", rank.last_text)
    if limit_bytes is None:
        return None
    if used_bytes is None or request_match is None:
        return True
    return used_bytes + int(request_match[1]) > MIN_USED_LIMIT_SHARE * limit_bytes or None


def _own_share(used_bytes: float | None, free_bytes: float | None, total_bytes: float | None) -> float | None:
    if used_bytes is None or free_bytes is None or not total_bytes:
        return None
    return (used_bytes + free_bytes) / total_bytes


def _size_bytes(text: str, patterns: tuple[str, ...]) -> float | None:
    match = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
    return match and float(match[1].rstrip(".")) * _BYTES_PER_UNIT[match[2]]


def fingerprint(cause_name: str, phase: str, line: str, traceback: str, hosts: Sequence[str]) -> str:
    """16 hex digits that are equal for the same failure at any place and time.

    They do not depend on numbers, addresses, folders, ranks, hosts or times.

    Args:
        phase: the phase of the rank.
        line: the line that shows the failure.
        traceback: a text with the traceback, if there is one.
        hosts: names of hosts that do not count.
    """
    frames = [(path, func) for path, func in _FRAME_LINE.findall(traceback) if not _PACKAGE_PATH.search(path)]
    frame_names = [f"{path.rpartition('/')[2]}:{func}" for path, func in frames[-NUM_FRAMES:]]
    for host in sorted(hosts, key=len, reverse=True):
        line = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", line)
    for pattern, replacement in _VOLATILE_PATTERNS:
        line = pattern.sub(replacement, line)
    return content_id([cause_name, phase, frame_names, line.strip()])
