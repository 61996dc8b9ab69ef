"""`ultrabench kernel try-log` shows what the patterns of a kernel find in a log."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.errors import ConfigError, counted, nearest_name
from ultrabench.log_patterns import (
    LOG_PATTERNS,
    compile_any,
    misread_reason,
    nearest_lines,
    options_of,
    parse_log_line,
)
from ultrabench.sweep.config.files import files, read_yaml

MAX_SHOWN_LINES = 5
"""Number of matches that the table shows, from the beginning of a log."""
NOUN_BY_OPTION = {"step_line": "step", "memory_line": "memory peak", "mfu_line": "MFU value"}
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
        settings = read_yaml(path)
        text_by_option = {option: settings[option] for option in LOG_PATTERNS if settings.get(option)}
        if not text_by_option:
            raise ConfigError(f"kernel={text} ({path}) has none of {', '.join(LOG_PATTERNS)}; give a pattern")
        return {option: compile_any(str(pattern)) for option, pattern in text_by_option.items()}
    pattern = compile_any(text)
    if not (option_names := options_of(pattern)):
        groups_text = "; ".join(f"{name}: {', '.join(LOG_PATTERNS[name].groups)}" for name in LOG_PATTERNS)
        similar_kernel = nearest_name(text, files("kernel"))
        rule = f"not a kernel, and has no group (?P<NAME>...) with one of these names: {groups_text}"
        raise ConfigError(f"{text!r} is {rule}", f"did you mean {similar_kernel}?" if similar_kernel else "")
    return dict.fromkeys(option_names, pattern)


def _match_report(option: str, pattern: re.Pattern[str], log: str) -> dict[str, Any]:
    """What a pattern finds in a log, as `--json` prints it.

    `lines` holds the values of the matching lines that count, `refused` says why other matching lines do not count,
    and `nearest` has the most similar lines where none counts. For an MFU, `form` says how its numbers are taken.
    """
    matched_lines, refused = [], []
    for line_number, line in enumerate(log.splitlines(), start=1):
        match = pattern.search(line)
        if match is None:
            continue
        values = parse_log_line(line, pattern, tokens_per_gpu=1.0, option=option) or {}
        refusal = misread_reason(option, values) or values.get("fault")
        if values and not refusal:
            matched_lines.append({"line": line_number, **dict(_line_values(option, match, values))})
        else:
            reason = refusal or "has no such number"
            refused.append(f"line {line_number} matches, but {reason}: {line.strip()}")
    nearest = [] if matched_lines else refused[:1] or nearest_lines(log, pattern.pattern)
    report = {"lines": matched_lines, "refused": refused, "nearest": nearest}
    return report | ({"form": _mfu_form_text(pattern, log, matched_lines)} if option == "mfu_line" else {})


def _mfu_form_text(pattern: re.Pattern[str], log: str, matched_lines: list[dict[str, Any]]) -> str:
    """A sentence that says whether MFU numbers are read as fractions or percent, and which group gives the other reading."""
    matches = [*filter(None, map(pattern.search, log.splitlines()))]
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


def _line_values(option: str, match: re.Match[str], values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The texts of the groups that a line matched, then the values that follow from them without knowing the layout."""
    log_pattern = LOG_PATTERNS[option]
    groups = {**log_pattern.groups, **log_pattern.optional_groups}
    texts = {name: text for name, text in match.groupdict().items() if text is not None and name in groups}
    yield from texts.items()
    for name, text in texts.items():
        quantity = groups[name][0]
        if quantity in values and quantity != name and text:
            yield quantity, values[quantity]


def _show_report(option: str, report: dict[str, Any], log_path: Path) -> None:
    """Prints the first matches of the pattern of one option, and an example of a matching line that does not count."""
    noun = NOUN_BY_OPTION[option]
    matched_lines, refused = report["lines"], report["refused"]
    if form_text := report.get("form"):
        say(f"kernel.{option}: {form_text}")
    if not matched_lines:
        say(f"kernel.{option}: no {noun} found in {log_path}; nearest lines:", *report["nearest"])
        return
    shown_lines = matched_lines[:MAX_SHOWN_LINES]
    columns = [*dict.fromkeys(name for line in shown_lines for name in line)]
    shown_rows = [[_short_value(line.get(name)) for name in columns] for line in shown_lines]
    first_text = f", the first {MAX_SHOWN_LINES}:" if len(matched_lines) > MAX_SHOWN_LINES else ""
    show(f"kernel.{option}: {counted(len(matched_lines), noun)} in {log_path}{first_text}")
    show(table("", *(f">{name}" for name in columns), rows=shown_rows))
    if refused:
        say(f"kernel.{option}: {counted(len(refused), 'matching line')} ignored, such as:", refused[0])


def _short_value(value: Any) -> Any:
    """A value as the table shows it: a float with at most six digits, any other value unchanged."""
    return f"{value:.6g}" if isinstance(value, float) else value
