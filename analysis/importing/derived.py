"""Completes an imported row: what follows from its other columns, and why it may be in doubt."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ultrabench.analysis.measured import shape_of
from ultrabench.analysis.rows import Row, sizes_of
from ultrabench.analysis.schema import RESULTS_SCHEMA_VERSION, SIZES
from ultrabench.errors import ConfigError
from ultrabench.hardware import GIB, Hardware
from ultrabench.layout import AXES, BATCH, DEGREES, NEUTRAL, details_of
from ultrabench.model_shape import ModelShape
from ultrabench.record import content_id
from ultrabench.result import Doubt
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_hardware, load_model
from ultrabench.sweep.running.outliers import impossible

_IDENTITY = (
    "model", *SIZES, "routing", *AXES, "nodes", "gpus", "gbs", "seq_len", "precision", "compile", "kernel", "kernel_version", "hardware",
)  # fmt: skip
"""Columns of which the run_id of an imported row is the hash."""
_PARAMS = ("num_params", "num_active_params")
_COUNTS = ("nodes", "gpus", *DEGREES, *BATCH, "gbs", "seq_len")
_PEAK_BYTES = ("peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes")
_MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", *_PEAK_BYTES)


def completed(row: Row, models: Mapping[str, str]) -> tuple[Row, list[Doubt]]:
    """The row with all columns that follow from those that the table gave, and reasons to doubt it.

    Sizes that the table lacks are those of the model that `models` names. The batch is dp*mbs*gas. Parameters
    and FLOPs are counted by our formulas, tied weights once. `tokens_per_step` is no column; conditions use it.
    """
    doubts = _fill_model(row, models)
    _fill_layout(row)
    batch = _product(row, "dp", *BATCH)
    if batch is not None and row.setdefault("gbs", batch) != batch:
        other = f"batch does not match the layout: gbs={row['gbs']}, dp*mbs*gas={batch}"
        doubts.append(Doubt("other_batch", other))
        row["gbs"] = batch
    row["tokens_per_step"] = _product(row, "gbs", "seq_len")
    if row.get("peak_flops_per_s") is None:
        row |= _peak(row.get("hardware", ""), row.get("precision", ""))
    _fill_speed(row)
    row |= {"schema_version": RESULTS_SCHEMA_VERSION, "attempt": 0, "is_final": True}
    row["run_id"] = content_id({name: row.get(name) for name in _IDENTITY})
    return row, [*doubts, *_impossible(row)]


def _fill_model(row: Row, models: Mapping[str, str]) -> list[Doubt]:
    """Fills the sizes that the row lacks; returns in which sizes it differs from the model that it names."""
    doubts = []
    if (name := models.get(row.get("model", ""))) is not None:
        row["model"] = name
        for size, usual in sizes_of(_model(name)).items():
            if size not in _PARAMS and row.setdefault(size, usual) != usual:
                doubts.append(_other(row, size, usual))
    if shape := _shape(row):
        row |= {name: getattr(shape, name) for name in _PARAMS}
    return doubts


def _impossible(row: Row) -> Iterator[Doubt]:
    """Reasons why the values of the row cannot have been measured."""
    ok = row.get("status") == "ok"
    for name in (*_COUNTS, *(_MEASURED if ok else ())):
        if row.get(name) is not None and row[name] <= 0:
            yield Doubt("impossible_value", f"impossible value: {name}={row[name]:.4g}")
    if row.get("model") is None:
        yield Doubt("unknown_model", "unknown model")
    if ok and row.get("step_time_s") is None:
        yield Doubt("unknown_step_time", "unknown step time")
    ranks = _product(row, *DEGREES)
    if ranks is not None and row.get("gpus") != ranks:
        text = (
            f"number of GPUs does not match the layout: gpus={row.get('gpus')}, {'*'.join(DEGREES)}={ranks}"
        )
        yield Doubt("other_gpus", text)
    yield from impossible(row.get("mfu"))
    used_bytes, node_type = (
        max(row.get(name) or 0 for name in _PEAK_BYTES),
        _hardware(row.get("hardware", "")),
    )
    if node_type and used_bytes > node_type.mem_bytes:
        text = f"more memory than a GPU has: {used_bytes / GIB:.0f} of {node_type.mem_bytes / GIB:.0f} GiB"
        yield Doubt("impossible_memory", text)


def _other(row: Row, size: str, usual: object) -> Doubt:
    subject = "vocabulary" if size == "vocab_size" else "architecture"
    grouped = size == "num_key_value_heads" and row[size] < row["num_attention_heads"]
    text = f"different {subject}: {size}={row[size]}{' (GQA)' * grouped}, {row['model']} has {usual}"
    return Doubt(f"other_{subject}", text)


_model = cache(load_model)


def _shape(row: Row) -> ModelShape | None:
    """The shape of the row's model; None where a size is unknown or sizes contradict each other."""
    try:
        return shape_of(row)
    except ConfigError:
        return None


def _fill_layout(row: Row) -> None:
    if row.get("gpus") is None:
        row["gpus"] = _product(row, "nodes", "gpus_per_node") or _product(row, *DEGREES)
    _fill_quotient(row, "gpus_per_node", "gpus", "nodes")
    _fill_quotient(row, "nodes", "gpus", "gpus_per_node")
    _fill_quotient(row, "dp", "gpus", "tp", "pp", "cp")
    _fill_quotient(row, "gas", "gbs", "dp", "mbs")
    if row.get("pp") == 1:
        row |= {name: NEUTRAL[name] for name in details_of("pp")}
    elif row.get("pp") and row.get("pp_schedule") is None:
        row["pp_schedule"] = "interleaved" if (row.get("virtual_stages") or 1) > 1 else "1f1b"
    if row.get("zero_stage") is not None:
        row["zero_shards"] = row.get("dp_shard") or _product(row, "dp", "cp") if row["zero_stage"] else 1


def _fill_quotient(row: Row, name: str, whole: str, *parts: str) -> None:
    """Fills the column `name` with whole / parts, where it is unknown and the quotient is a whole number."""
    product = _product(row, *parts)
    if row.get(name) is None and row.get(whole) and product and row[whole] % product == 0:
        row[name] = row[whole] // product


def _fill_speed(row: Row) -> None:
    """Fills step time, speeds and mfu of an ok row, as far as the table gives one of them."""
    gpus, tokens = row.get("gpus"), row["tokens_per_step"]
    if row.get("status") != "ok" or not gpus:
        return
    speed, time_s = row.get("tokens_per_s_per_gpu"), row.get("step_time_s")
    if speed is None and (total := row.get("tokens_per_s")) is not None:
        speed = total / gpus
    if speed is None and time_s and tokens:
        speed = tokens / time_s / gpus
    if not speed or speed < 0:
        return
    row |= {"tokens_per_s_per_gpu": speed, "tokens_per_s": speed * gpus}
    if time_s is None and tokens:
        row["step_time_s"] = tokens / (speed * gpus)
    if (shape := _shape(row)) and row.get("seq_len"):
        rate = shape.flops_per_token(row["seq_len"]) * speed
        row |= {"model_flops_per_s_per_gpu": rate, "flops_formula": "palm"}
        row["mfu"] = rate / peak if (peak := row.get("peak_flops_per_s")) else None


def _product(row: Row, *names: str) -> int | None:
    """The product of columns; None where one of them is unknown."""
    values: list[Any] = [row.get(name) for name in names]
    return None if None in values else math.prod(values)


def _peak(hardware: str, precision: str) -> Row:
    """The columns with the dense rate of a node type in this precision; empty where one of them is unknown."""
    node_type = _hardware(hardware)
    rate = node_type.peak_flops_per_s.get(precision) if node_type else None
    return {"peak_flops_per_s": rate, "peak_source": node_type.source} if node_type and rate else {}


@cache
def _hardware(name: str) -> Hardware | None:
    """The node type of that name; None where it is unknown."""
    return load_hardware(name) if name in files("hardware") else None
