"""Turns result rows, measured or imported, into the records that predictions are fitted to and checked against."""

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from ultrabench.analysis.results.options import VARIANT, variant_in
from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_config import PRECISIONS, KernelConfig, kind_by_name
from ultrabench.layout import AXES, BATCH, DEGREES, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict, missing_fields
from ultrabench.result import NOT_TRIED
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.checkpoint import with_usual_sizes
from ultrabench.variant import FLAGS

_SHAPE_COLUMNS = tuple(field.name for field in fields(ModelShape))

_NEEDED_COLUMNS = ("nodes", "gpus_per_node", *DEGREES, "zero_stage", *BATCH, "seq_len", "kernel", "precision")
"""Columns whose defaults would be a guess."""
_OPTION_COLUMNS = ("precision", "compile", "attention", "routing")
"""Columns that are options of the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One attempt of a run with what was measured; fields with the name of a column hold its value.

    Bandwidths are bus bandwidths in bytes/s that the job measured itself, None where it did not.
    """

    run_id: str
    spec: RunSpec
    """Model, batch, layout, kernel, nodes, and knobs in the variant; rotations and biases of the model have their
    defaults, the seed is 0."""
    hardware: str | None
    peak_flops_per_s: float | None
    sweep: str | None
    source: str | None
    kernel_version: str | None
    """Version of the program as its publisher writes it; that of `spec.kernel` is 1 if it is no number."""
    job_id: str | None
    is_final: bool
    status: str
    suspect: str | None
    """All reasons to doubt the row, as one text."""
    suspect_codes: list[str] | None
    step_time_s: float | None
    predicted_step_time_s: float | None
    """What was predicted when the run was planned."""
    peak_mem_reserved_bytes: int | None
    peak_mem_reserved_rank0_bytes: int | None
    peak_mem_allocated_bytes: int | None
    peak_mem_device_bytes: int | None
    allreduce_busbw_bytes_per_s: float | None
    allgather_busbw_bytes_per_s: float | None
    allreduce_intra_node_busbw_bytes_per_s: float | None
    alltoall_busbw_bytes_per_s: float | None
    alltoall_intra_node_busbw_bytes_per_s: float | None


_COLUMNS = tuple(field.name for field in fields(MeasuredRun) if field.name != "spec")
_READ_COLUMNS = frozenset({
    *_COLUMNS, *_SHAPE_COLUMNS, *_NEEDED_COLUMNS, *AXES, *_OPTION_COLUMNS, "model", "model_settings", "gbs", VARIANT,
})  # fmt: skip


def measured_runs(table: pa.Table) -> tuple[list[MeasuredRun], dict[str, list[str]]]:
    """The attempts in a table that `read_parquet` or `collect` gives, in its order.

    Candidates that were never attempted are left out, and so are runs that train no model. Rows whose
    model, batch or layout is incomplete are left out, too; the second value maps each reason to the names of such rows.
    """
    runs, left_out = list[MeasuredRun](), defaultdict[str, list[str]](list)
    for row in table.select([name for name in table.column_names if name in _READ_COLUMNS]).to_pylist():
        if row["status"] in NOT_TRIED or row["model"] is None:
            continue
        try:
            runs.append(MeasuredRun(spec=spec_of(row), **{name: row[name] for name in _COLUMNS}))
        except ConfigError as error:
            nodes_text = f" on {counted(row['nodes'], 'node')}" if row["nodes"] else ""
            left_out[str(error)].append(f"run {row['run_id']} of {row['model']}{nodes_text}")
    return runs, left_out


def spec_of(row: Mapping[str, Any]) -> RunSpec:
    """The run that a row of results measured; columns that may be null have the defaults of the records.

    Raises:
        ConfigError: a column that the run needs is null, or the values contradict each other.
    """
    if nulls := [name for name in _NEEDED_COLUMNS if row[name] is None]:
        raise ConfigError(
            f"missing {', '.join(nulls)}: give every degree, the ZeRO stage, batch, nodes and GPUs"
        )
    if row["precision"] not in PRECISIONS:
        todo = f"supported: {', '.join(PRECISIONS)}"
        raise ConfigError(f"precision={row['precision']} cannot be predicted", todo)
    kernel, version = row["kernel"], row.get("kernel_version") or ""
    kernel_fields: dict[str, Any] = {"name": kernel, "version": int(version) if version.isdecimal() else 1}
    kernel_fields |= {} if kind_by_name(kernel).trains_itself else {"kind": "command", "command": (kernel,)}
    return RunSpec(
        shape=shape_of(row),
        layout=_record_of(Layout, "", row, AXES),
        kernel=_record_of(KernelConfig, "", row, _OPTION_COLUMNS, **kernel_fields),
        workload=_record_of(Workload, "", row, ("seq_len", "gbs")),
        variant={k: v for k, v in variant_in(row.get(VARIANT)).items() if k.startswith(f"{FLAGS}.")},
        nodes=row["nodes"],
        gpus_per_node=row["gpus_per_node"],
    )


def shape_of(row: Mapping[str, Any]) -> ModelShape:
    """The model of a row of results, with the types of layers and other settings of its column `model_settings`.

    Raises:
        ConfigError: a size is unknown, or sizes contradict each other.
    """
    model_text, settings_text = f"model={row.get('model')}", row.get("model_settings") or "{}"
    known_columns = {name for name in _SHAPE_COLUMNS if row.get(name) is not None} | {"name"}
    known_columns |= _settings_in(settings_text, model_text).keys()
    if missing_columns := missing_fields(ModelShape, dict.fromkeys(known_columns)):
        rule = "give them, or use a model that `ultrabench configs model` lists"
        raise ConfigError(f"missing {', '.join(missing_columns)} of {model_text}: {rule}")
    values = map(row.get, _SHAPE_COLUMNS)
    shape: ModelShape = _cached_shape(model_text, row.get("model"), settings_text, *values)
    return shape


@functools.lru_cache(maxsize=4096)
def _cached_shape(where: str, name: str, settings_text: str, *values: Any) -> ModelShape:
    """The shape of this name with `values` of _SHAPE_COLUMNS that are not None, and with its other settings."""
    columns = {column: v for column, v in zip(_SHAPE_COLUMNS, values, strict=True) if v is not None}
    shape_fields = {**_settings_in(settings_text, where), **columns, "name": name}
    return from_dict(ModelShape, with_usual_sizes(shape_fields), where=where)


@functools.lru_cache(maxsize=256)
def _settings_in(text: str, where: str) -> dict[str, Any]:
    """The settings of a shape in the column `model_settings`, which the record of the shape checks.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{where}: model_settings={text!r} is not a JSON object", 'write {"rope_theta": 500000}'
        )
    return settings


def _record_of(kind: Any, where: str, row: Mapping[str, Any], names: tuple[str, ...], /, **extra: Any) -> Any:
    """The record `kind` from the columns `names` that are not null in the row, and from `extra`."""
    return _cached_record(kind, where, names, *map(row.get, names), *extra.items())


@functools.lru_cache(maxsize=4096)  # many rows have equal parts, and checking them takes longer than reading
def _cached_record(kind: Any, where: str, names: tuple[str, ...], *values: Any) -> Any:
    value_by_name = {name: value for name, value in zip(names, values, strict=False) if value is not None}
    return from_dict(kind, dict(values[len(names) :]) | value_by_name, where=where)
