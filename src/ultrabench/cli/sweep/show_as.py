"""`ultrabench sweep show --as` prints how another framework trains the layout of a run.

It is separate from `show`, so that `show` need not import the code that reads configurations.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.compute as pc

from ultrabench.analysis.collect import read_parquet
from ultrabench.analysis.measured import spec_of
from ultrabench.analysis.planned import is_predicted
from ultrabench.analysis.ranking import leaderboard
from ultrabench.cli.sweep.show import MAX_RANK_DIGITS, find_run
from ultrabench.cli.tables import print_json, say, show
from ultrabench.errors import SweepFolderError, counted, require_known
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import BATCH, FOLLOWING, Layout
from ultrabench.model_shape import ADDED_LATER, ModelShape
from ultrabench.record import from_dict, to_dict, values_of
from ultrabench.run import AttemptKey, RunSpec, fill_in, words_in
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.framework import ALL_SIZES_WORD, Framework, text_of
from ultrabench.sweep.config.load import load_config, load_framework, load_model
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.refusals import ROUTING_FLAG, unsupported
from ultrabench.variant import texts, variables_of

IMPLIED = ("name", *FOLLOWING, "gbs")
"""Fields that no command needs: name, and dp, and gas or gbs, which a framework derives from the others."""


def show_as(name: str, run: str, sweep: str | None, as_json: bool, results: Path) -> None:
    """Prints the command or the file by which a framework trains the layout of one run, and what it cannot express.

    A file goes to stdout and what is said about it to stderr, so that a shell can write it.

    Raises:
        ConfigError: no file in configs/kernel/ or configs/framework/ has this name.
        SweepFolderError: the run is unknown, the plan rejects it, or a file is no plan.
    """
    commands = {kernel: read_yaml(path).get("command") for kernel, path in files("kernel").items()}
    kernels = [kernel for kernel, words in commands.items() if isinstance(words, list)]
    require_known("framework", (*kernels, *files("framework")), name)
    if sweep is not None and sweep.endswith(".parquet"):
        sweep_name, (run_id, spec) = Path(sweep).stem, _spec_of_plan(Path(sweep), run)
    else:
        folder, run_id, read_state = find_run(run, sweep, results)
        sweep_name, spec = folder.name, _spec(folder, run_id, read_state())
    config = load_config([f"kernel={name}"] if name in kernels else [])
    framework = Framework(kernel=config.kernel) if name in kernels else load_framework(name)
    kernel = with_precision(framework.kernel, spec.kernel.precision)
    variables = variables_of(spec.variant)
    options = {key: value for key, value in spec.variant.items() if key.removeprefix("env.") not in variables}
    document: dict[str, Any] = {
        "sweep": sweep_name, "run_id": run_id, "framework": name, "written_from": kernel.written_from,
        "env": kernel.env | variables, "not_expressed": [*not_expressed(spec, kernel, framework.elsewhere), *texts(options)],
    }  # fmt: skip
    words = fill_in(spec_there(spec, kernel), AttemptKey(run_id, 0, 0), config.measure)
    if framework.file:
        document |= {"file": framework.file, "text": text_of(words, framework.file)}
    else:
        document |= {"command": _torchrun(spec, words, is_python=kernel.command[0] == "python")}
    if as_json:
        print_json(document)
    else:
        _show(document, f"# run {run_id}, {spec.shape.name} {spec.label()}, as {name}")


def _torchrun(spec: RunSpec, words: Sequence[str], *, is_python: bool) -> list[str]:
    """The command that starts a program on all GPUs of a run."""
    torchrun = ["torchrun", f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.gpus_per_node}"]
    return [*torchrun, *words[1:]] if is_python else [*torchrun, "--no-python", *words]


def _show(document: Mapping[str, Any], title: str) -> None:
    """Prints a command behind its comments, or a file, with its comments on stderr."""
    file, version = document.get("file"), document["written_from"]
    comments = [title, *([f"# written from {version}"] if version else [])]
    comments += [f"# not expressed: {reason}" for reason in document["not_expressed"]]
    variables = [f"{key}={shlex.quote(value)}" for key, value in document["env"].items() if value is not None]
    if file:
        say(*comments, *(f"# set {variable}" for variable in variables), f"# the file {file}:")
        sys.stdout.write(document["text"] + "\n")
    else:
        show(*comments)
        show(" \\\n  ".join([*variables, *map(shlex.quote, document["command"])]))


def _spec(folder: SweepFolder, run_id: str, state: SweepState) -> RunSpec:
    """The spec of a run, from the plan, or from an attempt if the plan has it no longer."""
    rows = [row for row in read_rows(folder.plan) if row["run_id"] == run_id]
    if run := next(runs_of(read_sweep_json(folder), rows, state), None):
        return run.spec
    for attempt in state.by_run().get(run_id, []):
        if (values := attempt.spec_as(dict[str, Any])) is not None:
            return from_dict(RunSpec, values)
    reason = rows[0]["reason"] if rows else "it was never attempted"
    raise SweepFolderError(f"run {run_id} of {folder.name} is not in the plan: {reason}; name another run")


def _spec_of_plan(path: Path, run: str) -> tuple[str, RunSpec]:
    """The run_id and the spec of a run in a file of `sweep plan -o`; `run` is its rank in `sweep top`, or begins its id.

    Raises:
        SweepFolderError: the file is no plan, or `run` means no run of it, or several.
    """
    table = read_parquet(path)
    if not is_predicted(table):
        rule = "--as reads only plan files: give the sweep, or write a plan with sweep plan -o"
        raise SweepFolderError(f"{path} is a table of results; {rule}")
    ids = [row["run_id"] for board in leaderboard(table) for row in board]
    is_rank = run.isdecimal() and len(run) <= MAX_RANK_DIGITS
    matches = ids[int(run) - 1 : int(run)] if is_rank else [i for i in ids if i.startswith(run)]
    if len(matches) != 1:
        rule = f"give a rank up to {len(ids):,}, or the first digits of one id, from: ultrabench sweep top {path}"
        raise SweepFolderError(f"{run!r} matches {counted(len(matches), 'run')} of {path}; {rule}")
    (row,) = table.filter(pc.field("run_id") == matches[0]).to_pylist()
    # A row has no settings of rotations.
    return matches[0], replace(spec_of(row), shape=load_model(row["model"]))


def spec_there(spec: RunSpec, kernel: KernelConfig) -> RunSpec:
    """The run as `kernel` trains it, with its flag for the routing of our run, if it has one."""
    flags = kernel.flags.get(ROUTING_FLAG, {}).get(str(spec.kernel.routing_of(spec.shape)), ())
    their_kernel = without_other_models(spec, kernel)
    # They come before other flags, of which torchtitan takes that of recompute last.
    return replace(spec, arguments=(), kernel=replace(their_kernel, command=(*their_kernel.command, *flags)))


def with_precision(kernel: KernelConfig, precision: str) -> KernelConfig:
    """The kernel in another precision, if it has flags for it."""
    return replace(kernel, precision=precision) if precision in kernel.flags.get("precision", ()) else kernel


def without_other_models(spec: RunSpec, kernel: KernelConfig) -> KernelConfig:
    """The kernel without its flags of a model, which name one of its own list, where the run has another shape.

    A command with sizes of a model in braces trains any model, so that its flags name none.
    """
    sizes = values_of(spec.shape)
    if sizes.keys() & words_in(replace(kernel, flags={}), with_tables=False):
        return kernel
    supports = {name: values for name, values in kernel.supports.items() if name in sizes}
    flags = {name: table for name, table in kernel.flags.items() if name in sizes}
    if not any(unsupported(replace(kernel, supports=supports, flags=flags), spec.layout, spec.shape)):
        return kernel
    return replace(kernel, flags={w: table for w, table in kernel.flags.items() if w not in sizes})


def not_expressed(
    spec: RunSpec, kernel: KernelConfig, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """What the command or the file of `kernel` does not say of a run, a line for each word.

    These are values that it does not support, and values other than the usual one of words that it does not use.

    Args:
        elsewhere: word -> why a file does not say it; empty for a command.
    """
    own_kernel, model = without_other_models(spec, kernel), values_of(spec.shape)
    dropped, noun = kernel.flags.keys() - own_kernel.flags.keys(), "file" if elsewhere else "command"
    supports = {name: values for name, values in kernel.supports.items() if not (dropped and name in model)}
    yield from unsupported(replace(own_kernel, supports=supports), spec.layout, spec.shape, kernel.name)
    words = words_in(own_kernel)
    expressed_words = {*words, *kernel.flags, *IMPLIED}
    if dropped:
        expressed_words |= model.keys()
        tables = (kernel.flags[name].values() for name in dropped)
        other_flags = " ".join(flag for table in tables for flags in table for flag in flags)
        remedy = f"register one with {_sizes(spec.shape)} and add the flag that selects it"
        yield f"the model, because {other_flags} selects another; {remedy}"
    if ALL_SIZES_WORD in elsewhere:
        expressed_words |= model.keys()
        yield f"the model: {elsewhere[ALL_SIZES_WORD]}, with {_sizes(spec.shape)}"
    if "dp_shard_size" in words:
        yield from _shards_lacking(spec.layout)
    for record in (spec.layout, spec.shape, spec.workload):
        defaults, values = {field.name: field.default for field in fields(record)}, to_dict(record)
        for name, value in values_of(record).items():
            if name in elsewhere and (value != defaults[name] or name in BATCH):
                yield f"{name}={values[name]}: {elsewhere[name]}"
            elif name not in {*expressed_words, *elsewhere} and value != defaults[name]:
                yield f"{name}={values[name]}: its {noun} has no such setting"
    routing = spec.kernel.routing_of(spec.shape)
    if routing and routing not in kernel.flags.get(ROUTING_FLAG, ()):
        yield f"routing={routing}: its own router chooses the experts of each token"
    in_braces = words_in(own_kernel, with_tables=False)
    for name in ("precision", "compile", "attention"):
        run_value, kernel_value = getattr(spec.kernel, name), getattr(kernel, name)
        if name not in in_braces and run_value != kernel_value:
            yield f"{name}={run_value}: its {noun} sets {name}={kernel_value}"
    if kernel.precision == "fp8":
        yield f"the scale per row of precision=fp8: its {noun} sets {' '.join(kernel.flags['precision']['fp8'])}"


def _sizes(shape: ModelShape) -> str:
    """The sizes of a model as NAME=VALUE, without those that most models do not have."""
    sizes = {name: size for name, size in to_dict(shape).items() if size != ADDED_LATER.get(name)}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if name != "name")


def _shards_lacking(layout: Layout) -> Iterator[str]:
    """The reason why a mesh of dp_replicate, dp_shard and cp cannot have the shard groups of a layout.

    A group there has all ranks of cp, and more than one of dp where others replicate it.
    """
    shards, cp = layout.dp_shard, layout.cp
    if cp > 1 and shards and (shards % cp or shards == cp < layout.dp * cp):
        yield f"dp_shard={shards} with cp={cp}: its groups have a multiple of cp ranks, at least 2*cp={2 * cp}, or all ranks"
