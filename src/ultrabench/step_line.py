"""Reads the steps of a program that only logs, by a pattern that its user gives as kernel.step_line."""

import re
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.rank_report import checked

STEP_TIMES = ("seconds", "milliseconds", "tokens_per_s_per_gpu")
"""Groups of a pattern that tell, in a line of a log, how long a step took."""
TRY_LOG = "ultrabench kernel try-log PATTERN FILE"
"""The command that tests a pattern without a launch."""

_WORD = re.compile(r"[A-Za-z]{2,}")
_NOT_LITERAL = re.compile(r"\(\?P<\w+>|\\.|\[[^\]]*\]")
"""Parts of a pattern whose letters are no text of the log: names of groups, escapes and sets."""


def step_pattern(text: str) -> re.Pattern[str]:
    """The compiled pattern.

    Raises:
        ConfigError: it is no regular expression, or lacks a group for the time of a step.
    """
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"kernel.step_line={text!r} is no regular expression: {error}") from None
    if not set(STEP_TIMES) & set(pattern.groupindex):
        wanted = ", ".join(f"(?P<{name}>...)" for name in STEP_TIMES)
        raise ConfigError(f"kernel.step_line={text!r} lacks a group, one of {wanted}")
    return pattern


def parse_log_line(line: str, pattern: re.Pattern[str], tokens_per_gpu: float) -> dict[str, Any] | None:
    """The step in a line of a program's log that matches `pattern`, as a line of a report; else None.

    Args:
        pattern: has one of the groups of STEP_TIMES, and may have the group loss.
        tokens_per_gpu: number of tokens of one step divided by the number of GPUs.
    """
    match = pattern.search(line)
    if match is None:
        return None
    try:
        values = {k: float(v.replace(",", "")) for k, v in match.groupdict().items() if v is not None}
        if "milliseconds" in values:
            values["seconds"] = values.pop("milliseconds") / 1000
        if "tokens_per_s_per_gpu" in values:
            values["seconds"] = tokens_per_gpu / values.pop("tokens_per_s_per_gpu")
    except (ValueError, ZeroDivisionError):
        return None
    return {"measured_by": "log", **checked({"event": "step", **values})}


def nearest_lines(text: str, pattern: str, most: int = 2) -> list[str]:
    """The lines of a log that share most words with a pattern that matches none of them, the nearest first.

    Lines without a digit cannot hold the time of a step. Of lines that differ in numbers only, the last counts.
    """
    wanted = {word.lower() for word in _WORD.findall(_NOT_LITERAL.sub(" ", pattern))}
    kinds = {re.sub(r"\d+", "#", line): line for line in text.splitlines() if re.search(r"\d", line)}
    latest_first = [*kinds.values()][::-1]
    return sorted(latest_first, key=lambda line: -len(wanted & {*_WORD.findall(line.lower())}))[:most]
