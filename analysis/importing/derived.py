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
_PEAK_COLUMNS = ["peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes"]
_MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", *_PEAK_COLUMNS)
_RANKS_PRODUCT, _BATCH_PRODUCT = "*".join(DEGREES), "*".join(("dp", *BATCH))
_DERIVED_COUNTS = (
    ("gpus", "nodes * gpus_per_node"), ("gpus", _RANKS_PRODUCT), ("gpus_per_node", "gpus / nodes"), ("nodes", "gpus / gpus_per_node"),
    ("dp", "gpus / (tp * pp * cp)"), ("gas", "gbs / (dp * mbs)"), ("gbs", _BATCH_PRODUCT),
)  # fmt: skip
"""Columns of counts, and the expressions that fill them where they are unknown, in the order of evaluation."""

Doubts = list[tuple[str, pd.Series]]
"""Code of a doubt and, for rows that are in doubt, its sentence; it may be null for others."""


def completed(rows: pd.DataFrame, models: Mapping[str, str]) -> tuple[pd.DataFrame, Doubts]:
    """The rows with all columns that follow from those that the table gave, and reasons to doubt them.

    Sizes that the table lacks are those of the model that `models` names. The batch is dp*mbs*gas. Parameters
    and FLOPs are counted by our formulas, tied weights once. `tokens_per_step` is no column of results; conditions
    use it. All numbers are floats.
    """
    type_by_column = {column.name: float if column.type in (INT, FLOAT) else object for column in SCHEMA}
    frame = rows.reindex(columns=[*type_by_column, "tokens_per_step"]).astype(type_by_column)
    doubts = [*_fill_model(frame, models)]
    for name, expression in _DERIVED_COUNTS:
        values = _computed(frame, expression)
        frame[name] = frame[name].where(frame[name].notna(), values.where((values % 1 == 0) & (values != 0)))
    _fill_pipeline_and_shards(frame)
    batch = _computed(frame, _BATCH_PRODUCT)
    gbs = frame["gbs"][batch.notna() & (batch != frame["gbs"])]
    texts = "batch does not match the layout: gbs=" + _text(gbs)
    texts += f", {_BATCH_PRODUCT}=" + _text(batch[gbs.index])
    frame.loc[gbs.index, "gbs"] = batch
    frame["tokens_per_step"] = _computed(frame, "gbs * seq_len")
    _fill_speed(frame)
    frame["schema_version"], frame["attempt"], frame["is_final"] = RESULTS_SCHEMA_VERSION, 0, True
    return frame, [*doubts, ("other_batch", texts), *_impossible(frame)]


def typed(frame: pd.DataFrame, names: list[str]) -> pa.Table:
    """The columns `names` of completed rows, with the types of results.

    Raises:
        pa.ArrowException: a number is too large.
    """
    schema = pa.schema([SCHEMA.field(name) for name in names])
    table = pa.Table.from_pandas(frame[names], schema=schema, preserve_index=False)
    return table.replace_schema_metadata(SCHEMA.metadata)


def _fill_model(frame: pd.DataFrame, models: Mapping[str, str]) -> Iterator[tuple[str, pd.Series]]:
    """Fills the sizes that rows lack, and says in which sizes they differ from the model that they name."""
    for name in {*frame["model"].dropna()} & models.keys():
        is_of_model = frame["model"] == name
        frame.loc[is_of_model, "model"] = models[name]
        for size, model_size in sizes_of(load_model(models[name])).items():
            if size not in _PARAM_COLUMNS:
                rows = frame[is_of_model & frame[size].notna() & (frame[size] != model_size)]
                subject = "vocabulary" if size == "vocab_size" else "architecture"
                is_grouped = (size == "num_key_value_heads") & (rows[size] < rows["num_attention_heads"])
                texts = f"different {subject}: {size}=" + _text(rows[size])
                texts += is_grouped.map({True: " (GQA)", False: ""}) + f", {models[name]} has {model_size}"
                yield f"other_{subject}", texts
                frame.loc[is_of_model & frame[size].isna(), size] = model_size
    for row, shape in _shapes(frame).items():
        frame.loc[row, _PARAM_COLUMNS] = [getattr(shape, name) for name in _PARAM_COLUMNS]


def _shapes(frame: pd.DataFrame) -> dict[Any, ModelShape]:
    """Row -> shape of its model, without rows where a size is unknown or sizes contradict each other."""
    shape_by_row = {}
    for row, columns in zip(frame.index, typed(frame, [*MODEL]).to_pylist(), strict=True):
        with contextlib.suppress(ConfigError):
            shape_by_row[row] = shape_of(columns)
    return shape_by_row


def _fill_pipeline_and_shards(frame: pd.DataFrame) -> None:
    frame.loc[frame["pp"] == 1, [*details_of("pp")]] = [NEUTRAL[name] for name in details_of("pp")]
    is_unnamed = frame["pp_schedule"].isna() & (frame["pp"] > 1)
    schedules = (frame["virtual_stages"] > 1).map({True: "interleaved", False: "1f1b"})
    frame.loc[is_unnamed, "pp_schedule"] = schedules
    shards = frame["dp_shard"].where(frame["dp_shard"] != 0).fillna(_computed(frame, "dp * cp"))
    frame.loc[frame["zero_stage"].notna(), "zero_shards"] = shards.where(frame["zero_stage"] != 0, 1)


def _fill_speed(frame: pd.DataFrame) -> None:
    """Fills the peak rate, and of ok rows step time, speeds and mfu, as far as the table gives one of them."""
    groups: Any = frame[frame["peak_flops_per_s"].isna()].groupby(["hardware", "precision"])
    for (name, precision), rows in groups:
        if name in files("hardware") and (rate := load_hardware(name).peak_flops_per_s.get(precision)):
            frame.loc[rows.index, ["peak_flops_per_s", "peak_source"]] = rate, load_hardware(name).source
    speed = frame["tokens_per_s_per_gpu"].fillna(_computed(frame, "tokens_per_s / gpus"))
    speed = speed.fillna(_computed(frame, "tokens_per_step / step_time_s / gpus"))
    is_known = (frame["status"] == "ok") & (frame["gpus"] != 0) & (speed > 0) & (speed < math.inf)
    frame.loc[is_known, "tokens_per_s_per_gpu"] = speed
    frame.loc[is_known, "tokens_per_s"] = _computed(frame, "tokens_per_s_per_gpu * gpus")
    step_time_s = _computed(frame, "tokens_per_step / tokens_per_s")
    frame.loc[is_known, "step_time_s"] = frame["step_time_s"].fillna(step_time_s)
    shapes = _shapes(frame[is_known & (frame["seq_len"] > 0)])
    token_flops = {row: shape.flops_per_token(int(frame["seq_len"][row])) for row, shape in shapes.items()}
    flops_per_s = pd.Series(token_flops, dtype=float) * speed.reindex([*token_flops])
    frame.loc[flops_per_s.index, "model_flops_per_s_per_gpu"] = flops_per_s
    frame.loc[flops_per_s.index, "flops_formula"] = "palm"
    frame.loc[flops_per_s.index, "mfu"] = flops_per_s / frame["peak_flops_per_s"]


def _impossible(frame: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Reasons why the values of rows cannot have been measured."""
    ok_rows = frame[frame["status"] == "ok"]
    for name in (*_COUNT_COLUMNS, *_MEASURED_COLUMNS):
        values = (frame if name in _COUNT_COLUMNS else ok_rows)[name]
        yield "impossible_value", values[values <= 0].map(f"impossible value: {name}={{:.4g}}".format)
    yield "unknown_model", pd.Series("unknown model", frame.index[frame["model"].isna()])
    yield "unknown_step_time", pd.Series("unknown step time", ok_rows.index[ok_rows["step_time_s"].isna()])
    num_ranks = _computed(frame, _RANKS_PRODUCT).dropna()
    other_ranks = num_ranks[num_ranks != frame["gpus"][num_ranks.index]]
    texts = "number of GPUs does not match the layout: gpus=" + _text(frame["gpus"][other_ranks.index])
    yield "other_gpus", texts + f", {_RANKS_PRODUCT}=" + _text(other_ranks)
    for row, mfu in frame["mfu"][frame["mfu"] > 1].items():
        yield from ((doubt.code, pd.Series({row: doubt.sentence})) for doubt in rate_doubts(mfu))
    for name in {*frame["hardware"].dropna()} & files("hardware").keys():
        mem_bytes = load_hardware(name).mem_bytes
        used_bytes = frame.loc[frame["hardware"] == name, _PEAK_COLUMNS].max(axis=1)
        texts = "more memory than a GPU has: " + _text(used_bytes[used_bytes > mem_bytes] / GIB)
        yield "impossible_memory", texts + f" of {mem_bytes / GIB:.0f} GiB"


def _computed(frame: pd.DataFrame, expression: str) -> Any:
    """The values of an expression of columns; null where one of them is unknown."""
    return frame.eval(expression)


def _text(values: pd.Series) -> pd.Series:
    """Values as texts, numbers without digits behind the point."""
    return values.map(lambda value: f"{value:.0f}" if isinstance(value, float) else str(value)).astype(object)
