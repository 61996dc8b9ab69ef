"""The command of a run of the user's program with its folder, variables and files, as ultrabench prints it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ultrabench.errors import ConfigError
from ultrabench.partial_step import Slice
from ultrabench.run import FILES_WORD, UNKNOWN_PROCESS, AttemptKey, RunSpec, fill_in, fill_in_files
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.variant import variables_of

ProgramStart = dict[str, Any]
"""How a program is started: {command, files, env, folder}, and {gas_of_starts} where it starts twice."""


def start_of(
    spec: RunSpec, key: AttemptKey, config: SweepConfig, slice_: Slice | None = None
) -> ProgramStart:
    """How a rank of an attempt is started; words that only its node decides stay in braces.

    Args:
        slice_: the parts of steps that the attempt measures, or None. A program that starts twice for them is shown
            as it starts first.

    Raises:
        ConfigError: our own kernel trains the run.
    """
    if spec.kernel.forks:
        fact = f"kernel={spec.kernel.name} is part of ultrabench and has no command"
        raise ConfigError(fact, "choose a program of your own with kernel=command")
    gas_of_starts = slice_.pair if slice_ and slice_.two_starts else None
    if gas_of_starts:
        spec = spec.with_gas(gas_of_starts[0])
    arguments = config.options.arguments_of(spec.variant) or spec.arguments
    program = replace(
        spec, kernel=replace(config.kernel, precision=spec.kernel.precision), arguments=arguments
    )
    return {
        "folder": program.kernel.folder, "env": program.kernel.env | variables_of(spec.variant),
        "command": fill_in(program, key, config.measure, UNKNOWN_PROCESS),
        "files": fill_in_files(program, key, config.measure),
        **({"gas_of_starts": [*gas_of_starts]} if gas_of_starts else {}),
    }  # fmt: skip


def start_lines(start: ProgramStart) -> Iterator[RenderableType]:
    """Lines with the command of a rank and the files that it may read."""
    if start["folder"]:
        yield Text(f"cd {shlex.quote(start['folder'])}")
    yield Text(command_text(start["env"], start["command"]))
    for name, text in start["files"].items():
        yield Text(f"\n{{{FILES_WORD}}}/{name}", "bold")
        yield Text(text.rstrip("\n"))
    if gas_of_starts := start.get("gas_of_starts"):
        first_gas, second_gas = gas_of_starts
        fact = f"the program starts twice: with {first_gas} micro-batches a step, as above, then with {second_gas}"
        yield Text(f"\n{fact}")
    texts = (*start["command"], *start["files"].values())
    open_words = [word for word in UNKNOWN_PROCESS if any(str(word) in text for text in texts)]
    if open_words:
        yield Text(f"\nknown when a rank starts: {', '.join(map(str, open_words))}")


def command_text(env: Mapping[str, str | None], words: list[str]) -> str:
    """A command with its variables for a shell, a word on each line."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items() if value is not None]
    return " \\\n  ".join([*variables, *map(shlex.quote, words)])
