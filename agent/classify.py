"""How an attempt ended, from evidence: what ranks reported, how they exited, what they logged."""

import math
import re
import signal
from typing import Any

from ultrabench.agent.deadline import Overdue
from ultrabench.agent.gathering import Gathering, RankStory
from ultrabench.measure import Measure
from ultrabench.result import RunResult, Status
from ultrabench.step_time import ci95_rel, extremes

OOM_TEXT = re.compile(
    r"OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: (?:can't|not enough)|"
    r"can't allocate memory|Cannot allocate memory|^MemoryError|std::bad_alloc",
    re.MULTILINE,
)
COMM_TEXT = re.compile(
    r"Connection (?:reset|closed|refused)|DistBackendError|DistNetworkError|NCCL error|"
    r"gloo.*(?:closed|reset|timed out)|Broken pipe",
    re.IGNORECASE,
)


def classify(
    gathering: Gathering,
    measure: Measure,
    *,
    stopped: Overdue | None,
    ended: str | None,
    gpu_names: tuple[str, ...] = (),
) -> RunResult:
    """The result of an attempt whose ranks are all gone.

    The program's own result comes first, then what we decided ourselves, then causes before their
    consequences: out of memory, an invalid number, a program's own error, a rank killed from
    outside, and only then a communication error, which the peers of any dying rank report.

    Args:
        stopped: the deadline for which the ranks were killed, if it was that.
        ended: why the allocation ended under the run, if it did.
        gpu_names: what the accelerators may call themselves; empty: anything.
    """
    status, reason = _judge(gathering, measure, stopped, ended)
    gpu = gathering.environment.get("gpu_name")
    if status == Status.OK and gpu_names and gpu is not None and gpu not in gpu_names:
        status, reason = Status.INVALID, f"it ran on {gpu!r}; this hardware has {' or '.join(gpu_names)}"
    rank0 = gathering.ranks[0]
    times = measured_steps(rank0, measure)
    done = rank0.done or {}
    reached = ci95_rel(times) if times else None
    environment = gathering.environment
    return RunResult(
        status=status,
        reason=reason,
        measured_by=("log" if "measured_by" in rank0.steps[-1] else "report") if rank0.steps else None,
        stopped=_text(done.get("stopped")) or _stopped_by(status, stopped),
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
        evidence={} if status == Status.OK else evidence(gathering),
    )


def _stopped_by(status: Status, stopped: Overdue | None) -> str | None:
    """Why the measuring of an ok run ended, when it did not say so itself."""
    if status != Status.OK:
        return None
    return "slower_than_best" if stopped is not None else "program"


def measured_steps(rank: RankStory, measure: Measure) -> list[float]:
    """Seconds of the measured steps; where a program does not mark them, all after warm-up."""
    marked = [s for s in rank.steps if "measured" in s]
    if marked:
        return [float(s["seconds"]) for s in marked if s["measured"] and "seconds" in s]
    return [float(s["seconds"]) for s in rank.steps[measure.warmup_steps :] if "seconds" in s]


def _judge(
    gathering: Gathering, measure: Measure, stopped: Overdue | None, ended: str | None
) -> tuple[Status, str | None]:
    ranks = gathering.ranks
    bad_loss = _non_finite(ranks[0])
    if all(_finished(rank) for rank in ranks):
        fault = bad_loss or _unmeasured(ranks[0], measure)
        return (Status.INVALID, fault) if fault else (Status.OK, None)
    for test in (_out_of_memory, _invalid):
        found = test(ranks)
        if found:
            return found
    if bad_loss:
        return Status.INVALID, bad_loss
    if ended is not None:
        return Status.CANCELLED, ended
    if stopped is not None:
        return stopped.status, stopped.reason
    return _failure(ranks)


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
    return rank.error is None and (rank.done is not None or rank.code == 0)


def _out_of_memory(ranks: list[RankStory]) -> tuple[Status, str] | None:
    for i, rank in enumerate(ranks):
        if rank.error and rank.error.get("kind") == "oom":
            return Status.OOM, f"rank {i}: {rank.error.get('message')}"
    for i, rank in enumerate(ranks):
        if rank.oom_killed:
            return Status.OOM, f"rank {i} was killed by the kernel, which was out of memory"
        if rank.error is None and rank.code not in (None, 0) and not rank.killed_by_us:
            line = _matching_line(rank.tail, OOM_TEXT)
            if line:
                return Status.OOM, f"rank {i}: {line}"
    return None


def _invalid(ranks: list[RankStory]) -> tuple[Status, str] | None:
    for i, rank in enumerate(ranks):
        if rank.error and rank.error.get("kind") == "non_finite":
            return Status.INVALID, f"rank {i}: {rank.error.get('message')}"
    return None


def _failure(ranks: list[RankStory]) -> tuple[Status, str]:
    """A crash, or a communication error when nothing else explains it."""
    for i, rank in enumerate(ranks):
        if rank.error and rank.error.get("kind") != "comm":
            return Status.CRASH, f"rank {i}: {rank.error.get('message')}"
    own = [(i, r) for i, r in enumerate(ranks) if not r.killed_by_us and r.code not in (None, 0)]
    for i, rank in own:
        if rank.code is not None and rank.code < 0 and rank.error is None:
            name = _signal_name(-rank.code)
            return Status.CRASH, f"rank {i} was killed by {name}, which ultrabench did not send"
    for i, rank in own:
        if rank.error is None and not COMM_TEXT.search(rank.tail):
            return Status.CRASH, f"rank {i} exited with code {rank.code}: {last_line(rank.tail)}"
    for i, rank in enumerate(ranks):
        if rank.error:
            return Status.COMM_ERROR, f"rank {i}: {rank.error.get('message')}"
    for i, rank in own:
        return Status.COMM_ERROR, f"rank {i}: {_matching_line(rank.tail, COMM_TEXT)}"
    return Status.CRASH, "the ranks vanished without an exit code"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _non_finite(rank: RankStory) -> str | None:
    for i, step in enumerate(rank.steps, start=1):
        loss = step.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            return f"loss is {loss} at step {step.get('step', i)}"
    return None


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


def _matching_line(text: str, pattern: re.Pattern[str]) -> str | None:
    for line in reversed(text.splitlines()):
        if pattern.search(line):
            return line.strip()[:300]
    return None


def last_line(text: str) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(empty log)"


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
                "error": (r.error or {}).get("message"),
                "last_line": last_line(r.tail) if r.tail and r.code else None,
            }
            for i, r in enumerate(gathering.ranks)
        ]
    }
