"""`ultrabench kernel try-log` shows what the patterns of a kernel find in a log."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.column import BYTES, FRACTION, SECONDS
from ultrabench.errors import ConfigError, counted, nearest_name
from ultrabench.kernel_config import SIZE_OPTIONS
from ultrabench.log_lines import LogLine, Sighting, split_log
from ultrabench.log_patterns import (
    LOG_PATTERNS,
    compile_any,
    compile_pattern,
    misread_reason,
    nearest_lines,
    options_of,
    parse_log_line,
    search_line,
)
from ultrabench.log_steps import (
    GROWING_RATES,
    DroppedLine,
    LoggedStep,
    StepLine,
    StepReader,
    even_growth_s,
    log_doubts,
)
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import kernel_settings

MAX_DEVICE_BYTES = 2.0**40
"""Memory that no device exceeds, where the device is unknown."""
MAX_SHOWN_LINES = 5
"""Number of matches that the table shows, from the beginning of a log."""
STEP_UNITS = {
    "seconds": "s", "steps_per_s": "steps/s", "samples_per_s": "samples/s",
    **{name: column_of(name).heading for name in ("tokens_per_s", RATE)},
}  # fmt: skip
"""Quantity of a line of steps -> its unit as the table shows it."""
TIME_BY_RATE = {
    "steps_per_s": "1", "samples_per_s": "gbs", "tokens_per_s": "gbs * seq_len",
    "tokens_per_s_per_gpu": "gbs * seq_len / gpus",
}  # fmt: skip
"""Rate -> what is divided by it to give the time of a step."""
HEADINGS = {"seconds": "time of a step", "num_steps": "steps"}
"""Name of a value -> its heading in the table, where it differs."""
NOUN_BY_OPTION = {
    "step_line": "step",
    "loss_line": "loss value",
    "memory_line": "memory peak",
    "mfu_line": "MFU value",
    "params": "number of parameters",
    "flops_per_token": "number of FLOPs",
}
"""Option of a kernel -> what a line that its pattern matches reports."""


def run_try_log(pattern_text: str, log_path: Path, as_json: bool) -> int:
    """Prints what a pattern, or each pattern of a kernel, finds in a log; returns 1 if one finds nothing.

    Args:
        pattern_text: a regular expression, or the name of a kernel.

    Raises:
        ConfigError: a pattern is wrong, or the file cannot be read.
    """
    patterns = _patterns(pattern_text)
    try:
        log = log_path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {log_path}: {error.strerror}; give the log of a program") from None
    reports = {option: _match_report(option, pattern, log) for option, pattern in patterns.items()}
    if as_json:
        print_json(reports)
    else:
        for option, report in reports.items():
            _show_report(option, report, log_path)
    return 0 if all(report["lines"] for report in reports.values()) else 1


def _patterns(text: str) -> dict[str, re.Pattern[str]]:
    """Option -> pattern: those of a kernel if `text` names one, else this pattern for each option with its groups."""
    if path := files("kernel").get(text):
        settings = kernel_settings(text)
        text_by_option = {option: settings[option] for option in LOG_PATTERNS if settings.get(option)}
        for option in SIZE_OPTIONS:  # which may also hold a number
            if "(?P<" not in str(text_by_option.get(option)):
                text_by_option.pop(option, None)
        if not text_by_option:
            raise ConfigError(f"kernel={text} ({path}) has none of {', '.join(LOG_PATTERNS)}; give a pattern")
        return {option: compile_pattern(option, str(pattern)) for option, pattern in text_by_option.items()}
    pattern = compile_any(text)
    similar_kernel = nearest_name(text, files("kernel"))
    if not (option_names := options_of(pattern)) or (similar_kernel and not pattern.groupindex):
        groups_text = "; ".join(f"{name}: {', '.join(LOG_PATTERNS[name].groups)}" for name in LOG_PATTERNS)
        rule = f"not a kernel, and has no group (?P<NAME>...) with one of these names: {groups_text}"
        raise ConfigError(f"{text!r} is {rule}", f"did you mean {similar_kernel}?" if similar_kernel else "")
    return {option: compile_pattern(option, text) for option in option_names}


def _match_report(option: str, pattern: re.Pattern[str], log: str) -> dict[str, Any]:
    """What a pattern finds in a log, as `--json` prints it.

    `lines` holds the values of the matching lines that count, `refused` says why other matching lines do not count,
    `notes` says what speaks against the pattern, and `nearest` has the most similar lines where no line counts. For an
    MFU, `form` says how its numbers are taken.
    """
    log_lines = split_log(log)
    if option == "step_line":
        matched_lines, refused, notes = _step_report(pattern, log_lines)
    else:
        matched_lines, refused = _observation_report(option, pattern, log_lines)
        notes = []
    nearest = [] if matched_lines else refused[:1] or nearest_lines(log, pattern.pattern)
    report = {"lines": matched_lines, "refused": refused, "notes": notes, "nearest": nearest}
    return report | (
        {"form": _mfu_form_text(pattern, log_lines, matched_lines)} if option == "mfu_line" else {}
    )


def _step_report(
    pattern: re.Pattern[str], log_lines: list[LogLine]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The steps in a log, why other matching lines do not count, and what speaks against the pattern."""
    reader = StepReader(pattern)
    outcomes = [outcome for line in log_lines for outcome in reader.read(line)] + reader.finish()
    step_lines = [outcome for outcome in outcomes if isinstance(outcome, StepLine)]
    dropped_lines = [outcome for outcome in outcomes if isinstance(outcome, DroppedLine)]
    for dropped in dropped_lines:  # a repeat may show the loss of its step
        step = next((line for line in reversed(step_lines) if line.number < dropped.number), None)
        if dropped.loss is not None and step:
            step.values.setdefault("loss", dropped.loss)
    refused = [f"line {d.number} matches, but {d.reason}: {d.text.strip()}" for d in dropped_lines]
    rows = [_step_row(line, is_by_arrival=reader.by_arrival) for line in step_lines]
    return rows, refused, [*_step_notes(reader, step_lines, dropped_lines)]


def _step_row(line: StepLine, *, is_by_arrival: bool) -> dict[str, Any]:
    """The values of a line of steps."""
    names = ("step", *STEP_UNITS, "loss")
    row: dict[str, Any] = {"line": line.number, **{n: line.values[n] for n in names if n in line.values}}
    if "step" in row:
        row["step"] = int(row["step"])
    return row | ({"num_steps": line.num_steps} if line.num_steps > 1 or is_by_arrival else {})


def _step_notes(
    reader: StepReader, step_lines: list[StepLine], dropped_lines: list[DroppedLine]
) -> Iterator[str]:
    """What a user should know about the steps: how they are timed, and what speaks against the pattern."""
    if reader.by_arrival:
        num_lines = len(step_lines)
        yield (
            "the pattern has no group for a time, so a run times steps by the arrival of these lines: "
            f"{counted(num_lines, 'line')} give {counted(max(0, num_lines - 1), 'time')}"
        )
    rates = {name for line in step_lines for name in line.values if name in STEP_UNITS} - {"seconds"}
    for name in sorted(rates):
        if even_growth_s([line.values[name] for line in step_lines if name in line.values]):
            yield GROWING_RATES
        yield f"a run computes the time of a step from {name}: {TIME_BY_RATE[name]} / {name}"
    times_s = [line.values["seconds"] for line in step_lines if "seconds" in line.values]
    if times_s:
        median_text, min_text, max_text = map(SECONDS.text, (median(times_s), min(times_s), max(times_s)))
        yield f"median {median_text} a step, from {min_text} to {max_text}"
    if reader.divided_by:
        undivided_text = SECONDS.text(median(times_s) * reader.divided_by)
        yield (
            f"a line is for {reader.divided_by} steps, so its time is divided by {reader.divided_by}; if it prints the "
            f"time of one step, a step takes {undivided_text}: leave out the group step. A "
            "run decides this by the arrival of the lines"
        )
    elif any(line.num_steps > 1 for line in step_lines) and times_s:
        yield "a line is for several steps, and its time is taken as that of one"
    infinite_losses = [line for line in step_lines if not math.isfinite(line.values.get("loss", 0.0))]
    if infinite_losses:
        yield (
            f"the loss of {counted(len(infinite_losses), 'line')} is not finite or not a number, first of line "
            f"{infinite_losses[0].number}: such a run is invalid"
        )
    if 0 < reader.num_evaluation < reader.num_counted:
        yield (
            f"{reader.num_evaluation} of {reader.num_counted} lines that count contain a word for evaluation; let the "
            "pattern match lines of training only"
        )
    if reader.num_equal_lines:
        yield (
            f"{counted(reader.num_equal_lines, 'line')} repeat the line before word for word; in a run they count only "
            "if they come at least half a step later"
        )
    unknown = None if all(line.sighting for line in step_lines) else Sighting(0.0, 0.0)
    logged_steps = [
        LoggedStep(line.values["seconds"], line.num_steps, unknown or line.sighting or Sighting(0.0, 0.0))
        for line in step_lines
        if "seconds" in line.values
    ]
    num_unread = sum(dropped.kind == "unreadable" for dropped in dropped_lines)
    yield from log_doubts(
        logged_steps, by_arrival=reader.by_arrival, num_lines=len(step_lines), num_unread=num_unread,
        lines_per_step=reader.lines_per_step, uncounted_stride=reader.uncounted_stride,
        are_of_one_step=reader.are_of_one_step, num_parts=reader.num_parts,
    ).values()  # fmt: skip


def _observation_report(
    option: str, pattern: re.Pattern[str], log_lines: list[LogLine]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What the lines of a log show beside steps, and why other matching lines do not count."""
    matched_lines, refused = [], []
    for line_number, line in enumerate(log_lines, start=1):
        if search_line(pattern, line.text) is None:
            continue
        values = dict(parse_log_line(line.text, pattern, option) or {})
        refusal = values.pop("misread", None) or misread_reason(option, values, MAX_DEVICE_BYTES)
        values.pop("event", None)
        if values and not refusal:
            matched_lines.append({"line": line_number, **values})
        else:
            reason = refusal or "has no such number"
            refused.append(f"line {line_number} matches, but {reason}: {line.text.strip()}")
    return matched_lines, refused


def _mfu_form_text(
    pattern: re.Pattern[str], log_lines: list[LogLine], matched_lines: list[dict[str, Any]]
) -> str:
    """A sentence that says whether MFU numbers are read as fractions or percent,
    and which group gives the other reading.
    """
    matches = [*filter(None, (search_line(pattern, line.text) for line in log_lines))]
    if "fraction" in pattern.groupindex:
        texts_after = (match.string[match.end("fraction") :] for match in matches if match["fraction"])
        if any(re.match(r"\s*%", text_after) for text_after in texts_after):
            return (
                "the number is read as a fraction of 1, but a % follows it: name the group (?P<percent>...)"
            )
        return "the number is read as a fraction of 1; for percent, name the group (?P<percent>...)"
    has_percent_sign = any("%" in match.string for match in matches)
    if matched_lines and max(line["mfu"] for line in matched_lines) < 0.01 and not has_percent_sign:
        return "every number is below 1 percent; for a fraction of 1, name the group (?P<fraction>...)"
    return "the number is divided by 100; for a fraction of 1, name the group (?P<fraction>...)"


def _show_report(option: str, report: dict[str, Any], log_path: Path) -> None:
    """Prints the first matches of the pattern of one option, and matching lines that do not count."""
    noun = NOUN_BY_OPTION[option]
    matched_lines, refused = report["lines"], report["refused"]
    if form_text := report.get("form"):
        say(f"kernel.{option}: {form_text}")
    if not matched_lines:
        say(f"kernel.{option}: no {noun} found in {log_path}; nearest lines:", *report["nearest"])
        return
    first_lines = matched_lines[:MAX_SHOWN_LINES]
    columns = [*dict.fromkeys(name for line in first_lines for name in line)]
    shown_rows = [[_with_unit(name, line.get(name)) for name in columns] for line in first_lines]
    first_text = f", the first {MAX_SHOWN_LINES}:" if len(matched_lines) > MAX_SHOWN_LINES else ""
    num_steps = sum(line.get("num_steps", 1) for line in matched_lines)
    count_text = counted(num_steps if option == "step_line" else len(matched_lines), noun)
    show(f"kernel.{option}: {count_text} in {log_path}{first_text}")
    show(table("", *(f">{HEADINGS.get(name, name)}" for name in columns), rows=shown_rows))
    say(*(f"kernel.{option}: {note}" for note in report["notes"]))
    if refused:
        limit_text = f", the first {MAX_SHOWN_LINES}" if len(refused) > MAX_SHOWN_LINES else ""
        ignored_text = counted(len(refused), "matching line")
        say(f"kernel.{option}: {ignored_text} ignored{limit_text}:", *refused[:MAX_SHOWN_LINES])


def _with_unit(name: str, value: Any) -> str:
    """A value as the table shows it: a number with at most six digits and its unit."""
    if not isinstance(value, int | float):
        return "" if value is None else str(value)
    if name.endswith("_bytes") or name == "mfu":
        return (FRACTION if name == "mfu" else BYTES).exact_text(value)
    text = str(value) if isinstance(value, int) else f"{value:.6g}"
    return f"{text} {STEP_UNITS.get(name, '')}".rstrip()
