"""Makes the result rows of one sweep: one for every attempt and for every candidate without an attempt."""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from statistics import median
from typing import Any

from ultrabench.analysis.schema import MODEL, RESULTS_SCHEMA_VERSION, SCHEMA
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
from ultrabench.store.state import AllocationState, AttemptState, SweepState, final_attempts, fold, with_lost
from ultrabench.store.sweep_json import SweepJson, read_sweep_json
from ultrabench.sweep.plan_table import formula_of, place_of, read_rows, runs_of, shapes_of
from ultrabench.sweep.running.attempts import dominated_by, left_out, not_promising
from ultrabench.sweep.running.outliers import control_times, impossible, suspect_attempts, with_loss_outliers

Row = dict[str, Any]
"""Column name -> value; an absent column is null."""

Warn = Callable[[str], None]

_PREDICTED = ("predicted_step_time_s", "predicted_peak_mem_bytes", "p_oom")
"""Columns that a claim's prediction gives, where their names have no `predicted_`."""
_OF_TRAINING = frozenset({"zero_shards", "gbs", "seq_len", "compile", *MODEL, *AXES, *_PREDICTED})
"""Columns that are null for runs that only measure devices and links; such runs are not ranked."""
_SPEED_OR_OTHER_TYPE = {"step_times_s", "started_at", "throttled", "evidence"}
_MEASURED = {f.name for f in fields(RunResult)} & {*SCHEMA.names} - _SPEED_OR_OTHER_TYPE
"""Columns that are copied from a result."""


def sweep_rows(folder: SweepFolder, warn: Warn) -> list[Row]:
    """The rows of a sweep, finished or not: runs of the plan in its order, then runs no longer in the plan.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep = read_sweep_json(folder)
    if not folder.plan.exists():
        warn(f"{folder.name}: no plan.parquet; candidates that were never attempted are missing")
    plan = read_rows(folder.plan) if folder.plan.exists() else []
    state = fold(read_journal(folder.journal, warn))
    rows = _rows(sweep, plan, state, warn)
    if sweep.kernel.kind == "probe":
        return [{k: v for k, v in row.items() if k not in _OF_TRAINING} for row in rows]
    return list(rows)


def _rows(sweep: SweepJson, plan: list[Row], told: SweepState, warn: Warn) -> Iterator[Row]:
    state = with_loss_outliers(with_lost(told))
    attempts = state.by_run()
    final = {attempt.key for attempt in final_attempts(state).values()}
    circumstances = {name: _circumstances(allocation) for name, allocation in state.allocations.items()}
    control, suspects = control_times(state), suspect_attempts(state, device=sweep.hardware.device)
    shapes, formula = shapes_of(sweep, state), formula_of(sweep, state)
    runs = list(runs_of(sweep, (row for row in plan if row["model"] in shapes), state))
    dominated = left_out(runs, state)
    unpromising = not_promising((run for run in runs if run.run_id not in dominated), state)

    def outcome(base: Row, attempt: AttemptState, shape: ModelShape | None) -> Row:
        row = _attempted(base, attempt, circumstances.get(attempt.allocation or "", {}))
        row["is_final"] = attempt.key in final
        # A run that is invalid only because of its loss keeps the speeds that its agent measured.
        row |= _speed(row, told.attempts[attempt.key].result, shape, formula)
        time_s, control_s = row.get("step_time_s"), control.get(attempt.allocation or "")
        row["control_ratio"] = control_s / time_s if time_s and control_s else None
        doubts = (suspects.get(attempt.key), impossible(row.get("mfu")))
        row["suspect"] = "; ".join(filter(None, doubts)) or None
        return row

    # The rows of a cell differ only in their layouts.
    cell_of = functools.cache(lambda shape, **place: _base(sweep, sweep.kernel, place, shape))
    for candidate in plan:
        run_id, shape = candidate["run_id"], shapes.get(candidate["model"])
        base = cell_of(shape, nodes=candidate["nodes"], pp_schedule=candidate["pp_schedule"])
        base = {**base, **candidate, "rule": None, "reason": None}
        tried = attempts.pop(run_id, [])
        if not tried:
            yield base | _not_attempted(candidate, dominated.get(run_id), unpromising.get(run_id))
        for attempt in tried:
            yield outcome(base, attempt, shape)
    for attempt in (attempt for tried in attempts.values() for attempt in tried):
        base, shape = _claimed(sweep, attempt, warn)
        yield outcome(base, attempt, shape)


def _base(sweep: SweepJson, kernel: KernelConfig, place: Row, shape: ModelShape | None) -> Row:
    """The columns that all attempts of a run share.

    Args:
        place: model, nodes, batch and layout of the run, as far as they are known.
    """
    peak = sweep.peak(place["nodes"], kernel.precision) if place else None
    return {
        "schema_version": RESULTS_SCHEMA_VERSION,
        "sweep": sweep.sweep,
        "cluster": sweep.cluster,
        "hardware": sweep.hardware.name,
        "kernel": kernel.name,
        "kernel_version": str(kernel.version),
        "kernel_digest": sweep.kernel_digest,
        "precision": kernel.precision,
        "compile": kernel.compiles(place.get("pp_schedule")),
        "git_commit": sweep.provenance.get("git_commit"),
        "peak_flops_per_s": peak and peak.flops_per_s,
        "peak_source": peak and peak.source,
        **place,
        **_sizes(shape),
    }


@functools.cache
def _sizes(shape: ModelShape | None) -> Row:
    """The columns of a model's sizes."""
    return {} if shape is None else {k: getattr(shape, k) for k in MODEL if k != "model"}


def _not_attempted(candidate: Row, dominator: str | None, unpromising: str | None) -> Row:
    """The status columns of a candidate without an attempt: rejected, skipped, or null while it waits."""
    row: Row = {"status": None, "is_final": True}
    if dominator is not None:
        reason = dominated_by(dominator)
        return row | {"status": Status.SKIPPED.value, "reason": reason, "dominated_by": dominator}
    if unpromising is not None:
        return row | {"status": Status.SKIPPED.value, "reason": unpromising}
    if candidate["decision"] in (Status.REJECTED, Status.SKIPPED):
        row |= {"status": candidate["decision"], "rule": candidate["rule"], "reason": candidate["reason"]}
    return row


def _claimed(sweep: SweepJson, attempt: AttemptState, warn: Warn) -> tuple[Row, ModelShape | None]:
    """The shared columns of a run that is not in the plan, from its claim in the journal, and its model."""
    try:
        spec = from_dict(RunSpec, attempt.spec or {})
    except ConfigError as error:
        warn(f"attempt {attempt.key} is not in the plan and its claim cannot be read: {error}")
        return _base(sweep, sweep.kernel, {}, None), None
    return _base(sweep, spec.kernel, place_of(spec), spec.shape), spec.shape


def _attempted(base: Row, attempt: AttemptState, circumstances: Row) -> Row:
    """The row of one attempt without its speeds; it has no status while there is no result."""
    return {
        **base,
        **attempt.key._asdict(),
        "allocation": attempt.allocation,
        **_known({name: attempt.predicted.get(name.removeprefix("predicted_")) for name in _PREDICTED}),
        **circumstances,
        **({"job_id": attempt.job.job_id} if attempt.job else {}),
        **(_measured(attempt.result, base.get("gpus")) if attempt.result else {}),
    }


def _known(row: Row) -> Row:
    """The columns of a row whose values are known; no names of hosts are known where the list is empty."""
    return {column: value for column, value in row.items() if value not in (None, ())}


def _circumstances(allocation: AllocationState) -> Row:
    """Columns of the allocation: rates in its preflight, its commit of ultrabench, its job and its control layout."""
    found, job_id = allocation.preflight, (allocation.job or {}).get("job_id")
    nodes, probe = found.get("nodes"), found.get("probe")
    first = nodes[0] if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict) else {}
    row: Row = summary(probe) if isinstance(probe, dict) else {}
    commit = {"git_commit": first["git_commit"]} if isinstance(first.get("git_commit"), str) else {}
    job = {"job_id": None if job_id is None else str(job_id)}
    return _known(row | commit | job | {"control": allocation.control})


def _measured(result: RunResult, gpus: int | None) -> Row:
    row: Row = {name: getattr(result, name) for name in _MEASURED}
    if result.probe:
        row |= summary(result.probe) | {"bandwidths": bandwidths(result.probe) or None}
    row["evidence"] = json.dumps(result.evidence, sort_keys=True) if result.evidence else None
    if result.sm_clock_hz is not None or result.throttled is not None:
        row["throttled"] = result.throttled is not None
    if result.started_at is not None:
        row["started_at"] = datetime.fromtimestamp(result.started_at, UTC)
    if result.duration_s is not None and gpus is not None:
        row["gpu_hours"] = result.duration_s * gpus / 3600
    return _known(row)


def _speed(row: Row, result: RunResult | None, shape: ModelShape | None, formula: str) -> Row:
    """The columns from `step_time_s` to `hfu` of an ok result with measured steps; empty for other results.

    mfu = FLOPs of a token * tokens_per_s_per_gpu / peak. A column is absent where its inputs are unknown.
    """
    gpus, peak = row.get("gpus"), row["peak_flops_per_s"]
    if result is None or result.status != Status.OK or gpus is None or not result.step_times_s:
        return {}
    step_time_s = median(result.step_times_s)
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
        rate = shape.flops_per_token(row["seq_len"], formula) * tokens_per_s / gpus
        out |= {"model_flops_per_s_per_gpu": rate, "flops_formula": formula}
        out["mfu"] = rate / peak if peak else None
    if result.hardware_flops_per_step is not None and peak:
        out["hfu"] = result.hardware_flops_per_step / step_time_s / gpus / peak
    return out
