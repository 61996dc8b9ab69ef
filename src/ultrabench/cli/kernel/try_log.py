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

MAX_SHOWN = 5
"""Number of matches that the table shows, from the beginning of a log."""
NOUNS = {"step_line": "step", "memory_line": "memory peak", "mfu_line": "MFU value"}
"""Option of a kernel -> what a line that its pattern matches reports."""


def run_try_log(text: str, file: Path, as_json: bool) -> int:
    """Prints what the pattern `text`, or each pattern of the kernel of that name, finds; returns 1 if one finds nothing.

    Raises:
        ConfigError: a pattern is wrong, or the file cannot be read.
    """
    patterns = _patterns(text)
    try:
        log = file.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; give the log of a program") from None
    reading_by_option = {option: _reading(option, pattern, log) for option, pattern in patterns.items()}
    if as_json:
        print_json(reading_by_option)
    else:
        for option, reading in reading_by_option.items():
            _show(option, reading, file)
    return 0 if all(reading["lines"] for reading in reading_by_option.values()) else 1


def _patterns(text: str) -> dict[str, re.Pattern[str]]:
    """Option -> pattern, for the kernel of the name `text`, or for a pattern by the names of its groups."""
    if path := files("kernel").get(text):
        settings = read_yaml(path)
        texts = {option: settings[option] for option in LOG_PATTERNS if settings.get(option)}
        if not texts:
            raise ConfigError(f"kernel={text} ({path}) has none of {', '.join(LOG_PATTERNS)}; give a pattern")
        return {option: compile_any(str(pattern)) for option, pattern in texts.items()}
    pattern = compile_any(text)
    if not (options := options_of(pattern)):
        forms = "; ".join(f"{option}: {', '.join(LOG_PATTERNS[option].groups)}" for option in LOG_PATTERNS)
        similar_kernel = nearest_name(text, files("kernel"))
        rule = f"not a kernel, and has no group (?P<NAME>...) with one of these names: {forms}"
        raise ConfigError(f"{text!r} is {rule}", f"did you mean {similar_kernel}?" if similar_kernel else "")
    return dict.fromkeys(options, pattern)


def _reading(option: str, pattern: re.Pattern[str], log: str) -> dict[str, Any]:
    """What a pattern finds in a log: `lines` that count, `refused` ones, and the `nearest` where none counts.

    Of an MFU `form` says how its numbers are taken.
    """
    lines, refused = [], []
    for number, line in enumerate(log.splitlines(), start=1):
        match = pattern.search(line)
        if match is None:
            continue
        values = parse_log_line(line, pattern, tokens_per_gpu=1.0, option=option) or {}
        refusal = misread_reason(option, values) or values.get("fault")
        if values and not refusal:
            lines.append({"line": number, **dict(_read(option, match, values))})
        else:
            refused.append(f"line {number} matches, but {refusal or 'has no such number'}: {line.strip()}")
    nearest = [] if lines else refused[:1] or nearest_lines(log, pattern.pattern)
    reading = {"lines": lines, "refused": refused, "nearest": nearest}
    return reading | ({"form": _form_of_mfu(pattern, log, lines)} if option == "mfu_line" else {})


def _form_of_mfu(pattern: re.Pattern[str], log: str, lines: list[dict[str, Any]]) -> str:
    """A sentence that says how the numbers of an MFU are taken, and which group fits them where another one seems to."""
    matches = [*filter(None, map(pattern.search, log.splitlines()))]
    if "fraction" in pattern.groupindex:
        ends = (match.string[match.end("fraction") :] for match in matches if match["fraction"])
        if any(re.match(r"\s*%", end) for end in ends):
            return (
                "the number is read as a fraction of 1, but a % follows it: name the group (?P<percent>...)"
            )
        return "the number is read as a fraction of 1; for percent, name the group (?P<percent>...)"
    if (
        lines
        and max(line["mfu"] for line in lines) < 0.01
        and not any("%" in match.string for match in matches)
    ):
        return "every number is below 1 percent; for a fraction of 1, name the group (?P<fraction>...)"
    return "the number is divided by 100; for a fraction of 1, name the group (?P<fraction>...)"


def _read(option: str, match: re.Match[str], values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The groups of an option with their texts, then what follows from them if that does not depend on a layout."""
    log_pattern = LOG_PATTERNS[option]
    groups = {**log_pattern.groups, **log_pattern.optional_groups}
    texts = {name: text for name, text in match.groupdict().items() if text is not None and name in groups}
    yield from texts.items()
    for name, text in texts.items():
        quantity = groups[name][0]
        if quantity in values and quantity != name and text:
            yield quantity, values[quantity]


def _show(option: str, reading: dict[str, Any], file: Path) -> None:
    noun = NOUNS[option]
    lines, refused = reading["lines"], reading["refused"]
    if form := reading.get("form"):
        say(f"kernel.{option}: {form}")
    if not lines:
        say(f"kernel.{option}: no {noun} found in {file}; nearest lines:", *reading["nearest"])
        return
    columns = [*dict.fromkeys(name for row in lines[:MAX_SHOWN] for name in row)]
    shown_rows = [[_short(row.get(name)) for name in columns] for row in lines[:MAX_SHOWN]]
    first_text = f", the first {MAX_SHOWN}:" if len(lines) > MAX_SHOWN else ""
    show(f"kernel.{option}: {counted(len(lines), noun)} in {file}{first_text}")
    show(table("", *(f">{name}" for name in columns), rows=shown_rows))
    if refused:
        say(f"kernel.{option}: {counted(len(refused), 'matching line')} ignored, such as:", refused[0])


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
