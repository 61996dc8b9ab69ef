"""How an attempt ended, from evidence: what ranks reported, how they exited, what they logged."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ultrabench.agent.deadline import Overdue
from ultrabench.agent.gathering import Gathering, RankStory
from ultrabench.agent.judgement import judge, measured_steps
from ultrabench.agent.root_cause import last_line
from ultrabench.measure import Measure
from ultrabench.result import RunResult, Status
from ultrabench.step_time import ci95_rel, extremes

MESSAGE_CHARS = 1000
"""Of a rank's error message, kept in the journal."""


def classify(
    gathering: Gathering,
    measure: Measure,
    *,
    stopped: Overdue | None,
    ended: str | None,
    lost: str | None = None,
    hosts: Sequence[str] = (),
    gpu_names: tuple[str, ...] = (),
) -> RunResult:
    """The result of an attempt whose ranks are all gone.

    The program's own result comes first, whatever its log says; then what ranks said of their own
    failure, then what we decided ourselves, then exits and logs. Among the ranks a cause comes before
    its consequences: a communication error, which the peers of any dying rank report, is the last.

    Args:
        stopped: the deadline for which the ranks were killed, if it was that.
        ended: why the allocation ended under the run, if it did.
        lost: which node was lost, if one was.
        hosts: the nodes, each with an equal share of the ranks, in their order.
        gpu_names: what the accelerators may call themselves; empty: anything.
    """
    judged = judge(gathering, measure, stopped, ended, lost, hosts)
    gpu = gathering.environment.get("gpu_name")
    if judged.status == Status.OK and gpu_names and gpu is not None and gpu not in gpu_names:
        reason = f"it ran on {gpu!r}; this hardware has {' or '.join(gpu_names)}"
        judged = RunResult(status=Status.INVALID, reason=reason, cause="wrong_gpu")
    rank0 = gathering.ranks[0]
    times = measured_steps(rank0, measure)
    done = rank0.done or {}
    reached = ci95_rel(times) if times else None
    environment = gathering.environment
    return replace(
        judged,
        measured_by=("log" if "measured_by" in rank0.steps[-1] else "report") if rank0.steps else None,
        stopped=_text(done.get("stopped")) or _stopped_by(judged.status, stopped),
        ci_reached=None if reached is None else reached <= measure.target_ci95_rel,
        step_times_s=tuple(times),
        rank_step_times_s=extremes([measured_steps(rank, measure) for rank in gathering.ranks]),
        loss_final=_loss(rank0, measure),
        loss_step=measure.loss_step,
        hardware_flops_per_step=done.get("hardware_flops_per_step"),
        peak_mem_allocated_bytes=_largest(gathering, "allocated_bytes"),
        peak_mem_reserved_bytes=_largest(gathering, "reserved_bytes"),
        peak_mem_reserved_rank0_bytes=rank0.memory.get("reserved_bytes"),
        init_time_s=gathering.first_step - gathering.started if gathering.first_step else None,
        started_at=gathering.started_at,
        gpu_name=_text(environment.get("gpu_name")),
        torch_version=_text(environment.get("torch_version")),
        cuda_version=_text(environment.get("cuda_version")),
        nccl_version=_text(environment.get("nccl_version")),
        driver_version=_text(environment.get("driver_version")),
        omp_num_threads=environment.get("omp_num_threads"),
        probe=gathering.probe,
        evidence={} if judged.status == Status.OK else evidence(gathering),
    )


def _stopped_by(status: Status, stopped: Overdue | None) -> str | None:
    """Why the measuring of an ok run ended, when it did not say so itself."""
    if status != Status.OK:
        return None
    return (stopped and stopped.stopped) or "program"


def _loss(rank: RankStory, measure: Measure) -> float | None:
    if len(rank.steps) < measure.loss_step:
        return None
    loss = rank.steps[measure.loss_step - 1].get("loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _largest(gathering: Gathering, name: str) -> int | None:
    values = [r.memory[name] for r in gathering.ranks if r.memory.get(name) is not None]
    return max((int(v) for v in values), default=None)


def evidence(gathering: Gathering) -> dict[str, Any]:
    """Exit codes, phases and last words of the ranks, for `sweep show`."""
    return {
        "ranks": [
            {
                "rank": i,
                "phase": r.phase,
                "microbatches": r.microbatches,
                "code": r.code,
                "killed_by_us": r.killed_by_us,
                "error": r.error and str(r.error.get("message"))[:MESSAGE_CHARS],
                "last_line": last_line(r.tail) if r.tail and r.code else None,
            }
            for i, r in enumerate(gathering.ranks)
        ]
    }
