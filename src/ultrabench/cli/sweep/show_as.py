"""`ultrabench sweep show --as` prints how another framework trains the layout of a run.

It is separate from `show`, so that `show` need not import the code that reads configurations.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.compute as pc
from rich.text import Text

from ultrabench.analysis.results.collect import read_parquet
from ultrabench.analysis.results.measured import spec_of
from ultrabench.analysis.results.planned import is_predicted
from ultrabench.analysis.results.ranking import leaderboard
from ultrabench.cli.sweep.show import MAX_RANK_DIGITS, find_run
from ultrabench.cli.tables import print_json, say, show
from ultrabench.errors import SweepFolderError, counted, require_known
from ultrabench.kernel_config import ROUTING, KernelConfig
from ultrabench.layout import BATCH, FOLLOWING, Layout
from ultrabench.model_shape import ADDED_LATER, ModelShape
from ultrabench.record import from_dict, to_dict, values_of
from ultrabench.run import (
    FILES_WORD,
    UNKNOWN_PROCESS,
    AttemptKey,
    ProcessWords,
    RunSpec,
    fill_in,
    fill_in_files,
    words_in,
)
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.framework import ALL_SIZES_WORD, Framework, text_of
from ultrabench.sweep.config.load import kernel_settings, load_config, load_framework, load_model
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.refusals import value_refusals
from ultrabench.variant import ENV, FLAGS, WORDS, Value, option_texts, options_in_group, variables_of

IMPLIED_FIELDS = ("name", *FOLLOWING, "gbs")
"""Fields that no command needs: name, and dp, and gas or gbs, which a framework derives from the others."""


SHELL_PROCESS = ProcessWords("$NODE_RANK", None, "$MASTER_ADDR", "$MASTER_PORT")
"""The variables that take the place of words of a command that is started once on each node."""


def show_as(name: str, id_or_rank: str, sweep: str | None, as_json: bool, results_dir: Path) -> None:
    """Prints the command or the file by which a framework trains the layout of one run, and what it cannot express.

    A file goes to stdout and what is said about it to stderr, so that a shell can write it.

    Args:
        name: name of a kernel or of a file in configs/framework/.
        id_or_rank: beginning of a run_id, or a rank in `sweep top`.
        sweep: a sweep or a file of `sweep plan -o`; None means any sweep.

    Raises:
        ConfigError: no file in configs/kernel/ or configs/framework/ has this name.
        SweepFolderError: the run is unknown, the plan rejects it, or a file is no plan.
    """
    command_by_kernel = {kernel: kernel_settings(kernel).get("command") for kernel in files("kernel")}
    kernel_names = [kernel for kernel, words in command_by_kernel.items() if isinstance(words, list)]
    require_known("framework", (*kernel_names, *files("framework")), name)
    if sweep is not None and sweep.endswith(".parquet"):
        sweep_name, (run_id, spec) = Path(sweep).stem, _spec_in_file(Path(sweep), id_or_rank)
    else:
        folder, run_id, read_state = find_run(id_or_rank, sweep, results_dir)
        sweep_name, spec = folder.name, _planned_spec(folder, run_id, read_state())
    config = load_config([f"kernel={name}"] if name in kernel_names else [])
    framework = Framework(kernel=config.kernel) if name in kernel_names else load_framework(name)
    kernel = with_precision(framework.kernel, spec.kernel.precision)
    document: dict[str, Any] = {
        "sweep": sweep_name, "run_id": run_id, "framework": name, "written_from": kernel.written_from,
        "env": kernel.env | variables_of(spec.variant),
        "not_expressed": [*not_expressed(spec, kernel, framework.elsewhere),
            *option_texts(options_not_expressed(spec, kernel))],
    }  # fmt: skip
    program = spec_for_kernel(spec, kernel), AttemptKey(run_id, 0, 0), config.measure
    process = SHELL_PROCESS if kernel.starts_ranks else UNKNOWN_PROCESS
    words = fill_in(*program, process._replace(files=FILES_WORD))
    files_of_run = fill_in_files(*program, FILES_WORD)
    if framework.file:
        document |= {"file": framework.file, "text": text_of(words, framework.file)}
    else:
        is_python = kernel.command[0] == "python"
        starter_words = words if kernel.starts_ranks else _torchrun_words(spec, words, is_python=is_python)
        document |= {"command": starter_words}
        document |= {"files": files_of_run} if files_of_run else {}
        document |= {"folder": kernel.folder} if kernel.folder else {}
    if as_json:
        print_json(document)
    else:
        _show_document(document, f"# run {run_id}, {spec.shape.name} {spec.label()}, as {name}")


def options_not_expressed(spec: RunSpec, kernel: KernelConfig) -> dict[str, Value]:
    """The options of a run beside the layout that neither the environment nor the command of `kernel` has."""
    variant = spec.variant
    values_by_group = {group: options_in_group(variant, group) for group in (ENV, FLAGS, WORDS)}
    flag_values = values_by_group[FLAGS].items()
    is_own_kernel = kernel.name == spec.kernel.name
    expressed_names = {f"{ENV}.{name}" for name in values_by_group[ENV]}
    expressed_names |= {
        f"{FLAGS}.{name}"
        for name, value in flag_values
        if kernel.has_knob_value(name, value) or (is_own_kernel and name not in kernel.knobs)
    }
    expressed_names |= {f"{WORDS}.{name}" for name in values_by_group[WORDS] if name in words_in(kernel)}
    return {name: value for name, value in variant.items() if name not in expressed_names}


def _torchrun_words(spec: RunSpec, words: Sequence[str], *, is_python: bool) -> list[str]:
    """The command that starts a program on all GPUs of a run; `words` is the command that each rank runs."""
    torchrun = ["torchrun", f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.gpus_per_node}"]
    return [*torchrun, *words[1:]] if is_python else [*torchrun, "--no-python", *words]


def _show_document(document: Mapping[str, Any], title: str) -> None:
    """Prints a command behind its comments, or a file, with its comments on stderr."""
    file_name, written_from = document.get("file"), document["written_from"]
    comments = [title, *([f"# written from {written_from}"] if written_from else [])]
    comments += [f"# not expressed: {reason}" for reason in document["not_expressed"]]
    env: dict[str, str | None] = document["env"]
    env_words = [f"{name}={shlex.quote(value)}" for name, value in env.items() if value is not None]
    if file_name:
        say(*comments, *(f"# set {env_word}" for env_word in env_words), f"# the file {file_name}:")
        sys.stdout.write(document["text"] + "\n")
    else:
        show(*comments, *([f"cd {shlex.quote(document['folder'])}"] if "folder" in document else []))
        for name, text in document.get("files", {}).items():
            path = shlex.quote(f"{FILES_WORD}/{name}")
            show(
                f"mkdir -p $(dirname {path})",
                f"cat > {path} <<'END_OF_FILE'",
                Text(text.rstrip("\n")),
                "END_OF_FILE",
            )
        show(Text(" \\\n  ".join([*env_words, *map(_shell_word, document["command"])])))


def _shell_word(word: str) -> str:
    """A word of a command as a shell reads it, with the variables of SHELL_PROCESS."""
    variables = (re.escape(str(variable)) for variable in SHELL_PROCESS if variable)
    fixed_text = re.sub("|".join(variables), "x", word)
    return word if shlex.quote(fixed_text) == fixed_text else shlex.quote(word)


def _planned_spec(folder: SweepFolder, run_id: str, state: SweepState) -> RunSpec:
    """The spec of a run, from the plan, or from an attempt if the plan has it no longer."""
    rows = [row for row in read_rows(folder.plan) if row["run_id"] == run_id]
    if run := next(runs_of(read_sweep_json(folder), rows, state), None):
        return run.spec
    for attempt in state.by_run().get(run_id, []):
        if (spec_values := attempt.spec_as(dict[str, Any])) is not None:
            return from_dict(RunSpec, spec_values)
    reason = rows[0]["reason"] if rows else "it was never attempted"
    raise SweepFolderError(f"run {run_id} of {folder.name} is not in the plan: {reason}; name another run")


def _spec_in_file(path: Path, id_or_rank: str) -> tuple[str, RunSpec]:
    """The run_id and the spec of a run in a file of `sweep plan -o`.

    Args:
        id_or_rank: beginning of the run_id, or the rank in `sweep top`.

    Raises:
        SweepFolderError: the file is no plan, or `id_or_rank` means no run of it, or several.
    """
    plan_table = read_parquet(path)
    if not is_predicted(plan_table):
        rule = "--as reads only plan files: give the sweep, or write a plan with sweep plan -o"
        raise SweepFolderError(f"{path} is a table of results; {rule}")
    run_ids = [row["run_id"] for cell_rows in leaderboard(plan_table) for row in cell_rows]
    matching_ids = [run_id for run_id in run_ids if run_id.startswith(id_or_rank)]
    if id_or_rank.isdecimal() and len(id_or_rank) <= MAX_RANK_DIGITS:
        matching_ids = run_ids[int(id_or_rank) - 1 : int(id_or_rank)]
    if len(matching_ids) != 1:
        rule = f"give a rank up to {len(run_ids):,}, or the first digits of one id, from: ultrabench sweep top {path}"
        fact = f"{id_or_rank!r} matches {counted(len(matching_ids), 'run')} of {path}"
        raise SweepFolderError(f"{fact}; {rule}")
    (row,) = plan_table.filter(pc.field("run_id") == matching_ids[0]).to_pylist()
    # A row has no settings of rotations.
    return matching_ids[0], replace(spec_of(row), shape=load_model(row["model"]))


def spec_for_kernel(spec: RunSpec, kernel: KernelConfig) -> RunSpec:
    """The run as `kernel` trains it, with the flag that gives it the routing of this run, if it has one.

    Arguments that the sweep gives to flags of its own are those of the program of the run; another one has none.
    """
    routing_flags = kernel.flags.get(ROUTING, {}).get(str(spec.kernel.routing_of(spec.shape)), ())
    shape_kernel = without_other_models(spec, kernel)
    # A kernel that does not take the routing of its own runs has flags for it all the same.
    command = (*shape_kernel.command, *routing_flags)
    flags = {name: by_value for name, by_value in shape_kernel.flags.items() if name != ROUTING}
    arguments = spec.arguments if kernel.name == spec.kernel.name else ()
    return replace(spec, arguments=arguments, kernel=replace(shape_kernel, command=command, flags=flags))


def with_precision(kernel: KernelConfig, precision: str) -> KernelConfig:
    """The kernel in another precision, if it has flags for it."""
    return replace(kernel, precision=precision) if precision in kernel.flags.get("precision", ()) else kernel


def without_other_models(spec: RunSpec, kernel: KernelConfig) -> KernelConfig:
    """The kernel without its flags of a model, which name one of its own list, where the run has another shape.

    A command with sizes of a model in braces trains any model, so that its flags name none.
    """
    model_sizes = values_of(spec.shape)
    if model_sizes.keys() & words_in(replace(kernel, flags={}), with_tables=False):
        return kernel
    supports = {name: values for name, values in kernel.supports.items() if name in model_sizes}
    size_flags = {name: by_value for name, by_value in kernel.flags.items() if name in model_sizes}
    if not any(value_refusals(replace(kernel, supports=supports, flags=size_flags), spec.layout, spec.shape)):
        return kernel
    kept_flags = {name: by_value for name, by_value in kernel.flags.items() if name not in model_sizes}
    return replace(kernel, flags=kept_flags)


def not_expressed(
    spec: RunSpec, kernel: KernelConfig, reason_by_word: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """What the command or the file of `kernel` does not say of a run, a line for each word.

    These are values that it does not support, and values other than the usual one of words that it does not use.

    Args:
        reason_by_word: word -> why a file does not say it; empty for a command.
    """
    shape_kernel, model_sizes = without_other_models(spec, kernel), values_of(spec.shape)
    dropped_words = kernel.flags.keys() - shape_kernel.flags.keys()
    noun = "file" if reason_by_word else "command"
    ignored_words = model_sizes.keys() if dropped_words else ()
    supports = {name: values for name, values in kernel.supports.items() if name not in ignored_words}
    yield from value_refusals(replace(shape_kernel, supports=supports), spec.layout, spec.shape, kernel.name)
    used_words = words_in(shape_kernel)
    tables, texts = shape_kernel.flags, words_in(shape_kernel, with_tables=False)
    silent_words = {name for name, table in tables.items() if name not in texts and not any(table.values())}
    expressed_words = {*used_words, *kernel.flags, *IMPLIED_FIELDS} - silent_words
    if dropped_words:
        expressed_words |= model_sizes.keys()
        dropped_flags = (flags for name in dropped_words for flags in kernel.flags[name].values())
        other_flags = " ".join(flag for flags in dropped_flags for flag in flags)
        remedy = f"register one with {_sizes_text(spec.shape)} and add the flag that selects it"
        yield f"the model, because {other_flags} selects another; {remedy}"
    if ALL_SIZES_WORD in reason_by_word:
        expressed_words |= model_sizes.keys()
        yield f"the model: {reason_by_word[ALL_SIZES_WORD]}, with {_sizes_text(spec.shape)}"
    if "dp_shard_size" in used_words:
        yield from _impossible_shards(spec.layout)
    for settings in (spec.layout, spec.shape, spec.workload):
        defaults, values = {field.name: field.default for field in fields(settings)}, to_dict(settings)
        for name, value in values_of(settings).items():
            if name in reason_by_word and (value != defaults[name] or name in BATCH):
                yield f"{name}={values[name]}: {reason_by_word[name]}"
            elif name not in {*expressed_words, *reason_by_word} and value != defaults[name]:
                yield f"{name}={values[name]}: its {noun} has no such setting"
    routing = spec.kernel.routing_of(spec.shape)
    if routing and routing not in kernel.flags.get(ROUTING, ()):
        yield f"routing={routing}: its own router chooses the experts of each token"
    braced_words = words_in(shape_kernel, with_tables=False)
    for name in ("precision", "compile", "attention"):
        run_value, kernel_value = getattr(spec.kernel, name), getattr(kernel, name)
        if name not in braced_words and run_value != kernel_value:
            yield f"{name}={run_value}: its {noun} sets {name}={kernel_value}"
    for name in ("node_rank", "local_rank") if not kernel.starts_ranks else ():
        if name in braced_words:
            yield f"{{{name}}}: torchrun gives it to each rank as ${name.upper()}, not in the command"
    if kernel.precision == "fp8":
        yield f"the scale per row of precision=fp8: its {noun} sets {' '.join(kernel.flags['precision']['fp8'])}"


def _sizes_text(shape: ModelShape) -> str:
    """The sizes of a model as NAME=VALUE, without those that most models do not have."""
    sizes = {name: size for name, size in to_dict(shape).items() if size != ADDED_LATER.get(name)}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if name != "name")


def _impossible_shards(layout: Layout) -> Iterator[str]:
    """The reason why a mesh of dp_replicate, dp_shard and cp cannot have the shard groups of a layout.

    A group there has all ranks of cp, and more than one of dp where others replicate it.
    """
    dp_shard, cp = layout.dp_shard, layout.cp
    if cp > 1 and dp_shard and (dp_shard % cp or dp_shard == cp < layout.dp * cp):
        yield (
            f"dp_shard={dp_shard} with cp={cp}: its groups have a multiple of cp ranks, "
            f"at least 2*cp={2 * cp}, or all ranks"
        )
