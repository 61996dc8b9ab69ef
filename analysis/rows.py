"""Makes the result rows of one sweep: one for every attempt and for every candidate without an attempt."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from statistics import median
from typing import Any

from ultrabench.analysis.schema import MODEL, RESULTS_SCHEMA_VERSION
from ultrabench.device_rates import bandwidths, summary
from ultrabench.errors import ConfigError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import RunSpec
from ultrabench.step_time import ci95_rel
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, AttemptState, SweepState, final_attempts, fold
from ultrabench.store.sweep_json import SweepJson, read_sweep_json
from ultrabench.sweep.plan_table import read_rows, runs_of, shapes_of
from ultrabench.sweep.running.attempts import left_out, skipped_reason
from ultrabench.sweep.running.losses import with_loss_outliers
from ultrabench.sweep.running.outliers import control_times, impossible, suspect_attempts

Row = dict[str, Any]
"""Column name -> value; an absent column is null."""

Warn = Callable[[str], None]

FLOPS_FORMULA = "matmul-v1"
"""Name of the formula that counts the FLOPs of a token; docs/results-schema.md explains it."""

_PLANNED = ("run_id", "model", "nodes", "gpus_per_node", "gpus", "gbs", "seq_len", *AXES)
_PREDICTED = {
    "predicted_step_time_s": "step_time_s",
    "predicted_peak_mem_bytes": "peak_mem_bytes",
    "p_oom": "p_oom",
}
"""Column -> name of the same value in the prediction that a claim holds."""
_OF_TRAINING = frozenset({"gbs", "seq_len", "recompute", "compile", *MODEL, *AXES, *_PREDICTED})
"""Columns that are null for runs that only measure devices and links; such runs are not ranked."""
_MEASURED = (
    "env_id", "gpu_name", "reason", "cause", "fingerprint", "confirmed", "stopped", "measured_by", "ci_reached",
    "loss_final", "sm_clock_hz",
    "peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes",
    "init_time_s", "duration_s", "torch_version", "cuda_version", "nccl_version", "driver_version",
)  # fmt: skip


def sweep_rows(folder: SweepFolder, warn: Warn) -> list[Row]:
    """The rows of a sweep, finished or not: runs of the plan in its order, then runs no longer in the plan.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep = read_sweep_json(folder)
    plan = _read_plan(folder, warn)
    state = fold(read_journal(folder.journal, warn))
    rows = _rows(sweep, plan, state, warn)
    if sweep.kernel.kind == "probe":
        return [{k: v for k, v in row.items() if k not in _OF_TRAINING} for row in rows]
    return list(rows)


def _read_plan(folder: SweepFolder, warn: Warn) -> list[Row]:
    if not folder.plan.exists():
        warn(f"{folder.name}: no plan.parquet; candidates that were never attempted are missing")
        return []
    return read_rows(folder.plan)


def _rows(sweep: SweepJson, plan: list[Row], told: SweepState, warn: Warn) -> Iterator[Row]:
    state = with_loss_outliers(told)
    attempts: dict[str, list[AttemptState]] = defaultdict(list)
    for key, attempt in sorted(state.attempts.items()):
        attempts[key.run_id].append(attempt)
    final = {attempt.key for attempt in final_attempts(state).values()}
    control, suspects = control_times(state), suspect_attempts(state, device=sweep.hardware.device)
    shapes = shapes_of(sweep, state)
    dominated = left_out(runs_of(sweep, (row for row in plan if row["model"] in shapes), state), state)

    def outcome(base: Row, attempt: AttemptState, shape: ModelShape | None) -> Row:
        row = _attempted(base, attempt, state, attempt.key in final)
        # A run that is invalid only because of its loss keeps the speeds that its agent measured.
        row |= _speed(sweep, row, told.attempts[attempt.key].result, shape)
        return _marked(row, control, suspects.get(attempt.key))

    for candidate in plan:
        shape = shapes.get(candidate["model"])
        base = _base(sweep, sweep.kernel, {k: candidate.get(k) for k in (*_PLANNED, *_PREDICTED)}, shape)
        tried = attempts.pop(candidate["run_id"], [])
        if not tried:
            yield {**base, **_not_attempted(candidate, dominated.get(candidate["run_id"]))}
        for attempt in tried:
            yield outcome(base, attempt, shape)
    for run_id, tried in sorted(attempts.items()):
        for attempt in tried:
            base, shape = _claimed(sweep, attempt, warn)
            yield outcome(base | {"run_id": run_id}, attempt, shape)


def _marked(row: Row, control: dict[str, float], doubt: str | None) -> Row:
    """Adds to a row its speed relative to the control layout, and the reasons why it is suspect, if any."""
    time_s, base_s = row.get("step_time_s"), control.get(row.get("allocation") or "")
    row["control_ratio"] = base_s / time_s if time_s and base_s else None
    row["suspect"] = "; ".join(filter(None, (doubt, impossible(row.get("mfu"))))) or None
    return row


def _base(sweep: SweepJson, kernel: KernelConfig, place: Row, shape: ModelShape | None) -> Row:
    """The columns that all attempts of a run share.

    Args:
        place: run_id, model, nodes, batch and layout of the run, as far as they are known.
    """
    peak = sweep.peak(place["nodes"], kernel.precision) if place else None
    return {
        "schema_version": RESULTS_SCHEMA_VERSION,
        "sweep": sweep.sweep,
        "cluster": sweep.cluster,
        "hardware": sweep.hardware.name,
        "kernel": kernel.name,
        "kernel_digest": sweep.kernel_digest,
        "recompute": kernel.recompute,
        "precision": kernel.precision,
        "compile": kernel.compile,
        "git_commit": sweep.provenance.get("git_commit"),
        "peak_flops_per_s": peak and peak.flops_per_s,
        "peak_source": peak and peak.source,
        **place,
        **({} if shape is None else {k: getattr(shape, k) for k in MODEL if k != "model"}),
    }


def _not_attempted(candidate: Row, dominated_by: str | None) -> Row:
    """The status columns of a candidate without an attempt: rejected, skipped, or null while it waits."""
    if dominated_by is not None:
        reason = skipped_reason(dominated_by)
        candidate = candidate | {"decision": "skipped", "reason": reason, "dominated_by": dominated_by}
    if candidate.get("decision") not in (Status.REJECTED, Status.SKIPPED):
        return {"status": None, "is_final": True}
    told = {k: candidate.get(k) for k in ("rule", "reason", "dominated_by")}
    return {"status": candidate["decision"], "is_final": True} | told


def _claimed(sweep: SweepJson, attempt: AttemptState, warn: Warn) -> tuple[Row, ModelShape | None]:
    """The shared columns of a run that is not in the plan, from its claim in the journal, and its model."""
    try:
        spec = from_dict(RunSpec, attempt.spec or {})
    except ConfigError as error:
        warn(f"attempt {attempt.key} is not in the plan and its claim cannot be read: {error}")
        return _base(sweep, sweep.kernel, {}, None), None
    place = {k: getattr(spec.layout, k) for k in AXES}
    place |= {"model": spec.shape.name, "seq_len": spec.workload.seq_len, "gbs": spec.workload.gbs}
    place |= {"nodes": spec.nodes, "gpus_per_node": spec.gpus_per_node, "gpus": spec.layout.world_size}
    return _base(sweep, spec.kernel, place, spec.shape), spec.shape


def _attempted(base: Row, attempt: AttemptState, state: SweepState, final: bool) -> Row:
    """The row of one attempt without its speeds; it has no status while there is no result."""
    _, repeat, number = attempt.key
    row = base | {"repeat": repeat, "attempt": number, "is_final": final}
    row["allocation"] = attempt.allocation
    for column, name in _PREDICTED.items():
        if attempt.predicted.get(name) is not None:
            row[column] = attempt.predicted[name]
    allocation = state.allocations.get(attempt.allocation or "")
    if allocation is not None:
        row |= _circumstances(allocation)
    told = ((allocation and allocation.job) or {}).get("job_id")
    row["job_id"] = attempt.job.job_id if attempt.job else None if told is None else str(told)
    return row if attempt.result is None else row | _measured(attempt.result, base.get("gpus"))


def _circumstances(allocation: AllocationState) -> Row:
    """Columns of the allocation: rates in its preflight, its commit of ultrabench, and its control layout."""
    found = allocation.preflight
    nodes = found.get("nodes")
    first = nodes[0] if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict) else {}
    probe = found.get("probe")
    row: Row = summary(probe) if isinstance(probe, dict) else {}
    commit = {"git_commit": first["git_commit"]} if isinstance(first.get("git_commit"), str) else {}
    return {k: v for k, v in (row | commit | {"control": allocation.control}).items() if v is not None}


def _measured(result: RunResult, gpus: int | None) -> Row:
    row: Row = {k: getattr(result, k) for k in _MEASURED}
    row["status"] = result.status.value
    if result.probe:
        row |= {k: v for k, v in summary(result.probe).items() if v is not None}
        row["bandwidths"] = bandwidths(result.probe)
    row["hostnames"], row["suspect_hosts"] = list(result.hostnames) or None, list(result.suspects) or None
    if result.sm_clock_hz is not None or result.throttled is not None:
        row["throttled"] = result.throttled is not None
    if result.kernel_digest is not None:
        row["kernel_digest"] = result.kernel_digest
    if result.started_at is not None:
        row["started_at"] = datetime.fromtimestamp(result.started_at, UTC)
    if result.duration_s is not None and gpus is not None:
        row["gpu_hours"] = result.duration_s * gpus / 3600
    return row


def _speed(sweep: SweepJson, row: Row, result: RunResult | None, shape: ModelShape | None) -> Row:
    """The columns from `step_time_s` to `hfu` of an ok result with measured steps; empty for other results.

    mfu = FLOPs of a token * tokens_per_s_per_gpu / peak. A column is absent where its inputs are unknown.
    """
    gpus = row.get("gpus")
    if result is None or result.status != Status.OK or gpus is None or not result.step_times_s:
        return {}
    step_time_s, peak = median(result.step_times_s), sweep.peak(row["nodes"], row["precision"])
    tokens_per_s = row["gbs"] * row["seq_len"] / step_time_s
    out: Row = {
        "step_time_s": step_time_s,
        "step_times_s": list(result.step_times_s),
        "step_time_ci95_rel": ci95_rel(result.step_times_s),
        "num_steps_measured": len(result.step_times_s),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / gpus,
    }
    if shape is not None:
        rate = shape.flops_per_token(row["seq_len"], FLOPS_FORMULA) * tokens_per_s / gpus
        out |= {"model_flops_per_s_per_gpu": rate, "flops_formula": FLOPS_FORMULA}
        out["mfu"] = rate / peak.flops_per_s if peak else None
    if result.hardware_flops_per_step is not None and peak is not None:
        out["hfu"] = result.hardware_flops_per_step / step_time_s / gpus / peak.flops_per_s
    return out
