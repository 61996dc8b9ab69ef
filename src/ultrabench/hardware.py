"""Describes the hardware of a node: its accelerators, their rates and the links between them."""

from dataclasses import dataclass
from typing import Annotated

from ultrabench.allowed import Count, Positive, at_least, one_of, require_allowed
from ultrabench.errors import ConfigError, require_known

GIB = 2**30

GUESSED = "guessed"
"""Source of a peak rate that nobody has measured."""
UNMEASURED_CPU_FLOPS_PER_S = 5e10
"""FP32 rate of a CPU core that predictions use until the rate has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak rate of one rank, which mfu is relative to."""

    flops_per_s: float
    source: str
    """Where the rate comes from; `measured` when it was measured on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A node type: its accelerators, the rates that their maker states, and the link between nodes.

    The numbers of each node type are only in configs/hardware/ or in a file of the user.
    """

    name: str
    gpu: str
    """Usual name of the accelerator."""
    device: Annotated[str, one_of("cuda", "cpu")] = "cuda"
    """The torch device type; AMD GPUs are also called cuda."""
    peak_flops_per_s: dict[str, Positive]
    """Precision -> rate without sparsity; empty on CPUs, where the rate has to be measured."""
    mem_bytes: Count
    """Bytes of memory of one accelerator, all of which its rank may use."""
    hbm_bytes_per_s: Positive
    """Bytes per second between an accelerator and its memory."""
    link_bytes_per_s: Positive
    """Bytes per second to the other accelerators of the node, in one direction."""
    reported_as: tuple[str, ...]
    """Names that the driver gives the accelerator; a run on any other accelerator is invalid."""
    source: str
    """Where the rates come from, such as a URL."""
    gpus_per_node: Count
    node_link_bytes_per_s: Positive
    """Bytes per second between nodes for each accelerator, in one direction."""
    precision: str = "bf16"
    """Precision of kernels whose configuration gives none."""
    warmup_s: Annotated[float, at_least(0.0)] = 0.0
    """Seconds of steps after which the clocks of the accelerator are steady; measure.warmup_s where that is null."""
    min_s: Annotated[float, at_least(0.0)] = 0.0
    """Seconds of steps in which the clocks of the accelerator average out; measure.min_s where that is null."""
    simulated: bool = False
    """Whether several nodes of this type are processes of one host."""

    def __post_init__(self) -> None:
        require_allowed(self, "hardware.")
        if self.device == "cuda" and not (self.peak_flops_per_s and self.reported_as):
            lacking = f"hardware={self.name} lacks values of peak_flops_per_s or reported_as"
            raise ConfigError(f"{lacking}; a GPU needs its dense rates and its names in `nvidia-smi -L`")

    def peak(self, precision: str, nodes: int, core_flops_per_s: float | None, cores: int) -> Peak:
        """Peak rate of one rank.

        It is the dense rate of the accelerator where there is one. On CPUs all simulated nodes share one host,
        so the peak of a rank is the measured rate of a core times cores / ranks on the host.

        Args:
            core_flops_per_s: fp32 rate of one core, measured with all cores busy; None when it was not measured.
            cores: cores of the host.
        """
        if rates := self.peak_flops_per_s:
            require_known(f"precision of {self.gpu}", rates, precision)
            return Peak(flops_per_s=rates[precision], source=self.source)
        ranks = self.gpus_per_node * (nodes if self.simulated else 1)
        rate = core_flops_per_s or UNMEASURED_CPU_FLOPS_PER_S
        return Peak(flops_per_s=rate * cores / ranks, source="measured" if core_flops_per_s else GUESSED)
