"""`ultrabench kernel try-log` shows the steps that a pattern finds in a log."""

from pathlib import Path

from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.errors import ConfigError, counted
from ultrabench.step_line import STEP_TIMES, nearest_lines, parse_log_line, step_pattern

SHOWN = 5
"""Number of steps that the table has from the begin of a log."""


def run_try_log(text: str, file: Path, as_json: bool) -> int:
    """Prints the steps that the pattern `text` finds; returns 1 if it finds none.

    Raises:
        ConfigError: the pattern is wrong, or the file cannot be read.
    """
    pattern = step_pattern(text)
    try:
        log = file.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give the log of a program") from None
    rows, refused = [], []
    for number, line in enumerate(log.splitlines(), start=1):
        step = parse_log_line(line, pattern, tokens_per_gpu=1.0)
        match = pattern.search(line)
        if step and match and "fault" not in step:
            read = {
                k: v for k, v in match.groupdict().items() if v is not None and k in (*STEP_TIMES, "loss")
            }
            rows.append({"line": number, **read})
        elif match:
            refused.append(f"line {number} matches, but holds no time of a step: {line.strip()}")
    nearest = [] if rows else refused[:1] or nearest_lines(log, text)
    if as_json:
        print_json({"steps": rows, "refused": refused, "nearest": nearest})
    elif rows:
        columns = [name for name in rows[0] if name != "line"]
        first = [(row["line"], *(row.get(name) for name in columns)) for row in rows[:SHOWN]]
        headers = [f">{name}" for name in ("line", *columns)]
        show(table(f"{counted(len(rows), 'step')} in {file}", *headers, rows=first))
    else:
        say(f"no line of {file} gives a step; nearest:", *nearest)
    return 0 if rows else 1
