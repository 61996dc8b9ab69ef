"""How an attempt ended and why, by the reports, exit codes and logs of its ranks."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ultrabench.agent.diagnose.root_cause import Finding, findings, fingerprint, own_gpu_memory, own_limit
from ultrabench.agent.diagnose.signatures import last_line, last_words
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.measure import Measure
from ultrabench.result import RunResult, Status
from ultrabench.run import Task
from ultrabench.step_time import ci95_rel, extremes

MESSAGE_CHARS = 1000
"""Longest error message of a rank, in characters, that is kept in the journal."""


def classify(
    progress: AttemptProgress, task: Task, end: RunResult | None, lost: str | None = None
) -> RunResult:
    """The result of an attempt whose ranks are all gone.

    The program's own result counts first, whatever its log says; then the failures that ranks reported,
    then what the agent decided, then exit codes and logs. Among the ranks a cause comes before its
    consequences; a communication error is last, since the peers of any dead rank report one.

    Args:
        end: why ultrabench ended the ranks; None if they ended by themselves.
        lost: which node was lost; None if none was.
    """
    measure, result = task.measure, _explained(progress, task, end, lost)
    environment, rank0, done = progress.environment, progress.ranks[0], progress.ranks[0].done
    gpu, wanted = environment.get("gpu_name"), () if task.probe else task.gpu_names
    if result.status == Status.OK and wanted and gpu is not None and gpu not in wanted:
        result = _invalid("wrong_gpu", f"it ran on {gpu!r}; this hardware has {' or '.join(wanted)}")
    times = rank0.measured_steps(measure)
    interval = ci95_rel(times)
    names = ("gpu_name", "torch_version", "cuda_version", "nccl_version", "driver_version", "omp_num_threads")
    known: dict[str, Any] = {name: environment.get(name) for name in names}
    ok, seen = result.status == Status.OK, end.evidence if end else {}
    return replace(
        result,
        **known,
        measured_by=("log" if "measured_by" in rank0.steps[-1] else "report") if rank0.steps else None,
        stopped=done.get("stopped") or ((result.stopped or "program") if ok else None),
        ci_reached=None if interval is None else interval <= measure.target_ci95_rel,
        step_times_s=tuple(times),
        rank_step_times_s=extremes([rank.measured_steps(measure) for rank in progress.ranks]),
        loss_final=_loss(rank0, measure),
        loss_step=measure.loss_step,
        hardware_flops_per_step=done.get("hardware_flops_per_step"),
        peak_mem_allocated_bytes=_largest(progress.ranks, "allocated_bytes"),
        peak_mem_reserved_bytes=_largest(progress.ranks, "reserved_bytes"),
        peak_mem_reserved_rank0_bytes=rank0.memory.get("reserved_bytes"),
        init_time_s=progress.first_step - progress.started if progress.first_step else None,
        started_at=progress.started_at,
        probe=progress.probe,
        evidence={} if ok else {"ranks": [_evidence(rank) for rank in progress.ranks], **seen},
    )


def _explained(progress: AttemptProgress, task: Task, end: RunResult | None, lost: str | None) -> RunResult:
    """The status, reason and cause, without the measured values; the arguments are those of `classify`."""
    if progress.fault is not None:
        return _invalid("bad_report", progress.fault)
    bad_loss = _non_finite(progress.ranks[0])
    # Our own kernel always reports that it is done; a program of the user may just exit with 0.
    if all(rank.done or (rank.ended_well and not task.forked) for rank in progress.ranks):
        if bad_loss:
            return _invalid("non_finite_loss", bad_loss)
        unmeasured = None if progress.probe else _unmeasured(progress.ranks[0], task.measure)
        return _invalid("unmeasured", unmeasured) if unmeasured else RunResult(status=Status.OK)
    found = findings(progress.ranks)
    root = found[0] if found else None
    sure = (Status.OOM, Status.INVALID) if lost else frozenset(Status) - {Status.COMM_ERROR}
    if root and root.certain and root.cause.status in sure:
        return _failed(found, progress)
    if bad_loss:
        return _invalid("non_finite_loss", bad_loss)
    if lost is not None:
        hosts = _named(progress.hosts, lost)
        return RunResult(status=Status.NODE_FAIL, reason=lost, cause="node_failure", suspect_hosts=hosts)
    if end and (end.status != Status.HANG or not root or root.cause.status == Status.COMM_ERROR):
        return end
    if root is not None:
        return _failed(found, progress)
    return RunResult(status=Status.CRASH, reason="the ranks vanished without an exit code", cause="exit_code")


def _invalid(cause: str, reason: str) -> RunResult:
    return RunResult(status=Status.INVALID, reason=reason, cause=cause)


def _failed(found: list[Finding], progress: AttemptProgress) -> RunResult:
    """The result that follows from the rank that failed first."""
    rank, cause, line = found[0].rank, found[0].cause, found[0].line
    pointed_at = _pointed_at(found, progress) if cause.status == Status.COMM_ERROR else ()
    proof = {"cuda_oom": own_gpu_memory, "cpu_oom": own_limit}.get(cause.name)
    mark = fingerprint(cause.name, rank.phase, line, rank.last_text, progress.hosts)
    return RunResult(
        status=cause.status,
        reason=f"{cause.what}, {rank.name}: {line}",
        cause=cause.name,
        fingerprint=mark if cause.telling else None,
        confirmed=bool(proof and proof(rank)) if cause.status == Status.OOM else None,
        suspect_hosts=pointed_at or ((rank.host,) if cause.blames_host else ()),
    )


def _pointed_at(found: Sequence[Finding], progress: AttemptProgress) -> tuple[str, ...]:
    """The hosts that communication errors point at.

    They are the hosts that ranks of other hosts name (NCCL begins each line of a log with its own host),
    else the hosts of the few ranks that reported no failure while most ranks did.
    """
    failed = [finding.rank for finding in found]
    texts = [(rank, "\n".join(last_words(rank.last_text))) for rank in failed]
    named = {host for rank, text in texts for host in _named(progress.hosts, text) if host != rank.host}
    silent = [rank for rank in progress.ranks if rank not in failed and not rank.done]
    if not named and len(silent) < len(found):
        named = {rank.host for rank in silent}
    return tuple(host for host in progress.hosts if host in named)


def _named(hosts: Sequence[str], text: str) -> tuple[str, ...]:
    """Those of `hosts` whose names occur in a text."""
    return tuple(h for h in hosts if re.search(rf"(?<![\w.-]){re.escape(h)}(?![\w-])", text))


def _unmeasured(rank: RankProgress, measure: Measure) -> str | None:
    """Why the steps of a program that ended well cannot be used as a measurement; None if they can."""
    for i, step in enumerate(rank.steps, start=1):
        if step.get("seconds", 0) <= 0:
            return f"step {i} was reported with {step.get('seconds', 'no')} seconds"
    if rank.measured_steps(measure):
        return None
    what = f"the program ended well but reported {len(rank.steps)} steps, of which 0 count"
    return f"{what}; it has to write them to ULTRABENCH_REPORT, or kernel.step_line to find them in its log"


def _non_finite(rank: RankProgress) -> str | None:
    """Which loss of a rank is not finite; None if all are."""
    for i, step in enumerate(rank.steps, start=1):
        if not math.isfinite(loss := step.get("loss", 0.0)):
            return f"loss is {loss} at step {step.get('step', i)}"
    return None


def _loss(rank: RankProgress, measure: Measure) -> float | None:
    """The loss at the step at which layouts are compared; None if it is unknown or not finite."""
    loss = rank.steps[measure.loss_step - 1].get("loss") if len(rank.steps) >= measure.loss_step else None
    return loss if loss is not None and math.isfinite(loss) else None


def _largest(ranks: Sequence[RankProgress], name: str) -> int | None:
    return max((rank.memory[name] for rank in ranks if name in rank.memory), default=None)


def _evidence(rank: RankProgress) -> dict[str, Any]:
    """How a rank ended and its last words, for `sweep show`."""
    facts = {name: getattr(rank, name) for name in ("phase", "microbatches", "code", "killed_by_us")}
    error = rank.error.get("message", "")[:MESSAGE_CHARS] if rank.error else None
    last = last_line(rank.tail) if rank.tail and rank.code else None
    return {"rank": rank.number, **facts, "error": error, "last_line": last}
