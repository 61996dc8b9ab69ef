"""How each rank failed, by its report, its exit code and its log."""

import re
import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ultrabench.agent.diagnose.log_lines import LineKind, line_kind, split_lines
from ultrabench.agent.diagnose.log_record import Failure
from ultrabench.agent.diagnose.rank_cause import (
    MAX_LINES_AFTER,
    RankCause,
    cause_of_error,
    cause_of_killed,
    cause_of_rank,
    signal_of,
)
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME, Cause, may_follow, tier_of
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

OOM_KILL_CAUSES = frozenset({"killed", "exit_code"})
"""Causes of ranks that Linux may have killed, or a child of them, if it counted a kill on their node."""
OOM_KILL_TEXT = "killed by Linux because the host ran out of memory"
"""What the reason says about a rank that Linux killed."""
_LOST_CHILD = re.compile(
    r"exited unexpectedly|terminated abruptly|BrokenProcessPool|died unexpectedly|unexpectedly terminated|SIGKILL"
    r"|WorkerCrashedError|exit ?code:? -9\b"
)

INVALID_CAUSES = {"non_finite": "non_finite_loss", "replicas": "replicas_differ", "option": "option_ignored"}
"""Kind of an error of our own kernel -> the cause that makes the run invalid."""
_BYTES_PER_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE_REGEX = r"([\d.]+) (bytes|[KMG]iB)"
_SIZE_PATTERNS = {
    # torch 2, c10/cuda/CUDACachingAllocator.cpp; the second of each pair is the text of torch 1.
    "total": (
        f"total capaci?ty of {_SIZE_REGEX}",
        f"{_SIZE_REGEX} total capacity",
    ),  # torch 2.0 writes "capacty"
    "free": (f"of which {_SIZE_REGEX} is free", f"{_SIZE_REGEX} free"),
    "process": (f"this process has {_SIZE_REGEX} memory in use",),
    "torch": (f"{_SIZE_REGEX} reserved in total",),
    "allocated": (f"{_SIZE_REGEX} is allocated by PyTorch",),
    "reserved": (f"{_SIZE_REGEX} is reserved by PyTorch but unallocated",),
}
_FIRST_FAILED_RANK = re.compile(
    r"Root Cause \(first observed failure\):.*?^ *rank *: (\d+) \(local_rank", re.DOTALL | re.MULTILINE
)
"""The rank that torchrun names as the first one that failed."""
_ANY_PROCESS = re.compile(f"Process \\d+ has {_SIZE_REGEX} memory in use")
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
    failure: Failure | None = None
    """The failure in the rank's log that shows the cause; None if its report or its exit shows it."""
    shares_log: bool = False
    """Whether all ranks of the node have the log and the exit code of this rank, whose command started them."""

    @property
    def rank_text(self) -> str:
        """The rank that failed and its host; only its host if the ranks of a node share a log that does not name it."""
        match = self.shares_log and _FIRST_FAILED_RANK.search(self.rank.log_record.tail)
        if match:
            return f"rank {match[1]} on {self.rank.host}"
        return f"a rank on {self.rank.host}" if self.shares_log else self.rank.name

    @property
    def text(self) -> str:
        """The lines that say what failed, without stacks."""
        lines = self.failure.lines if self.failure else split_lines(self.rank.last_text)
        return "\n".join(line for line in lines if line_kind(line) is not LineKind.STACK)

    @property
    def text_about_peers(self) -> str:
        """What may name the peers that this rank has lost."""
        warnings = self.failure.warnings if self.failure else []
        return "\n".join([*warnings, self.text])

    @property
    def ends_log(self) -> bool:
        """Whether so few lines of progress follow the failure that the program cannot have caught it."""
        return self.failure is None or self.failure.lines_after <= MAX_LINES_AFTER

    @property
    def tier(self) -> int:
        """Smaller for failures that come first, as `Cause.tier` says."""
        return tier_of(self.cause, self.line)

    @property
    def may_follow(self) -> bool:
        """Whether the failure of another rank may have caused this one."""
        return may_follow(self.cause, self.line)

    @property
    def traceback(self) -> str:
        """A text with the frames of the failure."""
        return "\n".join(self.failure.frames) if self.failure else self.rank.last_text


def findings(ranks: Sequence[RankProgress]) -> list[Finding]:
    """One finding for each rank that failed, the likeliest root first.

    The root is the earliest failure, by the times in the logs if all of those that compete have one,
    else by the order in which the ranks ended. What the failure of another rank may have caused comes after all others
    (`Finding.tier`).
    """
    starters = {rank.starter for rank in ranks}
    rank_findings = [
        finding._replace(shares_log=rank in starters)
        for rank in ranks
        if not rank.starter and (finding := _finding(rank))
    ]
    early_ranks = [rank for rank in ranks if rank.ended_well and not rank.done_line]
    # If most ranks have ended well, the other ranks will follow; one that is stopped or dead explains why they do not.
    explains_hang = any(rank.evidence["state"] in SURE_STATES for rank in ranks)
    for rank in early_ranks if len(early_ranks) <= len(ranks) / 2 and not explains_hang else ():
        line = f"exited with code 0 in phase {rank.phase} while other ranks kept running"
        rank_findings.append(Finding(rank=rank, cause=CAUSE_BY_NAME["exited_early"], line=line))
    rank_findings = _sorted_findings(rank_findings)
    return [*_lost_to_host_memory(ranks, rank_findings), *rank_findings]


def _sorted_findings(rank_findings: list[Finding]) -> list[Finding]:
    first_tier = min((finding.tier for finding in rank_findings), default=0)
    first_failures = [finding.failure for finding in rank_findings if finding.tier == first_tier]
    have_times = all(failure and failure.time_s is not None for failure in first_failures)
    cause_names = [*CAUSE_BY_NAME]

    def sort_key(finding: Finding) -> tuple[int, float, float, int, int]:
        time_s = finding.failure.time_s if have_times and finding.failure else None
        end_s = finding.rank.failed_at_s or 0.0
        return (
            finding.tier,
            time_s or 0.0,
            end_s,
            cause_names.index(finding.cause.name),
            finding.rank.number,
        )

    return sorted(rank_findings, key=sort_key)


def _lost_to_host_memory(ranks: Sequence[RankProgress], rank_findings: list[Finding]) -> Iterator[Finding]:
    """The root where Linux killed a process of the run, and nothing else says why the others lost their
    connections or hang.
    """
    killed_rank = next((rank for rank in ranks if rank.oom_killed), None)
    if killed_rank and (not rank_findings or rank_findings[0].cause.status == Status.COMM_ERROR):
        line = "Linux killed a process of its node because the host ran out of memory"
        yield Finding(rank=killed_rank, cause=CAUSE_BY_NAME["host_oom"], line=line)


def _finding(rank: RankProgress) -> Finding | None:
    if rank.ended_well or (not rank.error_line and rank.code is None):
        return None
    ended_by_us = rank.killed_by_us and (rank.code == -signal.SIGKILL or rank.was_aborted)
    if rank.error_line:
        rank_cause: RankCause | None = _cause_by_error(rank)
    elif ended_by_us:
        rank_cause = cause_of_killed(rank.log_record)
    else:
        rank_cause = cause_by_exit(rank)
    if rank_cause is None:
        return None
    cause, line, failure = rank_cause
    if rank.full_folder_text and cause.name in VAGUE_CAUSES:
        cause, line = CAUSE_BY_NAME["disk_full"], rank.full_folder_text
    is_certain = bool(rank.error_line) or (cause.status == Status.OOM and not ended_by_us)
    finding = Finding(rank=rank, cause=cause, line=line, is_certain=is_certain, failure=failure)
    if cause.name == "cuda_oom" and has_filled_gpu(rank, finding.text) is False:
        return finding._replace(cause=CAUSE_BY_NAME["foreign_memory"])
    return finding


def _cause_by_error(rank: RankProgress) -> RankCause:
    """The cause of an error that the rank reported; its text may be more exact than its kind."""
    kind, message = rank.error_line.get("kind"), rank.error_line.get("message") or "(no message)"
    rank_cause = cause_of_error(rank.last_text, message)
    cause = rank_cause.cause
    if kind in INVALID_CAUSES:
        cause = CAUSE_BY_NAME[INVALID_CAUSES[kind]]
    elif kind == "oom" and cause.status != Status.OOM:
        cause = CAUSE_BY_NAME["cpu_oom"]
    elif kind == "comm" and cause.name == "exception":
        cause = CAUSE_BY_NAME["connection_error"]
    return RankCause(cause, rank_cause.line)


def cause_by_exit(rank: RankProgress) -> RankCause:
    """The cause by the exit code and the log of a rank that ultrabench did not end, and by the counter of its node."""
    rank_cause = cause_of_rank(rank.code or 0, rank.log_record)
    is_killed = rank_cause.cause.name in OOM_KILL_CAUSES or _is_lost_child(rank_cause)
    if not rank.oom_killed or not is_killed:
        return rank_cause
    is_own_kill = signal_of(rank.code or 0) == signal.SIGKILL
    line = OOM_KILL_TEXT if is_own_kill else f"{OOM_KILL_TEXT}: {rank_cause.line}"
    return RankCause(CAUSE_BY_NAME["host_oom"], line)


def _is_lost_child(rank_cause: RankCause) -> bool:
    """Whether an exception says that a child of the rank ended without a reason."""
    is_exception = rank_cause.cause.name == "exception"
    return is_exception and (rank_cause.may_follow or bool(_LOST_CHILD.search(rank_cause.line)))


def has_filled_gpu(rank: RankProgress, text: str) -> bool | None:
    """Whether the run itself filled the GPU: False if other processes held memory, None if unknown.

    It follows from the allocator's message, from free_bytes and total_bytes, which the rank reported when the
    run began, and from free_bytes, total_bytes and torch_bytes, which it reported when it ran out.

    Args:
        text: the message of the allocator.
    """
    memory, error = rank.memory_report, rank.error_line
    bytes_of = {kind: _size_bytes(text, patterns) for kind, patterns in _SIZE_PATTERNS.items()}
    free_share_at_start = _share_of_gpu(memory.get("free_bytes"), 0.0, memory.get("total_bytes"))
    if free_share_at_start is not None and free_share_at_start < MIN_OWN_SHARE:
        return False
    torch_bytes = bytes_of["torch"]
    if bytes_of["allocated"] is not None:
        torch_bytes = bytes_of["allocated"] + (bytes_of["reserved"] or 0.0)
    process_bytes = bytes_of["process"] or _listed_process_bytes(text, torch_bytes)
    process_share = _share_of_gpu(process_bytes, bytes_of["free"], bytes_of["total"])
    if process_share is not None:
        return process_share >= MIN_OWN_SHARE
    reported_share = _share_of_gpu(
        error.get("torch_bytes"), error.get("free_bytes"), error.get("total_bytes")
    )
    torch_share = _share_of_gpu(torch_bytes, bytes_of["free"], bytes_of["total"]) or reported_share
    return (torch_share or 0.0) >= (MIN_OWN_SHARE if free_share_at_start is None else MIN_TORCH_SHARE) or None


def _listed_process_bytes(text: str, torch_bytes: float | None) -> float | None:
    """What the rank's process holds of the GPU, where torch does not know its own pid, as in a PID namespace.

    Torch then lists the process among the others. It is the smallest one that holds at least what torch has.
    """
    sizes = sorted(float(m[1].rstrip(".")) * _BYTES_PER_UNIT[m[2]] for m in _ANY_PROCESS.finditer(text))
    return next((size for size in sizes if torch_bytes is not None and size >= torch_bytes), None)


def has_reached_limit(rank: RankProgress, text: str) -> bool | None:
    """Whether a CPU rank reached the limit that was set for it; None if unknown.

    It follows from limit_bytes, which the rank reported when the limit was set, from data_bytes, which were in
    use when it ran out, if they are known, and from the allocator's message, `text`.
    """
    limit_bytes, used_bytes = rank.memory_report.get("limit_bytes"), rank.error_line.get("data_bytes")
    request_match = re.search(r"you tried to allocate (\d+) bytes", text)
    if limit_bytes is None:
        return None
    if used_bytes is None or request_match is None:
        return True
    return used_bytes + int(request_match[1]) > MIN_USED_LIMIT_SHARE * limit_bytes or None


def _share_of_gpu(
    used_bytes: float | None, free_bytes: float | None, total_bytes: float | None
) -> float | None:
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
