"""What a parity check asks and answers, and how to ask; no torch in here, so anybody may."""

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
"""Rounding in fp64 gives 1e-13; the smallest real fault seen is 1e-5."""

SINGLE_THREADED = thread_variables(1)
"""Environment of the server: numpy's BLAS starts threads when imported, and then forks may hang."""

SERVER_COMMAND = (sys.executable, "-P", "-m", "ultrabench.kernel.check")

TINY = ModelShape(
    name="tiny", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, vocab_size=256, tie_word_embeddings=False,
)  # fmt: skip
"""Small enough for a second, and every axis up to 4 cuts it: grouped heads, uneven thirds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec:
    """A layout to check, and on what."""

    layout: Layout
    shape: ModelShape = TINY
    seq_len: int = 64
    seed: int = 0
    steps: int = 3
    clip: float = 0.5
    """Largest gradient norm; small enough that clipping always happens, so the norm is checked."""
    recompute: str = "none"
    compile: bool = False
    """Each layer through torch's tracing, without generated code."""
    dump: str | None = None
    """Folder for the gathered gradients and parameters of both sides (check.pt, reference.pt)."""

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
    """How far a layout is from one process; a difference is None where it is not finite."""

    passed: bool
    """Whether it ran, no gradient is missing and every difference is at most TOLERANCE."""
    loss_diff: float | None = None
    """Largest over steps and ranks."""
    grad_diff: float | None = None
    """Largest of any element after the first backward, before clipping."""
    param_diff: float | None = None
    """Largest of any element after the last optimizer step."""
    worst_parameter: str | None = None
    """Where the largest gradient difference is."""
    missing_gradients: tuple[str, ...] = ()
    """`rank 3: layers.0.ffn.up.weight` for each parameter that backward did not reach."""
    error: str | None = None
    """What went wrong instead, the last line of a rank's traceback."""
    seconds: float = 0.0


def ask(spec: CheckSpec) -> CheckResult:
    """The result of one check, from a server started for it."""
    server = subprocess.run(
        SERVER_COMMAND,
        input=json.dumps(to_dict(spec)) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **SINGLE_THREADED},
        check=False,
        process_group=0,  # Ctrl-C is for us; the end of the server ends its children
    )
    if server.returncode:
        return CheckResult(passed=False, error=f"the check server exited with {server.returncode}")
    return from_dict(CheckResult, json.loads(server.stdout))
