"""Compares the speeds, times and FLOP rates that a table gives for one row: do they follow from one another?

Step time, tokens/s, tokens/s/GPU and the batch determine each other; FLOP rates and MFU follow from them by one of the
formulas in use. What contradicts is kept, and is a reason to doubt the row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.imported.readings import TOLERANCE, Reading, column_doubts, readings_of
from ultrabench.analysis.results.imported.table_map import TableMap
from ultrabench.analysis.results.numbers import with_unit
from ultrabench.attention_type import FLOPS_FORMULAS
from ultrabench.model_shape import ModelShape
from ultrabench.result import Status

RATE_COLUMNS = ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu")
"""Columns that give the tokens per second of a GPU; the first one counts if two contradict and nothing else decides."""
FLOP_COLUMNS = ("model_flops_per_s_per_gpu", "mfu", "source_mfu")
"""Columns that give the FLOP per second of a GPU by some formula, in the order in which they replace a speed."""
COMPARED_COLUMNS = (*RATE_COLUMNS, *FLOP_COLUMNS)
_FACT_COLUMNS = (*COMPARED_COLUMNS, "gpus", "tokens_per_step", "peak_flops_per_s")
"""Columns that the sentence about a contradiction needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRates:
    """What the speeds of rows have in common."""

    gpu_tokens_per_s: pd.Series
    """Tokens per second of a GPU on which most numbers of the row agree; null where the table gives no speed."""
    follows_from_flops: pd.Series
    """Whether it follows only from FLOP per second or MFU, by an assumed formula."""
    contradictions: list[pd.Series]
    """For each column a sentence about each row whose number contradicts the others; other rows are absent."""
    other_readings: list[pd.Series]
    """For each column a sentence about each row that is probably of another reading of it; other rows are absent."""


def flops_ranges(shape: ModelShape, seq_len: int, recompute: str | None) -> list[tuple[float, float]]:
    """The FLOPs of a token by each formula in use, as the smallest and the largest value; the first is palm.

    A formula counts 6 FLOPs for each parameter: those in matrix products (palm, megatron), all of them (nanotron), or
    all with the embedding twice although it is tied (nanotron with pp > 1); and 12 (palm), 6 (megatron, causal) or no
    FLOPs (6*N) for each layer, channel and position of attention. Executed FLOPs are a third more where backward
    computes everything again, and up to a third more where it computes a part again.
    """
    embedding_copies = shape.embedding_params if shape.tie_word_embeddings else 0
    parameter_counts = dict.fromkeys(
        (shape.num_matmul_params, shape.num_active_params, shape.num_active_params + embedding_copies)
    )
    product_flops = 6 * shape.num_matmul_params
    attention_flops = [shape.flops_per_token(seq_len, formula) - product_flops for formula in FLOPS_FORMULAS]
    counts = [6.0 * n + flops for n, flops in product(parameter_counts, (*attention_flops, 0))]
    if recompute == "none":
        return [(flops, flops) for flops in counts]
    if recompute in (None, "full"):
        return [(flops * share, flops * share) for share in (1, 4 / 3) for flops in counts]
    return [(flops, flops * 4 / 3) for flops in counts]


def compare_rates(
    frame: pd.DataFrame,
    half_digits: Mapping[str, pd.Series],
    ranges: Sequence[Sequence[tuple[float, float]]],
    formula_flops: pd.Series,
    table_map: TableMap,
) -> ComparedRates:
    """Compares the numbers of ok rows, of which the frame holds only those that the table gives.

    Args:
        half_digits: column -> for each row the most that the rounding of its digits changed.
        ranges: for each row what `flops_ranges` returns; empty where the model is unknown.
        formula_flops: FLOPs of a token by which a speed follows from FLOP per second; null where unknown.
        table_map: the map of the table, of which this takes units, scopes and which columns are certain.
    """
    flops_limits = _limits(ranges)
    gpus = frame["gpus"].where(frame["gpus"] > 0)
    rates = {
        "step_time_s": frame["tokens_per_step"] / frame["step_time_s"] / gpus,
        "tokens_per_s": frame["tokens_per_s"] / gpus,
        "tokens_per_s_per_gpu": frame["tokens_per_s_per_gpu"],
    }
    flop_rates = {
        "model_flops_per_s_per_gpu": frame["model_flops_per_s_per_gpu"],
        "mfu": frame["mfu"] * frame["peak_flops_per_s"],
        "source_mfu": frame["source_mfu"] * frame["peak_flops_per_s"],
    }
    is_ok = frame["status"] == Status.OK
    values = {name: _positive(column.where(is_ok)) for name, column in (rates | flop_rates).items()}
    roundings = {name: _rounding(half_digits.get(name), frame[name]) for name in COMPARED_COLUMNS}
    follows_from_flops = frame[[*RATE_COLUMNS]].isna().all(axis=1)
    has_rate = pd.concat([values[name] for name in RATE_COLUMNS], axis=1).notna().any(axis=1)
    reference = pd.Series(np.nan, frame.index)
    for name in FLOP_COLUMNS:
        reference = reference.fillna((values[name] / formula_flops).where(follows_from_flops))
    source = pd.Series("", frame.index, dtype=object)
    source[follows_from_flops & reference.notna()] = "the formula of the other"
    votes = {}
    for name in RATE_COLUMNS:
        agreement = _agreement(values, roundings, values[name], roundings[name], flops_limits)
        num_agreeing = pd.DataFrame(agreement).sum(axis=1)
        votes[name] = num_agreeing.where(values[name].notna(), -1)
    best_names = pd.DataFrame(votes).idxmax(axis=1)
    reference_rounding = pd.Series(0.0, frame.index)
    for name in RATE_COLUMNS:
        is_best = has_rate & (best_names == name)
        reference[is_best], source[is_best] = values[name], name
        reference_rounding[is_best] = roundings[name]
    agrees = _agreement(values, roundings, reference, reference_rounding, flops_limits)
    is_contradiction = pd.DataFrame({
        name: values[name].notna() & reference.notna() & ~agrees[name] for name in COMPARED_COLUMNS
    })  # fmt: skip
    for name in FLOP_COLUMNS:  # without a known model no formula can be tried
        is_contradiction[name] &= np.isfinite(flops_limits[0]).any(axis=1)
    readings_by_name = {name: readings_of(name, frame, table_map.unit_of(name)) for name in COMPARED_COLUMNS}
    certain_columns, columns_with_scope = table_map.certain_columns(), table_map.columns_with_scope()
    contradictions, other_readings = [], []
    num_agreeing = pd.DataFrame(agrees).sum(axis=1)
    for name in COMPARED_COLUMNS:
        is_doubtful = is_contradiction[name].to_numpy()
        facts_of_rows = frame.loc[is_doubtful, [*_FACT_COLUMNS]].to_dict("records")
        sentences = {}
        for position, facts in zip(np.flatnonzero(is_doubtful).tolist(), facts_of_rows, strict=True):
            row = frame.index[position]
            numbers = reference[row], values[name][row]
            sentences[row] = _sentence(
                facts, row, name, source[row], *numbers, ranges[position], readings_by_name
            )
        contradictions.append(pd.Series(sentences, dtype=object))
        if name in certain_columns or values[name].isna().all():
            continue
        flops = (
            formula_flops,
            flops_limits[0].min(axis=1, initial=np.inf, where=np.isfinite(flops_limits[0])),
        )
        usual_flops, least_flops = flops if name in RATE_COLUMNS else (1.0, 1.0)
        mfu = pd.DataFrame({"usual": values[name] * usual_flops, "least": values[name] * least_flops})
        mfu = mfu.div(frame["peak_flops_per_s"], axis=0).replace(np.inf, np.nan)
        is_confirmed = agrees[name] & (num_agreeing > 1)
        judged_speeds = values[name].where(~is_contradiction[name])
        other_readings.append(
            column_doubts(
                name,
                frame,
                judged_speeds,
                mfu,
                is_confirmed,
                readings_by_name[name],
                name in columns_with_scope,
            )
        )
    return ComparedRates(
        gpu_tokens_per_s=reference, follows_from_flops=follows_from_flops & reference.notna(),
        contradictions=contradictions, other_readings=other_readings,
    )  # fmt: skip


def _positive(values: pd.Series) -> pd.Series:
    return values.where((values > 0) & (values < np.inf))


def _rounding(halves: pd.Series | None, values: pd.Series) -> pd.Series:
    """The most that rounding changed the logarithm of numbers; 0 where their digits are unknown."""
    if halves is None:
        return pd.Series(0.0, values.index)
    ratios = (halves / values).where(values > 0).fillna(0.0).clip(upper=1.0)
    return pd.Series(np.log1p(ratios), values.index)


def _limits(ranges: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest FLOPs of a token of each row by each formula, in two matrices."""
    matrix_by_id: dict[int, np.ndarray] = {}
    width = max((len(row_ranges) for row_ranges in ranges), default=0)
    rows = []
    for row_ranges in ranges:
        if (key := id(row_ranges)) not in matrix_by_id:
            padded = [*row_ranges, *[(np.nan, np.nan)] * (width - len(row_ranges))]
            matrix_by_id[key] = np.array(padded, float).reshape(width, 2)
        rows.append(matrix_by_id[key])
    cube = np.array(rows).reshape(len(ranges), width, 2)
    return cube[:, :, 0], cube[:, :, 1]


def _agreement(
    values: Mapping[str, pd.Series],
    roundings: Mapping[str, pd.Series],
    rate: pd.Series,
    rate_rounding: pd.Series,
    flops_limits: tuple[np.ndarray, np.ndarray],
) -> dict[str, pd.Series]:
    """Column -> for each row whether its number follows from a rate; False where one of them is unknown."""
    agreement = {}
    for name in COMPARED_COLUMNS:
        max_difference = np.log1p(TOLERANCE) + roundings[name] + rate_rounding
        if name in RATE_COLUMNS:
            agreement[name] = pd.Series(np.log(values[name] / rate), rate.index).abs() <= max_difference
        else:
            ratio = np.log((values[name] / rate).to_numpy(float))[:, None]
            low, high = (np.log(limits) for limits in flops_limits)
            edge = max_difference.to_numpy(float)[:, None]
            is_near = (ratio >= low - edge) & (ratio <= high + edge)
            agreement[name] = pd.Series(is_near.any(axis=1), rate.index)
    return agreement


def _sentence(
    facts: Mapping[Any, Any],
    row: Any,
    name: str,
    source: str,
    reference: float,
    value: float,
    ranges: Sequence[tuple[float, float]],
    readings_by_name: Mapping[str, Sequence[Reading]],
) -> str:
    """The sentence about a number that contradicts the others, with what they mean, and its likeliest reading."""
    tokens_per_step = facts["tokens_per_step"]
    peak = facts["peak_flops_per_s"]
    flops = ranges[0][0] if ranges else np.nan
    expected = {
        "step_time_s": tokens_per_step / (reference * facts["gpus"]),
        "tokens_per_s": reference * facts["gpus"],
        "tokens_per_s_per_gpu": reference,
        "model_flops_per_s_per_gpu": reference * flops,
        "mfu": reference * flops / peak,
        "source_mfu": reference * flops / peak,
    }[name]
    number_text = f"{name}={_text(name, facts[name])}"
    source_text = f"{source}={_text(source, facts[source])}" if source in RATE_COLUMNS else source
    formula_text = " by the formula palm" if name in FLOP_COLUMNS else ""
    sentence = (
        f"{number_text} contradicts {source_text}, from which {_text(name, expected)} follows{formula_text}"
    )
    limits = [*ranges] if name in FLOP_COLUMNS else [(1.0, 1.0)]
    explanations = {}
    if source in RATE_COLUMNS:
        inverse_limits = [(1 / high, 1 / low) for low, high in limits]
        explanations[source] = [
            *_explanations(readings_by_name[source], row, reference / value, inverse_limits)
        ]
    explanations[name] = [*_explanations(readings_by_name[name], row, value / reference, limits)]
    if name in FLOP_COLUMNS and ranges and 0.5 < (count_ratio := value / reference / flops) < 2:
        explanations[name].append(f"another count of FLOPs, {count_ratio:.2f} times that of palm")
    texts = [f"{column} is {' or '.join(readings)}" for column, readings in explanations.items() if readings]
    return f"{sentence} (perhaps {', or '.join(texts)})" if texts else sentence


def _text(column: str, value: float) -> str:
    if column == "step_time_s":
        return column_of(column).unit.exact_text(value)
    return str(with_unit(column, value))


def _explanations(
    readings: Sequence[Reading], row: Any, ratio: float, limits: Sequence[tuple[float, float]]
) -> Iterator[str]:
    """The readings by which a number may be `ratio` times what the other one gives.

    Args:
        limits: the smallest and the largest ratio that would be right, by each formula.
    """
    for reading in readings:
        factor = reading.factors[row]
        if not factor > 0 or factor == 1:
            continue
        if any(
            low * factor / (1 + TOLERANCE) <= ratio <= high * factor * (1 + TOLERANCE) for low, high in limits
        ):
            yield reading.text
