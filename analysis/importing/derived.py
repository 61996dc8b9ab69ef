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
from ultrabench.sweep.running.outliers import impossible

_PARAMS = ["num_params", "num_active_params"]
_COUNTS = ("nodes", "gpus", *DEGREES, *BATCH, "gbs", "seq_len")
_PEAK_BYTES = ["peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes"]
_MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", *_PEAK_BYTES)
_RANKS, _BATCH = "*".join(DEGREES), "*".join(("dp", *BATCH))
_FOLLOWING = (
    ("gpus", "nodes * gpus_per_node"), ("gpus", _RANKS), ("gpus_per_node", "gpus / nodes"), ("nodes", "gpus / gpus_per_node"),
    ("dp", "gpus / (tp * pp * cp)"), ("gas", "gbs / (dp * mbs)"), ("gbs", _BATCH),
)  # fmt: skip
"""Columns of counts, and the whole number that each is where it is unknown; the order counts."""

Doubts = list[tuple[str, pd.Series]]
"""Code of a doubt and, for rows that are in doubt, its sentence; it may be null for others."""


def completed(rows: pd.DataFrame, models: Mapping[str, str]) -> tuple[pd.DataFrame, Doubts]:
    """The rows with all columns that follow from those that the table gave, and reasons to doubt them.

    Sizes that the table lacks are those of the model that `models` names. The batch is dp*mbs*gas. Parameters
    and FLOPs are counted by our formulas, tied weights once. `tokens_per_step` is no column of results; conditions
    use it. All numbers are floats.
    """
    kinds = {column.name: float if column.type in (INT, FLOAT) else object for column in SCHEMA}
    frame = rows.reindex(columns=[*kinds, "tokens_per_step"]).astype(kinds)
    doubts = [*_fill_model(frame, models)]
    for name, expression in _FOLLOWING:
        values = _computed(frame, expression)
        frame[name] = frame[name].where(frame[name].notna(), values.where((values % 1 == 0) & (values != 0)))
    _fill_pipeline_and_shards(frame)
    batch = _computed(frame, _BATCH)
    other = frame["gbs"][batch.notna() & (batch != frame["gbs"])]
    text = "batch does not match the layout: gbs=" + _text(other) + f", {_BATCH}=" + _text(batch[other.index])
    frame.loc[other.index, "gbs"] = batch
    frame["tokens_per_step"] = _computed(frame, "gbs * seq_len")
    _fill_speed(frame)
    frame["schema_version"], frame["attempt"], frame["is_final"] = RESULTS_SCHEMA_VERSION, 0, True
    return frame, [*doubts, ("other_batch", text), *_impossible(frame)]


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
        rows = frame["model"] == name
        frame.loc[rows, "model"] = models[name]
        for size, usual in sizes_of(load_model(models[name])).items():
            if size not in _PARAMS:
                other = frame[rows & frame[size].notna() & (frame[size] != usual)]
                subject = "vocabulary" if size == "vocab_size" else "architecture"
                grouped = (size == "num_key_value_heads") & (other[size] < other["num_attention_heads"])
                text = f"different {subject}: {size}=" + _text(other[size])
                text += grouped.map({True: " (GQA)", False: ""}) + f", {models[name]} has {usual}"
                yield f"other_{subject}", text
                frame.loc[rows & frame[size].isna(), size] = usual
    for row, shape in _shapes(frame).items():
        frame.loc[row, _PARAMS] = [getattr(shape, name) for name in _PARAMS]


def _shapes(frame: pd.DataFrame) -> dict[Any, ModelShape]:
    """Row -> shape of its model, without rows where a size is unknown or sizes contradict each other."""
    shapes = {}
    for row, columns in zip(frame.index, typed(frame, [*MODEL]).to_pylist(), strict=True):
        with contextlib.suppress(ConfigError):
            shapes[row] = shape_of(columns)
    return shapes


def _fill_pipeline_and_shards(frame: pd.DataFrame) -> None:
    frame.loc[frame["pp"] == 1, [*details_of("pp")]] = [NEUTRAL[name] for name in details_of("pp")]
    unnamed = frame["pp_schedule"].isna() & (frame["pp"] > 1)
    schedules = (frame["virtual_stages"] > 1).map({True: "interleaved", False: "1f1b"})
    frame.loc[unnamed, "pp_schedule"] = schedules
    shards = frame["dp_shard"].where(frame["dp_shard"] != 0).fillna(_computed(frame, "dp * cp"))
    frame.loc[frame["zero_stage"].notna(), "zero_shards"] = shards.where(frame["zero_stage"] != 0, 1)


def _fill_speed(frame: pd.DataFrame) -> None:
    """Fills the peak rate, and of ok rows step time, speeds and mfu, as far as the table gives one of them."""
    places: Any = frame[frame["peak_flops_per_s"].isna()].groupby(["hardware", "precision"])
    for (name, precision), rows in places:
        if name in files("hardware") and (rate := load_hardware(name).peak_flops_per_s.get(precision)):
            frame.loc[rows.index, ["peak_flops_per_s", "peak_source"]] = rate, load_hardware(name).source
    speed = frame["tokens_per_s_per_gpu"].fillna(_computed(frame, "tokens_per_s / gpus"))
    speed = speed.fillna(_computed(frame, "tokens_per_step / step_time_s / gpus"))
    known = (frame["status"] == "ok") & (frame["gpus"] != 0) & (speed > 0) & (speed < math.inf)
    frame.loc[known, "tokens_per_s_per_gpu"] = speed
    frame.loc[known, "tokens_per_s"] = _computed(frame, "tokens_per_s_per_gpu * gpus")
    step_time_s = _computed(frame, "tokens_per_step / tokens_per_s")
    frame.loc[known, "step_time_s"] = frame["step_time_s"].fillna(step_time_s)
    shapes = _shapes(frame[known & (frame["seq_len"] > 0)])
    flops = {row: shape.flops_per_token(int(frame["seq_len"][row])) for row, shape in shapes.items()}
    rates = pd.Series(flops, dtype=float) * speed.reindex([*flops])
    frame.loc[rates.index, "model_flops_per_s_per_gpu"] = rates
    frame.loc[rates.index, "flops_formula"] = "palm"
    frame.loc[rates.index, "mfu"] = rates / frame["peak_flops_per_s"]


def _impossible(frame: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Reasons why the values of rows cannot have been measured."""
    ok = frame[frame["status"] == "ok"]
    for name in (*_COUNTS, *_MEASURED):
        values = (frame if name in _COUNTS else ok)[name]
        yield "impossible_value", values[values <= 0].map(f"impossible value: {name}={{:.4g}}".format)
    yield "unknown_model", pd.Series("unknown model", frame.index[frame["model"].isna()])
    yield "unknown_step_time", pd.Series("unknown step time", ok.index[ok["step_time_s"].isna()])
    ranks = _computed(frame, _RANKS).dropna()
    other = ranks[ranks != frame["gpus"][ranks.index]]
    text = "number of GPUs does not match the layout: gpus=" + _text(frame["gpus"][other.index])
    yield "other_gpus", text + f", {_RANKS}=" + _text(other)
    for row, mfu in frame["mfu"][frame["mfu"] > 1].items():
        yield from ((doubt.code, pd.Series({row: doubt.sentence})) for doubt in impossible(mfu))
    for name in {*frame["hardware"].dropna()} & files("hardware").keys():
        limit = load_hardware(name).mem_bytes
        used = frame.loc[frame["hardware"] == name, _PEAK_BYTES].max(axis=1)
        text = "more memory than a GPU has: " + _text(used[used > limit] / GIB)
        yield "impossible_memory", text + f" of {limit / GIB:.0f} GiB"


def _computed(frame: pd.DataFrame, expression: str) -> Any:
    """The values of an expression of columns; null where one of them is unknown."""
    return frame.eval(expression)


def _text(values: pd.Series) -> pd.Series:
    """Values as texts, numbers without digits behind the point."""
    return values.map(lambda value: f"{value:.0f}" if isinstance(value, float) else str(value)).astype(object)
