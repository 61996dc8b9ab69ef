"""What failed first: the evidence of every rank, and the one that explains the others."""

import signal
from dataclasses import dataclass

from ultrabench.agent.gathering import RankStory
from ultrabench.agent.memory_account import own_gpu_memory
from ultrabench.agent.signatures import (
    BY_NAME,
    BY_SIGNAL,
    RANKING,
    Cause,
    by_text,
    ends_in_traceback,
    last_words,
)
from ultrabench.result import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one rank failed."""

    rank: int
    cause: Cause
    line: str
    """The words that tell, on one line."""
    told: bool = False
    """It does not matter who ended the rank: it had said so itself, or the kernel has."""
    at: float = 0.0
    """When the leader heard of it, by its own clock."""

    @property
    def key(self) -> tuple[int, float, int, int]:
        """Roots come before consequences; among equals what was heard first."""
        return _tier(self.cause), self.at, RANKING[self.cause.name], self.rank


def findings(ranks: list[RankStory]) -> list[Finding]:
    """How the ranks failed that did, the likeliest root first."""
    found = [f for number, rank in enumerate(ranks) if (f := _finding(number, rank))]
    early = [
        Finding(
            rank=number, cause=BY_NAME["exited_early"], at=rank.failed_at or 0.0,
            line=f"exited with code 0 in phase {rank.phase} while others went on",
        )
        for number, rank in enumerate(ranks)
        if rank.code == 0 and rank.done is None and rank.error is None
    ]  # fmt: skip
    # Where most have ended well, those that have not are late.
    return sorted(found + (early if len(early) <= len(ranks) / 2 else []), key=lambda f: f.key)


def own_words(rank: RankStory) -> str:
    """The text that tells how a rank ended: its error with the traceback, else the end of its log."""
    if rank.error is None:
        return rank.tail
    return f"{rank.error.get('traceback') or ''}\n{rank.error.get('message') or ''}"


def _tier(cause: Cause) -> int:
    if cause.name in ("exit_code", "exited_early"):
        return 4 if cause.name == "exit_code" else 5
    order = {Status.NODE_FAIL: 0, Status.OOM: 1, Status.INVALID: 2, Status.COMM_ERROR: 6}
    return 1 if cause.name == "foreign_memory" else order.get(cause.status, 3)


def _finding(number: int, rank: RankStory) -> Finding | None:
    at = rank.failed_at or 0.0
    if rank.done is not None:
        return None
    if rank.error is not None:
        cause, line = _of_error(rank)
        return Finding(rank=number, cause=_whose(cause, rank), line=line, told=True, at=at)
    if rank.code in (None, 0):
        return None
    if rank.oom_killed:
        line = "killed by the kernel, which was out of memory"
        return Finding(rank=number, cause=BY_NAME["host_oom"], line=line, told=True, at=at)
    if rank.killed_by_us and rank.code == -signal.SIGKILL:
        # Some that failed hang when they end: libraries wait for peers. What else it logged proves nothing.
        told = by_text(last_words(rank.tail)) if ends_in_traceback(rank.tail) else None
        return told and Finding(rank=number, cause=_whose(told[0], rank), line=told[1], at=at)
    cause, line = _of_exit(rank)
    sure = cause.status == Status.OOM
    return Finding(rank=number, cause=_whose(cause, rank), line=line, told=sure, at=at)


def _of_error(rank: RankStory) -> tuple[Cause, str]:
    """From what it reported: the text may tell more exactly than the kind."""
    error = rank.error or {}
    kind, message = error.get("kind"), " ".join(str(error.get("message") or "(no message)").split())[:300]
    found, _ = by_text(last_words(own_words(rank))) or (BY_NAME["exception"], "")
    if kind == "non_finite":
        return BY_NAME["non_finite_loss"], message
    if kind == "replicas":
        return BY_NAME["replicas_differ"], message
    if kind == "oom" and found.status != Status.OOM:
        found = BY_NAME["cpu_oom"]
    if kind == "comm" and found.name == "exception":
        found = BY_NAME["connection_error"]
    return found, message


def _of_exit(rank: RankStory) -> tuple[Cause, str]:
    """From its exit code, and from its log where that tells of more than the code does."""
    assert rank.code is not None
    told = by_text(last_words(rank.tail))
    said = last_line(rank.tail)
    if rank.code > 0:
        return told or (BY_NAME["exit_code"], f"exited with code {rank.code}: {said}")
    try:
        name = signal.Signals(-rank.code).name
    except ValueError:
        name = f"signal {-rank.code}"
    cause = BY_NAME[BY_SIGNAL.get(-rank.code, "signal")]
    # Libraries abort because of something they say; and who had lost a peer may well die in any way.
    if told and (cause.name == "abort" or (cause.name == "segfault" and told[0].status == Status.COMM_ERROR)):
        return told
    return cause, f"killed by {name}, which ultrabench did not send: {said}"


def _whose(cause: Cause, rank: RankStory) -> Cause:
    if cause.name == "cuda_oom" and own_gpu_memory(own_words(rank), rank.memory, rank.error or {}) is False:
        return BY_NAME["foreign_memory"]
    return cause


def last_line(text: str) -> str:
    """The last line of a log that says something, stacks left out."""
    lines = last_words(text) or [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(empty log)"
