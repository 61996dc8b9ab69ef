"""Makes the result rows of one sweep: one for every attempt and for every candidate without an attempt."""

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress, product
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.results.columns import RESULT_TABLE
from ultrabench.analysis.results.schema import MODEL, OF_EXPERTS, RESULTS_SCHEMA_VERSION, SCHEMA, SIZES
from ultrabench.device_rates import link_measurements, preflight_rates, summary
from ultrabench.errors import ConfigError, SweepFolderError, counted
from ultrabench.hardware import busy_peak, low_peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES
from ultrabench.model_flops import ModelFlops, model_flops
from ultrabench.model_shape import ModelShape
from ultrabench.record import canonical_json, from_dict, non_default_values
from ultrabench.result import DATES_TEXT, RESULT_COLUMNS, Doubt, RunResult, Status, doubt_text, is_date
from ultrabench.run import RunSpec
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
    first_values,
    formula_of,
    kernel_of_launch,
    price_per_gpu_hour,
    read_plan,
    rows_of,
    runs_of,
    scaling_of,
    shapes_of,
)
from ultrabench.sweep.predict.predict import PREDICTION_COLUMNS
from ultrabench.sweep.running.attempts import Skip, skips
from ultrabench.sweep.running.outliers import control_runs, for_answers
from ultrabench.sweep.running.standings import Suspicion, beside_control
from ultrabench.variant import Variant, identity

Row = dict[str, Any]
"""Column name -> value; an absent column is null."""

Warn = Callable[[str], None]
_ProgramKey = tuple[str, int, str, str | None, str | None]
"""Model, number of nodes, schedule, precision and variant of a candidate."""
_PROGRAM_COLUMNS = ("model", "nodes", "pp_schedule", "precision", "variant")
"""The columns of a _ProgramKey in the plan."""

_PREDICTED_FIELDS = {c.name: field for field, c in PREDICTION_COLUMNS.items() if c.name in RESULT_TABLE}
"""Column -> its field of the prediction in a claim."""
_TRAINING_COLUMNS = frozenset(
    {"zero_shards", "gbs", "scaling", "seq_len", "compile", *MODEL, *AXES, *_PREDICTED_FIELDS}
)
"""Columns that are null for runs that only measure devices and links; such runs are not ranked."""
_CANDIDATE_COLUMNS = (
    "run_id", "model", "nodes", "pp_schedule", "decision", "rule", "reason", "gpus", "gbs", "seq_len",
)  # fmt: skip
"""Columns of the plan from which rows are made one by one; all others are copied as a whole."""
_copied_values = operator.attrgetter(*RESULT_COLUMNS)
_json_text = json.JSONEncoder(sort_keys=True).encode


def sweep_table(folder: SweepFolder, warn: Warn) -> pa.Table:
    """The rows of a sweep, finished or not: runs of the plan in its order, then runs no longer in the plan.

    Raises:
        SweepFolderError: the folder is no sweep folder, or was written with a newer schema.
    """
    sweep = read_sweep_json(folder)
    plan = _readable_plan(folder, warn)
    state = fold(read_journal(folder.journal, warn))
    if missing := unrecorded_attempts(folder.claims, state):
        silence = (
            f"the journal has no record of {counted(len(missing), 'claimed attempt')}, such as {missing[0]}"
        )
        remedy = f"to run them again: ultrabench sweep resume {folder.display_name}"
        warn(f"{folder.name}: {silence}: some of its lines or files are damaged or missing; {remedy}")
    programs: list[_ProgramKey] = [*zip(*(plan[name].to_pylist() for name in _PROGRAM_COLUMNS), strict=True)]
    columns_by_program = _columns_by_program(sweep, programs, shapes_of(sweep, state))
    numbered_rows = [*_numbered_rows(sweep, plan, map(columns_by_program.__getitem__, programs), state, warn)]
    row_columns = _column_arrays([row for _, row in numbered_rows], warn)
    candidate_numbers = pa.array([number for number, _ in numbered_rows], pa.int64())
    plan_columns = _plan_columns(plan, programs, columns_by_program)
    plan_columns = {name: column.take(candidate_numbers) for name, column in plan_columns.items()}
    row_columns["scaling"] = pa.array([scaling_of(sweep, state)] * len(numbered_rows), pa.string())
    if not sweep.kernel.trains:
        for columns in (row_columns, plan_columns):
            for name in _TRAINING_COLUMNS & columns.keys():
                del columns[name]
    kernel = kernel_of_launch(sweep, state)
    if kernel.params is not None:  # the program's model is not that of its name
        hidden_names = [
            "num_params",
            "num_active_params",
            *(() if kernel.is_predictable else _PREDICTED_FIELDS),
        ]
        for columns, name in product((row_columns, plan_columns), hidden_names):
            columns.pop(name, None)
        if num_params := kernel.number("params"):
            row_columns["num_params"] = pa.array([round(num_params)] * len(numbered_rows), pa.int64())
    row_columns["first_values"] = pa.array(
        [_first_values(state.config or sweep.config)] * len(numbered_rows), pa.string()
    )
    arrays = []
    for name, column_type in zip(SCHEMA.names, SCHEMA.types, strict=True):
        sources = [columns[name] for columns in (row_columns, plan_columns) if name in columns]
        arrays.append(pc.coalesce(*sources) if sources else pa.nulls(len(numbered_rows), column_type))
    return without_doubtful_mfu(pa.Table.from_arrays(arrays, schema=SCHEMA))


def without_doubtful_mfu(table: pa.Table) -> pa.Table:
    """The table without mfu and hfu in sweeps whose peak is in doubt; mfu_problem says why.

    A peak is in doubt if it was measured beside other programs, or if a run that is not in doubt was faster.
    """
    sure_mfus = pc.if_else(pc.is_null(table["suspect"]), table["mfu"], None)
    if (
        low_peak(pc.max(sure_mfus).as_py()) is None
        and not pc.any(pc.is_valid(table["peak_core_share"])).as_py()
    ):
        return table
    sweeps, core_shares = table["sweep"].to_pylist(), table["peak_core_share"].to_pylist()
    max_mfu_by_sweep = dict[str | None, float]()
    for sweep, mfu in zip(sweeps, sure_mfus.to_pylist(), strict=True):
        max_mfu_by_sweep[sweep] = max(mfu or 0.0, max_mfu_by_sweep.get(sweep, 0.0))
    peak_problems = [
        busy_peak(core_share) or low_peak(max_mfu_by_sweep[sweep])
        for sweep, core_share in zip(sweeps, core_shares, strict=True)
    ]
    problems = pa.array(peak_problems, pa.string())
    is_doubtful = pc.and_(pc.is_valid(table["mfu"]), pc.is_valid(problems))
    columns = {name: pc.if_else(pc.is_valid(problems), None, table[name]) for name in ("mfu", "hfu")}
    columns["mfu_problem"] = pc.if_else(is_doubtful, problems, table["mfu_problem"])
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)
    return table


def _readable_plan(folder: SweepFolder, warn: Warn) -> pa.Table:
    """The plan of a sweep; empty, with a warning, where there is none that can be read."""
    try:
        if folder.plan.exists():
            return read_plan(folder.plan, warn=warn)
        fault = f"{folder.name}: no plan.parquet"
    except (SweepFolderError, OSError) as error:
        fault = f"{folder.name}: {error}"
    warn(f"{fault}; candidates that were never attempted are missing")
    return SCHEMA.empty_table()


def _first_values(config: Mapping[str, Any]) -> str | None:
    """The column `first_values` of a sweep with this resolved configuration; None where it cannot be read."""
    with contextlib.suppress(ConfigError, LookupError, TypeError, ValueError, AttributeError):
        return _json_text(first_values(config_from_tree(dict(config))))
    return None


def _column_arrays(rows: Sequence[Row], warn: Warn = lambda message: None) -> dict[str, pa.Array]:
    """Name -> array of each column that a row has; a value that its column cannot hold is null, with a warning."""
    column_names = frozenset[str]().union(*rows)
    struct_type = pa.struct([column for column in SCHEMA if column.name in column_names])
    try:
        struct_array = pa.array(rows, struct_type)
    except _UNFIT:
        fitting_rows = [_fitting_values(row, warn) for row in rows]
        struct_array = pa.array(fitting_rows, struct_type)
    return dict(zip(struct_type.names, struct_array.flatten(), strict=True))


_UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError, KeyError)
"""What pyarrow raises for a value that a column cannot hold."""


def _fitting_values(row: Row, warn: Warn) -> Row:
    """The values of a row that its columns can hold; each other one gives a warning."""
    fitting_row = Row()
    for name, value in row.items():
        try:
            pa.array([value], SCHEMA.field(name).type)
            fitting_row[name] = value
        except _UNFIT:
            warn(
                f"run {row.get('run_id')}: {name}={value!r:.60} is no {SCHEMA.field(name).type}; it is left out"
            )
    return fitting_row


def _columns_by_program(
    sweep: SweepJson, programs: Sequence[_ProgramKey], shapes: Mapping[str, ModelShape]
) -> dict[_ProgramKey, Row]:
    """The columns that all candidates with the same model, number of nodes, schedule and options share."""
    columns_by_program = {}
    for program in dict.fromkeys(programs):
        model, nodes, pp_schedule, precision, variant = program
        options = json.loads(variant or "{}")
        kernel = kernel_of(sweep.kernel, precision or sweep.kernel.precision, options)
        run_facts = {"nodes": nodes, "pp_schedule": pp_schedule} | variant_columns(options)
        columns_by_program[program] = _shared_columns(sweep, kernel, run_facts, shapes.get(model))
    return columns_by_program


def _plan_columns(
    plan: pa.Table, programs: Sequence[_ProgramKey], columns_by_program: Mapping[_ProgramKey, Row]
) -> dict[str, pa.ChunkedArray]:
    """The columns that follow from the plan, with a value for each candidate, but not why one was rejected."""
    number_by_program = {program: number for number, program in enumerate(columns_by_program)}
    program_numbers = pa.array(map(number_by_program.__getitem__, programs), pa.int64())
    # Why the plan rejects a candidate is not copied; older plans lack precision and variant.
    omitted_names = ("rule", "reason", "precision", "variant")
    plan_names = [n for n in plan.column_names if n in SCHEMA.names and n not in omitted_names]
    program_arrays = _column_arrays([*columns_by_program.values()])
    columns = {name: column.take(program_numbers) for name, column in program_arrays.items()}
    return columns | {name: plan[name].cast(SCHEMA.field(name).type) for name in plan_names}


def _numbered_rows(
    sweep: SweepJson, plan: pa.Table, shared_columns: Iterable[Row], recorded_state: SweepState, warn: Warn
) -> Iterator[tuple[int | None, Row]]:
    """For each row the number of its candidate in the plan, None if it has none, and its own columns.

    Args:
        shared_columns: the columns that each candidate shares with others.
    """
    state = for_answers(recorded_state)
    attempts = state.by_run()
    final_keys = {attempt.key for attempt in final_attempts(state).values()}
    columns_by_allocation = {
        name: _allocation_columns(allocation, sweep.cluster) for name, allocation in state.allocations.items()
    }
    controls_by_allocation, suspicion = control_runs(state), Suspicion.of(state, sweep.hardware.device)
    shapes, formula = shapes_of(sweep, state), formula_of(sweep, state)
    kernel, price = kernel_of_launch(sweep, state), price_per_gpu_hour(sweep, state)
    candidates = [*rows_of(plan, _CANDIDATE_COLUMNS)]
    is_run = [row["decision"] == "run" and row["model"] in shapes for row in candidates]
    # Only a run without an attempt can be skipped; where all were tried, the runs need not be made.
    has_untried = any(row["run_id"] not in attempts for row in compress(candidates, is_run))
    runs = [*runs_of(sweep, rows_of(plan, RUN_COLUMNS, is_kept=is_run), state)] if has_untried else []
    skip_by_run = skips(runs, state)

    for attempt in recorded_state.attempts.values():
        if (
            attempt.result
            and attempt.result.started_at is not None
            and not is_date(attempt.result.started_at)
        ):
            fact = f"attempt {attempt.key} has started_at={attempt.result.started_at:g}, which is no date"
            warn(f"{fact} of {DATES_TEXT}; its start counts as unknown")

    def outcome_columns(base: Row, attempt: AttemptState, shape: ModelShape | None) -> Row:
        allocation_columns = columns_by_allocation.get(attempt.allocation or "", {})
        row = _attempt_columns(attempt, allocation_columns, base.get("gpus"))
        row["is_final"] = attempt.key in final_keys
        # A run that is invalid only because of its loss keeps the speeds that its agent measured.
        result = recorded_state.attempts[attempt.key].result
        flops = ModelFlops(None)
        if shape is not None and base.get("seq_len"):
            flops = model_flops(kernel, shape, base["seq_len"], formula, result, base.get("gpus") or 1)
        row |= _speed_columns(base, result, flops)
        if price is not None and (tokens_per_s := row.get("tokens_per_s_per_gpu")):
            row["cost_per_billion_tokens"] = 1e9 * price / (3600 * tokens_per_s)
        comparison = beside_control(recorded_state.attempts[attempt.key], controls_by_allocation)
        row |= {"control_ratio": comparison.ratio, "control_ci95_rel": comparison.ci95_rel}
        trained_shape = shape if flops.formula else None
        rate = row.get("tokens_per_s_per_gpu") or 0.0
        sure_mfu = None if busy_peak(base["peak_core_share"]) else row.get("mfu")
        speed_facts = sure_mfu, trained_shape, base.get("seq_len") or 0, rate
        return row | doubt_columns(suspicion.doubts(attempt, *speed_facts, base["precision"]))

    def readable_columns(base: Row, attempt: AttemptState, shape: ModelShape | None) -> Row:
        try:
            return outcome_columns(base, attempt, shape)
        except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
            fault = f"{type(error).__name__}: {error}"
            warn(f"attempt {attempt.key} has values that are impossible ({fault}); only its status is shown")
            end_columns = (
                {"status": attempt.result.status, "reason": attempt.result.reason} if attempt.result else {}
            )
            is_final = {"is_final": attempt.key in final_keys}
            return attempt.key._asdict() | {"allocation": attempt.allocation} | is_final | end_columns

    for number, (base, candidate) in enumerate(zip(shared_columns, candidates, strict=True)):
        run_attempts = attempts.pop(run_id := candidate["run_id"], [])
        if not run_attempts:
            yield number, _status_columns(candidate, skip_by_run.get(run_id))
            continue
        for attempt in run_attempts:
            yield number, readable_columns(base | candidate, attempt, shapes.get(candidate["model"]))
    for attempt in (attempt for run_attempts in attempts.values() for attempt in run_attempts):
        base, shape = _claimed_run(sweep, attempt, warn)
        yield None, base | readable_columns(base, attempt, shape)


def _shared_columns(sweep: SweepJson, kernel: KernelConfig, run_facts: Row, shape: ModelShape | None) -> Row:
    """The columns that all attempts of a run share.

    Args:
        run_facts: model, nodes, batch and layout of the run, as far as they are known.
    """
    peak = sweep.peak(run_facts["nodes"], kernel.precision) if run_facts else None
    return {
        "schema_version": RESULTS_SCHEMA_VERSION, "sweep": sweep.sweep, "sweep_key": sweep.key,
        "cluster": sweep.cluster,
        "hardware": sweep.hardware.name, "kernel": kernel.name, "kernel_version": str(kernel.version),
        "kernel_digest": sweep.kernel_digest, "env": _json_text(kernel.env) if kernel.env else None,
        "precision": kernel.precision, "compile": kernel.compiles(run_facts.get("pp_schedule")),
        "git_commit": sweep.provenance.get("git_commit"), "peak_flops_per_s": peak and peak.flops_per_s,
        "peak_source": peak and peak.source, "peak_core_share": peak and peak.core_share, **run_facts,
        **sizes_of(shape), "model_id": shape and shape.model_id, "model_settings": settings_of(shape),
        "routing": shape and kernel.routing_of(shape),
    }  # fmt: skip


def variant_columns(variant: Variant) -> Row:
    """The column `variant`, the options that are set and have no columns of their own, and the listed attention."""
    variant_text = _json_text(options) if (options := identity(variant)) else None
    return {"variant": variant_text, "attention_listed": variant.get("attention")}


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
    shape_fields = {} if shape is None else non_default_values(shape)
    settings = {name: value for name, value in shape_fields.items() if name not in ("name", *SIZES)}
    return canonical_json(settings) if settings else None


def _status_columns(candidate: Row, skip: Skip | None) -> Row:
    """The status columns of a candidate without an attempt: rejected, skipped, or null while it waits."""
    row: Row = {"status": None, "is_final": True}
    if skip is not None:
        return row | {"status": Status.SKIPPED.value, "reason": skip.reason, "dominated_by": skip.dominator}
    if candidate["decision"] in (Status.REJECTED, Status.SKIPPED):
        row |= {"status": candidate["decision"], "rule": candidate["rule"], "reason": candidate["reason"]}
    return row


def _claimed_run(sweep: SweepJson, attempt: AttemptState, warn: Warn) -> tuple[Row, ModelShape | None]:
    """The shared columns of a run that is not in the plan, from its claim in the journal, and its model."""
    try:
        spec = from_dict(RunSpec, attempt.spec_as(dict[str, Any]) or {})
    except ConfigError as error:
        warn(f"attempt {attempt.key} is not in the plan and its claim cannot be read: {error}")
        return _shared_columns(sweep, sweep.kernel, {}, None), None
    run_facts = columns_of_run(spec) | variant_columns(spec.variant)
    return _shared_columns(sweep, spec.kernel, run_facts, spec.shape), spec.shape


def _attempt_columns(attempt: AttemptState, allocation_columns: Row, gpus: int | None) -> Row:
    """The columns of one attempt but its speeds; it has no status while there is no result.

    Args:
        gpus: ranks of the run, where they are known.
    """
    return {
        **attempt.key._asdict(),
        "allocation": attempt.allocation,
        **{name: attempt.predicted.get(field) for name, field in _PREDICTED_FIELDS.items()},
        **allocation_columns,
        **({"job_id": attempt.job.job_id} if attempt.job else {}),
        **(_result_columns(attempt.result, gpus) if attempt.result else {}),
    }


def _known_columns(row: Row) -> Row:
    """The columns of a row whose values are known; an empty list of hosts counts as unknown."""
    return {column: value for column, value in row.items() if value is not None and value != ()}


def _allocation_columns(allocation: AllocationState, cluster: str | None) -> Row:
    """Columns of the allocation: rates in its preflight, its commit of ultrabench, its job, control layout and cluster.

    Args:
        cluster: the cluster that the sweep names.
    """
    preflight, job_id = allocation.preflight, (allocation.job or {}).get("job_id")
    nodes = preflight.get("nodes")
    first_node = nodes[0] if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict) else {}
    commit = first_node.get("git_commit")
    commit_columns = {"git_commit": commit if isinstance(commit, str) else None}
    job_columns = {"job_id": None if job_id is None else str(job_id)}
    control_columns = {"control": allocation.control, "cluster": allocation.cluster(cluster)}
    return _known_columns(preflight_rates(preflight) | commit_columns | job_columns | control_columns)


def _result_columns(result: RunResult, gpus: int | None) -> Row:
    """The columns that a result gives, but its speeds."""
    row: Row = dict(zip(RESULT_COLUMNS, _copied_values(result), strict=True))
    if result.probe:
        row |= summary(result.probe) | {"bandwidths": link_measurements(result.probe) or None}
    row["evidence"] = _json_text(result.evidence) if result.evidence else None
    row["variables"] = _json_text(result.variables) if result.variables else None
    if result.sm_clock_hz is not None or result.throttled is not None:
        row["throttled"] = result.throttled is not None
    if is_date(result.started_at):
        row["started_at"] = datetime.fromtimestamp(result.started_at, UTC)
    if result.checkpoint_bytes and result.checkpoint_save_s and result.hostnames:
        bytes_per_s_per_node = result.checkpoint_bytes / result.checkpoint_save_s / len(result.hostnames)
        row["checkpoint_bytes_per_s_per_node"] = bytes_per_s_per_node
    if result.duration_s is not None and gpus is not None:
        row["gpu_hours"] = result.duration_s * gpus / 3600
    return _known_columns(row)


def _speed_columns(row: Row, result: RunResult | None, flops: ModelFlops) -> Row:
    """The columns from `step_time_s` to `hfu` of an ok result with measured steps; empty for other results.

    mfu = FLOPs of a token * tokens_per_s_per_gpu / peak. A column is absent where its inputs are unknown.
    """
    gpus, peak_flops_per_s = row.get("gpus"), row["peak_flops_per_s"]
    if result is None or result.status != Status.OK or gpus is None or not result.step_times_s:
        return {}
    step_time_s = median(result.step_times_s)
    tokens_per_s = row["gbs"] * row["seq_len"] / step_time_s
    columns: Row = {
        "step_time_s": step_time_s,
        "step_times_s": list(result.step_times_s),
        "step_time_ci95_rel": result.step_time_ci95_rel,
        "num_steps_measured": len(result.step_times_s),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / gpus,
    }
    if flops.per_token is not None:
        flops_per_s_per_gpu = flops.per_token * tokens_per_s / gpus
        columns |= {"model_flops_per_s_per_gpu": flops_per_s_per_gpu, "flops_formula": flops.formula}
        columns["mfu"] = flops_per_s_per_gpu / peak_flops_per_s if peak_flops_per_s else None
    elif flops.problem:
        columns["mfu_problem"] = flops.problem
    if result.hardware_flops_per_step is not None and peak_flops_per_s:
        columns["hfu"] = result.hardware_flops_per_step / step_time_s / gpus / peak_flops_per_s
    if result.power_w_mean:
        columns["energy_j_per_step"] = energy_j = result.power_w_mean * gpus * step_time_s
        columns["tokens_per_j"] = row["gbs"] * row["seq_len"] / energy_j
    return columns
