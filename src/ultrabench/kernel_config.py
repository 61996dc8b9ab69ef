"""The training program that a run uses, and its options."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

import ultrabench
from ultrabench.allowed import matching, one_of, require_allowed
from ultrabench.errors import ConfigError
from ultrabench.log_numbers import UnreadableError, read_number
from ultrabench.log_patterns import LOG_PATTERNS, PRINTED_PARAMS, compile_pattern, times_by_arrival
from ultrabench.model_shape import ModelShape

KERNEL_VERSION = 4
"""Version of the embedded kernel, raised by hand when its numbers may change; it is part of run_id."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2, "fp64": 8}
"""Precision -> bytes of a number in forward and backward.

fp8 is bf16 whose linear layers, other than the head, round the factors of their products to 8 bits.
"""
PRECISIONS = tuple(ELEMENT_BYTES)
PRECISIONS_16_BIT = tuple(precision for precision, num_bytes in ELEMENT_BYTES.items() if num_bytes == 2)
"""Precisions with parameters, activations and attention of 16 bits, and fp32 master weights."""

ROUTING_RULE = matching(
    r"balanced|learned|skew=[0-9]+(\.[0-9]+)?", "balanced, learned or skew=NUMBER, such as skew=0.5"
)
ATTENTION_NAMES = ("auto", "cudnn", "flash", "flash3", "math")

SIZE_OPTIONS = ("params", "flops_per_token")
"""Options that say what is known of the size of a program's model: a number, or a pattern for its log."""
UNKNOWN = "unknown"
"""The value of kernel.params for a model of unknown size."""
LOG_OPTIONS = (*(option for option in LOG_PATTERNS if option not in SIZE_OPTIONS), "step_rank")
"""Options that say how a log is read. While no result comes from a log, they may change within a sweep."""

ANY = "*"
"""What kernel.flags has in place of a value for all values that it does not list."""

RANK_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ULTRABENCH_SPEC", "ULTRABENCH_REPORT", "ULTRABENCH_STORE", "ULTRABENCH_TAG",
})  # fmt: skip
"""Names of the variables that the agent sets for each rank: those of torchrun, numbers of threads, and its own."""

_IMPORT = re.compile(r"^\s*(?:from|import)\s+ultrabench\.([\w.]+)(?:\s+import\s+(\w+))?", re.MULTILINE)
"""Matches an import of a module of this package: the module's path, and the first name imported from it."""

CODE_SUFFIXES = frozenset({".py", ".sh", ".yaml", ".yml", ".toml", ".json"})
"""Suffixes of files whose content is part of the digest of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """The embedded kernel or a command of the user, with its options."""

    name: str
    """Name of the kernel; results of different kernels are in different cells."""
    kind: Annotated[str, one_of("embedded", "command", "probe")] = "embedded"
    """The kind of program. embedded: ours, forked from a warm server. command: the user's program, started by
    exec. probe: measures devices and links instead of training, and is forked as well."""
    version: int = KERNEL_VERSION
    precision: Annotated[str, one_of(*PRECISIONS)] = "fp32"
    """Arithmetic of forward and backward: fp32, bf16 (fp32 master weights), fp8 (bf16 with products of fp8) or fp64."""
    compile: bool = False
    """Whether the decoder layers are compiled by torch.compile; a configuration may say auto, true on GPUs."""
    attention: Annotated[str, one_of(*ATTENTION_NAMES)] = "auto"
    """The implementation of attention: auto (the best that the device has), cudnn, flash (FlashAttention-2, on
    CPUs torch's own), flash3 (FlashAttention-3) or math (plain softmax(QK^T)V)."""
    routing: Annotated[str, ROUTING_RULE] = "balanced"
    """How tokens of a model with experts choose them: balanced (each expert gets as many tokens as any other),
    learned (by the scores of the router, kept in balance by a bias) or skew=A (expert e gets a share in proportion
    to (e + 1)**-A). With balanced and skew the router's scores weigh the experts but do not choose them."""
    command: tuple[str, ...] = ()
    """Program and arguments; `{tp}` and other words in braces are replaced by values of the run."""
    env: dict[str, str] = field(default_factory=dict, hash=False)
    """More environment variables of the program; they are part of env_id. Secrets are redacted, so that a new
    value of a secret does not change env_id. Those of RANK_VARIABLES cannot be set for a forked program."""
    written_from: str | None = None
    """The version of the program from whose sources the command was written."""
    supports: dict[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """Word of a layout or a model -> the values that the command supports; other words may have any value."""
    flags: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict, hash=False)
    """Word of a layout or a model -> each value that the command supports, as text, or ANY -> more arguments for it."""
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
    """The FLOPs of a token in the program's model, forward and backward, or a regular expression for its log; None means
    that they follow from the parameters."""
    step_rank: Annotated[
        int | Literal["last_stage"], Meta(description="the number of a rank or last_stage")
    ] = 0
    """The rank whose log has the steps. -1 means the last rank, last_stage the first rank of the last pipeline
    stage in a program that numbers the ranks of a stage one after another."""

    def __post_init__(self) -> None:
        require_allowed(self, "kernel.")
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
        if self.kind == "command" and not self.command:
            raise ConfigError("kernel.command is empty; give the program: kernel.command='[python,train.py]'")
        if self.kind != "command" and (reserved_names := sorted(RANK_VARIABLES & self.env.keys())):
            fact = f"kernel.env.{reserved_names[0]}: ultrabench sets it for each rank of kernel={self.name}"
            raise ConfigError(fact, "leave it out, or set it in a program of your own")

    def _require_size(self, option: str) -> None:
        """Raises ConfigError unless an option of SIZE_OPTIONS has a value that it may have."""
        value = getattr(self, option)
        if self.kind != "command":
            fact = f"kernel.{option}={value}: kernel={self.name} trains the model of the sweep"
            raise ConfigError(fact, "leave it out; it is for kernel=command")
        if option == "params" and value == UNKNOWN:
            return
        number = _number_in(value)
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
        return _number_in(getattr(self, option))

    def pattern(self, option: str) -> str | None:
        """The regular expression for an option of LOG_PATTERNS, also the one that stands for params without one."""
        value = getattr(self, option)
        if option not in SIZE_OPTIONS:
            return None if value is None else str(value)
        if isinstance(value, str) and value != UNKNOWN and _number_in(value) is None:
            return value
        return PRINTED_PARAMS if option == "params" and self.kind == "command" and value != UNKNOWN else None

    @property
    def reads_params(self) -> bool:
        """Whether the log says the number of parameters, by a pattern of the user."""
        return self.pattern("params") not in (None, PRINTED_PARAMS)

    @property
    def is_predictable(self) -> bool:
        """Whether memory and step time follow from the sizes of the model."""
        return self.params != UNKNOWN

    def logging_rank(self, world_size: int, pp: int) -> int:
        """The rank whose log has the steps of a run on `world_size` ranks with `pp` pipeline stages."""
        if self.step_rank == "last_stage":
            return world_size - world_size // pp
        return self.step_rank % world_size

    @property
    def times_by_arrival(self) -> bool:
        """Whether the arrival of lines in its log times the steps."""
        return times_by_arrival(self.step_line)

    def routing_of(self, shape: ModelShape) -> str | None:
        """How tokens choose their experts; None for a model without experts, and for a program that decides itself."""
        return self.routing if shape.num_experts and self.kind == "embedded" else None

    @property
    def in_16_bits(self) -> bool:
        """Whether parameters, activations and attention have 16 bits."""
        return self.precision in PRECISIONS_16_BIT

    def compiles(self, pp_schedule: str | None) -> bool:
        """Whether layers are compiled; ours are not under zbv, since torch cannot split their backward then."""
        return self.compile and (self.kind, pp_schedule) != ("embedded", "zbv")

    def digest(self) -> str:
        """First 16 hex digits of a hash of the code that runs.

        For our own kernel these are the sources that a rank imports. For a command they are its words and the
        content of the programs and configuration files among them. These are known by their suffix, because a
        log or a data file may change.
        """
        digest = hashlib.sha256()
        if self.kind != "command":
            package_folder = Path(ultrabench.__file__).parent
            for path in rank_sources(package_folder):
                digest.update(str(path.relative_to(package_folder)).encode() + b"\0" + path.read_bytes())
        flag_words = (word for table in self.flags.values() for words in table.values() for word in words)
        for argument in (*self.command, *flag_words):
            digest.update(argument.encode() + b"\0")
            for file_name in (argument, argument.partition("=")[2]):  # a file may be the value of an option
                if Path(file_name).suffix in CODE_SUFFIXES and Path(file_name).is_file():
                    digest.update(Path(file_name).read_bytes())
        return digest.hexdigest()[:16]


def _number_in(value: int | float | str | None) -> float | None:
    """The number that a setting holds, also as a text such as 124M; None for another text."""
    if not isinstance(value, str):
        return value
    try:
        number = read_number(value, ".")
    except UnreadableError:
        return None
    return None if number.unit else number.value


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
