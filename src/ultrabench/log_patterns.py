"""Reads steps, memory and MFU of a program that only logs, by the patterns that its user gives."""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from ultrabench.column import BYTES, NUMBER, TOKENS_PER_S, capacity_text
from ultrabench.errors import ConfigError, nearest_name
from ultrabench.log_lines import bar_step, split_log, without_escapes
from ultrabench.log_numbers import (
    LogNumber,
    UnreadableError,
    cut_suffix,
    decimal_mark_in,
    read_number,
    uncut_number_text,
    unit_beside,
)
from ultrabench.rank_report import is_number
from ultrabench.time_labels import OTHER_TIMES

TRY_LOG = "ultrabench kernel try-log PATTERN FILE"
"""The command that tests a pattern without a launch."""
_LOSS_GROUP = "(?P<loss>"
_NO_NUMBER = re.compile(r"[\[(]?[-+]?(?:nan|inf(?:inity)?|n/a|none|null)[\])]?[,;|]?", re.IGNORECASE)
"""What programs write in place of a loss that is no number."""
OBSERVED_EVENT = "observed"
"""Event of what a log shows beside the steps. A user's report cannot have this event, and it is no sign of progress."""


class LogPattern(NamedTuple):
    """What the pattern in one option of a kernel reads from the lines of a log."""

    groups: Mapping[str, tuple[str, float]]
    """Group of the pattern -> the quantity that it holds, and the factor from its unit to that of the quantity."""
    every_rank: bool = False
    """Whether the log of every rank is read, whatever kernel.step_rank is."""
    optional_groups: Mapping[str, tuple[str, float]] = {}
    """More groups, which alone do not make a pattern."""
    needs_group: bool = True
    """Whether a pattern must have one of `groups`."""


_BYTES_BY_UNIT = {"bytes": 1.0, "mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
LOG_PATTERNS: dict[str, LogPattern] = {
    "step_line": LogPattern(
        {
            "seconds": ("seconds", 1.0), "milliseconds": ("seconds", 1e-3), "steps_per_s": ("steps_per_s", 1.0),
            "samples_per_s": ("samples_per_s", 1.0), "tokens_per_s": ("tokens_per_s", 1.0),
            "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", 1.0),
        },
        optional_groups={"step": ("step", 1.0), "loss": ("loss", 1.0)},
        needs_group=False,
    ),
    "loss_line": LogPattern({"loss": ("loss", 1.0)}, optional_groups={"step": ("step", 1.0)}),
    "memory_line": LogPattern(
        {f"{kind}_{unit}": (f"{kind}_bytes", factor)
         for kind in ("reserved", "allocated") for unit, factor in _BYTES_BY_UNIT.items()},
        every_rank=True,
    ),
    "mfu_line": LogPattern({"fraction": ("mfu", 1.0), "percent": ("mfu", 1e-2)}),
    "params": LogPattern({"params": ("params", 1.0)}),
    "flops_per_token": LogPattern({"flops_per_token": ("flops_per_token", 1.0)}),
}  # fmt: skip
"""Option of a kernel that holds a pattern -> what it reads; the only list of these options and of their groups.

A step_line without a group for a time or a rate times the steps by the arrival of its lines.
"""
_COUNT = r"\d[\d.,]*(?:e[-+]?\d+)?(?: ?[KMGBT]\b)?"
PRINTED_PARAMS = (
    r"(?i)^(?=.*param)(?!.*(?:\brank\b|\bper\b|\bnon|embed|decay|frozen|shard|layer))"
    rf".*(?:\b(?:\w+_)?param(?:eter)?s\b[^\d:=]{{0,12}}[:=]\s*(?={_COUNT})"
    rf"|(?<![\d.,])(?={_COUNT} +(?:total |model |trainable )?param(?:eter)?s\b))(?P<params>{_COUNT})"
)
"""Matches how most programs print the number of their parameters, without lines about parts of a model.

It is used where kernel.params has no pattern, so that a model of another size is noticed.
"""
TIME_GROUPS = frozenset(LOG_PATTERNS["step_line"].groups)
"""Groups of a step_line from which the time of a step follows."""

_ALL_GROUPS = {
    name for pattern in LOG_PATTERNS.values() for name in (*pattern.groups, *pattern.optional_groups)
}
"""The groups of all options; a pattern may serve several of them."""
_UNITS_BY_GROUP = {
    "seconds": ("s", "s/step"),
    "milliseconds": ("ms", "ms/step"),
    "steps_per_s": ("step/s",),
    "samples_per_s": ("sample/s",),
    "tokens_per_s": ("token/s",),
    "tokens_per_s_per_gpu": ("token/s/gpu", "token/gpu/s", "token/s"),  # many programs leave out the GPU
    **{f"{kind}_{unit}": (unit.replace("i", ""),) for kind in ("reserved", "allocated") for unit in _BYTES_BY_UNIT},
}  # fmt: skip
"""Group -> the units that may stand beside its number, as `unit_beside` writes them."""
_THOUSANDS_GROUPS = frozenset(
    {
        "samples_per_s",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "step",
        "params",
        "flops_per_token",
        *LOG_PATTERNS["memory_line"].groups,
    }
)
"""Groups whose numbers are large, so that a comma before three digits separates thousands."""
_DECIMAL_GROUPS = frozenset({"loss", "fraction", "percent", "steps_per_s"})
"""Groups whose numbers are small, so that a comma before three digits stands before decimals."""
_RATE_OF_ONE_GPU = re.compile(
    r"tok\w*?[ _]?(?:/|per[ _])(?:s|sec|second)[ _]?(?:/|per[ _])(?:gpu|device)(?![a-z])|tok\w*/(?:gpu|device)/s",
    re.IGNORECASE,
)
"""The label of a rate in tokens/s of one GPU."""
_LABELS_BY_KIND = {
    "time": rf"{OTHER_TIMES}|loss|lr|learning[ _]rate|grad[ _]norm",
    "loss": r"loss[ _-]scale|scale",
    "reserved": r"(?:max[ _-]?)?(?:memory[ _-]?|mem[ _-]?)?(?:alloc|allocated)(?:[ _-]?(?:memory|mem))?",
    "allocated": r"(?:max[ _-]?)?(?:memory[ _-]?|mem[ _-]?)?reserved(?:[ _-]?(?:memory|mem))?",
    "mfu": r"hfu",
}
_LABEL_BY_KIND = {
    kind: re.compile(rf"(?<![a-z])({labels})[\s:=\"'(\[]*$", re.IGNORECASE)
    for kind, labels in _LABELS_BY_KIND.items()
}
"""Kind of a group -> the labels of other quantities, right before a number."""
_NEXT_THOUSANDS = re.compile(r"[ \u00a0\u2009\u202f]\d{3}(?![\d.,])")
"""Three digits behind a space, which may belong to the number before it."""
_WORD = re.compile(r"[A-Za-z]{2,}")
_NOT_LITERAL = re.compile(r"\(\?P<\w+>|\\.|\[[^\]]*\]")
"""Parts of a pattern whose letters are no text of the log: names of groups, escapes and sets."""


class MisreadError(ValueError):
    """A number of a log that the pattern takes for another quantity, or that has two readings; the message says why."""


def compile_pattern(option: str, pattern_text: str) -> re.Pattern[str]:
    """The compiled pattern of an option of LOG_PATTERNS.

    Raises:
        ConfigError: it is not a regular expression, lacks a group of this option, or has an unknown one.
    """
    pattern, log_pattern = compile_any(pattern_text, f"kernel.{option}="), LOG_PATTERNS[option]
    groups = {**log_pattern.groups, **log_pattern.optional_groups}
    if log_pattern.needs_group:
        if not log_pattern.groups.keys() & pattern.groupindex.keys():
            group_forms = ", ".join(f"(?P<{name}>...)" for name in log_pattern.groups)
            raise ConfigError(f"kernel.{option}={pattern_text!r} lacks a group; add one of {group_forms}")
    elif unknown_groups := [name for name in pattern.groupindex if name not in _ALL_GROUPS]:
        fact = f"kernel.{option}={pattern_text!r} has a group {unknown_groups[0]!r}; its groups are {', '.join(groups)}"
        similar_group = nearest_name(unknown_groups[0], groups)
        raise ConfigError(fact, f"did you mean {similar_group}?" if similar_group else "")
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
    """The options that this pattern can be used for, by the names of its groups; one without groups is a step_line."""
    if not pattern.groupindex:
        return ["step_line"]
    names = pattern.groupindex.keys()
    options = [option for option, log_pattern in LOG_PATTERNS.items() if names & log_pattern.groups.keys()]
    if "step_line" in options:
        options = [option for option in options if option != "loss_line"]
    elif names <= LOG_PATTERNS["step_line"].optional_groups.keys():
        options = ["step_line", *options]
    return options


def times_by_arrival(step_line: str | None) -> bool:
    """Whether a step_line has no group for a time, so that the arrival of its lines times the steps."""
    return step_line is not None and not TIME_GROUPS & compile_any(step_line).groupindex.keys()


def search_line(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Where a pattern matches a line; a loss that is no number is found, although its group may want digits.

    Without this, a loss that becomes nan would end the steps of a run, or leave them without a loss.
    """
    match = pattern.search(text)
    if "loss" not in pattern.groupindex or (match is not None and match["loss"] is not None):
        return match
    any_loss_pattern = _with_any_loss(pattern)
    any_loss_match = any_loss_pattern.search(text) if any_loss_pattern else None
    if any_loss_match is None or not _NO_NUMBER.fullmatch(any_loss_match["loss"] or ""):
        return match
    return any_loss_match


@cache
def _with_any_loss(pattern: re.Pattern[str]) -> re.Pattern[str] | None:
    """The pattern with a group `loss` that matches any word; None where that is no regular expression."""
    head, _, rest = pattern.pattern.partition(_LOSS_GROUP)
    depth, is_in_set, position = 1, False, 0
    while depth and position < len(rest):
        character = rest[position]
        if character == "\\":
            position += 1
        elif character in "[]":
            is_in_set = character == "["
        elif not is_in_set:
            depth += (character == "(") - (character == ")")
        position += 1
    try:
        return re.compile(f"{head}{_LOSS_GROUP}\\S+){rest[position:]}", pattern.flags)
    except re.error:  # it referred to a group inside the loss
        return None


def parse_log_line(line: str, pattern: re.Pattern[str], option: str) -> dict[str, Any] | None:
    """What a line shows that matches the pattern of an option other than step_line, as a line of a report; else None.

    Args:
        pattern: what `compile_pattern` returns for the option.
    """
    match = search_line(pattern, without_escapes(line))
    if match is None:
        return None
    values: dict[str, Any] = {}
    try:
        values = quantities(option, match)
    except MisreadError as error:
        if pattern.pattern == PRINTED_PARAMS:  # nobody has said that this line is about parameters
            return None
        return {"event": OBSERVED_EVENT, "misread": f"kernel.{option}: {error}"}
    except UnreadableError:
        if option != "loss_line":
            return None
    if option == "loss_line":
        step = values.get("step", bar_step(match.string))
        line_values = {"event": OBSERVED_EVENT, "loss": values.get("loss", math.nan)}
        return line_values if step is None else {**line_values, "step": step}
    positive_values = {k: v for k, v in values.items() if is_number(v) and v > 0}
    rounded_values = {k: round(v) if k.endswith("_bytes") else v for k, v in positive_values.items()}
    return {"event": OBSERVED_EVENT, **rounded_values} if rounded_values else None


def quantities(option: str, match: re.Match[str], decimal_mark: str | None = None) -> dict[str, float]:
    """Quantity -> its value in bytes, seconds or as a fraction, for the groups of an option that have a text.

    A loss that cannot be read is NaN, since it may be one that the program writes in its own way.

    Args:
        match: of the pattern in a line.
        decimal_mark: what stands before the decimals in this log, where the line itself does not say it.

    Raises:
        UnreadableError: the text of a group in `groups` is no number.
        MisreadError: the unit beside a number is another one, or its comma has two readings.
    """
    log_pattern = LOG_PATTERNS[option]
    groups = {**log_pattern.groups, **log_pattern.optional_groups}
    text_by_group = {k: v for k, v in match.groupdict().items() if v is not None and k in groups}
    mark = decimal_mark_in([*text_by_group.values()], "") or decimal_mark or decimal_mark_in([], match.string)
    value_by_quantity: dict[str, float] = {}
    for group, text in text_by_group.items():
        quantity, factor = groups[group]
        _require_uncut(group, match)
        _require_label(group, match)
        try:
            number = read_number(text, mark)
        except UnreadableError:
            if group in log_pattern.groups and quantity != "loss":
                raise
            if quantity == "loss" and text.strip():
                value_by_quantity[quantity] = math.nan
            continue
        unit = number.unit or unit_beside(match.string, *match.span(group))
        _require_unit(group, unit, text, groups)
        if group == "tokens_per_s_per_gpu" and unit == "token/s" and _RATE_OF_ONE_GPU.search(match.string):
            fact = f"{text.strip()!r:.40} is in {TOKENS_PER_S.symbol}"
            fact = f"{fact}, and the line has another number that is of one GPU"
            raise MisreadError(f"{fact}; match that one, or use the group (?P<tokens_per_s>...)")
        value_by_quantity[quantity] = _plausible_reading(group, number, text) * factor
    return value_by_quantity


def _require_uncut(group: str, match: re.Match[str]) -> None:
    """Raises MisreadError if a group matches only a part of a number."""
    start, end = match.span(group)
    uncut_text = uncut_number_text(match.string, start, end)
    if uncut_text and group == "step" and ":" in uncut_text:
        uncut_text = None
    suffix = cut_suffix(match.string, end)
    if suffix and match[group][-1:].isdigit() and group not in LOG_PATTERNS["memory_line"].groups:
        uncut_text = f"{match[group]}{suffix}"
    thousands = _NEXT_THOUSANDS.match(match.string[end:])
    if thousands and group in _THOUSANDS_GROUPS - {"step"} and re.fullmatch(r"[1-9]\d{0,2}", match[group]):
        uncut_text = f"{match[group]}{thousands[0]}"
    if uncut_text:
        fact = f"the group {group} matches {match[group]!r:.40}, which is only a part of {uncut_text!r:.60}"
        raise MisreadError(f"{fact}; let it match the whole number, such as with [0-9.,eE+-]+[KMGBT]?")


def _require_label(group: str, match: re.Match[str]) -> None:
    """Raises MisreadError if the label right before a number is that of another quantity."""
    kind = {
        "seconds": "time",
        "milliseconds": "time",
        "loss": "loss",
        "fraction": "mfu",
        "percent": "mfu",
    }.get(group)
    pattern = _LABEL_BY_KIND.get(kind or group.partition("_")[0])
    if pattern and (label := pattern.search(match.string[: match.start(group)])):
        fact = f"the label of {match[group].strip()!r:.40} is {label[1]!r}, which the group {group} does not read"
        raise MisreadError(f"{fact}; match another number or use another group")


def _require_unit(group: str, unit: str, text: str, groups: Mapping[str, object]) -> None:
    """Raises MisreadError if the unit beside a number is another one than that of its group."""
    if not unit or group not in _UNITS_BY_GROUP or unit in _UNITS_BY_GROUP[group]:
        return
    kind, _, unit_of_group = group.rpartition("_")
    if unit_of_group in _BYTES_BY_UNIT:
        if unit not in ("bytes", "kb", "mb", "gb", "tb", "%"):
            return
        fitting_groups = [name for name in groups if name.startswith(kind) and unit in _UNITS_BY_GROUP[name]]
    else:
        fitting_groups = [name for name in groups if unit in _UNITS_BY_GROUP.get(name, ())]
    advice = " or ".join(f"(?P<{name}>...)" for name in fitting_groups)
    advice = f"use the group {advice}" if fitting_groups else "no group reads it: match another number"
    raise MisreadError(
        f"the unit of {text.strip()!r:.40} is {unit}, which the group {group} does not read; {advice}"
    )


def _plausible_reading(group: str, number: LogNumber, text: str) -> float:
    """The value of a number of this group, where its comma has two readings that of the usual size of the quantity."""
    if number.other_value is None:
        return number.value
    as_decimal, as_thousands = sorted((number.value, number.other_value))
    if group in _THOUSANDS_GROUPS:
        return as_thousands
    if group in _DECIMAL_GROUPS:
        return as_decimal
    fact = f"{text.strip()!r:.40} may be {as_decimal:g} or {as_thousands:g}, and nothing else in the line shows which"
    raise MisreadError(f"{fact}; make the program write a decimal point and no separators")


def misread_reason(option: str, values: Mapping[str, float], device_bytes: float = math.inf) -> str | None:
    """Why the values that a pattern read from a log cannot be right; None if they can be.

    Args:
        values: quantity -> value, as `parse_log_line` gives them.
        device_bytes: memory of the device; infinite where it is unknown.
    """
    if option == "mfu_line" and values.get("mfu", 0.0) > 1:
        return (
            f"MFU {NUMBER.text(values['mfu'])} is above 1; for a percentage, use the group (?P<percent>...)"
        )
    peak_bytes = max(values.get("reserved_bytes", 0.0), values.get("allocated_bytes", 0.0))
    if option == "memory_line" and peak_bytes > device_bytes:
        sizes_text = f"{BYTES.exact_text(peak_bytes)} exceeds the {capacity_text(device_bytes)} of the device"
        return f"{sizes_text}; check the unit in the name of the group"
    return None


def nearest_lines(log: str, pattern: str) -> list[str]:
    """The two lines of a log that share most words with a pattern that matches none of them, the nearest first.

    Lines without a digit cannot hold the time of a step. Of lines that differ in numbers only, the last counts.
    """
    literal_words = {word.lower() for word in _WORD.findall(_NOT_LITERAL.sub(" ", pattern))}
    plain_lines = [line.text for line in split_log(log)]
    line_by_form = {re.sub(r"\d+", "#", line): line for line in plain_lines if re.search(r"\d", line)}
    latest_lines = [*line_by_form.values()][::-1]
    return sorted(latest_lines, key=lambda line: -len(literal_words & {*_WORD.findall(line.lower())}))[:2]
