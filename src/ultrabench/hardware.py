"""What a node is made of: accelerators, their rates and the links between them."""

from dataclasses import dataclass

from ultrabench.errors import ConfigError, unknown_name

GIB = 2**30

DEVICES = ("cuda", "cpu")
"""The torch device types; GPUs of AMD are cuda, too."""

GUESSED = "guessed"
"""Source of a peak rate that nobody has measured."""
UNMEASURED_CPU_FLOPS_PER_S = 5e10
"""Stands in for a CPU core's fp32 rate in predictions made before it has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A node type: how many of which accelerator, what their maker promises, and the link between nodes.

    The numbers of each are in configs/hardware/ or in a file of the user's, and nowhere else.
    """

    name: str
    gpu: str
    """Usual name of the accelerator."""
    device: str = "cuda"
    """The torch device type."""
    peak_flops_per_s: dict[str, float]
    """Precision -> dense rate, without sparsity; empty where it has to be measured, on CPUs."""
    mem_bytes: int
    """Bytes of memory of one accelerator."""
    hbm_bytes_per_s: float
    """Bytes per second between an accelerator and its memory."""
    link_bytes_per_s: float
    """Bytes per second to the other accelerators of the node, in one direction."""
    reported_as: tuple[str, ...]
    """How the driver names the accelerator; a run on anything else is invalid."""
    source: str
    """Where the rates come from."""
    gpus_per_node: int
    node_link_bytes_per_s: float
    """Bytes per second between nodes, per accelerator, in one direction."""
    precision: str = "bf16"
    """Precision of kernels that name none."""
    simulated: bool = False
    """Whether several nodes of this type are processes of one host."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(unknown_name("hardware.device", self.device, DEVICES))
        if self.gpus_per_node < 1:
            raise ConfigError(f"hardware.gpus_per_node={self.gpus_per_node}; must be >= 1")
        names = ("mem_bytes", "hbm_bytes_per_s", "link_bytes_per_s", "node_link_bytes_per_s")
        rates = {f"peak_flops_per_s.{k}": v for k, v in self.peak_flops_per_s.items()}
        for field, value in {**{name: getattr(self, name) for name in names}, **rates}.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"hardware.{field}={value:g}; must be > 0 and finite")
        if self.device == "cuda" and not (self.peak_flops_per_s and self.reported_as):
            raise ConfigError(
                f"hardware={self.name} lacks values of peak_flops_per_s or reported_as; a GPU needs its dense rates "
                "and its names as `nvidia-smi -L` prints them, so that no result is of another GPU"
            )

    @property
    def rank_mem_bytes(self) -> int:
        """Memory one rank may use: that of its accelerator."""
        return self.mem_bytes


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

    The hardware's dense rate where it has one. On CPUs every simulated node shares one host, so a
    rank gets the measured rate of a core times cores / ranks on the host.

    Args:
        core_flops_per_s: measured fp32 rate of one core with all cores busy, None when unmeasured.
        cores: cores of the host.
    """
    rates = hardware.peak_flops_per_s
    if rates:
        if precision not in rates:
            raise ConfigError(unknown_name(f"precision of {hardware.gpu}", precision, rates))
        return Peak(flops_per_s=rates[precision], source=hardware.source)
    ranks = hardware.gpus_per_node * (nodes if hardware.simulated else 1)
    if core_flops_per_s is None:
        return Peak(flops_per_s=UNMEASURED_CPU_FLOPS_PER_S * cores / ranks, source=GUESSED)
    return Peak(flops_per_s=core_flops_per_s * cores / ranks, source="measured")
