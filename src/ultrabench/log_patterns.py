"""Reads steps, memory and MFU of a program that only logs, by the patterns that its user gives."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.rank_report import checked, is_number

TRY_LOG = "ultrabench kernel try-log PATTERN FILE"
"""The command that tests a pattern without a launch."""
OBSERVED = "observed"
"""Event of a line that has memory or MFU. A user's report cannot have this event, and it is no sign of progress."""


class LogPattern(NamedTuple):
    """What an option of a kernel reads from the lines of a log."""

    groups: Mapping[str, tuple[str, float]]
    """Group of the pattern -> the quantity that it holds, and the factor from its unit to that of the quantity."""
    every_rank: bool = False
    """Whether the log of every rank is read, for that rank; otherwise that of kernel.step_rank, for rank 0."""
    optional: Mapping[str, tuple[str, float]] = {}
    """More groups, which alone do not make a pattern."""


_BYTES_BY_UNIT = {"bytes": 1.0, "mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
LOG_PATTERNS: dict[str, LogPattern] = {
    "step_line": LogPattern(
        {"seconds": ("seconds", 1.0), "milliseconds": ("seconds", 1e-3), "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", 1.0)},
        optional={"loss": ("loss", 1.0)},
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


def compiled(option: str, text: str) -> re.Pattern[str]:
    """The compiled pattern of an option of LOG_PATTERNS.

    Raises:
        ConfigError: it is not a regular expression, or lacks a group of this option.
    """
    pattern, groups = compiled_any(text, f"kernel.{option}="), LOG_PATTERNS[option].groups
    if not groups.keys() & pattern.groupindex.keys():
        group_forms = ", ".join(f"(?P<{name}>...)" for name in groups)
        raise ConfigError(f"kernel.{option}={text!r} lacks a group; add one of {group_forms}")
    return pattern


def compiled_any(text: str, where: str = "") -> re.Pattern[str]:
    """The compiled pattern, whatever it reads.

    Args:
        where: text before the pattern in a message.

    Raises:
        ConfigError: it is not a regular expression.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{where}{text!r} is not a regular expression: {error}") from None


def options_of(pattern: re.Pattern[str]) -> list[str]:
    """The options that this pattern can be used for, by the names of its groups."""
    return [option for option, (groups, *_) in LOG_PATTERNS.items() if groups.keys() & pattern.groupindex]


def parse_log_line(
    line: str, pattern: re.Pattern[str], tokens_per_gpu: float, option: str = "step_line"
) -> dict[str, Any] | None:
    """What a line of a program's log tells if it matches `pattern`, as a line of a report; else None.

    Args:
        pattern: what `compiled` returns for the option.
        tokens_per_gpu: number of tokens of one step divided by the number of GPUs.
    """
    match = pattern.search(line)
    if match is None:
        return None
    try:
        values = quantities(option, match.groupdict())
        if "tokens_per_s_per_gpu" in values:
            values["seconds"] = tokens_per_gpu / values.pop("tokens_per_s_per_gpu")
    except (ValueError, ZeroDivisionError):
        return None
    if option == "step_line":
        return {"measured_by": "log", **checked({"event": "step", **values})}
    amounts = {name: value for name, value in values.items() if is_number(value) and value > 0}
    rounded = {name: round(value) if name.endswith("_bytes") else value for name, value in amounts.items()}
    return {"event": OBSERVED, **rounded} if rounded else None


def quantities(option: str, text_by_group: Mapping[str, str | None]) -> dict[str, float]:
    """Quantity -> its value in bytes, seconds or as a fraction, for the groups of an option that have a text.

    Raises:
        ValueError: a text is not a number.
    """
    groups = {**LOG_PATTERNS[option].groups, **LOG_PATTERNS[option].optional}
    texts = {name: text for name, text in text_by_group.items() if text is not None and name in groups}
    return {groups[name][0]: _number(text) * groups[name][1] for name, text in texts.items()}


def _number(text: str) -> float:
    """The number that a program wrote, such as 5444.9, 7,282 or 4.71K."""
    digits = text.strip().replace(",", "")
    factor = _FACTOR_BY_SUFFIX.get(digits[-1:], 1.0)
    return float(digits[:-1] if digits[-1:] in _FACTOR_BY_SUFFIX else digits) * factor


def misread(option: str, values: Mapping[str, float], device_bytes: float = math.inf) -> str | None:
    """Why values that a pattern of an option found are impossible; None if they are possible.

    Args:
        values: quantity -> value, as `parse_log_line` gives them.
        device_bytes: memory of the device; infinite where it is unknown.
    """
    if option == "mfu_line" and values.get("mfu", 0.0) > 1:
        return f"MFU {values['mfu']:.4g} is above 1; for a percentage, use the group (?P<percent>...)"
    peak = max((values.get(name, 0.0) for name in ("reserved_bytes", "allocated_bytes")), default=0.0)
    if option == "memory_line" and peak > device_bytes:
        peak_gib, device_gib = (size / _BYTES_BY_UNIT["gib"] for size in (peak, device_bytes))
        sizes = f"{peak_gib:.4g} GiB exceeds the {device_gib:.4g} GiB of the device"
        return f"{sizes}; check the unit in the name of the group"
    return None


def nearest_lines(text: str, pattern: str) -> list[str]:
    """The two lines of a log that share most words with a pattern that matches none of them, the nearest first.

    Lines without a digit cannot hold the time of a step. Of lines that differ in numbers only, the last counts.
    """
    literal_words = {word.lower() for word in _WORD.findall(_NOT_LITERAL.sub(" ", pattern))}
    line_by_form = {re.sub(r"\d+", "#", line): line for line in text.splitlines() if re.search(r"\d", line)}
    latest_first = [*line_by_form.values()][::-1]
    return sorted(latest_first, key=lambda line: -len(literal_words & {*_WORD.findall(line.lower())}))[:2]
