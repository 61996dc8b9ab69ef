"""How an attempt ended and why, by the reports, exit codes and logs of its ranks.

It finds how every rank failed, what that says about memory, and which failure is the root of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any, NamedTuple

from ultrabench.agent.diagnose.families import cause_by_text
from ultrabench.agent.diagnose.findings import (
    Finding,
    cause_by_exit,
    findings,
    fingerprint,
    has_filled_gpu,
    has_reached_limit,
)
from ultrabench.agent.diagnose.log_lines import quoted
from ultrabench.agent.diagnose.rank_cause import last_line
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME
from ultrabench.agent.diagnose.suspects import NO_EVIDENCE_ABOUT_HOSTS, host_evidence
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.errors import counted
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.log_lines import Sighting, split_log
from ultrabench.log_patterns import TRY_LOG, compile_pattern, misread_reason, nearest_lines
from ultrabench.log_steps import LoggedStep, log_doubts
from ultrabench.measure import Measure
from ultrabench.model_flops import nearest_number
from ultrabench.partial_step import (
    UNKNOWN_DEPARTURE,
    PartTimes,
    extrapolation_error_rel,
    pooled,
    turns_ci95_rel,
    two_starts_error_rel,
    two_starts_times,
)
from ultrabench.rank_report import CHECKPOINT_NUMBERS
from ultrabench.result import NODE_FAILURE, RESULT_COLUMNS, SLOWER, UNMEASURED, RunResult, Status
from ultrabench.run import Task, steps_asked, words_in
from ultrabench.step_time import extreme_medians_s, with_error
from ultrabench.store.kernel_secrets import redact_env

MAX_MESSAGE_CHARS = 1000
"""Longest error message of a rank, in characters, that is kept in the journal."""
MEMORY_EXCESS_SHARE = 0.02
"""Share by which a device may have more memory than its configuration says; devices of one name differ by less."""

Columns = dict[str, Any]
"""Field of a RunResult -> its value."""
_STOPPED_EARLY_TEXT = "the run was stopped early because it was slower; measure.race=null never does this"


class Outage(NamedTuple):
    """The loss of a node during an attempt."""

    host: str
    reason: str
    cause: str = NODE_FAILURE
    """NODE_FAILURE if the node itself has said why, AGENT_GONE if only its agent is silent."""


def classify(
    progress: AttemptProgress, task: Task, agent_end: RunResult | None, outage: Outage | None = None
) -> RunResult:
    """The result of an attempt whose ranks are all gone.

    The program's own result counts first, whatever its log says; then the failures that ranks reported,
    then what the agent decided, then exit codes and logs. Among the ranks a cause comes before its
    consequences; a communication error is last, since the peers of any dead rank report one.

    Args:
        agent_end: why ultrabench ended the ranks; None if they ended by themselves.
        outage: which node was lost and why; None if none was.
    """
    measure, result = task.measure, _diagnosis(progress, task, agent_end, outage)
    has_no_steps = result.cause in (UNMEASURED, "time_limit") and not progress.launch_problem
    if has_no_steps and (hint := _step_line_hint(progress, task)):
        result = replace(result, reason=f"{result.reason}; {hint}")
    environment, rank0, done_line = progress.environment, progress.ranks[0], progress.ranks[0].done_line
    reporter = _with_log_values(progress)
    gpu_name, expected_names = environment.get("gpu_name"), () if task.probe else task.gpu_names
    if result.status == Status.OK and expected_names and gpu_name not in (None, *expected_names):
        result = _invalid_result("wrong_gpu", f"it ran on {gpu_name!r}, not on {' or '.join(expected_names)}")
    step_times_s = step_times_of(reporter, task)
    reported_mfu = median(reporter.mfus[-len(step_times_s) :]) if step_times_s and reporter.mfus else None
    if result.status == Status.OK and (misread_text := _misread_text(progress, task, reported_mfu)):
        result = _invalid_result(UNMEASURED, misread_text)
    arrival_error_s = _arrival_error_s(reporter, measure)
    columns_of_parts = _part_columns(reporter, task)
    step_time_ci95_rel = RunResult(
        status=result.status,
        step_times_s=tuple(step_times_s),
        screened=task.is_screened or None,
        arrival_error_s=arrival_error_s,
        **columns_of_parts,
    ).step_time_ci95_rel
    keys = ("gpu_name", "torch_version", "cuda_version", "nccl_version", "driver_version", "omp_num_threads")
    environment_columns: Columns = {key: environment.get(key) for key in keys}
    is_ok, evidence = result.status == Status.OK, agent_end.evidence if agent_end else {}
    return replace(
        result,
        **environment_columns,
        **columns_of_parts,
        variables=redact_env(environment.get("variables") or {})[0],
        measured_by=reporter.steps[-1].get("measured_by", "report") if reporter.steps else None,
        arrival_error_s=arrival_error_s,
        log_doubts=_log_doubts(reporter, task) if result.status == Status.OK else {},
        source_mfu=None if task.part_start else reported_mfu,
        source_num_params=_printed_params(progress.ranks, task),
        source_flops_per_token=next(filter(None, (r.flops_per_token for r in progress.ranks)), None),
        stopped=done_line.get("stopped") or ((result.stopped or "program") if is_ok else None),
        ci_reached=None if step_time_ci95_rel is None else step_time_ci95_rel <= measure.target_ci95_rel,
        step_times_s=tuple(step_times_s),
        screened=task.is_screened or None,
        rank_step_times_s=extreme_medians_s([rank.measured_seconds(measure) for rank in progress.ranks]),
        loss_final=_compared_loss(reporter, measure),
        loss_step=measure.loss_step,
        hardware_flops_per_step=done_line.get("hardware_flops_per_step"),
        ran=rank0.options_read_back,
        gradient_norm=reporter.steps[0].get("gradient_norm") if reporter.steps else None,
        attention=rank0.options_read_back.get("attention"),
        peak_mem_reserved_bytes=max(filter(None, (r.reserved_bytes for r in progress.ranks)), default=None),
        peak_mem_reserved_rank0_bytes=rank0.reserved_bytes,
        **_reported_numbers(progress.ranks),
        **_checkpoint_columns(progress, task, agent_end or result, outage),
        init_time_s=progress.first_step_s - progress.started_s if progress.first_step_s else None,
        started_at=progress.started_at,
        probe=progress.probe_rates,
        evidence={} if is_ok else {"ranks": [_rank_evidence(rank) for rank in progress.ranks], **evidence},
    )


def without_unlike(result: RunResult, task: Task) -> RunResult:
    """The result without what parts of a step measure, but whole steps need not have.

    Losses and gradients of another batch are not compared, the mean power of a part has another share of waiting, and
    the peak of the memory stays only where the formulas say that it is that of whole steps.
    """
    if task.slice is None or task.few_steps:
        return result
    blanks: Columns = dict.fromkeys(("loss_final", "gradient_norm", "power_w_mean"))
    if not task.slice.keeps_memory:
        memory_columns = (name for name in RESULT_COLUMNS if name.startswith("peak_mem_"))
        blanks |= dict.fromkeys((*memory_columns, "allocator_retries"))
    return replace(result, **blanks)


def step_times_of(rank: RankProgress, task: Task) -> list[float]:
    """Seconds of the measured steps of a rank; those of the whole step by each turn where parts are measured.

    A program that starts twice has turns from the first measured step of its second start on.
    """
    if task.part_start is None:
        return rank.measured_step_times_s(task.measure)
    parts = _parts_of(rank, task)
    return parts.whole_step_times_s if parts else []


def _parts_of(rank: RankProgress, task: Task) -> PartTimes | None:
    """The parts of steps that a rank has measured; None where there are none, and before the first turn."""
    if task.slice is None or task.part_start is None:
        return rank.part_times(task.measure) if task.slice else None
    second_times_s = rank.measured_seconds(task.measure)
    first_times_s, gas = task.part_start.first_times_s, task.spec.layout.gas
    return two_starts_times(task.slice, first_times_s, second_times_s, gas) if first_times_s else None


def of_both_starts(first: RunResult, second: RunResult, task: Task) -> RunResult:
    """The result of a program that has started twice, from the ok results of both starts.

    The second one has the times of whole steps, by the steps of both, and the memory of the larger steps.
    """
    assert task.slice is not None
    weight = task.slice.steps_beyond(task.spec.layout.gas)
    foreign_loads = [r.foreign_load for r in (first, second) if r.foreign_load is not None]
    init_times_s = [r.init_time_s for r in (first, second) if r.init_time_s is not None]
    arrival_error_s = (1 + weight) * second.arrival_error_s + weight * first.arrival_error_s
    parts_ci95_rel = second.parts_ci95_rel
    if parts_ci95_rel is not None:
        parts_ci95_rel += arrival_error_s / median(second.step_times_s)
    result = replace(
        second,
        arrival_error_s=arrival_error_s,
        parts_ci95_rel=parts_ci95_rel,
        log_doubts=first.log_doubts | second.log_doubts,
        started_at=first.started_at,
        init_time_s=fmean(init_times_s) if init_times_s else None,
        duration_s=(first.duration_s or 0.0) + (second.duration_s or 0.0),
        throttled=second.throttled or first.throttled,
        foreign_load=max(foreign_loads, default=None),
        foreign_gpu_processes=second.foreign_gpu_processes or first.foreign_gpu_processes,
    )
    ci95_rel_of_both = result.step_time_ci95_rel
    is_reached = None if ci95_rel_of_both is None else ci95_rel_of_both <= task.measure.target_ci95_rel
    return replace(result, ci_reached=is_reached)


def _part_columns(reporter: RankProgress, task: Task) -> Columns:
    """The columns of a run of which parts of steps are measured; none where whole steps alone are."""
    parts = _parts_of(reporter, task)
    if task.slice is None or parts is None:
        return {}
    line_departure = pooled((parts.departure, task.slice.departure))
    starts_error_rel = 0.0
    if task.slice.two_starts:
        line_departure = line_departure or UNKNOWN_DEPARTURE
        starts_error_rel = two_starts_error_rel(parts.slice, parts.turns, parts.gas)
    sizes = sorted({size for turn in parts.turns for size in turn})
    beside_whole: Columns = {"parts_step_time_s": median(parts.whole_step_times_s)}
    return {
        **(beside_whole if task.few_steps else {"measured_gas": parts.slice.text}),
        "parts_ci95_rel": turns_ci95_rel(parts.slice, parts.turns, parts.gas),
        "departure": parts.departure and parts.departure.value,
        "departure_error": parts.departure and parts.departure.error,
        "extrapolation_error_rel": with_error(
            extrapolation_error_rel(parts.slice, parts.turns, parts.gas, line_departure), starts_error_rel
        ),
        "part_times_s": {
            str(size): median(turn[size] for turn in parts.turns if size in turn) for size in sizes
        },
    }


def _diagnosis(
    progress: AttemptProgress, task: Task, agent_end: RunResult | None, outage: Outage | None
) -> RunResult:
    """The status, reason and cause, without the measured values; the arguments are those of `classify`."""
    if progress.fault is not None:
        return _invalid_result("bad_report", progress.fault)
    if progress.launch_problem is not None:
        return _invalid_result(UNMEASURED, progress.launch_problem)
    reporter = _with_log_values(progress)
    bad_loss_text = _bad_loss_text(reporter)
    # Our own kernel always reports that it is done; a program of the user may just exit with 0.
    if all(rank.done_line or (rank.ended_well and not task.forked) for rank in progress.ranks):
        if bad_loss_text:
            return _invalid_result("non_finite_loss", bad_loss_text)
        misread_text = _misread_steps_text(progress.ranks)
        problem = None if progress.probe_rates else misread_text or _unmeasured_text(reporter, task.measure)
        return _invalid_result(UNMEASURED, problem) if problem else RunResult(status=Status.OK)
    rank_findings = findings(progress.ranks)
    root = rank_findings[0] if rank_findings else None
    decisive_statuses = (Status.OOM, Status.INVALID) if outage else frozenset(Status) - {Status.COMM_ERROR}
    if root and root.is_certain and root.cause.status in decisive_statuses:
        return _failed_result(rank_findings, progress)
    if bad_loss_text:
        return _invalid_result("non_finite_loss", bad_loss_text)
    if outage is not None:
        hosts = (outage.host,)
        return RunResult(
            status=Status.NODE_FAIL,
            reason=outage.reason,
            cause=outage.cause,
            suspect_hosts=hosts,
            began_on=hosts,
        )
    if agent_end and (agent_end.status != Status.HANG or not root or root.cause.status == Status.COMM_ERROR):
        return agent_end
    if root is not None:
        return _failed_result(rank_findings, progress)
    return RunResult(status=Status.CRASH, reason="the ranks ended without an exit code", cause="exit_code")


def _with_log_values(progress: AttemptProgress) -> RankProgress:
    """The reporter of an attempt, with the losses and MFU of the first log that shows any if its own log has none."""
    reporter = progress.reporter
    if not (reporter.losses and reporter.mfus):
        losses = next((rank.losses for rank in (reporter, *progress.ranks) if rank.losses), [])
        mfus = next((rank.mfus for rank in (reporter, *progress.ranks) if rank.mfus), [])
        reporter = replace(reporter, losses=losses, mfus=mfus)
    return reporter


def _invalid_result(cause: str, reason: str) -> RunResult:
    return RunResult(status=Status.INVALID, reason=reason, cause=cause)


def _failed_result(rank_findings: list[Finding], progress: AttemptProgress) -> RunResult:
    """The result that follows from the rank that failed first."""
    root = rank_findings[0]
    rank, cause, line = root.rank, root.cause, root.line
    evidence = host_evidence(rank_findings, progress.ranks, progress.address_book)
    check_own_memory = {"cuda_oom": has_filled_gpu, "cpu_oom": has_reached_limit}.get(cause.name)
    failure_id = fingerprint(cause.name, rank.phase, line, root.traceback, progress.hosts)
    confirmed = (
        bool(check_own_memory and root.ends_log and check_own_memory(rank, root.text))
        if cause.status == Status.OOM
        else None
    )
    if confirmed or cause.name == "host_oom":
        evidence = NO_EVIDENCE_ABOUT_HOSTS  # the run needs more memory than it may use, on any node
    num_processes_alike = sum(finding.cause is cause for finding in rank_findings)
    num_processes = sum(not rank.starter for rank in progress.ranks)
    status, is_same_everywhere = cause.status, num_processes_alike == num_processes
    if status == Status.NODE_FAIL and not cause.proves_fault and is_same_everywhere:
        status = Status.CRASH  # a program that hides its GPUs finds none on any node
    return RunResult(
        status=status,
        reason=f"{cause.description}, {root.rank_text}: {line}",
        cause=cause.name,
        fingerprint=failure_id if cause.is_specific else None,
        confirmed=confirmed,
        **evidence._asdict(),
    )


def _unmeasured_text(rank: RankProgress, measure: Measure) -> str | None:
    """Why the steps of a program that ended well cannot be used as a measurement; None if they can."""
    for step_number, step in enumerate(rank.steps, start=1):
        if step.get("seconds", 0) <= 0:
            return f"step {step_number} was reported with {step.get('seconds', 'no')} seconds"
    if rank.measured_step_times_s(measure):
        return None
    steps_text = f"only warm-up ({counted(len(rank.steps), 'step')})" if rank.steps else "no step times"
    repeats_text = (
        f"; {counted(rank.num_repeats, 'line')} of its log repeat a step" if rank.num_repeats else ""
    )
    return f"the program exited with code 0 but reported {steps_text}{repeats_text}"


def _misread_steps_text(ranks: Sequence[RankProgress]) -> str | None:
    """Which pattern of the kernel takes a number of a log for another quantity; None if none does."""
    rank = next((rank for rank in ranks if rank.misread_text), None)
    return f"a pattern misreads the log: {rank.misread_text}; to test it: {TRY_LOG}" if rank else None


def _arrival_error_s(rank: RankProgress, measure: Measure) -> float:
    """How much the interval of the step time must widen, since lines of a log are seen later than they were written.

    Each step may be shorter or longer than measured by its own error. The result is 0 if nothing was timed by arrival.
    """
    steps = [s for s in rank.measured_steps(measure) if "arrival_error_s" in s]
    if not steps:
        return 0.0
    times_s: list[float] = [s["seconds"] for s in steps]
    errors_s: list[float] = [s["arrival_error_s"] for s in steps]
    low_median_s, high_median_s = (
        median(time_s + sign * error_s for time_s, error_s in zip(times_s, errors_s, strict=True))
        for sign in (-1, 1)
    )
    return max(high_median_s - median(times_s), median(times_s) - low_median_s)


def _log_doubts(rank: RankProgress, task: Task) -> dict[str, str]:
    """The doubts about steps that were read from a log; none if they were reported."""
    steps = [
        LoggedStep(
            s["seconds"], s["count"], Sighting(s["arrived_s"], s["seen_within_s"]), s.get("together", 1)
        )
        for s in rank.measured_steps(task.measure)
        if "arrived_s" in s
    ]
    is_asked = "steps" in words_in(task.spec.kernel, with_tables=False)
    return log_doubts(
        steps,
        by_arrival=task.spec.kernel.times_by_arrival,
        gas=task.started_spec.layout.gas,
        num_lines=rank.num_steps,
        num_unread=rank.num_unread,
        num_steps_asked=steps_asked(task.spec.kernel, task.measure) if is_asked else None,
        lines_per_step=rank.lines_per_step,
        uncounted_stride=rank.uncounted_stride,
        are_of_one_step=rank.are_of_one_step,
        num_parts=rank.num_parts,
    )


def _step_line_hint(progress: AttemptProgress, task: Task) -> str | None:
    """How to make the steps of a program known, with lines of its log; None if it reported some."""
    kernel, ranks = task.spec.kernel, progress.ranks
    if progress.reporter.steps or task.forked or _misread_steps_text(ranks):
        return None
    if num_untimed := max(rank.num_untimed for rank in ranks):
        lines_text = f"{num_untimed + 1} lines of kernel.step_line arrived at once"
        return f"{lines_text}, so that they time nothing; make the program flush each line, or print times"
    if kernel.step_line is None:
        return "write them to ULTRABENCH_REPORT, or set kernel.step_line to find them in the log"
    logging_rank, logs = task.spec.logging_rank, [rank for rank in ranks if not rank.starter]
    searched_logs = logs if logging_rank is None else [ranks[logging_rank].starter or ranks[logging_rank]]
    place_text = (
        f"the log of {_log_text(searched_logs[0], ranks)}"
        if len(searched_logs) == 1
        else "the log of any rank"
    )
    problem = f"kernel.step_line matches no line in {place_text}"
    pattern = compile_pattern("step_line", kernel.step_line)
    for rank in logs:
        num_lines = sum(bool(pattern.search(line.text)) for line in split_log(rank.tail))
        if num_lines and rank not in searched_logs:
            setting = f"kernel.step_rank={kernel.step_rank}"
            other_text = f"{counted(num_lines, 'line')} in the end of the log of {_log_text(rank, ranks)}"
            return f"{problem} ({setting}), but {other_text}: use kernel.step_rank=any"
    all_nearest = ((rank, nearest_lines(rank.tail, kernel.step_line)) for rank in searched_logs)
    rank, nearest = next((pair for pair in all_nearest if pair[1]), (searched_logs[0], []))
    excerpt = " | ".join(map(quoted, nearest)) or "(no line with a number)"
    of_rank_text = f" in that of {_log_text(rank, ranks)}" if nearest and len(searched_logs) > 1 else ""
    return f"{problem}; nearest{of_rank_text}: {excerpt}; to test a pattern: {TRY_LOG}"


def _log_text(rank: RankProgress, ranks: Sequence[RankProgress]) -> str:
    """Whose log the log of a rank is: its own, or that of its host where one command has started the ranks."""
    return rank.host if any(other.starter is rank for other in ranks) else f"rank {rank.number}"


def _misread_text(progress: AttemptProgress, task: Task, reported_mfu: float | None) -> str | None:
    """Which pattern of the kernel found an impossible value in a log; None if none did."""
    has_gpus = DEVICE_KINDS[task.device].has_gpus
    max_bytes = (1 + MEMORY_EXCESS_SHARE) * task.rank_mem_bytes if has_gpus else math.inf
    observed_values = [("memory_line", rank, rank.memory_report) for rank in progress.ranks]
    if reported_mfu is not None:
        mfu_rank = next(rank for rank in (progress.reporter, *progress.ranks) if rank.mfus)
        observed_values.append(("mfu_line", mfu_rank, {"mfu": reported_mfu}))
    for option, rank, values in observed_values:
        if getattr(task.spec.kernel, option) and (reason := misread_reason(option, values, max_bytes)):
            return f"kernel.{option} misreads the log of rank {rank.number}: {reason}; to test it: {TRY_LOG}"
    return None


def _bad_loss_text(rank: RankProgress) -> str | None:
    """Which loss of a rank is not finite; None if all are."""
    for step_number, step in enumerate(rank.steps, start=1):
        if not math.isfinite(loss := step.get("loss", 0.0)):
            return f"loss is {loss} at step {step.get('step', step_number)}"
    for line_number, line in enumerate(rank.losses, start=1):
        if not math.isfinite(line["loss"]):
            place_text = (
                f"step {line['step']:g}" if "step" in line else f"line {line_number} of kernel.loss_line"
            )
            return f"loss is {line['loss']} at {place_text}"
    return None


def _compared_loss(rank: RankProgress, measure: Measure) -> float | None:
    """The loss at the step at which layouts are compared; None if it is unknown or not finite."""
    if rank.losses:
        loss = _loss_of_lines(rank.losses, measure.loss_step)
    else:
        ends = accumulate(step.get("count", 1) for step in rank.steps)
        steps = (step for end, step in zip(ends, rank.steps, strict=True) if end >= measure.loss_step)
        loss = next(steps, {}).get("loss")
    return loss if loss is not None and math.isfinite(loss) else None


def _loss_of_lines(losses: Sequence[dict[str, Any]], loss_step: int) -> float | None:
    """The loss that lines of kernel.loss_line show for this step; of lines with numbers, the first one from it on."""
    if "step" in losses[0]:
        return next((line["loss"] for line in losses if line.get("step", 0) >= loss_step), None)
    return losses[loss_step - 1]["loss"] if len(losses) >= loss_step else None


def _printed_params(ranks: Sequence[RankProgress], task: Task) -> int | None:
    """The number of parameters that the logs show; the largest where a pattern of the user reads them."""
    kernel, shape = task.spec.kernel, task.spec.shape
    printed_params = [number for rank in ranks for number in rank.printed_params]
    if kernel.reads_params:
        return max(printed_params, default=None)
    return nearest_number(printed_params, kernel.number("params") or shape.num_params)


def _reported_numbers(ranks: Sequence[RankProgress]) -> Columns:
    """The fields whose columns name the report that has them: the largest number of all ranks,
    None where none has it.
    """
    columns = Columns()
    for name, column in RESULT_COLUMNS.items():
        if column.report:
            lines = (rank.reported_values(column.report.event) for rank in ranks)
            numbers = [line[column.report.field] for line in lines if column.report.field in line]
            columns[name] = max(numbers, default=None)
    return columns


def _checkpoint_columns(
    progress: AttemptProgress, task: Task, end: RunResult, outage: Outage | None
) -> Columns:
    """The columns of a checkpoint: its numbers, or why a run that was asked for one has none.

    Args:
        end: how the run ended.
    """
    if task.checkpoint and end.stopped == SLOWER:
        return {"checkpoint_cause": "stopped", "checkpoint_reason": _STOPPED_EARLY_TEXT}
    checkpoint_lines = [rank.checkpoint_line for rank in progress.ranks if rank.checkpoint_line]
    messages = [quoted(line["message"]) for line in checkpoint_lines if "message" in line]
    exit_causes = [cause_by_exit(rank) for rank in progress.ranks if rank.code and not rank.killed_by_us]
    cause, reason = end.cause or "stopped", end.reason or "the ranks ended before the checkpoint"
    if checkpoint_lines and not messages:
        return {f"checkpoint_{column}": checkpoint_lines[0].get(column) for column in CHECKPOINT_NUMBERS}
    # Without a `done` line the result of the run itself says what ended it.
    if not task.checkpoint or not progress.ranks[0].done_line:
        return {}
    if messages:
        cause, reason = (cause_by_text(messages[0]) or (CAUSE_BY_NAME["exception"], ""))[0].name, messages[0]
    elif outage:
        cause, reason = outage.cause, outage.reason
    elif exit_causes:
        cause, reason = exit_causes[0].cause.name, exit_causes[0].line
    return {"checkpoint_cause": cause, "checkpoint_reason": reason}


def _rank_evidence(rank: RankProgress) -> dict[str, Any]:
    """How a rank ended, its error and the last line of its log, for `sweep show`."""
    rank_facts = {name: getattr(rank, name) for name in ("phase", "microbatches", "code", "killed_by_us")}
    error_text = rank.error_line.get("message", "")[:MAX_MESSAGE_CHARS] if rank.error_line else None
    final_line = last_line(rank.tail) if rank.tail and rank.code else None
    return {"rank": rank.number, **rank_facts, "error": error_text, "last_line": final_line}
