"""The requests for a parity check or a dry run, and their results; without torch, so that the CLI can import it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from ultrabench.allowed import one_of, require_allowed
from ultrabench.errors import ConfigError
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.kernel_config import EMBEDDED_PRECISIONS, ROUTING_RULE, KernelConfig
from ultrabench.layout import AUTO, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.processes import thread_variables
from ultrabench.record import from_dict, to_dict
from ultrabench.run import RunSpec, Workload

FP64_TOLERANCE = 1e-10
"""Largest difference that passes in fp64; rounding gives 1e-13, the smallest real fault so far gave 1e-5."""

SINGLE_THREAD_ENV = thread_variables(1)
"""Environment of the process that forks. Without it numpy's BLAS starts threads on import; forks may then hang."""

TINY = ModelShape(
    name="tiny", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, vocab_size=256, tie_word_embeddings=False,
)  # fmt: skip
"""A model that trains in a second; every axis can divide it up to 4, with grouped heads and uneven thirds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec:
    """A layout to check, and the model and data to check it with."""

    layout: Layout
    shape: ModelShape = TINY
    seq_len: int = 64
    seed: int = 0
    steps: int = 3
    sizes: tuple[int, ...] = ()
    """Micro-batches of the steps in turn, if they are parts of a step; empty: all steps have gas of them."""
    clip: float = 0.5
    """Largest gradient norm; so small that gradients are clipped, so that the norm is checked.
    The second step is not."""
    attention: str = AUTO
    """The implementation of attention of the layout; the single process always has the one that torch takes."""
    routing: Annotated[str, ROUTING_RULE] = "balanced"
    """How tokens of a model with experts choose them, in the layout and in the single process."""
    compile: bool = False
    """Whether torch traces each layer as for compilation, without generating code."""
    precision: Annotated[str, one_of(*EMBEDDED_PRECISIONS)] = "fp64"
    """Arithmetic of the layout; it is always compared with one process that trains in fp64."""
    device: Annotated[str, one_of(*DEVICE_KINDS)] = "cpu"
    """Device type of all processes: gloo and a process each on CPUs, NCCL and a GPU each on GPUs."""
    dump: str | None = None
    """Folder for the full gradients and parameters: check.pt of the ranks, reference.pt of the reference."""

    def __post_init__(self) -> None:
        require_allowed(self)

    @property
    def run(self) -> RunSpec:
        """The run whose training is checked."""
        kernel_fields = {key: getattr(self, key) for key in ("precision", "compile", "attention", "routing")}
        kernel_config = KernelConfig(name="check", **kernel_fields)
        workload = Workload(seq_len=self.seq_len, gbs=self.layout.gbs, seed=self.seed)
        return RunSpec(
            shape=self.shape, workload=workload, layout=self.layout, kernel=kernel_config,
            nodes=1, gpus_per_node=self.layout.world_size,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The differences between a layout and a single process; a difference that is not finite is None."""

    passed: bool = False
    """Whether the layout ran, no gradient is missing and every difference is at most the allowed one."""
    loss_diff: float | None = None
    """L2 norm of the difference of the losses of all steps, on the worst rank."""
    loss_allowed: float = FP64_TOLERANCE
    grad_diff: float | None = None
    """L2 norm of the difference of a gradient after the first backward, before clipping; of all gradients it is
    the one that is largest in relation to what is allowed."""
    grad_allowed: float = FP64_TOLERANCE
    """What is allowed for the gradient of `worst_parameter`: FP64_TOLERANCE in fp64, else a multiple of the rounding
    error of one process in the same precision."""
    param_diff: float | None = None
    """L2 norm of the difference of all parameters together after the last optimizer step."""
    param_allowed: float = FP64_TOLERANCE
    worst_parameter: str | None = None
    """The parameter whose gradient differs most in relation to what is allowed."""
    missing_gradients: tuple[str, ...] = ()
    """The parameters that got no gradient, each as `rank 3: layers.0.ffn.up.weight`."""
    graphs: int = 0
    """Graphs that a rank compiled in all steps, the largest number of all ranks."""
    error: str | None = None
    """The last line of the traceback of a rank that failed; None if no rank failed."""
    refused: str | None = None
    """Why this machine cannot run the check; None if it can."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """The cost of one optimizer step for the first rank of a pipeline stage, once optimizer states exist."""

    pp_rank: int
    rank: int
    static_bytes: int
    """Bytes that stay allocated from step to step."""
    peak_bytes: int
    """Largest number of live bytes; its parts are parameter, gradient, optimizer and activation bytes."""
    parameter_bytes: int
    """Bytes of this rank's shards, and of shards gathered from other ranks, at the peak."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes that are kept for backward, are temporary, or are being sent to other ranks, at the peak."""
    hardware_flops: int
    """FLOPs of the matrix products and attention that were executed."""
    collectives: dict[str, tuple[int, ...]]
    """Axis and operation, such as `tp all_gather` -> number of calls, payload in bytes."""


def check(spec: CheckSpec) -> CheckResult:
    """Compares the training of a layout with that of a single process.

    Raises:
        ConfigError: this machine has too few GPUs.
    """
    answer, *_ = _answers_of_process("ultrabench.kernel.check.parity", spec)
    if (result := from_dict(CheckResult, answer)).refused:
        raise ConfigError(f"{result.refused}; choose smaller degrees, or leave out --device cuda")
    return result


def dry_run(spec: RunSpec) -> Iterator[RankCost]:
    """Yields the cost of each pipeline stage of `spec` as soon as it is known.

    Raises:
        ConfigError: the kernel cannot build or train this layout.
    """
    for answer in _answers_of_process("ultrabench.kernel.dryrun.rank_cost", spec):
        if "error" in answer:
            raise ConfigError(f"{spec.layout.label()} cannot be dry-run: {answer['error']}")
        yield from_dict(RankCost, answer)


def _answers_of_process(module: str, request: CheckSpec | RunSpec) -> Iterator[dict[str, Any]]:
    """Starts `module` as a process that reads `request`; yields each line that it writes, or its `error`."""
    command, pipe = (sys.executable, "-P", "-m", module), subprocess.PIPE
    env = {**os.environ, **SINGLE_THREAD_ENV}
    # In a process group of its own, it gets no Ctrl-C; its children end with it.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, process_group=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        json.dump(to_dict(request), process.stdin)
        process.stdin.close()
        try:
            yield from map(json.loads, process.stdout)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        yield {"error": f"the process ended with exit code {process.returncode}"}
