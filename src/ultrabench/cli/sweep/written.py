"""Writes chosen layouts as a sweep for `recommend --write` and `sweep plan --write`, and says how to launch it."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ultrabench.cli.tables import say
from ultrabench.errors import ConfigError, counted
from ultrabench.store.kernel_secrets import redact_arguments
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.config.sweep_file import write_sweep_file


def written_lines(
    path: Path, config: SweepConfig, overrides: Sequence[str], runs: Sequence[Candidate]
) -> list[str]:
    """Writes a sweep of `runs` to `path`; returns the lines that say how to launch it.

    Raises:
        ConfigError: the file cannot be written.
    """
    command = shlex.join(["ultrabench", *redact_arguments(sys.argv[1:], config.secrets)])
    heading = f"{counted(len(runs), 'layout')} chosen by: {command}"
    try:
        write_sweep_file(path, config, overrides, runs, " ".join(heading.split()))
    except OSError as error:
        problem = f"cannot write {error.filename or path}: {error.strerror}"
        raise ConfigError(problem, "free or unlock the folder, or run the command elsewhere") from error
    say(f"wrote {counted(len(runs), 'layout')} to {path}")
    lines = ["\nto measure these layouts:", f"ultrabench sweep launch sweep={path.stem}"]
    if secrets := config.secrets:
        names = ", ".join(f"kernel.env.{name}" for name in secrets)
        lines.insert(
            0, f"not written, because they look like secrets: {names}; give them to sweep launch again"
        )
    return lines
