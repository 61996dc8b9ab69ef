"""The verdict on an attempt: its own result, its ranks' own words, our decisions, and only then the logs."""

import math
import re
from collections.abc import Sequence

from ultrabench.agent.deadline import Overdue
from ultrabench.agent.fingerprint import fingerprint
from ultrabench.agent.gathering import Gathering, RankStory
from ultrabench.agent.memory_account import own_gpu_memory, own_limit
from ultrabench.agent.root_cause import Finding, findings, own_words
from ultrabench.agent.signatures import last_words
from ultrabench.measure import Measure
from ultrabench.result import RunResult, Status


def measured_steps(rank: RankStory, measure: Measure) -> list[float]:
    """Seconds of the measured steps; where a program does not mark them, all after warm-up."""
    marked = [s for s in rank.steps if "measured" in s]
    if marked:
        return [float(s["seconds"]) for s in marked if s["measured"] and "seconds" in s]
    return [float(s["seconds"]) for s in rank.steps[measure.warmup_steps :] if "seconds" in s]


def judge(
    gathering: Gathering,
    measure: Measure,
    stopped: Overdue | None,
    ended: str | None,
    lost: str | None,
    hosts: Sequence[str],
) -> RunResult:
    """How an attempt ended, and why, without what was measured; the arguments are those of `classify`."""
    ranks = gathering.ranks
    if gathering.fault is not None:
        return RunResult(status=Status.INVALID, reason=gathering.fault, cause="bad_report")
    bad_loss = _non_finite(ranks[0])
    if all(_finished(rank) for rank in ranks):
        fault = bad_loss or (None if gathering.probe else _unmeasured(ranks[0], measure))
        if fault is None:
            return RunResult(status=Status.OK)
        cause = "non_finite_loss" if bad_loss else "unmeasured"
        return RunResult(status=Status.INVALID, reason=fault, cause=cause)
    found = findings(ranks)
    root = found[0] if found else None
    sure = (Status.OOM, Status.INVALID) if lost else frozenset(Status) - {Status.COMM_ERROR}
    if root and root.told and root.cause.status in sure:
        return _explained(root, gathering, hosts)
    if bad_loss:
        return RunResult(status=Status.INVALID, reason=bad_loss, cause="non_finite_loss")
    if lost is not None:
        there = _named(hosts, lost)
        return RunResult(status=Status.NODE_FAIL, reason=lost, cause="node_failure", suspects=there)
    if ended is not None:
        return RunResult(status=Status.CANCELLED, reason=ended, cause="stopped")
    if stopped is not None and stopped.status != Status.HANG:
        limit = "time_limit" if stopped.status == Status.TIMEOUT else None  # else a race was lost
        return RunResult(status=stopped.status, reason=stopped.reason, cause=limit)
    if stopped is not None and (root is None or root.cause.status == Status.COMM_ERROR):
        return RunResult(status=stopped.status, reason=stopped.reason, cause="hang")
    if root is not None:
        return _explained(root, gathering, hosts, found)
    return RunResult(status=Status.CRASH, reason="the ranks vanished without an exit code", cause="exit_code")


def _explained(
    root: Finding, gathering: Gathering, hosts: Sequence[str], found: Sequence[Finding] = ()
) -> RunResult:
    """What follows from the rank that failed first."""
    rank, cause = gathering.ranks[root.rank], root.cause
    host = _host(root.rank, len(gathering.ranks), hosts)
    suspects = host if cause.blames_host else ()
    if cause.status == Status.COMM_ERROR:
        suspects = _complained_of(found, gathering, hosts) or _silent(found, gathering, hosts) or host
    where = f"rank {root.rank}{f' on {host[0]}' if host else ''}"
    confirmed = None
    if cause.name == "cuda_oom":
        confirmed = bool(own_gpu_memory(own_words(rank), rank.memory, rank.error or {}))
    elif cause.status == Status.OOM:
        confirmed = cause.name == "cpu_oom" and bool(
            own_limit(own_words(rank), rank.memory, rank.error or {})
        )
    return RunResult(
        status=cause.status,
        reason=f"{cause.what}, {where}: {root.line}",
        cause=cause.name,
        fingerprint=fingerprint(cause.name, rank.phase, root.line, own_words(rank), hosts)
        if cause.telling
        else None,
        confirmed=confirmed,
        suspects=suspects,
    )


def _host(rank: int, world_size: int, hosts: Sequence[str]) -> tuple[str, ...]:
    return (hosts[rank * len(hosts) // world_size],) if hosts else ()


def _complained_of(found: Sequence[Finding], gathering: Gathering, hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts that ranks of others name; NCCL begins each line of a log with its own."""
    named = set[str]()
    for finding in found:
        own = _host(finding.rank, len(gathering.ranks), hosts)
        words = "\n".join(last_words(own_words(gathering.ranks[finding.rank])))
        named |= {*_named(hosts, words)} - {*own}
    return tuple(h for h in hosts if h in named)


def _silent(found: Sequence[Finding], gathering: Gathering, hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts of the few ranks that complain of nothing while most do."""
    told = {f.rank for f in found}
    silent = [n for n, rank in enumerate(gathering.ranks) if n not in told and rank.done is None]
    if not 0 < len(silent) < len(found):
        return ()
    return tuple(dict.fromkeys(h for rank in silent for h in _host(rank, len(gathering.ranks), hosts)))


def _named(hosts: Sequence[str], text: str) -> tuple[str, ...]:
    """The hosts whose names occur in a text."""
    return tuple(h for h in hosts if re.search(rf"(?<![\w.-]){re.escape(h)}(?![\w-])", text))


def _unmeasured(rank: RankStory, measure: Measure) -> str | None:
    """Why the steps of a program that ended well are no measurement."""
    for i, step in enumerate(rank.steps, start=1):
        if step.get("seconds", 0) <= 0:
            return f"step {i} was reported with {step.get('seconds', 'no')} seconds"
    times = measured_steps(rank, measure)
    if not times:
        steps = len(rank.steps)
        return (
            f"the program ended well but reported {steps} steps, of which {len(times)} count; it has to "
            "write them to ULTRABENCH_REPORT, or kernel.step_line to find them in its log"
        )
    return None


def _finished(rank: RankStory) -> bool:
    """It said that it was done, or ended as if it was; what happens in its teardown is no news."""
    return rank.done is not None or (rank.error is None and rank.code == 0)


def _non_finite(rank: RankStory) -> str | None:
    for i, step in enumerate(rank.steps, start=1):
        loss = step.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            return f"loss is {loss} at step {step.get('step', i)}"
    return None
