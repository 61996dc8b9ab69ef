"""Reads steps, memory and MFU of a program that only logs, by the patterns that its user gives."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.rank_report import checked_line, is_number

TRY_LOG = "ultrabench kernel try-log PATTERN FILE"
"""The command that tests a pattern without a launch."""
OBSERVED_EVENT = "observed"
"""Event of a line that has memory or MFU. A user's report cannot have this event, and it is no sign of progress."""


class LogPattern(NamedTuple):
    """What the pattern in one option of a kernel reads from the lines of a log."""

    groups: Mapping[str, tuple[str, float]]
    """Group of the pattern -> the quantity that it holds, and the factor from its unit to that of the quantity."""
    every_rank: bool = False
    """Whether the log of every rank is read, for that rank; otherwise that of kernel.step_rank, for rank 0."""
    optional_groups: Mapping[str, tuple[str, float]] = {}
    """More groups, which alone do not make a pattern."""


_BYTES_BY_UNIT = {"bytes": 1.0, "mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
LOG_PATTERNS: dict[str, LogPattern] = {
    "step_line": LogPattern(
        {"seconds": ("seconds", 1.0), "milliseconds": ("seconds", 1e-3), "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", 1.0)},
        optional_groups={"loss": ("loss", 1.0)},
    ),
    "memory_line": LogPattern(
        {f"{kind}_{unit}": (f"{kind}_bytes", factor)
         for kind in ("reserved", "allocated") for unit, factor in _BYTES_BY_UNIT.items()},
        every_rank=True,
    ),
    "mfu_line": LogPattern({"fraction": ("mfu", 1.0), "percent": ("mfu", 1e-2)}),
}  # fmt: skip
"""Option of a kernel that holds a pattern -> what it reads; the only list of these options and of their groups."""

_FACTOR_BY_SUFFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
"""Suffixes of numbers, such as 4.71K; nanotron writes B for 10^9, older versions of it G."""
_WORD = re.compile(r"[A-Za-z]{2,}")
_NOT_LITERAL = re.compile(r"\(\?P<\w+>|\\.|\[[^\]]*\]")
"""Parts of a pattern whose letters are no text of the log: names of groups, escapes and sets."""


def compile_pattern(option: str, pattern_text: str) -> re.Pattern[str]:
    """The compiled pattern of an option of LOG_PATTERNS.

    Raises:
        ConfigError: it is not a regular expression, or lacks a group of this option.
    """
    pattern, groups = compile_any(pattern_text, f"kernel.{option}="), LOG_PATTERNS[option].groups
    if not groups.keys() & pattern.groupindex.keys():
        group_forms = ", ".join(f"(?P<{name}>...)" for name in groups)
        raise ConfigError(f"kernel.{option}={pattern_text!r} lacks a group; add one of {group_forms}")
    return pattern


def compile_any(pattern_text: str, where: str = "") -> re.Pattern[str]:
    """The compiled pattern, with whatever groups it has.

    Args:
        where: the text that an error message has before the pattern.

    Raises:
        ConfigError: it is not a regular expression.
    """
    try:
        return re.compile(pattern_text)
    except re.error as error:
        raise ConfigError(f"{where}{pattern_text!r} is not a regular expression: {error}") from None


def options_of(pattern: re.Pattern[str]) -> list[str]:
    """The options that this pattern can be used for, by the names of its groups."""
    return [option for option, (groups, *_) in LOG_PATTERNS.items() if groups.keys() & pattern.groupindex]


def parse_log_line(
    line: str, pattern: re.Pattern[str], tokens_per_gpu: float, option: str = "step_line"
) -> dict[str, Any] | None:
    """What a line of a program's log tells if it matches `pattern`, as a line of a report; else None.

    Args:
        pattern: what `compile_pattern` returns for the option.
        tokens_per_gpu: number of tokens of one step divided by the number of GPUs.
    """
    match = pattern.search(line)
    if match is None:
        return None
    try:
        value_by_quantity = quantities(option, match.groupdict())
        if "tokens_per_s_per_gpu" in value_by_quantity:
            value_by_quantity["seconds"] = tokens_per_gpu / value_by_quantity.pop("tokens_per_s_per_gpu")
    except (ValueError, ZeroDivisionError):
        return None
    if option == "step_line":
        return {"measured_by": "log", **checked_line({"event": "step", **value_by_quantity})}
    positive_values = {k: v for k, v in value_by_quantity.items() if is_number(v) and v > 0}
    rounded_values = {k: round(v) if k.endswith("_bytes") else v for k, v in positive_values.items()}
    return {"event": OBSERVED_EVENT, **rounded_values} if rounded_values else None


def quantities(option: str, text_by_group: Mapping[str, str | None]) -> dict[str, float]:
    """Quantity -> its value in bytes, seconds or as a fraction, for the groups of an option that have a text.

    Raises:
        ValueError: a text is not a number.
    """
    groups = {**LOG_PATTERNS[option].groups, **LOG_PATTERNS[option].optional_groups}
    text_by_known_group = {k: v for k, v in text_by_group.items() if v is not None and k in groups}
    return {groups[k][0]: _parse_number(text) * groups[k][1] for k, text in text_by_known_group.items()}


def _parse_number(text: str) -> float:
    """The number that a program wrote, such as 5444.9, 7,282 or 4.71K."""
    number_text = text.strip().replace(",", "")
    suffix_factor = _FACTOR_BY_SUFFIX.get(number_text[-1:], 1.0)
    return float(number_text[:-1] if number_text[-1:] in _FACTOR_BY_SUFFIX else number_text) * suffix_factor


def misread_reason(option: str, values: Mapping[str, float], device_bytes: float = math.inf) -> str | None:
    """Why the values that a pattern read from a log cannot be right; None if they can be.

    Args:
        values: quantity -> value, as `parse_log_line` gives them.
        device_bytes: memory of the device; infinite where it is unknown.
    """
    if option == "mfu_line" and values.get("mfu", 0.0) > 1:
        return f"MFU {values['mfu']:.4g} is above 1; for a percentage, use the group (?P<percent>...)"
    peak_bytes = max(values.get("reserved_bytes", 0.0), values.get("allocated_bytes", 0.0))
    if option == "memory_line" and peak_bytes > device_bytes:
        peak_gib, device_gib = (size / _BYTES_BY_UNIT["gib"] for size in (peak_bytes, device_bytes))
        sizes_text = f"{peak_gib:.4g} GiB exceeds the {device_gib:.4g} GiB of the device"
        return f"{sizes_text}; check the unit in the name of the group"
    return None


def nearest_lines(log: str, pattern: str) -> list[str]:
    """The two lines of a log that share most words with a pattern that matches none of them, the nearest first.

    Lines without a digit cannot hold the time of a step. Of lines that differ in numbers only, the last counts.
    """
    literal_words = {word.lower() for word in _WORD.findall(_NOT_LITERAL.sub(" ", pattern))}
    line_by_form = {re.sub(r"\d+", "#", line): line for line in log.splitlines() if re.search(r"\d", line)}
    latest_lines = [*line_by_form.values()][::-1]
    return sorted(latest_lines, key=lambda line: -len(literal_words & {*_WORD.findall(line.lower())}))[:2]
