"""Writes and reads plan.parquet: one row for each candidate, with decision, reason and prediction."""

import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.json import ParseOptions, read_json

from ultrabench.errors import ConfigError, SweepFolderError, counted
from ultrabench.kernel_config import SIZE_OPTIONS, KernelConfig
from ultrabench.layout import AXES, NEUTRAL, SWEEP_VALUES, TEXT_AXES, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.partial_step import Slice
from ultrabench.record import canonical_json, from_dict
from ultrabench.run import RunSpec
from ultrabench.store.folder import write_whole
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import SweepJson
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.partial_steps import WholeSteps
from ultrabench.sweep.plan import kernel_of
from ultrabench.sweep.predict.predict import PREDICTION_COLUMNS, Prediction
from ultrabench.variant import Value

Row = dict[str, Any]
"""Column name -> value."""
Warn = Callable[[str], None]
_COLUMN_BY_FIELD = {field: column.name for field, column in PREDICTION_COLUMNS.items()}
"""Field of a prediction -> its column, which is null where a structural rule rejects the layout."""
SLICE_COLUMNS = ("slice", "whole_rule", "whole_reason")
"""Columns of a plan whose runs are screened: by which parts or how few whole steps, as JSON, and the rule and the
reason why no parts are measured. Other plans lack them."""
RUN_COLUMNS = [
    "decision", "run_id", "model", "nodes", "gpus_per_node", "seq_len", "gbs", "precision", "variant", *AXES,
    *_COLUMN_BY_FIELD.values(), *SLICE_COLUMNS,
]  # fmt: skip
"""Columns that `runs_of` reads."""

NULLABLE_TYPES = pa.schema({name: pa.string() for name in ("rule", "reason", "variant", *SLICE_COLUMNS)})
"""Types of the columns in which all values may be null, which would leave them without a type."""


_OLDER_VALUES = NEUTRAL | {"precision": None, "variant": None} | dict.fromkeys(SLICE_COLUMNS)
"""Column that an older plan may lack -> its value there; a precision that is None is that of sweep.json."""


def columns_of_run(spec: RunSpec) -> Row:
    """The columns that tell on what a run is measured: model, nodes, layout and batch."""
    return {
        "model": spec.shape.name,
        "nodes": spec.nodes,
        "gpus_per_node": spec.gpus_per_node,
        "gpus": spec.layout.world_size,
        **{name: getattr(spec.layout, name) for name in (*AXES, "zero_shards", "gbs")},
        "seq_len": spec.workload.seq_len,
        "precision": spec.kernel.precision,
        "variant": canonical_json(spec.variant) if spec.variant else None,
    }


class _PlannedSlice(msgspec.Struct):
    """The column `slice` of a plan."""

    slice: Slice | None = None
    turn_share: float = 1.0
    few_steps: bool = False
    second_start_s: float = 0.0


def _slice_columns(candidate: Candidate) -> Row:
    """The columns of SLICE_COLUMNS."""
    text = None
    if candidate.is_screened:
        how = candidate.turn_share, candidate.few_steps, candidate.second_start_s
        planned = _PlannedSlice(candidate.slice, *how)
        text = msgspec.json.encode(planned).decode()
    rule_and_reason = candidate.whole_steps or (None, None)
    return dict(zip(SLICE_COLUMNS, (text, *rule_and_reason), strict=True))


@functools.lru_cache(maxsize=256)  # many runs have equal ones
def _planned_slice(text: str | None) -> _PlannedSlice:
    """The column `slice` of a run, which is null where all whole steps are measured.

    Raises:
        ConfigError, msgspec.DecodeError: the text is damaged.
    """
    return msgspec.json.decode(text, type=_PlannedSlice) if text else _PlannedSlice()


def _decision(candidate: Candidate) -> str:
    """What a plan decides about a candidate: that it runs, is skipped, or is rejected by a rule or the kernel."""
    if candidate.runs:
        return "run"
    return "skipped" if candidate.trainable else "rejected"


def plan_table(candidates: Iterable[Candidate]) -> pa.Table:
    """The candidates as a table, in the order given."""
    candidates = [*candidates]
    has_slices = any(c.is_screened or c.whole_steps for c in candidates)
    rows = [
        {
            "order": position,
            "run_id": c.run_id,
            **columns_of_run(c.spec),
            "compile": c.spec.compiles,
            "valid": c.valid,
            "rule": c.rule,
            "reason": c.reason,
            "decision": _decision(c),
            **{column: getattr(c.predicted, field, None) for field, column in _COLUMN_BY_FIELD.items()},
            "predicted_to_fit": c.fits if c.valid else None,
            "predicted_gpu_hours": c.gpu_hours if c.valid else None,
            **(_slice_columns(c) if has_slices else {}),
        }
        for position, c in enumerate(candidates)
    ]
    text_types = {field: pa.string() for field, value in rows[0].items() if isinstance(value, str)}
    types = pa.unify_schemas([NULLABLE_TYPES, pa.schema(text_types)])
    # Table.from_pylist would import pandas, which takes longer.
    json_lines = pa.py_buffer(msgspec.json.Encoder().encode_lines(rows))
    options = ParseOptions(explicit_schema=types)
    return read_json(pa.BufferReader(json_lines), parse_options=options).select([*rows[0]])


HARDWARE_KEY, KERNEL_KEY, FIRST_VALUES_KEY = (
    "ultrabench.hardware",
    "ultrabench.kernel",
    "ultrabench.first_values",
)
"""Keys of the names of hardware and kernel in the metadata of a plan."""


def first_values(config: SweepConfig) -> dict[str, Any]:
    """Axis or option with several values -> the first one that the sweep lists, as it stands in a layout."""
    layout_values = {
        (axis, word): in_sweep.first
        for axis, in_sweep in SWEEP_VALUES.items()
        for word in (in_sweep.default, in_sweep.several)
    }
    axes = config.axes.layout.items()
    values_by_axis = {axis: [layout_values.get((axis, v), v) for v in values] for axis, values in axes}
    values_by_axis |= {option: [*values] for option, values in config.options.values.items()}
    several = {axis for axis, values in axes if axis in SWEEP_VALUES and SWEEP_VALUES[axis].several in values}
    return {axis: values[0] for axis, values in values_by_axis.items() if len(values) > 1 or axis in several}


def write_plan(candidates: Sequence[Candidate], path: Path, config: SweepConfig | None = None) -> None:
    """Writes the plan to a temporary file beside `path` and renames it to `path`.

    Args:
        config: that of the plan, if the file is to be drawn without its sweep.

    Raises:
        SweepFolderError: the file cannot be written.
    """
    buffer = pa.BufferOutputStream()
    kernel = candidates[0].spec.kernel.name if candidates else ""
    metadata = {HARDWARE_KEY: config.hardware.name if config else "", KERNEL_KEY: kernel}
    metadata |= {FIRST_VALUES_KEY: json.dumps(first_values(config))} if config else {}
    pq.write_table(plan_table(candidates).replace_schema_metadata(metadata), buffer)
    try:
        write_whole(path, buffer.getvalue().to_pybytes())
    except OSError as error:
        raise SweepFolderError(f"cannot write {path}: {error.strerror}; choose another place") from error


def read_failure(error: Exception) -> str:
    """Why a Parquet file cannot be read, in one line without the name that pyarrow gives to its buffer."""
    return str(error).partition("\n")[0].rpartition("'<Buffer>': ")[2]


_TEXT_COLUMNS = (
    *("decision", "run_id", "model", "precision", "variant", "predicted_limited_by"),
    *SLICE_COLUMNS,
    *TEXT_AXES,
)
"""Columns of texts among RUN_COLUMNS; the others are numbers."""
_COUNT_COLUMNS = ("nodes", "gpus_per_node", "seq_len", "gbs")
"""Columns of positive integers of a run."""


def read_plan(
    path: Path, columns: Sequence[str] | None = None, warn: Warn = lambda message: None
) -> pa.Table:
    """The rows of a plan.parquet in the plan's order, with all columns or only some.

    Args:
        columns: columns to read, at least those of RUN_COLUMNS; None means all.
        warn: called with one line if rows are left out because they are damaged.

    Raises:
        SweepFolderError: the file is missing, cannot be read or is not a plan.
    """
    try:
        # read_table would import pandas, which takes longer, and pyarrow takes no name that is not UTF-8
        parquet_file = pq.ParquetFile(pa.py_buffer(path.read_bytes()))
        # A thread of pyarrow that lets go of the bytes while Python exits ends the process with SIGABRT.
        table = parquet_file.read(columns=columns, use_threads=False)
        table = _with_added_columns(table, (*AXES, *_OLDER_VALUES) if columns is None else columns)
    except FileNotFoundError:
        remedy = "wait if a launch is starting, else launch the sweep again"
        raise SweepFolderError(f"{path} is missing; {remedy}") from None
    except (OSError, pa.ArrowException) as error:
        reason = read_failure(error).rstrip(".")
        raise SweepFolderError(
            f"cannot read {path}: {reason}; to write it again, launch the sweep again"
        ) from error
    _require_plan(path, table)
    return _without_damaged_rows(path, table, warn)


def _require_plan(path: Path, table: pa.Table) -> None:
    """Raises SweepFolderError unless the table has the columns of RUN_COLUMNS with texts and numbers in them."""
    if missing_names := [name for name in RUN_COLUMNS if name not in table.column_names]:
        more_text = f" and {len(missing_names) - 1} more" if len(missing_names) > 1 else ""
        fact = f"{path} lacks the column {missing_names[0]}{more_text}"
    elif wrong_names := [name for name in RUN_COLUMNS if not _has_kind(name, table.schema.field(name).type)]:
        fact = f"{path}: column {wrong_names[0]} has type {table.schema.field(wrong_names[0]).type}"
    else:
        return
    raise SweepFolderError(
        f"{fact}; it is not the plan of a sweep: to write it again, launch the sweep again"
    )


def _has_kind(name: str, column_type: pa.DataType) -> bool:
    """Whether a column of this type may hold the values of one of RUN_COLUMNS; one without values has no type."""
    if pa.types.is_null(column_type):
        return True
    if name in _TEXT_COLUMNS:
        return bool(pa.types.is_string(column_type) or pa.types.is_large_string(column_type))
    checks = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    return any(check(column_type) for check in checks)


def _without_damaged_rows(path: Path, table: pa.Table, warn: Warn) -> pa.Table:
    """The table without rows whose values cannot be those of a candidate, of which `warn` names the first."""

    @functools.cache
    def variant_fault(text: str | None) -> str | None:
        try:
            _VARIANT.decode(text or "{}")
        except (msgspec.DecodeError, UnicodeError):
            return f"variant={text!r:.60} is not a JSON object of options"
        return None

    @functools.cache
    def run_fault(*values: Any) -> str | None:
        counts, axis_values = values[: len(_COUNT_COLUMNS)], values[len(_COUNT_COLUMNS) :]
        for name, count in zip(_COUNT_COLUMNS, counts, strict=True):
            if not isinstance(count, int) or count < 1:
                return f"{name}={count} is not a positive integer"
        value_by_axis = dict(zip(AXES, axis_values, strict=True))
        try:
            from_dict(Layout, value_by_axis)
        except (ConfigError, ValueError, TypeError, ArithmeticError) as error:
            return f"its layout is impossible: {error}"
        return None

    @functools.cache
    def slice_fault(text: str | None) -> str | None:
        try:
            _planned_slice(text)
        except (ConfigError, msgspec.MsgspecError, UnicodeError):
            return f"slice={text!r:.60} says no parts of a step"
        return None

    columns = (*_COUNT_COLUMNS, *AXES)
    runs_values: Iterable[tuple[Any, ...]] = zip(*(table[name].to_pylist() for name in columns), strict=True)
    key_columns = ("run_id", "decision", "variant", "slice")
    keys = zip(*(table[name].to_pylist() for name in key_columns), strict=True)
    fault_by_row = dict[int, str]()
    for row, ((run_id, decision, variant, part), run_values) in enumerate(
        zip(keys, runs_values, strict=True)
    ):
        fault = (
            variant_fault(variant)
            or slice_fault(part)
            or (run_fault(*run_values) if decision == "run" else None)
        )
        fault = fault or (None if run_id else "it has no run_id")
        if fault:
            fault_by_row[row] = f"run {run_id}: {fault}"
    if not fault_by_row:
        return table
    first_fault = next(iter(fault_by_row.values()))
    warn(f"{path}: skipped {counted(len(fault_by_row), 'damaged row')}, such as {first_fault}")
    return table.filter(pa.array([row not in fault_by_row for row in range(len(table))]))


_VARIANT = msgspec.json.Decoder(dict[str, Value])
"""Decodes the text of the column variant."""


def _with_added_columns(plan: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The plan with a column for each axis and option; one from before an axis was added knows its
    neutral value only.
    """
    for column in columns:
        if column in _OLDER_VALUES and column not in plan.column_names:
            column_type = pa.string() if _OLDER_VALUES[column] is None else None
            plan = plan.append_column(column, pa.array([_OLDER_VALUES[column]] * len(plan), column_type))
    return plan


def read_rows(path: Path, *, runs_only: bool = False, warn: Warn = lambda message: None) -> list[Row]:
    """The rows of `read_plan`; with `runs_only`, only runs and what `runs_of` reads of them."""
    table = read_plan(path, RUN_COLUMNS if runs_only else None, warn)
    is_run_by_row = (decision == "run" for decision in table["decision"].to_pylist()) if runs_only else None
    return [*rows_of(table, is_kept=is_run_by_row)]


def rows_of(
    table: pa.Table, columns: Sequence[str] | None = None, is_kept: Iterable[bool] | None = None
) -> Iterator[Row]:
    """The rows of a table, all or those that are `is_kept`, with all columns or some; `to_pylist` takes longer."""
    column_names = [name for name in table.column_names if columns is None or name in columns]
    rows: Iterable[tuple[Any, ...]] = zip(*(table[name].to_pylist() for name in column_names), strict=True)
    rows = rows if is_kept is None else compress(rows, is_kept)
    return (dict(zip(column_names, row_values, strict=True)) for row_values in rows)


def shapes_of(sweep: SweepJson, state: SweepState) -> dict[str, ModelShape]:
    """Model name -> shape, for the models of sweep.json and of the latest launch, which wrote the plan."""
    try:
        launched_shapes = [from_dict(ModelShape, sizes) for sizes in state.config.get("models") or []]
    except ConfigError:
        launched_shapes = []
    return {shape.name: shape for shape in (*sweep.models, *launched_shapes)}


def scaling_of(sweep: SweepJson, state: SweepState) -> str:
    """Whether gbs grows with the nodes (weak) or not (strong), as the latest launch gave it."""
    return str((state.config or sweep.config).get("sweep", {}).get("scaling") or "strong")


def kernel_of_launch(sweep: SweepJson, state: SweepState) -> KernelConfig:
    """The kernel of the sweep with the size of its model as the latest launch gave it, which no result depends on."""
    settings = (state.config or sweep.config).get("kernel")
    sizes = dict[str, Any]()
    if isinstance(settings, dict):
        sizes = {option: settings.get(option) for option in SIZE_OPTIONS}
    try:
        return replace(sweep.kernel, **sizes)
    except (ConfigError, TypeError):
        return sweep.kernel


def formula_of(sweep: SweepJson, state: SweepState) -> str:
    """The formula that counts the FLOPs of a token, as the latest launch gave it."""
    return str((state.config or sweep.config).get("measure", {}).get("flops_formula", "palm"))


def price_per_gpu_hour(sweep: SweepJson, state: SweepState) -> float | None:
    """The price of an hour of one GPU, as the file of the cluster gave it at the latest launch;
    None where it gave none.
    """
    price = ((state.config or sweep.config).get("cluster") or {}).get("price_per_gpu_hour")
    return None if price is None else float(price)


def runs_of(sweep: SweepJson, rows: Iterable[Row], state: SweepState) -> Iterator[Candidate]:
    """The runs among the rows of plan.parquet, which leave out what all runs of the sweep share.

    Args:
        state: it holds the latest launch, which wrote the plan.

    Raises:
        SweepFolderError: neither sweep.json nor the latest launch has the shape of a model.
    """
    shape_by_name, trains_model = shapes_of(sweep, state), sweep.kernel.trains
    formula, kernel = formula_of(sweep, state), kernel_of_launch(sweep, state)
    # Many runs have equal parts; checking each part once takes a third of the time.
    axes_of = operator.itemgetter(*AXES)
    layout_of = functools.cache(lambda values: Layout(**dict(zip(AXES, values, strict=True))))
    workload_of = functools.cache(lambda seq_len, gbs: replace(sweep.workload, seq_len=seq_len, gbs=gbs))
    variant_of = functools.cache(lambda text: json.loads(text) if text else {})
    program_of = functools.cache(lambda precision, text: kernel_of(kernel, precision, variant_of(text)))
    peak_of = functools.cache(lambda nodes, precision: sweep.peak(nodes, precision) if trains_model else None)
    for row in rows:
        if row["decision"] != "run":
            continue
        if row["model"] not in shape_by_name:
            raise SweepFolderError(f"the sizes of model={row['model']} are unknown; launch the sweep again")
        precision = row["precision"] or sweep.kernel.precision
        peak, planned_slice = peak_of(row["nodes"], precision), _planned_slice(row.get("slice"))
        yield Candidate(
            run_id=row["run_id"],
            spec=RunSpec(
                shape=shape_by_name[row["model"]],
                workload=workload_of(row["seq_len"], row["gbs"]),
                layout=layout_of(axes_of(row)),
                kernel=program_of(precision, row["variant"]),
                variant=variant_of(row["variant"]),
                nodes=row["nodes"],
                gpus_per_node=row["gpus_per_node"],
            ),
            predicted=Prediction(**{field: row[column] for field, column in _COLUMN_BY_FIELD.items()}),
            peak_flops_per_s=peak.flops_per_s if peak else None,
            mfu_problem=peak.mfu_problem if peak else None,
            flops_formula=formula,
            slice=planned_slice.slice,
            few_steps=planned_slice.few_steps,
            whole_steps=WholeSteps(rule, row["whole_reason"]) if (rule := row.get("whole_rule")) else None,
            turn_share=planned_slice.turn_share,
            second_start_s=planned_slice.second_start_s,
        )
