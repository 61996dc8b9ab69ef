"""A run: one model with one layout on some nodes, named by a hash of its content."""

import functools
import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, NamedTuple

from ultrabench.allowed import Size, at_least, require_allowed
from ultrabench.errors import ConfigError, counted, unknown_name
from ultrabench.kernel_config import ANY, ROUTING, KernelConfig
from ultrabench.layout import ADDED_LATER as ADDED_AXES
from ultrabench.layout import AUTO, NEUTRAL, Layout
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.model_words import FIELDS_BY_WORD, model_words, pipeline_words
from ultrabench.partial_step import Departure, PartStart, Slice, only_screens
from ultrabench.placeholders import CALCULATION, command_text, names_in, replace_words
from ultrabench.process_text import require_command
from ultrabench.record import content_id, to_dict, values_of
from ultrabench.tensor_parallel import KV_COPIES_WORD, most_kv_copies
from ultrabench.variant import FLAGS, WORDS, Value, identity, option_texts, options_in_group, variables_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one optimizer step trains on."""

    seq_len: Size
    """Tokens of a sequence."""
    gbs: Size
    """Sequences of a global batch."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of the parameters and the tokens."""

    def __post_init__(self) -> None:
        require_allowed(self)


ADDED_LATER: dict[str, Any] = {
    "kernel.routing": "balanced",
    **{f"layout.{name}": NEUTRAL[name] for name in ADDED_AXES},
}  # fmt: skip
"""Dotted name -> default of each field that was added to the identity after version 1, beside those of the shape. A
field with its default is left out of the hash, so that old run_ids stay valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything that identifies a run: two measurements with equal values are of the same run."""

    shape: ModelShape
    workload: Workload
    layout: Layout
    kernel: KernelConfig
    nodes: int
    gpus_per_node: int
    variant: dict[str, Value] = field(default_factory=dict)
    """The options beside the layout that the sweep varies; see `ultrabench.variant`."""
    arguments: tuple[str, ...] = ()
    """Arguments that the flags of the variant add to the command; the variant names them in run_id."""

    def __post_init__(self) -> None:
        if self.layout.world_size != self.nodes * self.gpus_per_node:
            ranks_text = f"{self.layout.label()} has {counted(self.layout.world_size, 'rank')}"
            nodes_text = f"{counted(self.nodes, 'node')} of {self.gpus_per_node}"
            raise ConfigError(f"{ranks_text}; {nodes_text} have {self.nodes * self.gpus_per_node}")
        if self.layout.gbs != self.workload.gbs:
            batch_text = f"{self.layout.label()} makes a global batch of dp*mbs*gas={self.layout.gbs}"
            raise ConfigError(f"{batch_text} sequences; gbs={self.workload.gbs}")

    def identity(self) -> dict[str, Any]:
        """The JSON value that run_id hashes: defaults are written out, the name of the model is left out."""
        options = ("name", "version", "precision", "compile", "attention", "routing")
        content: dict[str, Any] = {
            "shape": self.shape.identity(),
            "workload": values_of(self.workload),
            "layout": {name: value for name, value in values_of(self.layout).items() if name != "recompute"},
            # Version 1 hashed it as an option of the kernel.
            "kernel": {k: getattr(self.kernel, k) for k in options} | {"recompute": self.layout.recompute},
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
        }
        if self.kernel.attention == AUTO:
            content["kernel"]["attention"] = "sdpa"  # its first name, so that old run_ids stay valid
        if not self.kernel.takes_routing:
            del content["kernel"]["routing"]
        for dotted_name, default in ADDED_LATER.items():
            group, _, name = dotted_name.partition(".")
            if content[group].get(name) == default:
                del content[group][name]
        if variant := self.variant and identity(self.variant):
            content["variant"] = variant
        return content

    @property
    def run_id(self) -> str:
        """First 16 hex digits of the sha256 of `identity()`."""
        return content_id(self.identity())

    @property
    def cell(self) -> tuple[object, ...]:
        """What the runs have in common that are ranked together."""
        kernel = self.kernel
        return self.shape, self.workload, self.nodes, self.gpus_per_node, kernel.name, kernel.precision

    def with_gas(self, gas: int) -> "RunSpec":
        """The run of the same layout with another number of micro-batches, and so another global batch."""
        layout = replace(self.layout, gas=gas)
        return replace(self, layout=layout, workload=replace(self.workload, gbs=layout.gbs))

    def label(self) -> str:
        """A short text of the layout and the variant, such as `dp2 tp1 pp1 z0 mbs1 gas4 NCCL_ALGO=Ring`."""
        return " ".join((self.layout.label(), *option_texts(self.variant)))

    @property
    def flag_values(self) -> dict[str, Value]:
        """Knob of the program, or flag that the sweep itself maps to arguments -> its value."""
        return options_in_group(self.variant, FLAGS) | self.kernel.knobs_of(self.variant)

    @property
    def logging_rank(self) -> int | None:
        """The rank whose log has the steps of a program that only logs; None if it may be any."""
        return self.kernel.logging_rank(self.layout)

    @property
    def linearity_kind(self) -> tuple[str, int]:
        """Runs of one kind depart alike from the straight line through parts of their steps."""
        return self.layout.pp_schedule, self.layout.zero_stage

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled."""
        return self.kernel.compiles(self.layout.pp_schedule)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of one optimizer step, all ranks together."""
        return self.workload.gbs * self.workload.seq_len


class AttemptKey(NamedTuple):
    """Identifies one attempt of one repeat of a run."""

    run_id: str
    repeat: int
    attempt: int

    def __str__(self) -> str:
        """Name of the attempt in claims and folders: run_id.repeat.attempt."""
        return f"{self.run_id}.{self.repeat}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """Base class of the records about one attempt of one repeat of a run."""

    run_id: str
    repeat: int
    attempt: int

    @property
    def key(self) -> AttemptKey:
        """The key of the attempt."""
        return AttemptKey(self.run_id, self.repeat, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(AttemptRecord):
    """One attempt of one repeat of a run, as its agent and its ranks receive it."""

    spec: RunSpec
    measure: Measure
    device: str
    """The torch device type: cuda or cpu."""
    rank_mem_bytes: int
    """Memory of one rank in bytes; on CPUs a limit of its process."""
    predicted_step_time_s: float
    predicted_duration_s: float
    """Predicted seconds of the whole attempt; it is not started when its allocation has less time left."""
    limit_s: float
    """Wall-clock limit of the attempt."""
    predicted_start_s: float = 0.0
    """The part of predicted_duration_s until the first step ends; 0 where the launcher did not say it."""
    best_step_time_s: float | None = None
    """Step time of the best run of the cell when the attempt was submitted; None when there was none."""
    best_control_ratio: float | None = None
    """Step time of the control run divided by that of this best run, both measured in the allocation of the best run;
    None where it is unknown."""
    gpu_names: tuple[str, ...] = ()
    """Names that the driver may give the accelerators, or empty for any name. A result on an accelerator with
    another name is invalid."""
    slice: Slice | None = None
    """The parts of a step that are measured for whole steps of `spec`; None: whole steps are measured."""
    few_steps: bool = False
    """Whether few whole steps are measured, before the parts if there are any."""
    part_start: PartStart | None = None
    """The start that measures one size of `slice`, of a program that starts twice; None: one start measures all."""
    probe: bool = False
    """Whether devices and links of the allocation are measured instead of training."""
    traced: bool = False
    """Whether some more steps are traced after the measured ones."""
    checkpoint: str | None = None
    """Folder in which the state is saved and loaded after the measured steps, and removed; None: it is not saved."""

    def with_departure(self, departure: Departure | None) -> "Task":
        """The task with the departure that other runs of its kind have measured, without a third size if that is
        certain enough.
        """
        if departure is None or self.slice is None:
            return self
        return replace(self, slice=self.slice.with_departure(departure, self.measure.target_ci95_rel))

    def in_start(self, part_start: PartStart | None) -> "Task":
        """The task as one start of its program measures it."""
        return self if part_start is None else replace(self, part_start=part_start)

    @property
    def started_spec(self) -> RunSpec:
        """The run as its ranks start it: `spec`, or a start of two with fewer micro-batches and a smaller batch."""
        return self.spec if self.part_start is None else self.spec.with_gas(self.part_start.gas)

    @property
    def largest_spec(self) -> RunSpec:
        """The run with the largest steps that its ranks run: `spec`, or that of the largest part."""
        if self.slice is None or self.few_steps:
            return self.spec
        return self.spec.with_gas(max(self.slice.all_sizes))

    @property
    def is_screened(self) -> bool:
        """Whether what it measures only chooses whether its run is measured again."""
        return only_screens(self.slice, self.few_steps)

    @property
    def forked(self) -> bool:
        """Whether its ranks are forked from the warm server; a program of the user is started by exec."""
        return self.probe or self.spec.kernel.forks

    @property
    def starts_ranks(self) -> bool:
        """Whether one command starts all ranks of a node."""
        return not self.forked and self.spec.kernel.starts_ranks


def words_of(spec: RunSpec) -> dict[str, Any]:
    """Word that a command may use in braces -> its value in this run; the words are those of a run and
    those of the user.
    """
    spec_values = to_dict(spec)
    pipeline_microbatches = spec.layout.gas if spec.layout.pp > 1 else 1
    shape_words = spec_values["shape"] | model_words(spec.shape)
    shape_words["head_dim"] = shape_words["head_dim"] or spec.shape.head_width
    return {**shape_words, **spec_values["workload"], **spec_values["layout"], **{
        "nodes": spec.nodes, "gpus_per_node": spec.gpus_per_node, "precision": spec.kernel.precision,
        "dp_shard_size": spec.layout.dp_shard_size, "dp_replicate_size": spec.layout.dp // spec.layout.dp_shard_size,
        "world_size": spec.layout.world_size,
        KV_COPIES_WORD: most_kv_copies(spec.shape, spec.layout.tp),
        "pipeline_batch": spec.layout.mbs * pipeline_microbatches, "pipeline_microbatches": pipeline_microbatches,
        "microbatch_tokens": spec.layout.mbs * spec.workload.seq_len,
        "step_tokens": spec.workload.gbs * spec.workload.seq_len,
        **pipeline_words(spec.shape, spec.layout),
        ROUTING: spec.kernel.routing_of(spec.shape), **spec.kernel.knobs_of(spec.variant),
        **options_in_group(spec.variant, WORDS),
    }}  # fmt: skip


_IN_BRACES = re.compile(r"(?<!\$)\{\s*(?P<quote>[\"']?)(?:words\.)?(?P<name>\w+)(?P=quote)\s*\}")
"""A word in braces; also with quotes, spaces or its group, which are refused if there is such a word."""


# A plan calls this for each candidate: 181 us with the 100 parts of kernel=megatron, and 2 us with the cache.
@functools.lru_cache(maxsize=64)
def words_in(kernel: KernelConfig, *, with_tables: bool = True) -> frozenset[str]:
    """The names of the words that the command and the files of a kernel use, such as `tp`,
    and of the model sizes that decide them.

    Args:
        with_tables: whether the keys of `supports` and `flags` are included; otherwise only the words in braces are.
    """
    flag_words = (word for table in kernel.flags.values() for words in table.values() for word in words)
    command = " ".join((*kernel.command, *flag_words))
    names = {match["name"] for match in _IN_BRACES.finditer(command)}
    names.update(*map(names_in, (command, *kernel.files.values())))
    if with_tables:
        names |= {*kernel.supports, *kernel.flags}
        names.update(
            size_name for name in names & FIELDS_BY_WORD.keys() for size_name in FIELDS_BY_WORD[name]
        )
    return frozenset(names)


def steps_asked(kernel: KernelConfig, measure: Measure) -> int:
    """The steps that a program is asked for: one more where arrival times them, since the first line has no time."""
    return measure.warmup_steps + measure.max_steps + kernel.times_by_arrival


FILES_WORD = "files"
"""The word for the folder of the files of a run, which is another one for each attempt and node."""


class ProcessWords(NamedTuple):
    """Where a command is started: the words of a command that differ between the processes of one run."""

    node_rank: int | str = 0
    """The number of the node in the run."""
    local_rank: int | str | None = 0
    """The number of the rank on its node; None where the command starts all ranks of the node."""
    master_addr: str = "127.0.0.1"
    """The address of the first node."""
    master_port: int | str = 29500
    """A free port of the first node; by default the one that torchrun uses."""
    files: str = f"{{{FILES_WORD}}}"
    """The folder of the files of the run on this node."""


PROCESS_WORDS = ProcessWords._fields[:-1]
"""Words that differ between the processes of a run; only a command has them,
since the ranks of a node share its files."""
UNKNOWN_PROCESS = ProcessWords(*(f"{{{name}}}" for name in ProcessWords._fields))
"""The words of a process that is not started yet, which stay in their braces."""


def _words_of_attempt(spec: RunSpec, key: AttemptKey, measure: Measure) -> dict[str, Any]:
    """Word -> its value for the command and the files of an attempt, without those of a process."""
    return words_of(spec) | key._asdict() | {"steps": steps_asked(spec.kernel, measure)}


def fill_in(
    spec: RunSpec, key: AttemptKey, measure: Measure, process: ProcessWords | None = None
) -> list[str]:
    """The user's command and the flags for values of this run, as a list of words.

    Each `{word}` is replaced by the value of this run, whole numbers without `.0`; so are words with + - * between
    them. If the first word is `python`, it is replaced by the Python that runs this. `${WORD}` is left as it is,
    because the command may be a shell that replaces it.

    Args:
        process: the words of the process that the command starts; None for an example.

    Raises:
        ConfigError: a `{word}` is unknown, a known one has quotes, spaces or its group in the braces, or no process can
            take the command.
    """
    process = process or ProcessWords()
    process_words = {name: value for name, value in process._asdict().items() if value is not None}
    if spec.kernel.starts_ranks:
        process_words.pop("local_rank", None)
    if not spec.kernel.files:
        del process_words[FILES_WORD]
    words = process_words | _words_of_attempt(spec, key, measure)  # a user may have words of these names

    def value_text(match: re.Match[str]) -> str:
        braces, word = match[0], match["name"]
        if braces != f"{{{word}}}":
            if word in words:
                raise ConfigError(
                    f"kernel.command has {braces}; braces may contain only the word: write {{{word}}}"
                )
            return braces
        if word not in words and word == FILES_WORD:
            raise ConfigError(
                f"kernel.command has {braces}, the folder of kernel.files, which is empty: set it"
            )
        if word not in words and word in ProcessWords._fields:
            problem = f"kernel.command has {braces} with kernel.launch_per={spec.kernel.launch_per}"
            raise ConfigError(
                f"{problem}; the command starts once on each node: leave it out, the command sets {word.upper()}"
            )
        if word not in words:
            kind = f"word in kernel.command of kernel={spec.kernel.name}"
            raise ConfigError(unknown_name(kind, braces, words, first=options_in_group(spec.variant, WORDS)))
        return command_text(words[word])

    flag_arguments = _flag_arguments(spec, words)
    last_arguments = [flag_arguments.pop(name, ()) for name in spec.kernel.flags_at_end]
    parts = chain(spec.kernel.command, *flag_arguments.values(), spec.arguments, *last_arguments)
    calculated_parts = (replace_words(part, words, "kernel.command", CALCULATION) for part in parts)
    command = [_IN_BRACES.sub(value_text, part) for part in calculated_parts]
    require_command(command, {**spec.kernel.env, **variables_of(spec.variant)})
    return [sys.executable if command[0] == "python" else command[0], *command[1:]]


def _flag_arguments(spec: RunSpec, words: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Word in kernel.flags -> the arguments for its value in a run; a model without experts has none for its routing.

    Args:
        words: word -> its value.
    """
    value_by_word = {word: words.get(word) for word in spec.kernel.flags}
    if value_by_word.get(ROUTING, "") is None:
        del value_by_word[ROUTING]
    tables = spec.kernel.flags
    return {word: tables[word].get(str(v), tables[word].get(ANY, ())) for word, v in value_by_word.items()}


def idle_knobs(spec: RunSpec) -> set[str]:
    """The knobs that change nothing in a run: no value adds arguments, and neither the command nor the arguments of
    other words nor a file has the knob in braces.
    """
    kernel, arguments = spec.kernel, _flag_arguments(spec, words_of(spec))
    candidates = {knob for knob in kernel.knobs if not any(kernel.flags[knob].values())}
    texts = chain(kernel.command, *arguments.values(), spec.arguments, kernel.files.values())
    return candidates - {name for text in texts for name in names_in(text)} if candidates else set()


def fill_in_files(
    spec: RunSpec, key: AttemptKey, measure: Measure, folder: str = f"{{{FILES_WORD}}}"
) -> dict[str, str]:
    """Path of each of the user's files below their folder -> its text for this run.

    Known words in braces are replaced by values of this run, also with + - * between them; all else stays. True, false,
    no value and nested values are written as in JSON, and in a file of Python as there.

    Args:
        folder: the folder of the files.

    Raises:
        ConfigError: a word is one edit from a known one or differs between ranks, or a word of a calculation is no
            number.
    """
    words = _words_of_attempt(spec, key, measure) | {FILES_WORD: folder}
    json_words = {name: _as_json(value) for name, value in words.items()}
    texts = {}
    for name, template in spec.kernel.files.items():
        where = f"kernel.files.{name}"
        process_words = (w for w in names_in(template) if w in PROCESS_WORDS and w not in words)
        if process_word := next(process_words, None):
            fact = f"{where} has {{{process_word}}}, which only a command can have, since ranks share a file"
            raise ConfigError(
                fact, f"give {{{process_word}}} to the program in kernel.command", setting=where
            )
        texts[name] = replace_words(template, words if name.endswith(".py") else json_words, where)
    return texts


def _as_json(value: object) -> object:
    """A value of a word as JSON, YAML and TOML have it: texts and numbers stay as they are."""
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if is_plain else json.dumps(value)


def env_id(
    environment: dict[str, Any], kernel: KernelConfig, kernel_digest: str, varied: Collection[str] = ()
) -> str:
    """Hash of the environment in which a result was made; results are reused only where it is equal.

    Args:
        varied: names of the variables that the sweep varies; they make another run and not another environment.
        environment: gpu_name, torch_version, cuda_version, nccl_version, driver_version and the variables
            that configure CUDA, NCCL, Transformer Engine and torch, as the kernel reports them.
    """
    fact_names = ("gpu_name", "torch_version", "cuda_version", "nccl_version", "driver_version")
    value_by_fact = {fact: environment.get(fact) for fact in fact_names}
    variables = {k: v for k, v in environment.get("variables", {}).items() if k not in varied} | kernel.env
    return content_id({**value_by_fact, "kernel_digest": kernel_digest, "variables": variables})
