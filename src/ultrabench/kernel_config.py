"""The training program that a run uses, and its options."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from msgspec import Meta

import ultrabench
from ultrabench.allowed import matching, one_of, require_allowed
from ultrabench.errors import SETTING, ConfigError, require_known
from ultrabench.hardware import DEVICE_KINDS, SCALED_PRECISIONS
from ultrabench.layout import AUTO, DEGREES, RANK_ORDER, Layout
from ultrabench.log_patterns import LOG_PATTERNS, PRINTED_PARAMS, compile_pattern, times_by_arrival
from ultrabench.model_shape import ModelShape
from ultrabench.quantity import parsed_number
from ultrabench.routing import LEARNED_ROUTING
from ultrabench.variant import FLAGS, Value, Variant, options_in_group

KERNEL_VERSION = 4
"""Version of the embedded kernel, raised by hand when its numbers may change; it is part of run_id."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, **dict.fromkeys(SCALED_PRECISIONS, 2), "fp64": 8}
"""Precision -> bytes of a number in forward and backward, beside the factors of scaled products."""
PRECISIONS = tuple(ELEMENT_BYTES)
EMBEDDED_PRECISIONS = ("fp32", "bf16", "fp8", "fp64")
"""Precisions of our own kernel."""
PRECISIONS_16_BIT = tuple(precision for precision in EMBEDDED_PRECISIONS if ELEMENT_BYTES[precision] == 2)
"""Precisions of our own kernel with parameters, activations and attention of 16 bits, and fp32 master weights."""

ROUTING_RULE = matching(
    r"balanced|learned|skew=[0-9]+(\.[0-9]+)?", "balanced, learned or skew=NUMBER, such as skew=0.5"
)
ATTENTION_NAMES = (AUTO, "cudnn", "flash", "flash3", "math")
AUTO_NEEDS = "flash"
"""The implementation of attention that a GPU must have for attention=auto in 16 bits,
as `auto_attention` falls back to it."""


def auto_attention(device: str, in_16_bits: bool, prefers_cudnn: bool | None) -> str:
    """What attention=auto of our own kernel is on a device: flash, math or cudnn; auto where that is unknown.

    Args:
        device: cpu or cuda.
        in_16_bits: whether the precision has 16 bits, in which alone the fused attention of GPUs computes.
        prefers_cudnn: whether cuDNN is the faster one on the GPU; None if the GPU is unknown.
    """
    if not DEVICE_KINDS[device].has_gpus:
        return "flash"
    if not in_16_bits:
        return "math"
    if prefers_cudnn is None:
        return AUTO
    return "cudnn" if prefers_cudnn else AUTO_NEEDS


SIZE_OPTIONS = ("params", "flops_per_token")
"""Options that say what is known of the size of a program's model: a number, or a pattern for its log."""
JUDGED_ANEW = ("written_from", "accepted_by", "loss_comparable", "rank_order", *SIZE_OPTIONS)
"""Options that change nothing that runs: the latest launch decides them for all results of a sweep."""
UNKNOWN = "unknown"
"""The value of kernel.params for a model of unknown size."""
LOG_OPTIONS = (*(option for option in LOG_PATTERNS if option not in SIZE_OPTIONS), "step_rank")
"""Options that say how a log is read; if a launch changes them, kept logs are read again."""

ANY = "*"
"""What kernel.flags has in place of a value for all values that it does not list."""
ROUTING = "routing"
"""The word of a command for how tokens choose their experts; only a command whose file has it gets a routing."""
NODE, NVLINK_DOMAIN, NVLINK_RACK = "node", "nvlink_domain", "nvlink_rack"
"""Values of kernel.spans: the ranks of a group are on one node, or on GPUs that NVLink joins; with the last one only
where NVLink joins several nodes, and else on any."""

RANK_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ULTRABENCH_SPEC", "ULTRABENCH_REPORT", "ULTRABENCH_STORE",
    "ULTRABENCH_TAG",
})  # fmt: skip
"""Names of the variables that the agent sets for each rank: those of torchrun, numbers of threads, and its own."""

_IMPORT = re.compile(r"^\s*(?:from|import)\s+ultrabench\.([\w.]+)(?:\s+import\s+(\w+))?", re.MULTILINE)
"""Matches an import of a module of this package: the module's path, and the first name imported from it."""

CODE_SUFFIXES = frozenset({".py", ".sh", ".yaml", ".yml", ".toml", ".json"})
"""Suffixes of files whose content is part of the digest of a command."""

Span = int | Literal["node", "nvlink_domain", "nvlink_rack"]
"""The most that the groups of a degree may span."""
SpanSetting = Annotated[
    Span | dict[str, dict[str, Span]],
    Meta(
        description="node, nvlink_domain, nvlink_rack or a number of ranks, or {KNOB: {VALUE: one of these}}"
    ),
]
"""Type of a value of kernel.spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKind:
    """What distinguishes the kinds of training programs; other modules ask for these properties, not for the kind."""

    forks: bool
    """Whether ranks are forked from a warm server that has loaded our own code and torch; the ranks of other kinds
    are started by exec of the user's command."""
    trains: bool
    """Whether runs train a model; those of other kinds only measure devices and links."""

    @property
    def trains_itself(self) -> bool:
        """Whether our own code trains the model, so that its options, its trace and its state are known."""
        return self.forks and self.trains


EMBEDDED = "embedded"
"""The kind of a kernel whose configuration gives none."""
KERNEL_KINDS = {
    EMBEDDED: KernelKind(forks=True, trains=True),
    "command": KernelKind(forks=False, trains=True),
    "probe": KernelKind(forks=True, trains=False),
}
"""The values of kernel.kind -> their properties. Our own kernels are named as their kinds."""


def kind_by_name(kernel_name: object) -> KernelKind:
    """The kind of a kernel of which a table has only the name: all names but those of our own kernels are commands."""
    return KERNEL_KINDS.get(str(kernel_name), KERNEL_KINDS["command"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """The embedded kernel or a command of the user, with its options."""

    name: str
    """Name of the kernel; results of different kernels are in different cells."""
    kind: Annotated[str, one_of(*KERNEL_KINDS)] = EMBEDDED
    """The kind of program. embedded: ours, forked from a warm server. command: the user's program, started by
    exec. probe: measures devices and links instead of training, and is forked as well."""
    version: int = KERNEL_VERSION
    precision: Annotated[str, one_of(*PRECISIONS)] = "fp32"
    """Arithmetic of forward and backward: fp32, bf16 or fp16 (with fp32 master weights), fp8, mxfp8 or nvfp4 (bf16 with
    products of scaled numbers of 8 or 4 bits) or fp64."""
    compile: bool = False
    """Whether the decoder layers are compiled by torch.compile; a configuration may say auto, true on GPUs."""
    attention: Annotated[str, one_of(*ATTENTION_NAMES)] = AUTO
    """The implementation of attention: auto (the best that the device has), cudnn, flash (FlashAttention-2, on
    CPUs torch's own), flash3 (FlashAttention-3) or math (plain softmax(QK^T)V)."""
    routing: Annotated[str, ROUTING_RULE] = "balanced"
    """How tokens of a model with experts choose them: balanced (each expert gets as many tokens as any other),
    learned (by the scores of the router, kept in balance by a bias) or skew=A (expert e gets a share in proportion
    to (e + 1)**-A). With balanced and skew the router's scores weigh the experts but do not choose them."""
    command: tuple[str, ...] = ()
    """Program and arguments; `{tp}` and other words in braces are replaced by values of the run."""
    folder: str | None = None
    """The working folder of the command; None: the folder of the launch, from which a relative path starts."""
    files: dict[str, str] = field(default_factory=dict, hash=False)
    """Path below the folder `{files}` of a run -> text of a file that is written there on each node for each run.
    Words in braces are replaced by values of the run."""
    env: dict[str, str] = field(default_factory=dict, hash=False)
    """More environment variables of the program; they are part of env_id. Secrets are redacted, so that a new
    value of a secret does not change env_id. Those of RANK_VARIABLES cannot be set for a forked program."""
    written_from: str | None = None
    """The version of the program from whose sources the command was written."""
    accepted_by: str | None = None
    """The version of the program whose own parser accepted the command last, and when (tools/check_flags.py)."""
    loss_comparable: bool | None = None
    """Whether losses of layouts are compared, because the initial weights do not depend on the layout; None means true
    for our own kernel and false for a command."""
    launch_per: Annotated[str, one_of("rank", "node")] = "rank"
    """How often the command is started: once for each rank, or once on each node, for torchrun and other programs that
    start the ranks of a node themselves."""
    supports: dict[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """Word of a layout or a model -> the values that the command supports; other words may have any value."""
    flags: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict, hash=False)
    """Word of a layout or a model, or a knob -> each value that the command supports, as text, or ANY -> more arguments
    for it."""
    flags_at_end: tuple[str, ...] = ()
    """Names in `flags` whose arguments end the command, also after those of `sweep.flags`."""
    knobs: dict[str, str] = field(default_factory=dict, hash=False)
    """Knob of the command -> what it sets, in words. `flags` has its values; a sweep may list some in `sweep.flags`."""
    knob_values: dict[str, str] = field(default_factory=dict, hash=False)
    """Knob -> its value in runs for which a sweep lists none; without an entry, the first value in `flags`."""
    spans: dict[str, SpanSetting] = field(default_factory=dict, hash=False)
    """Degree -> the most that its groups of ranks may span in this program: NODE, NVLINK_DOMAIN, NVLINK_RACK, or a
    number of ranks; or knob -> its value -> this, where it depends on a knob. Others may span all."""
    step_line: str | None = None
    """A regular expression for programs that only log. It is searched in each line of one rank's log, and has
    groups that LOG_PATTERNS lists for it. Without a group for a time or a rate, the arrival of its lines times the
    steps."""
    loss_line: str | None = None
    """A regular expression for the loss, where it is not in the lines of `step_line`, searched in the same log."""
    memory_line: str | None = None
    """A regular expression for the peak memory of a rank, searched in the log of every rank."""
    mfu_line: str | None = None
    """A regular expression for the MFU as the program itself computes it, searched in the log of `step_rank`."""
    params: Annotated[
        int | float | str | None, Meta(description="a number, a regular expression or unknown")
    ] = None
    """The number of parameters of the program's model, where it is not model= of the sweep: a number such as 124e6 or
    124M, a regular expression with a group `params` for its log, or UNKNOWN: then there is no MFU and no prediction."""
    flops_per_token: Annotated[
        int | float | str | None, Meta(description="a number or a regular expression")
    ] = None
    """The FLOPs of a token in the program's model, forward and backward, or a regular expression for its log;
    None means that they follow from the parameters."""
    step_rank: Annotated[
        int | Literal["any", "last_stage"], Meta(description="the number of a rank, any or last_stage")
    ] = "any"
    """The rank whose log has the steps. any means the lowest rank whose log has them all, -1 the last rank, and
    last_stage the first rank of the last pipeline stage."""
    rank_order: tuple[str, ...] = RANK_ORDER
    """The degrees of parallelism in the order in which the program numbers its ranks: neighbouring ranks differ in the
    first one. Which groups of ranks cross nodes follows from it."""

    def __post_init__(self) -> None:
        require_allowed(self, "kernel.")
        if isinstance(self.step_rank, int) and self.step_rank < -1:
            fact = (
                f"kernel.step_rank={self.step_rank}; must be the number of a rank, "
                "-1 (the last rank), any or last_stage"
            )
            raise ConfigError(fact, setting="kernel.step_rank")
        self._require_rank_order()
        for option in LOG_PATTERNS:
            if option in SIZE_OPTIONS and getattr(self, option) is not None:
                self._require_size(option)
            elif (pattern_text := self.pattern(option)) is not None:
                compile_pattern(option, pattern_text)
        if (
            self.loss_line
            and self.step_line
            and "loss" in compile_pattern("step_line", self.step_line).groupindex
        ):
            raise ConfigError(
                "kernel.loss_line and the group loss of kernel.step_line read the same; give one of them"
            )
        if self.forks and self.precision not in EMBEDDED_PRECISIONS:
            fact = f"{SETTING}={self.precision} with kernel={self.name}"
            remedy = f"choose {', '.join(EMBEDDED_PRECISIONS)} or a program of your own"
            raise ConfigError(fact, remedy, setting="kernel.precision")
        require_known("degree in kernel.spans:", (*DEGREES, "ep"), *self.spans, setting="kernel.spans")
        for degree, condition, limit in self.span_limits():
            if isinstance(limit, int) and limit < 1:
                setting = ".".join(("kernel.spans", degree, *(condition or ())))
                raise ConfigError(f"{setting}={limit}; must be at least 1 rank", setting="kernel.spans")
        if not self.forks and not self.command:
            raise ConfigError("kernel.command is empty; give the program: kernel.command='[python,train.py]'")
        _require_file_names(self.files)
        for option in ("files", "folder", "knobs", "spans"):
            if self.forks and getattr(self, option):
                fact = f"kernel.{option} with kernel={self.name}; only a program of your own has it"
                raise ConfigError(fact, "leave it out", setting=f"kernel.{option}")
        if self.forks and (reserved_names := sorted(RANK_VARIABLES & self.env.keys())):
            fact = f"kernel.env.{reserved_names[0]}: ultrabench sets it for each rank of kernel={self.name}"
            raise ConfigError(fact, "leave it out, or set it in a program of your own")

    @property
    def forks(self) -> bool:
        """Whether ranks are forked from a warm server with our own code, and not started by exec of a command."""
        return KERNEL_KINDS[self.kind].forks

    @property
    def trains(self) -> bool:
        """Whether runs train a model, and do not only measure devices and links."""
        return KERNEL_KINDS[self.kind].trains

    @property
    def trains_itself(self) -> bool:
        """Whether our own code trains the model."""
        return KERNEL_KINDS[self.kind].trains_itself

    def _require_rank_order(self) -> None:
        setting = f"kernel.rank_order=[{','.join(self.rank_order)}]"
        require_known("degree in kernel.rank_order", DEGREES, *self.rank_order, setting="kernel.rank_order")
        if sorted(self.rank_order) != sorted(DEGREES):
            rule = (
                f"it must name each of {', '.join(RANK_ORDER)} once, "
                "first the one in which neighbouring ranks differ"
            )
            raise ConfigError(f"{setting}; {rule}", setting="kernel.rank_order")

    def _require_size(self, option: str) -> None:
        """Raises ConfigError unless an option of SIZE_OPTIONS has a value that it may have."""
        value = getattr(self, option)
        if self.forks:
            fact = f"kernel.{option}={value}: kernel={self.name} trains the model of the sweep"
            raise ConfigError(fact, "leave it out; it is for kernel=command")
        if option == "params" and value == UNKNOWN:
            return
        number = _number_in(value, option)
        if number is not None and not 1 <= number < 1e18:
            raise ConfigError(f"kernel.{option}={value}; must be from 1 to 1e18")
        if number is None and f"(?P<{option}>" not in str(value):
            forms = "a number such as 124e6 or 124M, or a regular expression with the group"
            more_forms = ", or unknown" * (option == "params")
            raise ConfigError(f"kernel.{option}={value!r}; must be {forms} (?P<{option}>...){more_forms}")
        if number is None:
            compile_pattern(option, str(value))

    def number(self, option: str) -> float | None:
        """The number in an option of SIZE_OPTIONS; None where it has none."""
        return _number_in(getattr(self, option), option)

    def pattern(self, option: str) -> str | None:
        """The regular expression for an option of LOG_PATTERNS, also the one that stands for params without one."""
        value = getattr(self, option)
        if option not in SIZE_OPTIONS:
            return None if value is None else str(value)
        if isinstance(value, str) and value != UNKNOWN and _number_in(value, option) is None:
            return value
        return PRINTED_PARAMS if option == "params" and not self.forks and value != UNKNOWN else None

    @property
    def reads_params(self) -> bool:
        """Whether the log says the number of parameters, by a pattern of the user."""
        return self.pattern("params") not in (None, PRINTED_PARAMS)

    @property
    def is_predictable(self) -> bool:
        """Whether memory and step time follow from the sizes of the model."""
        return self.params != UNKNOWN

    def logging_rank(self, layout: Layout) -> int | None:
        """The rank whose log has the steps of a run with this layout; None if it may be any."""
        if self.step_rank == "any":
            return None
        if self.step_rank == "last_stage":
            return layout.stride("pp", self.rank_order) * (layout.pp - 1)
        return self.step_rank % layout.world_size

    @property
    def times_by_arrival(self) -> bool:
        """Whether the arrival of lines in its log times the steps."""
        return times_by_arrival(self.step_line)

    @property
    def starts_ranks(self) -> bool:
        """Whether the command is a starter such as torchrun, which starts all ranks of its node."""
        return self.launch_per == "node"

    @property
    def takes_routing(self) -> bool:
        """Whether the program is told how tokens choose their experts; another one decides it itself.

        A command is told if its file says what it supports, or which arguments it needs for LEARNED_ROUTING. Arguments
        for other routings alone only serve `sweep show --as`, which gives a run of our own kernel to the program.
        """
        return self.forks or ROUTING in self.supports or LEARNED_ROUTING in self.flags.get(ROUTING, ())

    def routing_of(self, shape: ModelShape) -> str | None:
        """How tokens choose their experts; None for a model without experts, and for a program that decides itself."""
        return self.routing if shape.num_experts and self.trains and self.takes_routing else None

    def knob_choices(self, knob: str) -> tuple[str, ...]:
        """The values of a knob that `flags` lists; ANY is not among them."""
        return tuple(value for value in self.flags.get(knob, ()) if value != ANY)

    def usual_knob_value(self, knob: str) -> str:
        """The value of a knob in runs for which a sweep lists none."""
        return self.knob_values.get(knob) or self.knob_choices(knob)[0]

    def has_knob_value(self, knob: str, value: Value) -> bool:
        """Whether a knob of the command may have a value."""
        table = self.flags.get(knob, {}) if knob in self.knobs else {}
        return str(value) in table or ANY in table

    def span_limits(self) -> Iterator[tuple[str, tuple[str, str] | None, Span]]:
        """Each degree with a limit, the knob and the value of it that have this limit (None for all), and the limit."""
        for degree, setting in self.spans.items():
            if not isinstance(setting, dict):
                yield degree, None, setting
                continue
            for knob, limit_by_value in setting.items():
                for value, limit in limit_by_value.items():
                    yield degree, (knob, value), limit

    def knob_value(self, knob: str, variant: Variant) -> Value:
        """The value in `knobs_of` or, of a flag that is not a knob, in the variant; None where both lack it."""
        value = variant.get(f"{FLAGS}.{knob}")
        if knob not in self.knobs:
            return value
        return (
            value if value is not None and self.has_knob_value(knob, value) else self.usual_knob_value(knob)
        )

    def knobs_of(self, variant: Variant) -> dict[str, Value]:
        """Knob -> its value in a run with this variant; the usual one where the variant has none of its own."""
        varied = options_in_group(variant, FLAGS)
        return {
            knob: varied[knob]
            if knob in varied and self.has_knob_value(knob, varied[knob])
            else self.usual_knob_value(knob)
            for knob in self.knobs
        }

    @property
    def in_16_bits(self) -> bool:
        """Whether parameters, activations and attention have 16 bits."""
        return self.precision in PRECISIONS_16_BIT

    def compiles(self, pp_schedule: str | None) -> bool:
        """Whether layers are compiled; ours are not under zbv, since torch cannot split their backward then."""
        return self.compile and not (pp_schedule == "zbv" and self.trains_itself)

    def digest(self) -> str:
        """First 16 hex digits of a hash of the code that runs.

        For our own kernel these are the sources that a rank imports. For a command they are its words and the
        content of the programs and configuration files among them. These are known by their suffix, because a
        log or a data file may change. Its folder and the texts of its files count where they are set.
        """
        digest = hashlib.sha256()
        if self.forks:
            package_folder = Path(ultrabench.__file__).parent
            for path in rank_sources(package_folder):
                digest.update(str(path.relative_to(package_folder)).encode() + b"\0" + path.read_bytes())
        if self.starts_ranks:  # left out at its default, so that old digests stay valid
            digest.update(b"launch_per=node\0")
        flag_words = (word for table in self.flags.values() for words in table.values() for word in words)
        for argument in (*self.command, *flag_words):
            digest.update(argument.encode() + b"\0")
            for file_name in (argument, argument.partition("=")[2]):  # a file may be the value of an option
                path = self.path_of(file_name)
                if path.suffix in CODE_SUFFIXES and path.is_file():
                    digest.update(path.read_bytes())
        set_options = {"folder": self.folder} if self.folder else {}
        set_options |= {f"knob_values.{knob}": value for knob, value in sorted(self.knob_values.items())}
        set_options |= {f"files.{name}": text for name, text in sorted(self.files.items())}
        for option, text in set_options.items():
            digest.update(f"{option}\0{text}\0".encode())
        return digest.hexdigest()[:16]

    def path_of(self, file_name: str) -> Path:
        """The path of a file that the command names, as seen from the folder of the launch."""
        return Path(self.folder or "") / file_name


MAX_NAME_BYTES = 255
"""Largest size of the name of a file or a folder (NAME_MAX of Linux)."""


def _require_file_names(names: Iterable[str]) -> None:
    """Raises ConfigError for a path of kernel.files that is not below the folder of the files,
    or for two that exclude each other.
    """
    paths = {name: PurePosixPath(name) for name in names}
    folders = {parent: name for name, path in paths.items() for parent in path.parents if parent.name}
    for name, path in paths.items():
        setting = f"kernel.files.{name}"
        if path.is_absolute() or ".." in path.parts or str(path) != name or not path.name or "\0" in name:
            fact = f"kernel.files has the name {name!r}; a name is a path below the folder of the files"
            raise ConfigError(
                f"{fact}, without a leading '/', '.' or '..'", "write it as in conf/train.json", setting
            )
        if long_part := next((part for part in path.parts if len(part.encode()) > MAX_NAME_BYTES), None):
            fact = f"kernel.files has a name of {len(long_part.encode())} bytes, {long_part[:20]!r}..."
            raise ConfigError(f"{fact}; Linux takes at most {MAX_NAME_BYTES}", "shorten it", "kernel.files")
        if path in folders:
            fact = f"kernel.files has {name} and {folders[path]}, so that {name} would be a file and a folder"
            raise ConfigError(fact, "rename one of them", setting)


def compares_losses(kind: str, loss_comparable: bool | None) -> bool:
    """Whether losses of layouts are compared with a kernel of this kind and setting of `loss_comparable`."""
    return KERNEL_KINDS[kind].forks if loss_comparable is None else loss_comparable


def _number_in(value: int | float | str | None, option: str) -> float | None:
    """The number in an option of SIZE_OPTIONS, also as a text such as 124M; None for another text."""
    if not isinstance(value, str):
        return value
    return parsed_number(value, f"kernel.{option}", allows_plain=True)


def rank_sources(root: Path) -> list[Path]:
    """The files of the package at `root` that a rank imports: those of the kernel and what they import."""
    queue, sources = [*(root / "kernel").rglob("*.py")], set[Path]()
    while queue:
        path = queue.pop()
        if path not in sources:
            sources.add(path)
            for module_path, first_name in _IMPORT.findall(path.read_text()):
                base = root.joinpath(*module_path.split("."))
                queue += [p for p in (base.with_suffix(".py"), base / f"{first_name}.py") if p.is_file()]
    return sorted(sources)
