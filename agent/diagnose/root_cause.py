"""How every rank failed, what it says about memory, and which failure is the root of the others."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrabench.agent.diagnose.signatures import BY_NAME, Cause, by_text, ends_in_traceback, last_words
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.record import content_id
from ultrabench.result import Status

OWN_SHARE = 0.95
"""Share of a GPU's memory that must be free when the run begins, and free or its own when it runs out."""
TORCH_SHARE = 0.85
"""Share in place of OWN_SHARE where only the memory of torch is known, not that of the CUDA context and NCCL."""
LIMIT_SHARE = 0.9
"""Share of a CPU rank's limit that must be used; below 1, because a rank frees memory before it reports."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_TEXTS = {
    # torch 2, c10/cuda/CUDACachingAllocator.cpp; the second of each pair is the text of torch 1.
    "total": (f"total capacity of {_SIZE}", f"{_SIZE} total capacity"),
    "free": (f"of which {_SIZE} is free", f"{_SIZE} free"),
    "process": (f"this process has {_SIZE} memory in use",),
    "torch": (f"{_SIZE} reserved in total",),
}


def own_gpu_memory(text: str, memory: Mapping[str, Any], error: Mapping[str, Any]) -> bool | None:
    """Whether the run itself filled the GPU; False: other processes held memory; None: unknown.

    Args:
        text: the message of the allocator.
        memory: the rank's report when the run began: free_bytes and total_bytes.
        error: the rank's report when it ran out: free_bytes, total_bytes and torch_bytes.
    """
    told = {name: _size(text, patterns) for name, patterns in _TEXTS.items()}
    at_start = _share(memory.get("free_bytes"), 0.0, memory.get("total_bytes"))
    if at_start is not None and at_start < OWN_SHARE:
        return False
    process = _share(told["process"], told["free"], told["total"])
    if process is not None:
        return process >= OWN_SHARE
    torch = _share(told["torch"], told["free"], told["total"])
    if torch is None:
        reserved, free = error.get("torch_bytes"), error.get("free_bytes")
        torch = _share(reserved, free, error.get("total_bytes"))
    needed = OWN_SHARE if at_start is None else TORCH_SHARE
    return True if torch is not None and torch >= needed else None


def own_limit(text: str, memory: Mapping[str, Any], error: Mapping[str, Any]) -> bool | None:
    """Whether a CPU rank reached the limit that was set for it; None: unknown.

    Args:
        text: the message of the allocator.
        memory: the rank's report when the limit was set: limit_bytes.
        error: the rank's report when it ran out: data_bytes in use, if known.
    """
    limit, used = memory.get("limit_bytes"), error.get("data_bytes")
    if limit is None:
        return None
    requested = re.search(r"you tried to allocate (\d+) bytes", text)
    if used is None or requested is None or used + int(requested[1]) > LIMIT_SHARE * limit:
        return True
    return None


def _share(own: float | None, free: float | None, total: float | None) -> float | None:
    return None if own is None or free is None or not total else (own + free) / total


def _size(text: str, patterns: tuple[str, ...]) -> float | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return float(match[1].rstrip(".")) * _UNITS[match[2]]
    return None


BY_SIGNAL: dict[int, str] = {
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "bus_error",
    signal.SIGABRT: "abort",
    **dict.fromkeys((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP), "killed"),
}
"""Signal that ultrabench did not send -> cause."""
LINE_CHARS = 300
"""Longest line, in characters, that is quoted."""
FRAMES = 3
"""Number of innermost frames that count in a fingerprint; those of installed packages do not count."""

_FRAME = re.compile(r'^\s*(?:\[rank\d+\]:\s*)?File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)
_PACKAGES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")
_VOLATILE = (
    (re.compile(r"(?:/[\w.+@-]+)+/"), ""),  # folders; the name of the file stays
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)[0-9a-f]{6,}\b", re.IGNORECASE), "#"),
    (re.compile(r"\b\d+(?:[.:]\d+)+\b|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b"), "#"),
    (re.compile(r"# ?(?:bytes|[KMG]i?B)\b"), "#"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one rank failed."""

    rank: RankProgress
    cause: Cause
    line: str
    """The line of the rank's error or log that shows the failure."""
    told: bool = False
    """The rank itself or Linux reported the failure, so that it counts whoever ended the rank."""

    @property
    def key(self) -> tuple[int, float, int, int]:
        """The sort key: roots before consequences, then the failure that was known first."""
        known_at, place = self.rank.failed_at or 0.0, list(BY_NAME).index(self.cause.name)
        return _tier(self.cause), known_at, place, self.rank.number


def findings(ranks: list[RankProgress]) -> list[Finding]:
    """One finding for each rank that failed, the likeliest root first."""
    found = [f for rank in ranks if (f := _finding(rank))]
    early = []
    for rank in ranks:
        if rank.code == 0 and rank.done is None and rank.error is None:
            line = f"exited with code 0 in phase {rank.phase} while others went on"
            early.append(Finding(rank=rank, cause=BY_NAME["exited_early"], line=line))
    # If most ranks have ended well, the others are only late.
    return sorted(found + (early if len(early) <= len(ranks) / 2 else []), key=lambda f: f.key)


def own_words(rank: RankProgress) -> str:
    """The text that tells how a rank ended: its error with the traceback, or the end of its log."""
    error = rank.error
    return rank.tail if error is None else f"{error.get('traceback') or ''}\n{error.get('message') or ''}"


def _tier(cause: Cause) -> int:
    """Smaller for causes that come first: hardware, memory, invalid numbers, and at last communication."""
    by_name = {"foreign_memory": 1, "exit_code": 4, "exited_early": 5}
    by_status = {Status.NODE_FAIL: 0, Status.OOM: 1, Status.INVALID: 2, Status.COMM_ERROR: 6}
    return by_name.get(cause.name, by_status.get(cause.status, 3))


def _finding(rank: RankProgress) -> Finding | None:
    told = True
    if rank.done is not None or (rank.error is None and rank.code in (None, 0)):
        return None
    if rank.error is not None:
        cause, line = _of_error(rank)
    elif rank.oom_killed:
        cause, line = BY_NAME["host_oom"], "killed by Linux, because the host was out of memory"
    elif rank.killed_by_us and rank.code == -signal.SIGKILL:
        # A rank may fail and then hang, since libraries wait for peers; only a final traceback counts then.
        known = by_text(last_words(rank.tail)) if ends_in_traceback(rank.tail) else None
        if known is None:
            return None
        (cause, line), told = known, False
    else:
        cause, line = _of_exit(rank)
        told = cause.status == Status.OOM
    if cause.name == "cuda_oom" and own_gpu_memory(own_words(rank), rank.memory, rank.error or {}) is False:
        cause = BY_NAME["foreign_memory"]
    return Finding(rank=rank, cause=cause, line=line, told=told)


def _of_error(rank: RankProgress) -> tuple[Cause, str]:
    """The cause of an error that the rank reported; its text may be more exact than its kind."""
    error = rank.error or {}
    message = " ".join(str(error.get("message") or "(no message)").split())[:LINE_CHARS]
    known = {"non_finite": "non_finite_loss", "replicas": "replicas_differ"}
    kind = str(error.get("kind"))
    if kind in known:
        return BY_NAME[known[kind]], message
    found, _ = by_text(last_words(own_words(rank))) or (BY_NAME["exception"], "")
    if kind == "oom" and found.status != Status.OOM:
        found = BY_NAME["cpu_oom"]
    if kind == "comm" and found.name == "exception":
        found = BY_NAME["connection_error"]
    return found, message


def _of_exit(rank: RankProgress) -> tuple[Cause, str]:
    """The cause by the exit code, or by the log if that is more exact."""
    code, said = rank.code or 0, last_line(rank.tail)
    told = by_text(last_words(rank.tail))
    if code > 0:
        return told or (BY_NAME["exit_code"], f"exited with code {code}: {said}")
    name = {int(s): s.name for s in signal.Signals}.get(-code, f"signal {-code}")
    cause = BY_NAME[BY_SIGNAL.get(-code, "signal")]
    # A library that aborts prints why, and a rank that lost a peer may die in any way.
    if told and (cause.name == "abort" or (cause.name == "segfault" and told[0].status == Status.COMM_ERROR)):
        return told
    return cause, f"killed by {name}, which ultrabench did not send: {said}"


def last_line(text: str) -> str:
    """The last line of a log that is not empty and not part of a stack."""
    lines = last_words(text) or [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LINE_CHARS] if lines else "(empty log)"


def fingerprint(cause: str, phase: str, line: str, stack: str, hosts: Sequence[str]) -> str:
    """16 hex digits that are equal for the same failure wherever and whenever it happens.

    They do not depend on numbers, addresses, folders, ranks, hosts or times.

    Args:
        phase: the phase of the rank.
        line: the line that shows the failure.
        stack: a text with the traceback, if there is one.
        hosts: names of hosts that do not count.
    """
    frames = [(path, name) for path, name in _FRAME.findall(stack) if not _PACKAGES.search(path)]
    places = [f"{path.rpartition('/')[2]}:{name}" for path, name in frames[-FRAMES:]]
    return content_id([cause, phase, places, normalized(line, hosts)])


def normalized(line: str, hosts: Sequence[str]) -> str:
    """The line without the parts that differ from one host or time to another."""
    for host in sorted(hosts, key=len, reverse=True):
        line = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", line)
    for pattern, replacement in _VOLATILE:
        line = pattern.sub(replacement, line)
    return line.strip()
