"""Completes imported rows: what follows from their other columns, and why they may be in doubt."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis.results.imported.given_rates import compare_rates, flops_ranges
from ultrabench.analysis.results.imported.scopes import convert_scopes
from ultrabench.analysis.results.imported.table_map import TableMap
from ultrabench.analysis.results.measured import shape_of
from ultrabench.analysis.results.rows import settings_of, sizes_of
from ultrabench.analysis.results.schema import FLOAT, INT, MODEL, RESULTS_SCHEMA_VERSION, SCHEMA
from ultrabench.attention_type import FLOPS_FORMULAS
from ultrabench.column import FLOPS_PER_S, NUMBER, fill_text
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import ADDED_LATER, BATCH, DEGREES, NEUTRAL, details_of
from ultrabench.model_shape import ModelShape
from ultrabench.result import Status
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_hardware, load_model
from ultrabench.sweep.running.outliers import rate_doubts

_PARAM_COLUMNS = ["num_params", "num_active_params"]
_COUNT_COLUMNS = ("nodes", "gpus", *DEGREES, *BATCH, "gbs", "seq_len")
_PEAK_MEM_COLUMNS = [
    "peak_mem_allocated_bytes",
    "peak_mem_reserved_bytes",
    "peak_mem_reserved_rank0_bytes",
    "peak_mem_device_bytes",
]
_MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", *_PEAK_MEM_COLUMNS)
MIN_PEAK_MEM_BYTES = 1e6
"""Number of bytes below which a peak of memory is probably in another unit."""
_RANKS_PRODUCT, _BATCH_PRODUCT = "*".join(DEGREES), "*".join(("dp", *BATCH))
"""Expressions of columns that give the number of ranks and the global batch size."""
_DERIVED_COUNTS = (
    ("gpus", "nodes * gpus_per_node"), ("gpus", _RANKS_PRODUCT), ("gpus_per_node", "gpus / nodes"),
    ("nodes", "gpus / gpus_per_node"),
    ("dp", "gpus / (tp * pp * cp)"), ("gas", "gbs / (dp * mbs)"), ("gbs", _BATCH_PRODUCT),
)  # fmt: skip
"""Columns of counts, and the expressions that fill them if they are unknown, in the order of evaluation."""

Doubts = list[tuple[str, pd.Series]]
"""Pairs of a doubt's code and its sentence for each row that has it; the sentence may be null for other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """The rows of a table with all columns that follow from those that it gives."""

    frame: pd.DataFrame
    """All numbers are floats. `tokens_per_step` is not a column of results, but conditions of a TableMap may use it."""
    doubts: Doubts
    notes: list[str]
    """Sentences about what was assumed."""


def with_derived_columns(
    rows: pd.DataFrame, table_map: TableMap, half_digits: Mapping[str, pd.Series]
) -> Derived:
    """The rows with the columns that follow from those of the table, and reasons to doubt them.

    What the table gives is kept, also where it contradicts what follows; only the batch is always dp*mbs*gas.
    Sizes that the table lacks are those of the row's model. Parameters and FLOPs are counted by our formulas, tied
    weights once.

    Args:
        table_map: the map of the table, of which this takes the names of models, units, and what rates are of.
        half_digits: column -> for each row half a unit of the last digit of its number.
    """
    type_by_column = {column.name: float if column.type in (INT, FLOAT) else object for column in SCHEMA}
    frame = rows.reindex(columns=[*type_by_column, "tokens_per_step"]).astype(type_by_column)
    doubts = [*_fill_model(frame, table_map.models)]
    shapes = _shapes(frame)
    for name in _PARAM_COLUMNS:
        counts = pd.Series({row: getattr(shape, name) for row, shape in shapes.items()}, dtype=float)
        frame[name] = counts.reindex(frame.index).fillna(frame[name])
    _fill_counts(frame)
    _fill_pipeline_and_shards(frame)
    doubts.append(("other_batch", _checked_batch(frame)))
    frame["tokens_per_step"] = _evaluated(frame, "gbs * seq_len")
    _fill_peak(frame)
    half_digits, scope_notes = convert_scopes(frame, table_map.scope_by_column(), half_digits)
    speed_doubts, notes = _fill_speed(frame, shapes, half_digits, table_map)
    doubts += speed_doubts
    frame["schema_version"] = RESULTS_SCHEMA_VERSION
    return Derived(frame=frame, doubts=[*doubts, *_impossible_doubts(frame)], notes=[*scope_notes, *notes])


def typed_table(frame: pd.DataFrame, columns: list[str]) -> pa.Table:
    """These columns of what `with_derived_columns` returns, with the types of results.

    Raises:
        pa.ArrowException: a number is too large.
    """
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    table = pa.Table.from_pandas(frame[columns], schema=schema, preserve_index=False)
    return table.replace_schema_metadata(SCHEMA.metadata)


def _fill_model(frame: pd.DataFrame, models: Mapping[str, str]) -> Iterator[tuple[str, pd.Series]]:
    """Fills the sizes that rows lack; returns doubts about rows whose sizes differ from those of
    the model they name.
    """
    for table_name in {*frame["model"].dropna()} & models.keys():
        is_of_model = frame["model"] == table_name
        model_name = models[table_name]
        frame.loc[is_of_model, "model"] = model_name
        shape = load_model(model_name)
        frame.loc[is_of_model & frame["model_settings"].isna(), "model_settings"] = settings_of(shape)
        for column, model_value in sizes_of(shape).items():
            if column in _PARAM_COLUMNS:
                continue
            is_other = is_of_model & frame[column].notna() & (frame[column] != model_value)
            if is_other.any():
                other_values = frame[column][is_other]
                subject = "vocabulary" if column == "vocab_size" else "architecture"
                has_fewer = other_values < frame["num_attention_heads"][is_other]
                is_grouped = has_fewer & (column == "num_key_value_heads")
                sentences = f"different {subject}: {column}=" + _texts(other_values)
                sentences += is_grouped.map({True: " (GQA)", False: ""}) + f", {model_name} has {model_value}"
                yield f"other_{subject}", sentences
            frame.loc[is_of_model & frame[column].isna(), column] = model_value


def _shapes(frame: pd.DataFrame) -> dict[Any, ModelShape]:
    """Row -> shape of its model, without rows where a size is unknown or sizes contradict each other."""
    model_numbers = frame.groupby([*MODEL], sort=False, dropna=False).ngroup()
    first_rows = frame.loc[~model_numbers.duplicated().to_numpy()]
    shape_by_number = {}
    for number, columns in enumerate(typed_table(first_rows, [*MODEL]).to_pylist()):
        with contextlib.suppress(ConfigError):
            shape_by_number[number] = shape_of(columns)
    numbered_rows = zip(frame.index, model_numbers, strict=True)
    return {row: shape_by_number[number] for row, number in numbered_rows if number in shape_by_number}


def _fill_counts(frame: pd.DataFrame) -> None:
    """Fills the counts of nodes, GPUs and batch that follow from others.

    A node of known hardware has no more GPUs than that hardware, whatever the ranks are. GPUs that fill no whole number
    of nodes count as on the fewest nodes that hold them; gpus_per_node is then their
    number on each, null if they cannot be spread equally.
    """
    for name, expression in _DERIVED_COUNTS[:2]:
        _fill_count(frame, name, expression)
    for hardware_name in {*frame["hardware"].dropna()} & files("hardware").keys():
        node_size = load_hardware(hardware_name).gpus_per_node
        has_no_size = (frame["hardware"] == hardware_name) & frame["gpus_per_node"].isna()
        is_crowded = frame["gpus"] > frame["nodes"] * node_size
        has_no_size &= frame["nodes"].isna() | frame["gpus"].isna() | is_crowded
        frame.loc[has_no_size, "gpus_per_node"] = node_size
    _fill_count(frame, *_DERIVED_COUNTS[0])
    num_slots = frame["gpus_per_node"].where(frame["gpus_per_node"] > 0)
    num_nodes = np.ceil((frame["gpus"] / num_slots).where(frame["gpus"] > 0))
    frame["nodes"] = frame["nodes"].fillna(pd.Series(num_nodes, frame.index))
    is_partial = frame["gpus"] < frame["nodes"] * num_slots
    gpus_of_node = frame["gpus"] / frame["nodes"]
    frame.loc[is_partial, "gpus_per_node"] = gpus_of_node.where(gpus_of_node % 1 == 0)
    for name, expression in _DERIVED_COUNTS[2:]:
        _fill_count(frame, name, expression)


def _fill_count(frame: pd.DataFrame, name: str, expression: str) -> None:
    values = _evaluated(frame, expression)
    frame[name] = frame[name].where(frame[name].notna(), values.where((values % 1 == 0) & (values != 0)))


def _checked_batch(frame: pd.DataFrame) -> pd.Series:
    """Sets gbs to dp*mbs*gas, and returns a sentence for each row with another gbs."""
    batch_sizes = _evaluated(frame, _BATCH_PRODUCT)
    wrong_gbs = frame["gbs"][batch_sizes.notna() & (batch_sizes != frame["gbs"])]
    sentences = "batch does not match the layout: gbs=" + _texts(wrong_gbs)
    sentences += f", {_BATCH_PRODUCT}=" + _texts(batch_sizes[wrong_gbs.index])
    is_in_tokens = wrong_gbs == (batch_sizes * frame["seq_len"])[wrong_gbs.index]
    sentences += is_in_tokens.map({True: " (perhaps gbs is in tokens: give it unit: tokens)", False: ""})
    frame.loc[wrong_gbs.index, "gbs"] = batch_sizes
    split_batch = _evaluated(frame, "dp * mbs")
    has_rest = (
        frame["gas"].isna() & (split_batch > 0) & (frame["gbs"] % split_batch != 0) & frame["gbs"].notna()
    )
    rest_sentences = "batch does not match the layout: gbs=" + _texts(frame["gbs"][has_rest])
    rest_sentences += " is no multiple of dp*mbs=" + _texts(split_batch[has_rest])
    all_sentences: pd.Series = pd.concat([sentences, rest_sentences]).astype(object)
    return all_sentences


def _fill_pipeline_and_shards(frame: pd.DataFrame) -> None:
    details = [name for name in details_of("pp") if name not in ADDED_LATER]
    frame.loc[frame["pp"] == 1, details] = [NEUTRAL[name] for name in details]
    has_unknown_schedule = frame["pp_schedule"].isna() & (frame["pp"] > 1)
    schedules = (frame["virtual_stages"] > 1).map({True: "interleaved", False: "1f1b"})
    frame.loc[has_unknown_schedule, "pp_schedule"] = schedules
    shards = frame["dp_shard"].where(frame["dp_shard"] != 0).fillna(_evaluated(frame, "dp * cp"))
    shards = shards.where(frame["zero_stage"] != 0, 1).where(frame["zero_stage"].notna())
    frame["zero_shards"] = frame["zero_shards"].fillna(shards)


def _fill_peak(frame: pd.DataFrame) -> None:
    """Fills the peak rates of known hardware."""
    rows_by_hardware: Any = frame[frame["peak_flops_per_s"].isna()].groupby(["hardware", "precision"])
    for (name, precision), rows in rows_by_hardware:
        hardware = load_hardware(name) if name in files("hardware") else None
        if hardware and (peak := hardware.peak_flops_per_s.get(precision)):
            frame.loc[rows.index, ["peak_flops_per_s", "peak_source"]] = peak, hardware.source


def _fill_speed(
    frame: pd.DataFrame,
    shapes: Mapping[Any, ModelShape],
    half_digits: Mapping[str, pd.Series],
    table_map: TableMap,
) -> tuple[Doubts, list[str]]:
    """Fills step time, speeds, FLOP per second and mfu of ok rows as far as they follow from those of the table.

    Returns doubts about numbers that contradict others or look like another quantity, and what was assumed.
    """
    formulas = frame["flops_formula"].where(frame["flops_formula"].isin([*FLOPS_FORMULAS]), "palm")
    facts = zip(frame.index, frame["seq_len"], frame["recompute"], formulas, strict=True)
    keys = [  # a null may be unequal to itself
        (shapes.get(row), seq_len, recompute if isinstance(recompute, str) else None, formula)
        for row, seq_len, recompute, formula in facts
    ]
    ranges_by_key: dict[Any, list[tuple[float, float]]] = {}
    flops_by_key: dict[Any, float] = {}
    for key in dict.fromkeys(keys):
        shape, seq_len, recompute, formula = key
        ranges_by_key[key], flops_by_key[key] = [], np.nan
        if shape is not None and seq_len > 0:
            ranges_by_key[key] = flops_ranges(shape, int(seq_len), recompute)
            flops_by_key[key] = shape.flops_per_token(int(seq_len), formula)
    formula_flops = pd.Series([flops_by_key[key] for key in keys], frame.index, float)
    ranges = [ranges_by_key[key] for key in keys]
    rates = compare_rates(frame, half_digits, ranges, formula_flops, table_map)
    has_speed = (frame["status"] == Status.OK) & (frame["gpus"] != 0) & rates.gpu_tokens_per_s.notna()
    gpu_tokens_per_s = rates.gpu_tokens_per_s.where(has_speed)
    tokens_per_s = gpu_tokens_per_s * frame["gpus"]
    _fill(frame, "tokens_per_s_per_gpu", gpu_tokens_per_s)
    _fill(frame, "tokens_per_s", tokens_per_s)
    _fill(frame, "step_time_s", frame["tokens_per_step"] / tokens_per_s)
    has_mfu_of_table = frame["mfu"].notna() & frame["flops_formula"].isna()
    is_palm = np.isclose(
        frame["mfu"], gpu_tokens_per_s * formula_flops / frame["peak_flops_per_s"], rtol=1e-3
    )
    flops_per_s = gpu_tokens_per_s * formula_flops
    _fill(frame, "model_flops_per_s_per_gpu", flops_per_s)
    _fill(frame, "mfu", flops_per_s / frame["peak_flops_per_s"])
    has_formula = flops_per_s.notna() & (~has_mfu_of_table | is_palm)
    frame.loc[has_formula, "flops_formula"] = formulas[has_formula]
    notes = []
    if num_assumed := int((rates.follows_from_flops & has_speed).sum()):
        used = " and ".join(sorted({*formulas[rates.follows_from_flops & has_speed]}))
        fact = f"speeds of {counted(num_assumed, 'row')} follow from {FLOPS_PER_S.symbol} or MFU by the formula {used}"
        notes.append(f"{fact}; if the table counts otherwise, set constants.flops_formula")
    is_ok = frame["status"] == Status.OK
    has_rate = frame["tokens_per_s_per_gpu"] > 0
    if num_timeless := int((is_ok & has_rate & frame["step_time_s"].isna()).sum()):
        why = "since mbs, gas (or gbs) or seq_len is missing"
        todo = "they rank by speed; compare and predict validate need the batch"
        notes.append(f"{counted(num_timeless, 'row')} with a speed but no step time, {why}: {todo}")
    if num_rateless := int((is_ok & ~has_rate & (frame["step_time_s"] > 0)).sum()):
        why = "since GPUs, mbs, gas (or gbs) or seq_len is missing"
        todo = "give them, or rank with --rank-by step_time_s"
        notes.append(f"{counted(num_rateless, 'row')} with a step time but no speed, {why}: {todo}")
    doubts = [("contradiction", sentences) for sentences in rates.contradictions]
    return [*doubts, *(("other_reading", sentences) for sentences in rates.other_readings)], notes


def _fill(frame: pd.DataFrame, name: str, values: pd.Series) -> None:
    frame[name] = frame[name].fillna(values)


def _impossible_doubts(frame: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Doubts about rows whose values cannot have been measured."""
    ok_rows = frame[frame["status"] == Status.OK]
    for column in (*_COUNT_COLUMNS, *_MEASURED_COLUMNS):
        values = (frame if column in _COUNT_COLUMNS else ok_rows)[column]
        yield "impossible_value", values[values <= 0].map(f"impossible value: {column}={{:.4g}}".format)
    for column in _PEAK_MEM_COLUMNS:
        few_bytes = ok_rows[column][(ok_rows[column] > 0) & (ok_rows[column] < MIN_PEAK_MEM_BYTES)]
        sentences = f"{column}=" + _texts(few_bytes)
        yield "other_reading", sentences + " is in bytes (perhaps it is in MiB or GiB: give its unit)"
    yield "unknown_model", pd.Series("unknown model", frame.index[frame["model"].isna()])
    has_no_speed = ~(ok_rows["step_time_s"] > 0) & ~(ok_rows["tokens_per_s_per_gpu"] > 0)
    yield "unknown_step_time", pd.Series("unknown step time", ok_rows.index[has_no_speed])
    num_ranks = _evaluated(frame, _RANKS_PRODUCT).dropna()
    other_ranks = num_ranks[num_ranks != frame["gpus"][num_ranks.index]]
    num_slots = _evaluated(frame, "nodes * gpus_per_node").dropna()
    crowded = num_slots[num_slots < frame["gpus"][num_slots.index]]
    sentences = "more GPUs than the nodes have: gpus=" + _texts(frame["gpus"][crowded.index])
    yield "other_gpus", sentences + ", nodes*gpus_per_node=" + _texts(crowded)
    sentences = "number of GPUs does not match the layout: gpus=" + _texts(frame["gpus"][other_ranks.index])
    yield "other_gpus", sentences + f", {_RANKS_PRODUCT}=" + _texts(other_ranks)
    known_ranks = frame[[*DEGREES]].fillna(1).prod(axis=1)[frame[[*DEGREES]].isna().any(axis=1)]
    excess_ranks = known_ranks[known_ranks > frame["gpus"][known_ranks.index]]
    sentences = "number of GPUs does not match the layout: gpus=" + _texts(frame["gpus"][excess_ranks.index])
    sentences += f", {_RANKS_PRODUCT}=" + _texts(excess_ranks)
    yield "other_gpus", sentences + ", with unknown degrees as 1"
    source_mfu = frame["source_mfu"][frame["source_mfu"] > 1]
    sentences = "impossible value: source_mfu=" + source_mfu.map(NUMBER.text).astype(object)
    yield "impossible_value", sentences + " is above 1 (perhaps it is in per cent: give it unit: '%')"
    sentences_by_code: dict[str, dict[Any, str]] = {}
    for row, mfu in frame["mfu"][frame["mfu"] > 1].items():
        for doubt in rate_doubts(mfu):
            sentences_by_code.setdefault(doubt.code, {})[row] = doubt.sentence
    yield from ((code, pd.Series(by_row)) for code, by_row in sentences_by_code.items())
    for hardware_name in {*frame["hardware"].dropna()} & files("hardware").keys():
        mem_bytes = load_hardware(hardware_name).mem_bytes
        used_bytes = frame.loc[frame["hardware"] == hardware_name, _PEAK_MEM_COLUMNS].max(axis=1)
        excess_bytes = used_bytes[used_bytes > mem_bytes]
        fill_texts = excess_bytes.map(partial(fill_text, limit_bytes=mem_bytes)).astype(object)
        yield "impossible_memory", "more memory than a GPU has: " + fill_texts


def _evaluated(frame: pd.DataFrame, expression: str) -> Any:
    """The value of an expression of columns for each row; null if one of the columns is unknown."""
    names = sorted({*re.findall(r"[a-z]\w*", expression)})
    return frame[names].eval(expression)  # of all columns, pandas would prepare each one


def _texts(values: pd.Series) -> pd.Series:
    """The values as texts, numbers without digits behind the point."""
    return values.map(lambda value: f"{value:.0f}" if isinstance(value, float) else str(value)).astype(object)
