"""`ultrabench sweep show --as` prints how another framework trains the layout of a run.

It is apart from `show`, which so need not import what reads configurations.
"""

import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from ultrabench.cli.sweep.show import find_run
from ultrabench.cli.tables import print_json, show
from ultrabench.errors import SweepFolderError, require_known
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import FOLLOWING
from ultrabench.model_shape import ADDED_LATER
from ultrabench.record import from_dict, to_dict, values_of
from ultrabench.run import AttemptKey, RunSpec, fill_in, words_in
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.refusals import ROUTED, unsupported
from ultrabench.variant import texts, variables_of

IMPLIED = ("name", *FOLLOWING, "gbs")
"""Fields that no command needs: name, and dp, and gas or gbs, which a framework derives from the others."""


def show_as(framework: str, run: str, sweep: str | None, as_json: bool, results: Path) -> None:
    """Prints the command of another framework that trains the layout of one run, and what it cannot express.

    Raises:
        ConfigError: no file in configs/kernel/ gives a command for this framework.
        SweepFolderError: the run is unknown, or the plan rejects it.
    """
    commands = {name: read_yaml(path).get("command") for name, path in files("kernel").items()}
    frameworks = [name for name, words in commands.items() if isinstance(words, list)]
    require_known("framework", frameworks, framework)
    folder, run_id, look = find_run(run, sweep, results)
    spec, config = _spec(folder, run_id, look()), load_config([f"kernel={framework}"])
    kernel = with_precision(config.kernel, spec.kernel.precision)
    varied = variables_of(spec.variant)
    others = {name: value for name, value in spec.variant.items() if name.removeprefix("env.") not in varied}
    lacking = [*not_expressed(spec, kernel), *texts(others)]
    words = fill_in(spec_there(spec, kernel), AttemptKey(run_id, 0, 0), config.measure)
    is_python = config.kernel.command[0] == "python"
    torchrun = ["torchrun", f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.gpus_per_node}"]
    words = [*torchrun, *words[1:]] if is_python else [*torchrun, "--no-python", *words]
    if as_json:
        env, name = (
            config.kernel.env | varied,
            {"sweep": folder.name, "run_id": run_id, "framework": framework},
        )
        print_json({**name, "command": words, "env": env, "not_expressed": lacking})
        return
    variables = [
        f"{name}={shlex.quote(value)}"
        for name, value in (config.kernel.env | varied).items()
        if value is not None
    ]
    show(f"# run {run_id}, {spec.shape.name} {spec.label()}, as kernel={framework}")
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


def spec_there(spec: RunSpec, kernel: KernelConfig) -> RunSpec:
    """The run as `kernel` trains it, with its flag for the routing of our run, if it has one."""
    flags = kernel.flags.get(ROUTED, {}).get(str(spec.kernel.routing_of(spec.shape)), ())
    there = without_other_models(spec, kernel)
    # They come before other flags, of which torchtitan takes that of recompute last.
    return replace(spec, arguments=(), kernel=replace(there, command=(*there.command, *flags)))


def with_precision(kernel: KernelConfig, precision: str) -> KernelConfig:
    """The kernel in another precision, if it has flags for it."""
    return replace(kernel, precision=precision) if precision in kernel.flags.get("precision", ()) else kernel


def without_other_models(spec: RunSpec, kernel: KernelConfig) -> KernelConfig:
    """The kernel without its flags of a model, which name one of its own list, where the run has another shape.

    A command with sizes of a model in braces trains any model, so that its flags name none.
    """
    ours = values_of(spec.shape)
    if ours.keys() & words_in(replace(kernel, flags={}), with_tables=False):
        return kernel
    supports = {name: values for name, values in kernel.supports.items() if name in ours}
    flags = {name: table for name, table in kernel.flags.items() if name in ours}
    if not any(unsupported(replace(kernel, supports=supports, flags=flags), spec.layout, spec.shape)):
        return kernel
    return replace(kernel, flags={w: table for w, table in kernel.flags.items() if w not in ours})


def not_expressed(spec: RunSpec, kernel: KernelConfig) -> Iterator[str]:
    """What the command of `kernel` does not say of a run, a line for each word.

    These are values that it does not support, and values other than the usual one of words that it does not use.
    """
    own_kernel, model = without_other_models(spec, kernel), values_of(spec.shape)
    others = kernel.flags.keys() - own_kernel.flags.keys()
    supports = {name: values for name, values in kernel.supports.items() if not (others and name in model)}
    yield from unsupported(replace(own_kernel, supports=supports), spec.layout, spec.shape)
    expressed = {*words_in(own_kernel), *kernel.flags, *IMPLIED}
    if others:
        expressed |= model.keys()
        other_flags = " ".join(
            flag for name in others for flags in kernel.flags[name].values() for flag in flags
        )
        size_by_name = {k: v for k, v in to_dict(spec.shape).items() if v != ADDED_LATER.get(k)}
        sizes = ", ".join(f"{name}={value}" for name, value in size_by_name.items() if name != "name")
        yield f"the model, since {other_flags} is another; register one with {sizes} and add the flag that names it"
    for record in (spec.layout, spec.shape, spec.workload):
        usual, shown = {field.name: field.default for field in fields(record)}, to_dict(record)
        for name, value in values_of(record).items():
            if name not in expressed and value != usual[name]:
                yield f"{name}={shown[name]} is no word of its command"
    routing = spec.kernel.routing_of(spec.shape)
    if routing and routing not in kernel.flags.get(ROUTED, ()):
        yield f"routing={routing}; its own router chooses the experts of a token"
    for name in ("precision", "compile", "attention"):
        if name not in words_in(own_kernel, with_tables=False) and (
            ours := getattr(spec.kernel, name)
        ) != getattr(kernel, name):
            yield f"{name}={ours}; its command has {name}={getattr(kernel, name)}"
    if kernel.precision == "fp8":
        yield f"the scale of each row in precision=fp8; its command has {' '.join(kernel.flags['precision']['fp8'])}"
