"""The request and the result of a parity check; this module needs no torch, so that the CLI can import it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.processes import thread_variables
from ultrabench.record import from_dict, to_dict
from ultrabench.run import RunSpec, Workload

TOLERANCE = 1e-10
"""Largest difference that passes; rounding in fp64 gives 1e-13, the smallest real fault so far gave 1e-5."""

SINGLE_THREADED = thread_variables(1)
"""Environment of the server: without it the BLAS of numpy starts threads on import, and forks may hang."""

SERVER_COMMAND = (sys.executable, "-P", "-m", "ultrabench.kernel.check")

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
    clip: float = 0.5
    """Largest gradient norm; so small that gradients are always clipped, so that the norm is checked too."""
    recompute: str = "none"
    compile: bool = False
    """Whether torch traces each layer as for compilation, without generating code."""
    dump: str | None = None
    """Folder for the full gradients and parameters: check.pt of the ranks, reference.pt of the reference."""

    @property
    def run(self) -> RunSpec:
        """The run whose training is checked."""
        return RunSpec(
            shape=self.shape,
            workload=Workload(seq_len=self.seq_len, gbs=self.layout.gbs, seed=self.seed),
            layout=self.layout,
            kernel=KernelConfig(
                name="check", precision="fp64", recompute=self.recompute, compile=self.compile
            ),
            nodes=1,
            gpus_per_node=self.layout.world_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The differences between a layout and a single process; a difference that is not finite is None."""

    passed: bool
    """Whether the layout ran, no gradient is missing and every difference is at most TOLERANCE."""
    loss_diff: float | None = None
    """Largest difference of the loss over all steps and ranks."""
    grad_diff: float | None = None
    """Largest difference of a gradient's element after the first backward, before clipping."""
    param_diff: float | None = None
    """Largest difference of a parameter's element after the last optimizer step."""
    worst_parameter: str | None = None
    """The parameter with the largest gradient difference."""
    missing_gradients: tuple[str, ...] = ()
    """The parameters that got no gradient, each as `rank 3: layers.0.ffn.up.weight`."""
    error: str | None = None
    """The last line of the traceback of a rank that failed; None if no rank failed."""
    seconds: float = 0.0


def ask(spec: CheckSpec) -> CheckResult:
    """Starts a server for one check; returns the result."""
    server = subprocess.run(
        SERVER_COMMAND,
        input=json.dumps(to_dict(spec)) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **SINGLE_THREADED},
        check=False,
        process_group=0,  # only this process gets Ctrl-C; children end with the server
    )
    if server.returncode:
        return CheckResult(passed=False, error=f"the check server exited with {server.returncode}")
    return from_dict(CheckResult, json.loads(server.stdout))
