"""`ultrabench sweep show --as` prints how another framework trains the layout of a run.

It is apart from `show`, which so need not import what reads configurations.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from ultrabench.cli.sweep.show import find_run
from ultrabench.cli.tables import print_json, show
from ultrabench.errors import SweepFolderError, require_known
from ultrabench.kernel_config import KernelConfig
from ultrabench.record import from_dict, to_dict, values_of
from ultrabench.run import AttemptKey, RunSpec, fill_in
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.compose import files, read_yaml
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.grid import unsupported
from ultrabench.sweep.plan_table import read_rows, runs_of

IMPLIED = ("name", "dp", "gas", "gbs")
"""Fields that no command needs: name, and dp, and gas or gbs, which a framework derives from the others."""


def show_as(framework: str, given: str, sweep: str | None, as_json: bool, results: Path) -> None:
    """Prints the command of another framework that trains the layout of one run, and what it cannot express.

    Raises:
        ConfigError: no file in configs/kernel/ gives a command for this framework.
        SweepFolderError: the run is unknown, or the plan rejects it.
    """
    commands = {name: read_yaml(path).get("command") for name, path in files("kernel").items()}
    known = [name for name, words in commands.items() if isinstance(words, list)]
    require_known("framework", known, framework)
    folder, run_id, look = find_run(given, sweep, results)
    spec, config = _spec(folder, run_id, look()), load_config([f"kernel={framework}"])
    lacking = list(not_expressed(spec, config.kernel))
    there = replace(spec, kernel=without_other_models(spec, config.kernel))
    words = fill_in(there, AttemptKey(run_id, 0, 0), config.measure)
    if config.kernel.command[0] == "python":
        words[:1] = ["torchrun", f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.gpus_per_node}"]
    if as_json:
        env, name = config.kernel.env, {"sweep": folder.name, "run_id": run_id, "framework": framework}
        print_json({**name, "command": words, "env": env, "not_expressed": lacking})
        return
    variables = [f"{name}={shlex.quote(value)}" for name, value in config.kernel.env.items()]
    show(f"# run {run_id}, {spec.shape.name} {spec.layout.label()}, as kernel={framework}")
    show(*(f"# not expressed: {reason}" for reason in lacking))
    show(" \\\n  ".join([*variables, *map(shlex.quote, words)]))


def _spec(folder: SweepFolder, run_id: str, state: SweepState) -> RunSpec:
    """The spec of a run, from the plan, or from an attempt if the plan has it no longer."""
    rows = [row for row in read_rows(folder.plan) if row["run_id"] == run_id]
    if run := next(runs_of(read_sweep_json(folder), rows, state), None):
        return run.spec
    for attempt in state.by_run().get(run_id, []):
        if attempt.spec is not None:
            return from_dict(RunSpec, attempt.spec)
    reason = rows[0]["reason"] if rows else "it was never attempted"
    raise SweepFolderError(f"run {run_id} of {folder.name} is not in the plan: {reason}; name another run")


def without_other_models(spec: RunSpec, kernel: KernelConfig) -> KernelConfig:
    """The kernel without its flags of a model, which name one of its own list, where the run has another shape."""
    ours = values_of(spec.shape)
    supports = {word: values for word, values in kernel.supports.items() if word in ours}
    flags = {word: table for word, table in kernel.flags.items() if word in ours}
    if not any(unsupported(replace(kernel, supports=supports, flags=flags), spec.layout, spec.shape)):
        return kernel
    return replace(kernel, flags={w: table for w, table in kernel.flags.items() if w not in ours})


def not_expressed(spec: RunSpec, kernel: KernelConfig) -> Iterator[str]:
    """What the command of `kernel` does not say of a run, a line for each word.

    These are values that it does not support, and values other than the usual one of words that it does not use.
    """
    there, model = without_other_models(spec, kernel), values_of(spec.shape)
    others = kernel.flags.keys() - there.flags.keys()
    supports = {word: values for word, values in kernel.supports.items() if not (others and word in model)}
    yield from unsupported(replace(there, supports=supports), spec.layout, spec.shape)
    told = {*re.findall(r"\{(\w+)\}", " ".join(kernel.command)), *kernel.supports, *kernel.flags, *IMPLIED}
    if others:
        named = " ".join(flag for word in others for flags in kernel.flags[word].values() for flag in flags)
        known = {word: value for word, value in to_dict(spec.shape).items() if value is not None}
        sizes = ", ".join(f"{word}={value}" for word, value in known.items() if word != "name")
        yield f"the model, since {named} is another; register one with {sizes} and add the flag that names it"
    for record in (spec.layout, spec.shape, spec.workload):
        usual, shown = {field.name: field.default for field in fields(record)}, to_dict(record)
        for word, value in values_of(record).items():
            if word not in told and value != usual[word]:
                yield f"{word}={shown[word]} is no word of its command"
    for word in ("precision", "compile", "attention"):
        if word not in told and (ours := getattr(spec.kernel, word)) != getattr(kernel, word):
            yield f"{word}={ours}; its command has {word}={getattr(kernel, word)}"
