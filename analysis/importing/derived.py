"""Completes imported rows: what follows from their other columns, and why they may be in doubt."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa

from ultrabench.analysis.measured import shape_of
from ultrabench.analysis.rows import sizes_of
from ultrabench.analysis.schema import FLOAT, INT, MODEL, RESULTS_SCHEMA_VERSION, SCHEMA
from ultrabench.errors import ConfigError
from ultrabench.hardware import GIB
from ultrabench.layout import BATCH, DEGREES, NEUTRAL, details_of
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_hardware, load_model
from ultrabench.sweep.running.outliers import rate_doubts

_PARAM_COLUMNS = ["num_params", "num_active_params"]
_COUNT_COLUMNS = ("nodes", "gpus", *DEGREES, *BATCH, "gbs", "seq_len")
_PEAK_MEM_COLUMNS = ["peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes"]
_MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", *_PEAK_MEM_COLUMNS)
_RANKS_PRODUCT, _BATCH_PRODUCT = "*".join(DEGREES), "*".join(("dp", *BATCH))
"""Expressions of columns that give the number of ranks and the global batch size."""
_DERIVED_COUNTS = (
    ("gpus", "nodes * gpus_per_node"), ("gpus", _RANKS_PRODUCT), ("gpus_per_node", "gpus / nodes"), ("nodes", "gpus / gpus_per_node"),
    ("dp", "gpus / (tp * pp * cp)"), ("gas", "gbs / (dp * mbs)"), ("gbs", _BATCH_PRODUCT),
)  # fmt: skip
"""Columns of counts, and the expressions that fill them if they are unknown, in the order of evaluation."""

Doubts = list[tuple[str, pd.Series]]
"""Pairs of a doubt's code and its sentence for each row that has it; the sentence may be null for other rows."""


def with_derived_columns(rows: pd.DataFrame, models: Mapping[str, str]) -> tuple[pd.DataFrame, Doubts]:
    """The rows with all columns that follow from those of the table, and reasons to doubt them.

    Sizes that the table lacks are those of the row's model. The batch is dp*mbs*gas. Parameters and FLOPs are
    counted by our formulas, tied weights once. `tokens_per_step` is not a column of results, but conditions of a
    TableMap may use it. All numbers are floats.

    Args:
        models: name of a model in the table -> our name of it.
    """
    type_by_column = {column.name: float if column.type in (INT, FLOAT) else object for column in SCHEMA}
    frame = rows.reindex(columns=[*type_by_column, "tokens_per_step"]).astype(type_by_column)
    doubts = [*_fill_model(frame, models)]
    for name, expression in _DERIVED_COUNTS:
        values = _evaluated(frame, expression)
        frame[name] = frame[name].where(frame[name].notna(), values.where((values % 1 == 0) & (values != 0)))
    _fill_pipeline_and_shards(frame)
    batch_sizes = _evaluated(frame, _BATCH_PRODUCT)
    wrong_gbs = frame["gbs"][batch_sizes.notna() & (batch_sizes != frame["gbs"])]
    sentences = "batch does not match the layout: gbs=" + _texts(wrong_gbs)
    sentences += f", {_BATCH_PRODUCT}=" + _texts(batch_sizes[wrong_gbs.index])
    frame.loc[wrong_gbs.index, "gbs"] = batch_sizes
    frame["tokens_per_step"] = _evaluated(frame, "gbs * seq_len")
    _fill_speed(frame)
    frame["schema_version"], frame["attempt"], frame["is_final"] = RESULTS_SCHEMA_VERSION, 0, True
    return frame, [*doubts, ("other_batch", sentences), *_impossible_doubts(frame)]


def typed_table(frame: pd.DataFrame, columns: list[str]) -> pa.Table:
    """These columns of what `with_derived_columns` returns, with the types of results.

    Raises:
        pa.ArrowException: a number is too large.
    """
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    table = pa.Table.from_pandas(frame[columns], schema=schema, preserve_index=False)
    return table.replace_schema_metadata(SCHEMA.metadata)


def _fill_model(frame: pd.DataFrame, models: Mapping[str, str]) -> Iterator[tuple[str, pd.Series]]:
    """Fills the sizes that rows lack; returns doubts about rows whose sizes differ from those of the model they name."""
    for table_name in {*frame["model"].dropna()} & models.keys():
        is_of_model = frame["model"] == table_name
        model_name = models[table_name]
        frame.loc[is_of_model, "model"] = model_name
        for column, model_value in sizes_of(load_model(model_name)).items():
            if column not in _PARAM_COLUMNS:
                other_rows = frame[is_of_model & frame[column].notna() & (frame[column] != model_value)]
                subject = "vocabulary" if column == "vocab_size" else "architecture"
                has_fewer = other_rows[column] < other_rows["num_attention_heads"]
                is_grouped = has_fewer & (column == "num_key_value_heads")
                sentences = f"different {subject}: {column}=" + _texts(other_rows[column])
                sentences += is_grouped.map({True: " (GQA)", False: ""}) + f", {model_name} has {model_value}"
                yield f"other_{subject}", sentences
                frame.loc[is_of_model & frame[column].isna(), column] = model_value
    for row, shape in _shapes(frame).items():
        frame.loc[row, _PARAM_COLUMNS] = [getattr(shape, name) for name in _PARAM_COLUMNS]


def _shapes(frame: pd.DataFrame) -> dict[Any, ModelShape]:
    """Row -> shape of its model, without rows where a size is unknown or sizes contradict each other."""
    shape_by_row = {}
    for row, columns in zip(frame.index, typed_table(frame, [*MODEL]).to_pylist(), strict=True):
        with contextlib.suppress(ConfigError):
            shape_by_row[row] = shape_of(columns)
    return shape_by_row


def _fill_pipeline_and_shards(frame: pd.DataFrame) -> None:
    frame.loc[frame["pp"] == 1, [*details_of("pp")]] = [NEUTRAL[name] for name in details_of("pp")]
    has_unknown_schedule = frame["pp_schedule"].isna() & (frame["pp"] > 1)
    schedules = (frame["virtual_stages"] > 1).map({True: "interleaved", False: "1f1b"})
    frame.loc[has_unknown_schedule, "pp_schedule"] = schedules
    shards = frame["dp_shard"].where(frame["dp_shard"] != 0).fillna(_evaluated(frame, "dp * cp"))
    frame.loc[frame["zero_stage"].notna(), "zero_shards"] = shards.where(frame["zero_stage"] != 0, 1)


def _fill_speed(frame: pd.DataFrame) -> None:
    """Fills the peak rate, and of ok rows step time, speeds and mfu, as far as the table gives one of them."""
    rows_by_hardware: Any = frame[frame["peak_flops_per_s"].isna()].groupby(["hardware", "precision"])
    for (name, precision), rows in rows_by_hardware:
        hardware = load_hardware(name) if name in files("hardware") else None
        if hardware and (peak := hardware.peak_flops_per_s.get(precision)):
            frame.loc[rows.index, ["peak_flops_per_s", "peak_source"]] = peak, hardware.source
    gpu_tokens_per_s = frame["tokens_per_s_per_gpu"].fillna(_evaluated(frame, "tokens_per_s / gpus"))
    gpu_tokens_per_s = gpu_tokens_per_s.fillna(_evaluated(frame, "tokens_per_step / step_time_s / gpus"))
    is_positive = gpu_tokens_per_s.between(0, math.inf, inclusive="neither")
    has_speed = (frame["status"] == "ok") & (frame["gpus"] != 0) & is_positive
    frame.loc[has_speed, "tokens_per_s_per_gpu"] = gpu_tokens_per_s
    frame.loc[has_speed, "tokens_per_s"] = _evaluated(frame, "tokens_per_s_per_gpu * gpus")
    step_time_s = _evaluated(frame, "tokens_per_step / tokens_per_s")
    frame.loc[has_speed, "step_time_s"] = frame["step_time_s"].fillna(step_time_s)
    shapes = _shapes(frame[has_speed & (frame["seq_len"] > 0)])
    token_flops = {row: shape.flops_per_token(int(frame["seq_len"][row])) for row, shape in shapes.items()}
    flops_per_s = pd.Series(token_flops, dtype=float) * gpu_tokens_per_s.reindex([*token_flops])
    frame.loc[flops_per_s.index, "model_flops_per_s_per_gpu"] = flops_per_s
    frame.loc[flops_per_s.index, "flops_formula"] = "palm"
    frame.loc[flops_per_s.index, "mfu"] = flops_per_s / frame["peak_flops_per_s"]


def _impossible_doubts(frame: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Doubts about rows whose values cannot have been measured."""
    ok_rows = frame[frame["status"] == "ok"]
    for column in (*_COUNT_COLUMNS, *_MEASURED_COLUMNS):
        values = (frame if column in _COUNT_COLUMNS else ok_rows)[column]
        yield "impossible_value", values[values <= 0].map(f"impossible value: {column}={{:.4g}}".format)
    yield "unknown_model", pd.Series("unknown model", frame.index[frame["model"].isna()])
    yield "unknown_step_time", pd.Series("unknown step time", ok_rows.index[ok_rows["step_time_s"].isna()])
    num_ranks = _evaluated(frame, _RANKS_PRODUCT).dropna()
    other_ranks = num_ranks[num_ranks != frame["gpus"][num_ranks.index]]
    sentences = "number of GPUs does not match the layout: gpus=" + _texts(frame["gpus"][other_ranks.index])
    yield "other_gpus", sentences + f", {_RANKS_PRODUCT}=" + _texts(other_ranks)
    for row, mfu in frame["mfu"][frame["mfu"] > 1].items():
        yield from ((doubt.code, pd.Series({row: doubt.sentence})) for doubt in rate_doubts(mfu))
    for hardware_name in {*frame["hardware"].dropna()} & files("hardware").keys():
        mem_bytes = load_hardware(hardware_name).mem_bytes
        used_bytes = frame.loc[frame["hardware"] == hardware_name, _PEAK_MEM_COLUMNS].max(axis=1)
        sentences = "more memory than a GPU has: " + _texts(used_bytes[used_bytes > mem_bytes] / GIB)
        yield "impossible_memory", sentences + f" of {mem_bytes / GIB:.0f} GiB"


def _evaluated(frame: pd.DataFrame, expression: str) -> Any:
    """The value of an expression of columns for each row; null if one of the columns is unknown."""
    return frame.eval(expression)


def _texts(values: pd.Series) -> pd.Series:
    """The values as texts, numbers without digits behind the point."""
    return values.map(lambda value: f"{value:.0f}" if isinstance(value, float) else str(value)).astype(object)
