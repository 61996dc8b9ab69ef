"""Numbers as texts with their units, as tables, figures and messages show them."""

from collections.abc import Iterable
from typing import Any

from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.column import BYTES, FRACTION, Form, Unit


def percent(fraction: float | None) -> str | None:
    """A percentage such as `43.2 %`, with two significant digits below 1 %, or `< 0.01 %`; None if unknown."""
    return None if fraction is None else FRACTION.text(fraction)


def half_width(ci95_rel: float) -> str:
    """Half of an interval beside its number, such as `+- 53.0 %`; one that reaches to zero says no more than that."""
    return f"+- {percent(ci95_rel)}" if ci95_rel < 1 else "+- 100 % or more"


def too_wide(ci_reached: bool | None, ci95_rel: float | None) -> str:
    """A text such as `+- 53.0 %` for an interval that missed its target; empty for one that met it."""
    return half_width(ci95_rel) if ci_reached is False and ci95_rel is not None else ""


def count(number: float, unit: str = "") -> str:
    """A number with three digits and a metric prefix, such as `1.34 G`."""
    return Unit(unit, Form.PREFIXED).text(number)


def params_text(num_params: int, num_active_params: int | None) -> str:
    """A text such as `498 k parameters, 351 k active`, or `8.03 G parameters` where a token uses all of them."""
    is_sparse = num_active_params not in (None, num_params)
    active_text = f", {count(num_active_params or 0)} active" if is_sparse else ""
    return f"{count(num_params)} parameters{active_text}"


def formula_text(formulas: Iterable[str], has_experts: bool) -> str:
    """A sentence that names the formulas of MFU, and says what is counted of experts if there are any."""
    experts_text = ", counting only the experts that a token passes through" * has_experts
    return f"MFU uses the FLOPs formula {', '.join(sorted(formulas))}{experts_text}"


def memory(
    reserved_bytes: float | None, rank0_bytes: float | None = None, allocated_bytes: float | None = None
) -> str | None:
    """Memory as a text in MiB or GiB; it says so if only that of rank 0 or allocated memory is known.
    None if all are unknown.
    """
    if reserved_bytes is None:
        if rank0_bytes is not None:
            return f"{memory(rank0_bytes)} (rank 0)"
        return None if allocated_bytes is None else f"{memory(allocated_bytes)} (allocated)"
    return BYTES.text(reserved_bytes)


def scale_end(values: Iterable[float | None]) -> float:
    """Upper end of a colour scale: the smallest round number that no value exceeds; None is no value."""
    largest = max((value for value in values if value is not None), default=0.0)
    round_ends = [0.1, 0.2, 0.5, 1, 2, 5, *range(10, 201, 10)]
    return next((end for end in round_ends if end >= largest), largest)


def rate_text(tokens_per_s_per_gpu: float) -> str:
    """A rate as a text with its name, such as `12,345 tokens/s/GPU`."""
    return f"{with_unit(RATE, tokens_per_s_per_gpu)} {column_of(RATE).heading}"


def with_unit(name: str, value: Any) -> str | None:
    """The value of the column with this name as a text with its unit; None when it is unknown."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None if value is None else str(value)
    return column_of(name).text(value)


def with_interval(name: str, value: float, low: float, high: float) -> str:
    """A cell under `Column.bare_heading`: the value of a column, and its interval in brackets where it has one."""
    text, low_text, high_text = map(column_of(name).unit.bare_text, (value, low, high))
    return text if low_text == high_text else f"{text} ({low_text}-{high_text})"
