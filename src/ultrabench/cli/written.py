"""Writes chosen layouts as a sweep for the option --write of several commands, and says how to launch it."""

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
    path: Path,
    config: SweepConfig,
    overrides: Sequence[str],
    runs: Sequence[Candidate] | None,
    arguments: str = "",
) -> list[str]:
    """Writes a sweep of `runs` to `path`; returns the lines that say how to launch it.

    Args:
        runs: the runs whose layouts it lists; None for all axes of `config`.
        arguments: what follows the name of the sweep in the command that launches it.

    Raises:
        ConfigError: the file cannot be written.
    """
    command = shlex.join(["ultrabench", *redact_arguments(sys.argv[1:], config.secrets)])
    sweep_text, measured_text = "a sweep", "this sweep"
    if runs is not None:
        sweep_text, measured_text = counted(len(runs), "layout"), "these layouts"
    heading = f"{sweep_text} chosen by: {command}"
    try:
        write_sweep_file(path, config, overrides, runs, " ".join(heading.split()))
    except OSError as error:
        problem = f"cannot write {error.filename or path}: {error.strerror}"
        raise ConfigError(problem, "free or unlock the folder, or run the command elsewhere") from error
    say(f"wrote {sweep_text} to {path}")
    lines = [f"\nto measure {measured_text}:", f"ultrabench sweep launch sweep={path.stem}{arguments}"]
    if secrets := config.secrets:
        names = ", ".join(f"kernel.env.{name}" for name in secrets)
        lines.insert(
            0, f"not written, because they look like secrets: {names}; give them to sweep launch again"
        )
    return lines
