"""What a node is made of: accelerators, their rates with sources, and links."""

from dataclasses import dataclass

from ultrabench.errors import ConfigError, unknown_name

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU (or one CPU process) and what its maker promises."""

    name: str
    device: str
    """The torch device type: cuda or cpu."""
    peak_flops_per_s: dict[str, float]
    """Precision -> dense rate, without sparsity; empty where it has to be measured."""
    mem_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """To the other accelerators of the node, one direction."""
    reported_as: tuple[str, ...]
    """How the driver names it; a run on anything else is invalid."""
    source: str


_TABLE = (
    Accelerator(
        name="H100-SXM",
        device="cuda",
        peak_flops_per_s={"bf16": 989e12, "fp32": 67e12, "fp64": 34e12},
        mem_bytes=80 * GIB,
        hbm_bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
        reported_as=("NVIDIA H100 80GB HBM3",),
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    Accelerator(
        name="H200-SXM",
        device="cuda",
        peak_flops_per_s={"bf16": 989e12, "fp32": 67e12, "fp64": 34e12},
        mem_bytes=141 * 10**9,
        hbm_bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
        reported_as=("NVIDIA H200",),
        source="https://www.nvidia.com/en-us/data-center/h200/",
    ),
    Accelerator(
        name="cpu",
        device="cpu",
        peak_flops_per_s={},
        mem_bytes=2 * GIB,
        hbm_bytes_per_s=1e10,
        link_bytes_per_s=1e9,
        reported_as=(),
        source="rates are measured on the machine itself when a sweep is launched",
    ),
)
ACCELERATORS = {a.name: a for a in _TABLE}

UNMEASURED_CPU_FLOPS_PER_S = 5e10
"""Stands in for a CPU core's fp32 rate in predictions made before it has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A node type: how many of which accelerator, and the link between nodes."""

    name: str
    gpu: str
    """A name of the ACCELERATORS table."""
    gpus_per_node: int
    node_link_bytes_per_s: float
    """Between nodes, per accelerator, one direction."""
    precision: str = "bf16"
    """What kernels compute in unless they say otherwise."""
    simulated: bool = False
    """Several nodes of this type are processes of one host."""
    mem_bytes: int | None = None
    """Memory of one accelerator; by default the table's."""

    def __post_init__(self) -> None:
        if self.gpu not in ACCELERATORS:
            raise ConfigError(unknown_name("gpu", self.gpu, ACCELERATORS))
        if self.gpus_per_node < 1:
            raise ConfigError(f"hardware.gpus_per_node={self.gpus_per_node}; must be >= 1")
        if self.node_link_bytes_per_s <= 0 or self.rank_mem_bytes <= 0:
            raise ConfigError(
                f"hardware.node_link_bytes_per_s={self.node_link_bytes_per_s:g}, hardware.mem_bytes="
                f"{self.rank_mem_bytes}; both must be > 0"
            )

    @property
    def accelerator(self) -> Accelerator:
        """The row of the table."""
        return ACCELERATORS[self.gpu]

    @property
    def device(self) -> str:
        """The torch device type: cuda or cpu."""
        return self.accelerator.device

    @property
    def rank_mem_bytes(self) -> int:
        """Memory one rank may use."""
        return self.accelerator.mem_bytes if self.mem_bytes is None else self.mem_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The rate that mfu is a fraction of, for one rank."""

    flops_per_s: float
    source: str
    """Where the number comes from; `measured` when this machine gave it."""


def rank_peak(
    hardware: Hardware, precision: str, *, nodes: int, core_flops_per_s: float | None, cores: int
) -> Peak:
    """Peak rate of one rank.

    The table's dense rate where there is one. On CPUs every simulated node shares one host, so a
    rank gets the measured rate of a core times cores / ranks on the host.

    Args:
        core_flops_per_s: measured fp32 rate of one core with all cores busy, None when unmeasured.
        cores: cores of the host.
    """
    row = hardware.accelerator
    if row.peak_flops_per_s:
        if precision not in row.peak_flops_per_s:
            raise ConfigError(unknown_name(f"precision of {row.name}", precision, row.peak_flops_per_s))
        return Peak(flops_per_s=row.peak_flops_per_s[precision], source=row.source)
    ranks = hardware.gpus_per_node * (nodes if hardware.simulated else 1)
    if core_flops_per_s is None:
        return Peak(flops_per_s=UNMEASURED_CPU_FLOPS_PER_S * cores / ranks, source="guessed")
    return Peak(flops_per_s=core_flops_per_s * cores / ranks, source="measured")
