"""What a column of speeds may hold instead of what it is mapped to, and whether all of its rows together say so.

Where a row has a second number, the two are compared (given_rates.py). A column alone is judged by the MFU that follows
from it. How its numbers change with the layout proves nothing alone: tokens/s of a DP rank grow with tp * pp * cp, and
so do those of a GPU where slow links make DP slow. A reading is one of the whole column, so a row is in doubt although
only others of its column are impossible.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.imported.scopes import SCOPE_TEXTS, gpus_in_scope, is_of_one_gpu
from ultrabench.analysis.results.imported.units import UNITS
from ultrabench.analysis.results.numbers import percent, with_unit
from ultrabench.column import FLOPS_PER_S
from ultrabench.errors import counted

TOLERANCE = 0.03
"""Relative difference, beside the rounding of digits, up to which two numbers say the same."""
MAX_USUAL_MFU = 0.85
"""MFU that no program reaches: matrix products alone have 70 to 90 % of the peak of a GPU."""
MIN_USUAL_MFU, MIN_LIKELY_MFU = 0.01, 0.05
"""MFU below which a number probably means something else, and the least that another reading must give in its place."""
MIN_TREND = 0.35
"""Power of the factor of another reading with which numbers of this reading grow at least."""
MIN_TREND_ROWS, MIN_TREND_RANGE = 3, 3.0
"""Smallest number of rows, and smallest ratio of the largest to the smallest factor, that show how numbers grow."""
MAX_SLIP_RATIO = 4.0
"""Ratio of the largest MFU to the next one from which it says nothing about the column."""
MAX_SPREAD_RATIO = 2.0
"""Ratio to the spread of the reading that makes the speeds most alike, up to which other readings are named, too."""
_GROUP_COLUMNS = ["model", "seq_len", "hardware", "precision", "kernel"]
"""Columns of settings within which numbers of different layouts are comparable."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Another quantity that the numbers of a column may be."""

    text: str
    """What the column is, such as `per DP rank`."""
    factors: pd.Series
    """For each row how many times the speed is too high if the column is read as it is mapped."""
    map_entry: str | None = None
    """What to write into the map, such as `unit: ms`; None where no entry makes ultrabench read the column so."""
    is_scope: bool = False
    """Whether it is the same rate of another number of GPUs."""


def readings_of(name: str, frame: pd.DataFrame, unit: str | None = None) -> list[Reading]:
    """The readings of a column of COMPARED_COLUMNS beside the one that it is mapped to.

    Args:
        unit: the unit that the map or the header names; None if they name none.
    """
    readings = []
    if name in ("tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu"):
        num_gpus = gpus_in_scope(frame, "gpu" if is_of_one_gpu(name) else "all")
        for scope, text in SCOPE_TEXTS.items():
            if scope != ("gpu" if is_of_one_gpu(name) else "all"):
                readings.append(
                    Reading(text, gpus_in_scope(frame, scope) / num_gpus, f"per: {scope}", is_scope=True)
                )
    if name.startswith("tokens_per_s"):
        readings.append(Reading("in sequences/s", 1 / frame["seq_len"]))
        readings += _in_units(frame, {"in thousands": (1e-3, "unit: thousand")})
    elif name == "step_time_s":  # the speed is the higher, the shorter the time is
        readings.append(Reading("of one micro-batch", frame["gas"]))
        readings.append(Reading("of a gbs in tokens", _tokens_of_sequence(frame), "unit: tokens for gbs"))
        units = {"in ms": (1e-3, "unit: ms"), "in us": (1e-6, "unit: us"), "in minutes": (60.0, "unit: min")}
        if unit not in (None, "s"):
            units = {"in s": (1 / UNITS[unit][1], "unit: s")}
        readings += _in_units(frame, units)
    elif name == "model_flops_per_s_per_gpu":
        units = {
            f"in {prefix}{FLOPS_PER_S.symbol}": (size, f"unit: {prefix}{FLOPS_PER_S.symbol}")
            for prefix, size in (("T", 1e-12), ("G", 1e-9), ("P", 1e-15))
        }
        readings += _in_units(frame, units | {"in thousands": (1e-3, None)})
    else:
        readings += _in_units(frame, {
            "in per cent": (100.0, "unit: '%'"),
            "a fraction that was read as per cent": (0.01, "unit: fraction"),
            "relative to half the peak": (2.0, None),
            "relative to twice the peak, as with sparsity": (0.5, None),
        })  # fmt: skip
    return readings


def _tokens_of_sequence(frame: pd.DataFrame) -> pd.Series:
    """The tokens of a sequence, null where gbs is no number of tokens that are whole sequences of
    equal micro-batches.
    """
    sequences_of_step = frame["gbs"] / frame["seq_len"]
    is_whole = (
        (frame["seq_len"] > 1) & (sequences_of_step >= 1) & (sequences_of_step % frame["mbs"].fillna(1) == 0)
    )
    return frame["seq_len"].where(is_whole)


def _in_units(frame: pd.DataFrame, units: Mapping[str, tuple[float, str | None]]) -> Iterator[Reading]:
    for text, (factor, map_entry) in units.items():
        yield Reading(text, pd.Series(factor, frame.index), map_entry)


def column_doubts(
    name: str,
    frame: pd.DataFrame,
    speeds: pd.Series,
    mfu: pd.DataFrame,
    is_confirmed: pd.Series,
    readings: list[Reading],
    names_scope: bool = False,
) -> pd.Series:
    """For each row whose number is probably of another reading of its column a sentence with both;
    other rows are absent.

    Args:
        speeds: what the column says of one GPU, in tokens/s or FLOP/s; null in rows that are not to be judged.
        mfu: columns `usual` and `least`: the MFU that follows, by the usual formula and by the one with the fewest
            FLOPs.
        is_confirmed: rows in which another number of the table says the same.
        names_scope: whether the map or the header says of how many GPUs the rate is; only impossible rows speak
            against it.
    """
    groups = frame.groupby(_GROUP_COLUMNS, dropna=False, sort=False).ngroup()
    likely: list[tuple[float, Reading, pd.Series]] = []
    for reading in readings:
        factors = reading.factors.where(reading.factors > 0)
        differs = factors.notna() & ~np.isclose(factors, 1.0) & speeds.notna()
        if not differs.any() or (differs & is_confirmed).any():
            continue
        rows = _likely_rows(
            speeds, mfu, factors, groups, differs, may_be_low=names_scope and reading.is_scope
        )
        if rows.any():
            likely.append((_spread(speeds / factors, groups), reading, rows))
    if not likely:
        return pd.Series(dtype=object)
    likely.sort(key=lambda entry: entry[0])
    least_spread, best, rows = likely[0]
    max_spread = MAX_SPREAD_RATIO * least_spread + TOLERANCE
    named_readings = [reading for spread, reading, _ in likely if spread <= max_spread]
    texts = " or ".join(reading.text for reading in named_readings)
    entries = [entry for reading in named_readings if (entry := reading.map_entry)]
    numbers = mfu["usual"].where(rows).dropna()
    numbers_as_mapped, show = (numbers, _mfu_text) if len(numbers) else (speeds[rows], _speed_text)
    numbers_as_read = numbers_as_mapped / best.factors[numbers_as_mapped.index]
    rows_text = counted(len(numbers_as_mapped), "row")
    span = f"{_span(numbers_as_read, show)} instead of {_span(numbers_as_mapped, show)} in {rows_text}"
    todo = f"write {' or '.join(entries)} into the map if so, " if entries else ""
    quantity = column_of("mfu").heading if len(numbers) else "the speed of a GPU"
    sentences = {}
    for row, number in frame.loc[rows, name].items():
        fact = f"{name}={_number_text(name, number)} may be {texts}: {quantity} is then {span}"
        sentences[row] = f"{fact}; {todo}certain: true if not"
    return pd.Series(sentences, dtype=object)


def _likely_rows(
    speeds: pd.Series,
    mfu: pd.DataFrame,
    factors: pd.Series,
    groups: pd.Series,
    differs: pd.Series,
    *,
    may_be_low: bool,
) -> pd.Series:
    """The rows whose numbers are probably of the reading with these factors.

    Args:
        may_be_low: whether a low MFU says nothing, so that only an impossible one does.
    """
    no_rows = pd.Series(False, speeds.index)
    usual, least = mfu["usual"] / factors, mfu["least"] / factors
    judged = speeds.notna() & factors.notna()
    is_low = judged & (mfu["usual"] < MIN_USUAL_MFU) & (not may_be_low)
    are_apart = not (mfu["usual"][judged & ~is_low] < MIN_LIKELY_MFU).any()
    if (differs & is_low).any() and are_apart and _good_mfu(usual[is_low]) >= MIN_LIKELY_MFU:
        has_fitting_trend = not _trend(speeds[is_low], factors[is_low], groups) < MIN_TREND
        if has_fitting_trend and not (least[is_low] > MAX_USUAL_MFU).any():
            return is_low & differs
    if (least[judged] > MAX_USUAL_MFU).any():
        return no_rows
    is_impossible = judged & differs & (mfu["least"] > MAX_USUAL_MFU)
    if is_impossible.any() and not _is_slip(mfu["least"][judged]) and usual[judged].max() >= MIN_USUAL_MFU:
        return judged & differs
    return no_rows


def _is_slip(mfu: pd.Series) -> bool:
    """Whether a single row of several is far above all others, as where its number is mistyped."""
    largest = mfu.nlargest(2).tolist()
    return len(mfu) > 2 and len(largest) > 1 and largest[0] > MAX_SLIP_RATIO * largest[1]


def _good_mfu(mfu: pd.Series) -> float:
    """The MFU that a quarter of the rows have or exceed; layouts are tried that are slow."""
    return float(mfu.quantile(0.75))


def _trend(speeds: pd.Series, factors: pd.Series, groups: pd.Series) -> float:
    """The power of the factors with which the speeds of comparable rows grow; NaN where the rows do not show it."""
    logs: pd.DataFrame = pd.DataFrame({"speed": speeds, "factor": factors}).map(math.log)
    logs = logs - logs.groupby(groups[logs.index]).transform("mean")
    factor_range = logs["factor"].groupby(groups[logs.index]).agg(np.ptp).max()
    if len(logs) < MIN_TREND_ROWS or not factor_range >= np.log(MIN_TREND_RANGE) - 1e-9:
        return np.nan
    return float((logs["speed"] * logs["factor"]).sum() / (logs["factor"] ** 2).sum())


def _spread(speeds: pd.Series, groups: pd.Series) -> float:
    """How much the logarithms of the speeds of comparable rows differ from their mean."""
    logs: pd.Series = speeds.dropna().map(math.log)
    return float((logs - logs.groupby(groups[logs.index]).transform("mean")).abs().sum())


def _span(values: pd.Series, show: Any) -> str:
    low, high = show(values.min()), show(values.max())
    return low if low == high else f"{low} to {high}"


def _mfu_text(mfu: float) -> str:
    return str(percent(mfu))


def _speed_text(speed: float) -> str:
    return column_of("tokens_per_s").unit.bare_text(speed)


def _number_text(column: str, value: float) -> str:
    if column == "step_time_s":
        return column_of(column).unit.exact_text(value)
    return _speed_text(value) if column.startswith("tokens_per_s") else str(with_unit(column, value))
