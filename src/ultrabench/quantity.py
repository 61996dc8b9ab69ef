"""Numbers with a unit, such as 80GB, 989T or 400Gbps, for settings whose names say what they measure."""

import re
from typing import NamedTuple

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


class Quantity(NamedTuple):
    """What settings measure whose names end in a certain way."""

    name_pattern: str
    noun: str
    """What a message calls it, such as `bytes`."""
    example: str
    factor_by_unit: dict[str, float]
    """Unit, which may follow a prefix -> its factor; the empty one allows a prefix alone."""
    factor_by_prefix: dict[str, float] = _PREFIXES


QUANTITIES = (
    Quantity(r"bytes_per_s", "bytes per second", "4.5e11, 450GB/s or 400Gbps", {
        "": 1, "B/s": 1, "Bps": 1, "bps": 1 / 8, "b/s": 1 / 8, "bit/s": 1 / 8,
    }, _PREFIXES | _BINARY_PREFIXES),
    Quantity(r"bytes", "bytes", "80000000000, 80GB or 80GiB", {"": 1, "B": 1}, _PREFIXES | _BINARY_PREFIXES),
    Quantity(r"flops_per_s(?:\.\w+)?", "FLOP/s", "9.89e14, 989T or 989TFLOP/s", {
        "": 1, "FLOPS": 1, "FLOPs": 1, "FLOP/s": 1, "FLOPs/s": 1, "flops": 1,
    }),
    Quantity(r"kernel\.(?:params|flops_per_token)", "a number", "124e6, 124M or 7B", {"": 1}, {
        spelling: factor for suffix, factor in {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.items()
        for spelling in (suffix, suffix.upper())
    }),
    Quantity(r"tokens", "tokens", "15e12 or 15T", {"": 1}, _PREFIXES | {"B": 1e9}),
    Quantity(r"hz", "Hz", "1.98e9 or 1980MHz", {"": 1, "Hz": 1}),
    Quantity(r"w", "watts", "700 or 700W", {"": 1, "W": 1}),
    Quantity(r"minutes", "minutes", "120 or 2h", {"min": 1, "h": 60}, {"": 1}),
    Quantity(r"s", "seconds", "90, 90s or 1.5min", {"s": 1, "ms": 1e-3, "min": 60, "h": 3600}, {"": 1}),
)  # fmt: skip
"""The quantities, those with longer names first."""
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")


def quantity_of(name: str) -> Quantity | None:
    """What a setting with this name measures; None where its name has no unit."""
    return next((q for q in QUANTITIES if re.search(rf"(?:^|[_.-]){q.name_pattern}$", name)), None)


def parsed_number(text: str, name: str, allows_plain: bool = False) -> float | None:
    """The number that a text gives to the setting `name`, in its unit; None for other texts.

    Args:
        allows_plain: whether the text may have neither a unit nor an exponent.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if not unit:
        return number if allows_plain or "e" in text.lower() else None
    quantity = quantity_of(name)
    factors = (
        {prefix + base: factor * base_factor for base, base_factor in quantity.factor_by_unit.items()
         for prefix, factor in quantity.factor_by_prefix.items()}
        if quantity else {}
    )  # fmt: skip
    return number * factors[unit] if unit in factors else None
