"""How every rank failed, what it says about memory, and which failure is the root of the others."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ultrabench.agent.diagnose.signatures import BY_NAME, Cause, by_signal, by_text, last_line, quoted
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.record import content_id
from ultrabench.result import Status

OWN_SHARE = 0.95
"""Share of a GPU's memory that must be free when the run begins, and free or its own when it runs out."""
TORCH_SHARE = 0.85
"""Share in place of OWN_SHARE where only the memory of torch is known, not that of the CUDA context and NCCL."""
LIMIT_SHARE = 0.9
"""Share of a CPU rank's limit that must be used; below 1, because a rank frees memory before it reports."""
FRAMES = 3
"""Number of innermost frames that count in a fingerprint; those of installed packages do not count."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_TEXTS = {
    # torch 2, c10/cuda/CUDACachingAllocator.cpp; the second of each pair is the text of torch 1.
    "total": (f"total capacity of {_SIZE}", f"{_SIZE} total capacity"),
    "free": (f"of which {_SIZE} is free", f"{_SIZE} free"),
    "process": (f"this process has {_SIZE} memory in use",),
    "torch": (f"{_SIZE} reserved in total",),
}
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
    certain: bool = False
    """The rank itself or Linux reported the failure, so that it counts whoever ended the rank."""

    @property
    def key(self) -> tuple[int, float, int, int]:
        """The sort key: roots before consequences, then the failure that was known first."""
        place = list(BY_NAME).index(self.cause.name)
        return self.cause.tier, self.rank.failed_at or 0.0, place, self.rank.number


def findings(ranks: Sequence[RankProgress]) -> list[Finding]:
    """One finding for each rank that failed, the likeliest root first."""
    found = [f for rank in ranks if (f := _finding(rank))]
    early = [rank for rank in ranks if rank.ended_well and not rank.done]
    # If most ranks have ended well, the others are only late.
    for rank in early if len(early) <= len(ranks) / 2 else ():
        line = f"exited with code 0 in phase {rank.phase} while others went on"
        found.append(Finding(rank=rank, cause=BY_NAME["exited_early"], line=line))
    return sorted(found, key=lambda f: f.key)


def _finding(rank: RankProgress) -> Finding | None:
    if rank.ended_well or (not rank.error and rank.code is None):
        return None
    ended_by_us = rank.killed_by_us and rank.code == -signal.SIGKILL
    if rank.error:
        found: tuple[Cause, str] | None = _of_error(rank)
    elif rank.oom_killed:
        found = BY_NAME["host_oom"], "killed by Linux, because the host was out of memory"
    elif ended_by_us:
        # A rank may fail and then hang, since libraries wait for peers; only a final traceback counts then.
        found = by_text(rank.tail, only_uncaught=True)
    else:
        found = _of_exit(rank)
    if found is None:
        return None
    cause, line = found
    certain = bool(rank.error) or rank.oom_killed or (cause.status == Status.OOM and not ended_by_us)
    if cause.name == "cuda_oom" and own_gpu_memory(rank) is False:
        cause = BY_NAME["foreign_memory"]
    return Finding(rank=rank, cause=cause, line=line, certain=certain)


def _of_error(rank: RankProgress) -> tuple[Cause, str]:
    """The cause of an error that the rank reported; its text may be more exact than its kind."""
    kind, message = rank.error.get("kind"), rank.error.get("message") or "(no message)"
    found, _ = by_text(rank.last_text) or (BY_NAME["exception"], "")
    if kind in ("non_finite", "replicas"):
        found = BY_NAME["non_finite_loss" if kind == "non_finite" else "replicas_differ"]
    elif kind == "oom" and found.status != Status.OOM:
        found = BY_NAME["cpu_oom"]
    elif kind == "comm" and found.name == "exception":
        found = BY_NAME["connection_error"]
    return found, quoted(message)


def _of_exit(rank: RankProgress) -> tuple[Cause, str]:
    """The cause by the exit code, or by the log if that is more exact."""
    code, last, known = rank.code or 0, last_line(rank.tail), by_text(rank.tail)
    if code > 0:
        return known or (BY_NAME["exit_code"], f"exited with code {code}: {last}")
    cause = by_signal(-code)
    # A library that aborts prints why, and a rank that lost a peer may die in any way.
    lost_peer = cause.name == "segfault" and known and known[0].status == Status.COMM_ERROR
    if known and (cause.name == "abort" or lost_peer):
        return known
    name = {int(s): s.name for s in signal.Signals}.get(-code, f"signal {-code}")
    return cause, f"killed by {name}, which ultrabench did not send: {last}"


def own_gpu_memory(rank: RankProgress) -> bool | None:
    """Whether the run itself filled the GPU; False: other processes held memory; None: unknown.

    It follows from the allocator's message, from free_bytes and total_bytes, which the rank reported when the
    run began, and from free_bytes, total_bytes and torch_bytes, which it reported when it ran out.
    """
    memory, error, text = rank.memory, rank.error, rank.last_text
    sizes = {name: _size(text, patterns) for name, patterns in _TEXTS.items()}
    at_start = _share(memory.get("free_bytes"), 0.0, memory.get("total_bytes"))
    if at_start is not None and at_start < OWN_SHARE:
        return False
    process = _share(sizes["process"], sizes["free"], sizes["total"])
    if process is not None:
        return process >= OWN_SHARE
    torch = _share(sizes["torch"], sizes["free"], sizes["total"])
    torch = torch or _share(error.get("torch_bytes"), error.get("free_bytes"), error.get("total_bytes"))
    return (torch or 0.0) >= (OWN_SHARE if at_start is None else TORCH_SHARE) or None


def own_limit(rank: RankProgress) -> bool | None:
    """Whether a CPU rank reached the limit that was set for it; None: unknown.

    It follows from limit_bytes, which the rank reported when the limit was set, from data_bytes, which were in
    use when it ran out, if they are known, and from the allocator's message.
    """
    limit, used = rank.memory.get("limit_bytes"), rank.error.get("data_bytes")
    requested = re.search(r"you tried to allocate (\d+) bytes", rank.last_text)
    if limit is None:
        return None
    return used is None or requested is None or used + int(requested[1]) > LIMIT_SHARE * limit or None


def _share(own: float | None, free: float | None, total: float | None) -> float | None:
    return None if own is None or free is None or not total else (own + free) / total


def _size(text: str, patterns: tuple[str, ...]) -> float | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return float(match[1].rstrip(".")) * _UNITS[match[2]]
    return None


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
    for host in sorted(hosts, key=len, reverse=True):
        line = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", line)
    for pattern, replacement in _VOLATILE:
        line = pattern.sub(replacement, line)
    return content_id([cause, phase, places, line.strip()])
