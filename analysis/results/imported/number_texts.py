"""Reads the numbers in the cells of a column: decimal points or commas, thousands, units,
and how far they are rounded.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ultrabench.analysis.results.imported.units import UNITS, cell_unit
from ultrabench.errors import ConfigError

POINT, COMMA = ".", ","
_OTHER = {POINT: COMMA, COMMA: POINT}
"""Sign of decimals -> the sign between thousands that goes with it."""
_CELL = re.compile(r"^([+-]?(?:\d[\d.,]*|[.,]\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s.,+-].*)?$")
"""Pattern of a number with a unit behind it."""
_GAPS = re.compile(r"(?<=\d)['\u2019_ \u00a0\u2009\u202f](?=\d{3}(?!\d))")
"""Pattern of the other signs that stand between thousands."""
_PLAIN = re.compile(r"^[+-]?(?:\d+|\d*\.\d+|\d+\.)(?:[eE][+-]?\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers of a column in ultrabench's unit."""

    values: pd.Series
    """Floats; null for a cell that is empty."""
    distinct_texts: Sequence[str]
    codes: np.ndarray
    """For each cell the index of its text, -1 for an empty one."""
    factors: np.ndarray
    """For each distinct text the size of its unit."""
    decimal: str

    def has_unit(self) -> pd.Series:
        """For each cell whether its number was multiplied by the size of a unit."""
        return pd.Series(np.append(self.factors, 1.0)[self.codes] != 1.0, self.values.index)

    def half_digits(self) -> pd.Series:
        """For each number half a unit of its last written digit, in ultrabench's unit:
        the most that rounding changed.
        """
        halves = np.array([_half_digit(text, self.decimal) for text in self.distinct_texts]) * self.factors
        cell_halves = np.append(halves, np.nan)[self.codes]
        return pd.Series(cell_halves, self.values.index)


def decimal_reading(texts: Iterable[str], *, is_int: bool) -> str | None:
    """The sign of decimals in a column: POINT or COMMA where its texts decide it,
    `both` where they may be read either way.

    None means that it has neither commas nor groups of thousands with points, so it is read with a point.

    Args:
        texts: cells without those that are empty.
        is_int: whether the numbers must be integers.
    """
    cores = [_core(text) for text in texts]
    signed_cores = [core for core in cores if COMMA in core or POINT in core]
    if not any(COMMA in core or core.count(POINT) > 1 for core in signed_cores):
        are_groups = signed_cores and all(_grouped(core, POINT) for core in signed_cores)
        return "points" if are_groups else None
    allowed = [sign for sign in (POINT, COMMA) if all(_fits(core, sign, is_int) for core in signed_cores)]
    return "both" if len(allowed) == 2 else allowed[0] if allowed else None


def read_numbers(
    texts: pd.Series, is_empty: pd.Series, *, our_column: str, unit: str | None, decimal: str
) -> tuple[Numbers, dict[str, str]]:
    """The numbers of a column, and for each text that is none the end of a sentence that says why.

    Args:
        unit: the unit of the column; None is ultrabench's.
        decimal: the sign of decimals.
    """
    codes, distinct = pd.factorize(texts.where(~is_empty, None))
    distinct_texts = [str(text) for text in distinct]
    factors = np.full(len(distinct_texts), 1.0 if unit is None else UNITS[unit][1])
    values = pd.to_numeric(pd.Series(distinct_texts, dtype=object), errors="coerce").to_numpy(
        float, copy=True
    )
    if decimal == COMMA:  # a point stands between thousands, or nowhere
        values[["." in text for text in distinct_texts]] = np.nan
    fault_by_text = {}
    for index in np.flatnonzero(~np.isfinite(values)):
        text = distinct_texts[index]
        try:
            values[index], cell_factor = _number_and_factor(text, decimal, our_column, unit)
        except ConfigError as error:
            fault_by_text[text] = str(error)
        else:
            factors[index] = factors[index] if cell_factor is None else cell_factor
    numbers = np.append(values * factors, np.nan)[codes]
    column = Numbers(
        values=pd.Series(numbers, texts.index, float), distinct_texts=distinct_texts, codes=codes,
        factors=factors, decimal=decimal,
    )  # fmt: skip
    return column, fault_by_text


def in_words(text: str, decimal: str) -> str:
    """What a text means if this is its sign of decimals, such as 6500 or 6.5."""
    return f"{_float(_core(text), decimal):,.15g}"


def _number_and_factor(
    text: str, decimal: str, our_column: str, unit: str | None
) -> tuple[float, float | None]:
    """The number of a cell, and the size of its unit if it names one."""
    match = _CELL.match(_GAPS.sub("", text))
    if match is None or not _fits(match[1], decimal, is_int=False):
        raise ConfigError("is not a number")
    number = _float(match[1], decimal)
    if not np.isfinite(number):
        raise ConfigError("is not a number")
    if match[2] is None:
        return number, None
    return number, UNITS[cell_unit(our_column, match[2].strip(), unit)][1]


def _core(text: str) -> str:
    """The number of a cell without unit, without spaces and other signs between thousands."""
    text = _GAPS.sub("", text)
    match = _CELL.match(text)
    return match[1] if match else text


def _grouped(core: str, sign: str) -> bool:
    """Whether this sign stands between groups of thousands; a number with leading zero has none."""
    return re.match(rf"^[+-]?[1-9]\d{{0,2}}(?:{re.escape(sign)}\d{{3}})+$", core) is not None


def _fits(core: str, decimal: str, is_int: bool) -> bool:
    """Whether a number can be read with this sign of decimals."""
    integer_text, has_decimals, decimals = core.partition(decimal)
    if decimal in decimals:
        return False
    integer_digits = _without_groups(integer_text, _OTHER[decimal])
    if integer_digits is None or not _PLAIN.match(
        f"{integer_digits}.{decimals}" if has_decimals else integer_digits
    ):
        return False
    return not is_int or _float(core, decimal) % 1 == 0


def _without_groups(integer_text: str, sign: str) -> str | None:
    """The digits before the decimals without the signs between thousands; None if these stand elsewhere."""
    if sign not in integer_text:
        return integer_text
    return integer_text.replace(sign, "") if _grouped(integer_text, sign) else None


def _float(core: str, decimal: str) -> float:
    return float(core.replace(_OTHER[decimal], "").replace(decimal, POINT))


def _half_digit(text: str, decimal: str) -> float:
    """Half a unit of the last digit of a number, such as 0.05 for 8.8."""
    core = _core(text).lower()
    mantissa, _, exponent = core.partition("e")
    num_decimals = len(mantissa.partition(decimal)[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - num_decimals) if re.match(r"^[+-]?\d*$", exponent) else 0.0
