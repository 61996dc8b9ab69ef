"""Makes the result rows of one sweep: one for every attempt and for every candidate without an attempt."""

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from itertools import compress
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.schema import MODEL, OF_EXPERTS, RESULTS_SCHEMA_VERSION, SCHEMA, SIZES
from ultrabench.device_rates import link_measurements, preflight_rates, summary
from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES, default_schedule
from ultrabench.model_shape import ModelShape
from ultrabench.record import canonical_json, from_dict, non_default_values
from ultrabench.result import Doubt, RunResult, Status, doubt_text
from ultrabench.run import RunSpec
from ultrabench.step_time import ci95_rel
from ultrabench.store.claim import unrecorded_attempts
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, AttemptState, SweepState, final_attempts, fold
from ultrabench.store.sweep_json import SweepJson, read_sweep_json
from ultrabench.sweep.config.load import config_from_tree
from ultrabench.sweep.plan import kernel_of
from ultrabench.sweep.plan_table import (
    RUN_COLUMNS,
    columns_of_run,
    formula_of,
    price_per_gpu_hour,
    read_plan,
    rows_of,
    runs_of,
    scaling_of,
    shapes_of,
)
from ultrabench.sweep.running.attempts import Skip, skips
from ultrabench.sweep.running.outliers import control_times, for_answers
from ultrabench.sweep.running.standings import Suspicion, control_ratio
from ultrabench.variant import Variant, identity

Row = dict[str, Any]
"""Column name -> value; an absent column is null."""

Warn = Callable[[str], None]
_Program = tuple[str, int, str, str | None, str | None]
"""Model, number of nodes, schedule, precision and variant of a candidate."""
_PROGRAM = ("model", "nodes", "pp_schedule", "precision", "variant")
"""Their columns in the plan."""

_PREDICTED = ("predicted_step_time_s", "predicted_peak_mem_bytes", "p_oom")
"""Columns that a claim's prediction gives, where their names have no `predicted_`."""
_OF_TRAINING = frozenset({"zero_shards", "gbs", "scaling", "seq_len", "compile", *MODEL, *AXES, *_PREDICTED})
"""Columns that are null for runs that only measure devices and links; such runs are not ranked."""
_SPEED_OR_OTHER_TYPE = {"step_times_s", "started_at", "throttled", "evidence", "variables"}
_OF_CANDIDATES = (
    "run_id", "model", "nodes", "pp_schedule", "decision", "rule", "reason", "gpus", "gbs", "seq_len",
)  # fmt: skip
"""Columns of the plan from which rows are made one by one; all others are copied as a whole."""
_MEASURED = sorted({f.name for f in fields(RunResult)} & {*SCHEMA.names} - _SPEED_OR_OTHER_TYPE)
"""Columns that are copied from a result."""
_measured_of = operator.attrgetter(*_MEASURED)
_json_text = json.JSONEncoder(sort_keys=True).encode


def sweep_table(folder: SweepFolder, warn: Warn) -> pa.Table:
    """The rows of a sweep, finished or not: runs of the plan in its order, then runs no longer in the plan.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep = read_sweep_json(folder)
    if not folder.plan.exists():
        warn(f"{folder.name}: no plan.parquet; candidates that were never attempted are missing")
    plan = read_plan(folder.plan) if folder.plan.exists() else SCHEMA.empty_table()
    state = fold(read_journal(folder.journal, warn))
    if missing := unrecorded_attempts(folder.claims, state):
        silence = (
            f"the journal has no record of {counted(len(missing), 'claimed attempt')}, such as {missing[0]}"
        )
        remedy = f"to run them again: ultrabench sweep resume {folder.display_name}"
        warn(f"{folder.name}: {silence}: some of its lines or files are damaged or missing; {remedy}")
    programs: list[_Program] = [*zip(*(plan[name].to_pylist() for name in _PROGRAM), strict=True)]
    bases = _bases(sweep, programs, shapes_of(sweep, state))
    numbered_rows = [*_rows(sweep, plan, map(bases.__getitem__, programs), state, warn)]
    row_columns = _columns([row for _, row in numbered_rows])
    candidates = pa.array([n for n, _ in numbered_rows], pa.int64())
    plan_columns = {name: column.take(candidates) for name, column in _planned(plan, programs, bases).items()}
    row_columns["scaling"] = pa.array([scaling_of(sweep, state)] * len(numbered_rows), pa.string())
    if sweep.kernel.kind == "probe":
        for columns in (row_columns, plan_columns):
            for name in _OF_TRAINING & columns.keys():
                del columns[name]
    row_columns["first_values"] = pa.array(
        [_first_values(state.config or sweep.config)] * len(numbered_rows), pa.string()
    )
    arrays = []
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        parts = [columns[name] for columns in (row_columns, plan_columns) if name in columns]
        arrays.append(pc.coalesce(*parts) if parts else pa.nulls(len(numbered_rows), kind))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _first_values(config: Mapping[str, Any]) -> str | None:
    """The column `first_values` of a sweep with this resolved configuration; None where it cannot be read."""
    with contextlib.suppress(ConfigError, LookupError, TypeError, ValueError, AttributeError):
        sweep = config_from_tree(dict(config))
        in_layouts = {
            ("dp_shard", "all"): 0,
            ("pp_schedule", "auto"): default_schedule(2, 2),
            ("ep", "auto"): 1,
        }
        listed = {name: [in_layouts.get((name, v), v) for v in of] for name, of in sweep.axes.layout.items()}
        listed |= {name: [*of] for name, of in sweep.options.values.items()}
        return _json_text({name: of[0] for name, of in listed.items() if len(of) > 1})
    return None


def _columns(rows: Sequence[Row]) -> dict[str, pa.Array]:
    """Name -> array of each column that a row has."""
    names = frozenset[str]().union(*rows)
    kinds = pa.struct([column for column in SCHEMA if column.name in names])
    return dict(zip(kinds.names, pa.array(rows, kinds).flatten(), strict=True))


def _bases(
    sweep: SweepJson, programs: Sequence[_Program], shapes: Mapping[str, ModelShape]
) -> dict[_Program, Row]:
    """The columns that candidates share which have the same model, number of nodes, schedule and options."""
    bases = {}
    for program in dict.fromkeys(programs):
        model, nodes, schedule, precision, variant = program
        options = json.loads(variant or "{}")
        kernel = kernel_of(sweep.kernel, precision or sweep.kernel.precision, options)
        place = {"nodes": nodes, "pp_schedule": schedule} | _variant_columns(options)
        bases[program] = _base(sweep, kernel, place, shapes.get(model))
    return bases


def _planned(
    plan: pa.Table, programs: Sequence[_Program], bases: Mapping[_Program, Row]
) -> dict[str, pa.ChunkedArray]:
    """The columns that the plan tells, with a value for each candidate; it is not told why one was rejected."""
    number = {program: n for n, program in enumerate(bases)}
    base_numbers = pa.array(map(number.__getitem__, programs), pa.int64())
    of_bases = _columns([*bases.values()])
    of_plan = (name for name in plan.column_names if name in SCHEMA.names and name not in ("rule", "reason"))
    names = [name for name in of_plan if name not in ("precision", "variant")]  # older plans lack them
    columns = {name: column.take(base_numbers) for name, column in of_bases.items()}
    return columns | {name: plan[name].cast(SCHEMA.field(name).type) for name in names}


def _rows(
    sweep: SweepJson, plan: pa.Table, bases: Iterable[Row], recorded: SweepState, warn: Warn
) -> Iterator[tuple[int | None, Row]]:
    """For each row the number of its candidate in the plan, None where it has none, and the columns of its own.

    Args:
        bases: the columns that each candidate shares with others.
    """
    state = for_answers(recorded)
    attempts = state.by_run()
    final = {attempt.key for attempt in final_attempts(state).values()}
    circumstances = {
        name: _circumstances(allocation, sweep.cluster) for name, allocation in state.allocations.items()
    }
    control, suspicion = control_times(state), Suspicion.of(state, sweep.hardware.device)
    shapes, formula, price = (
        shapes_of(sweep, state),
        formula_of(sweep, state),
        price_per_gpu_hour(sweep, state),
    )
    candidates = [*rows_of(plan, _OF_CANDIDATES)]
    is_run = [row["decision"] == "run" and row["model"] in shapes for row in candidates]
    # Only a run without an attempt can be skipped; where all were tried, the runs need not be made.
    has_untried = any(row["run_id"] not in attempts for row in compress(candidates, is_run))
    runs = [*runs_of(sweep, rows_of(plan, RUN_COLUMNS, is_kept=is_run), state)] if has_untried else []
    skipped = skips(runs, state)

    def outcome(base: Row, attempt: AttemptState, shape: ModelShape | None) -> Row:
        row = _attempted(attempt, circumstances.get(attempt.allocation or "", {}), base.get("gpus"))
        row["is_final"] = attempt.key in final
        # A run that is invalid only because of its loss keeps the speeds that its agent measured.
        row |= _speed(base, recorded.attempts[attempt.key].result, shape, formula)
        if price is not None and (tokens_per_s := row.get("tokens_per_s_per_gpu")):
            row["cost_per_billion_tokens"] = 1e9 * price / (3600 * tokens_per_s)
        row["control_ratio"] = control_ratio(recorded.attempts[attempt.key], control)
        speed = row.get("mfu"), shape, base.get("seq_len") or 0, row.get("tokens_per_s_per_gpu") or 0.0
        return row | doubt_columns(suspicion.doubts(attempt, *speed, base["precision"]))

    for n, (base, candidate) in enumerate(zip(bases, candidates, strict=True)):
        tried = attempts.pop(run_id := candidate["run_id"], [])
        if not tried:
            yield n, _not_attempted(candidate, skipped.get(run_id))
            continue
        for attempt in tried:
            yield n, outcome(base | candidate, attempt, shapes.get(candidate["model"]))
    for attempt in (attempt for tried in attempts.values() for attempt in tried):
        base, shape = _claimed(sweep, attempt, warn)
        yield None, base | outcome(base, attempt, shape)


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
        "env": _json_text(kernel.env) if kernel.env else None,
        "precision": kernel.precision,
        "compile": kernel.compiles(place.get("pp_schedule")),
        "git_commit": sweep.provenance.get("git_commit"),
        "peak_flops_per_s": peak and peak.flops_per_s,
        "peak_source": peak and peak.source,
        "peak_core_share": peak and peak.core_share,
        **place,
        **sizes_of(shape),
        "model_id": shape and shape.model_id,
        "model_settings": settings_of(shape),
        "routing": shape and kernel.routing_of(shape),
    }


def _variant_columns(variant: Variant) -> Row:
    """The column `variant`, the options that are set and have no columns of their own, and the listed attention."""
    text = _json_text(options) if (options := identity(variant)) else None
    return {"variant": text, "attention_listed": variant.get("attention")}


def doubt_columns(doubts: Sequence[Doubt]) -> Row:
    """The columns that say why a row is in doubt."""
    return {"suspect": doubt_text(doubts), "suspect_codes": [doubt.code for doubt in doubts] or None}


@functools.cache
def sizes_of(shape: ModelShape | None) -> Row:
    """The columns of a model's sizes."""
    if shape is None:
        return {}
    names = (name for name in SIZES if shape.num_experts or name not in OF_EXPERTS)
    return dict.fromkeys(OF_EXPERTS) | {name: getattr(shape, name) for name in names}


def settings_of(shape: ModelShape | None) -> str | None:
    """The column `model_settings`."""
    values = {} if shape is None else non_default_values(shape)
    settings = {name: value for name, value in values.items() if name not in ("name", *SIZES)}
    return canonical_json(settings) if settings else None


def _not_attempted(candidate: Row, skip: Skip | None) -> Row:
    """The status columns of a candidate without an attempt: rejected, skipped, or null while it waits."""
    row: Row = {"status": None, "is_final": True}
    if skip is not None:
        return row | {"status": Status.SKIPPED.value, "reason": skip.reason, "dominated_by": skip.dominator}
    if candidate["decision"] in (Status.REJECTED, Status.SKIPPED):
        row |= {"status": candidate["decision"], "rule": candidate["rule"], "reason": candidate["reason"]}
    return row


def _claimed(sweep: SweepJson, attempt: AttemptState, warn: Warn) -> tuple[Row, ModelShape | None]:
    """The shared columns of a run that is not in the plan, from its claim in the journal, and its model."""
    try:
        spec = from_dict(RunSpec, attempt.spec_as(dict[str, Any]) or {})
    except ConfigError as error:
        warn(f"attempt {attempt.key} is not in the plan and its claim cannot be read: {error}")
        return _base(sweep, sweep.kernel, {}, None), None
    place = columns_of_run(spec) | _variant_columns(spec.variant)
    return _base(sweep, spec.kernel, place, spec.shape), spec.shape


def _attempted(attempt: AttemptState, circumstances: Row, gpus: int | None) -> Row:
    """The columns of one attempt but its speeds; it has no status while there is no result.

    Args:
        gpus: ranks of the run, where they are known.
    """
    return {
        **attempt.key._asdict(),
        "allocation": attempt.allocation,
        **{name: attempt.predicted.get(name.removeprefix("predicted_")) for name in _PREDICTED},
        **circumstances,
        **({"job_id": attempt.job.job_id} if attempt.job else {}),
        **(_measured(attempt.result, gpus) if attempt.result else {}),
    }


def _known(row: Row) -> Row:
    """The columns of a row whose values are known; no names of hosts are known where the list is empty."""
    return {column: value for column, value in row.items() if value is not None and value != ()}


def _circumstances(allocation: AllocationState, cluster: str | None) -> Row:
    """Columns of the allocation: rates in its preflight, its commit of ultrabench, its job, control layout and cluster.

    Args:
        cluster: the cluster that the sweep names.
    """
    preflight, job_id = allocation.preflight, (allocation.job or {}).get("job_id")
    nodes = preflight.get("nodes")
    first = nodes[0] if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict) else {}
    commit = {"git_commit": first["git_commit"]} if isinstance(first.get("git_commit"), str) else {}
    job = {"job_id": None if job_id is None else str(job_id)}
    place = {"control": allocation.control, "cluster": allocation.cluster(cluster)}
    return _known(preflight_rates(preflight) | commit | job | place)


def _measured(result: RunResult, gpus: int | None) -> Row:
    row: Row = dict(zip(_MEASURED, _measured_of(result), strict=True))
    if result.probe:
        row |= summary(result.probe) | {"bandwidths": link_measurements(result.probe) or None}
    row["evidence"] = _json_text(result.evidence) if result.evidence else None
    row["variables"] = _json_text(result.variables) if result.variables else None
    if result.sm_clock_hz is not None or result.throttled is not None:
        row["throttled"] = result.throttled is not None
    if result.started_at is not None:
        row["started_at"] = datetime.fromtimestamp(result.started_at, UTC)
    if result.checkpoint_bytes and result.checkpoint_save_s and result.hostnames:
        rate = result.checkpoint_bytes / result.checkpoint_save_s / len(result.hostnames)
        row["checkpoint_bytes_per_s_per_node"] = rate
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
    if result.power_w_mean:
        out["energy_j_per_step"] = energy_j = result.power_w_mean * gpus * step_time_s
        out["tokens_per_j"] = row["gbs"] * row["seq_len"] / energy_j
    return out
