"""Describes the hardware of a node: its accelerators, their rates and the links between them."""

import math
from dataclasses import dataclass
from typing import Annotated

from ultrabench.allowed import Count, NonNegative, between, matching, one_of, require_allowed
from ultrabench.errors import ConfigError

GIB = 2**30

SCALED_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
"""Precisions that are bf16 whose linear layers, other than the head, round the factors of their products to 8 or 4 bits
and scale them: mxfp8 each block of 32 numbers (OCP Microscaling Formats 1.0), nvfp4 each block of 16."""

PEAK_GUESSED = "guessed"
"""Source of a peak rate that nobody has measured."""
PEAK_GIVEN = "given as hardware.peak_flops_per_s"
"""Source of a peak rate of CPUs that a user gives."""
UNMEASURED_CPU_FLOPS_PER_S = 5e10
"""FP32 rate of a CPU core that predictions use until the rate has been measured."""
CPU_FLOPS_PER_S_RANGE = (1e9, 1e11)
"""Rates of a CPU core, also of a busy one, between which that of an unmeasured machine is."""
CLOCK_POWER_EXPONENT = 1 / 3
"""The compute rate is proportional to (power_limit_w / rated_power_w) to the power of this. It is an assumption:
power grows as clock * voltage**2, and voltage in proportion to the clock. No run under a limit was measured."""
ARCHITECTURE_RULE = matching(r"sm_\d{2,3}|gfx[\da-f]{3,4}", "a GPU architecture, such as sm_90 or gfx942")

# Each range holds all accelerators, but no number in a usual wrong unit such as GB, GB/s or TFLOP/s.
PeakRate = Annotated[float, between(1e9, 1e18, "FLOPs per second, such as 9.89e14")]
Memory = Annotated[int, between(2**28, 2**44, "bytes, such as 80000000000")]
Power = Annotated[float, between(1.0, 1e5, "watts, such as 700")]
MemoryRate = Annotated[float, between(1e9, 1e15, "bytes per second, such as 3.35e12")]
LinkRate = Annotated[float, between(1e8, 1e14, "bytes per second, such as 4.5e11")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak rate of one rank, which mfu is relative to."""

    flops_per_s: float
    source: str
    """Where the rate comes from; `measured` when it was measured on this machine."""
    core_share: float | None = None
    """Share of the CPU cores that the measurement had, where other programs used the rest; None where it was alone."""

    @property
    def mfu_problem(self) -> str | None:
        """Why no MFU relative to this peak is given; None where the peak can be trusted."""
        return busy_peak(self.core_share)


_MEASURE_PEAK_AGAIN = "to measure it again, launch with another name= on an idle machine"


def busy_peak(core_share: float | None) -> str | None:
    """Why no MFU is given relative to a peak that was measured beside other programs; None where it was alone.

    Args:
        core_share: the field of `Peak`.
    """
    if core_share is None:
        return None
    fact = f"the peak was measured with {core_share:.0%} of the cores, as other programs used the rest"
    return f"{fact}; {_MEASURE_PEAK_AGAIN}"


def low_peak(max_mfu: float | None) -> str | None:
    """Why no MFU is given relative to a peak that runs exceed; None where they do not.

    Args:
        max_mfu: the highest MFU of the runs that are not in doubt, a fraction; None where it is unknown.
    """
    if max_mfu is None or max_mfu <= 1:
        return None
    fact = f"a run computed {max_mfu:.2f} x as fast as the peak, which may have been measured while other programs ran"
    return f"{fact}; {_MEASURE_PEAK_AGAIN}"


def peak_suffix(precision: str | None) -> str:
    """The text after `MFU` that names the peak rate to which it is relative, such as ` of fp8`; nothing where the
    products of a run are not scaled ones."""
    return f" of {precision}" if precision in SCALED_PRECISIONS else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What distinguishes the types of devices; modules outside the kernel ask for these
    properties, not for the type.
    """

    has_gpus: bool
    """Whether each rank has a GPU of its own, which a driver lists and a batch system allocates."""
    is_rated: bool
    """Whether the maker states peak rates, to which published runs are relative; other rates have to be measured."""
    shares_host: bool
    """Whether ranks share the cores and the memory of their host, so that other programs slow them down, and each
    rank is held to its part of the memory."""
    max_foreign_load: float
    """measure.max_foreign_load where that is auto: the share of a node's cores that other programs may use during the
    steps. Other programs of a laptop always use some cores, which slows control runs down as well."""
    allocation_start_s: float
    """Expected seconds from the start of an allocation to its first run; used until measured."""
    rank_start_s: float
    """Seconds from the start of a run to its first step; where ranks share their host, for each rank of the host."""


DEVICE_KINDS = {
    "cuda": DeviceKind(
        has_gpus=True, is_rated=True, shares_host=False, max_foreign_load=0.1,
        allocation_start_s=60.0, rank_start_s=20.0,
    ),
    "cpu": DeviceKind(
        has_gpus=False, is_rated=False, shares_host=True, max_foreign_load=0.5,
        allocation_start_s=20.0, rank_start_s=0.6,
    ),
}  # fmt: skip
"""The torch device types, which are the values of hardware.device -> their properties."""
USUAL_DEVICE = "cuda"
"""The type of device of hardware whose configuration gives none; AMD GPUs are also called cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A node type: its accelerators, the rates that their maker states, and the link between nodes.

    The numbers of each node type are only in configs/hardware/ or in a file of the user.
    """

    name: str
    gpu: str
    """Usual name of the accelerator."""
    device: Annotated[str, one_of(*DEVICE_KINDS)] = USUAL_DEVICE
    """The torch device type; AMD GPUs are also called cuda."""
    peak_flops_per_s: dict[str, PeakRate]
    """Precision -> rate without sparsity; empty on CPUs, where the rate has to be measured."""
    mem_bytes: Memory
    """Bytes of memory of one accelerator as torch reports them; on CPUs those that a rank may use,
    which is enforced."""
    hbm_bytes_per_s: MemoryRate
    """Bytes per second between an accelerator and its memory."""
    link_bytes_per_s: LinkRate
    """Bytes per second to the other accelerators of the node, in one direction."""
    reported_as: tuple[str, ...]
    """Names that the driver gives the accelerator; a run on any other accelerator is invalid."""
    source: str
    """Where the rates come from, such as a URL."""
    gpus_per_node: Count
    node_link_bytes_per_s: LinkRate
    """Bytes per second between nodes for each accelerator, in one direction."""
    nvlink_domain: Count | None = None
    """Number of accelerators that links of link_bytes_per_s join, also across nodes, such as 72 in an NVL72;
    None: those of a node."""
    precision: str = "bf16"
    """Precision of kernels whose configuration gives none."""
    architecture: Annotated[str, ARCHITECTURE_RULE] | None = None
    """sm_ and the compute capability of an NVIDIA GPU, such as sm_90, or the gfx name of an AMD GPU. None: unknown;
    a plan then does not check whether the accelerator has the attention of our own kernel."""
    warmup_s: NonNegative = 0.0
    """Seconds of steps after which the clocks of the accelerator are steady; measure.warmup_s where that is null."""
    min_s: NonNegative = 0.0
    """Seconds of steps in which the clocks of the accelerator average out; measure.min_s where that is null."""
    rated_power_w: Power | None = None
    """Watts of one accelerator in its data sheet, at which profiles were measured; None: unknown."""
    power_limit_w: Power | None = None
    """Watts to which this site limits each accelerator; None: no lower limit than rated_power_w."""
    simulated: bool = False
    """Whether several nodes of this type are processes of one host."""

    def __post_init__(self) -> None:
        require_allowed(self, "hardware.")
        if self.is_rated and not (self.peak_flops_per_s and self.reported_as):
            fact = f"hardware={self.name} lacks peak_flops_per_s or reported_as"
            raise ConfigError(f"{fact}; give the dense rates of the GPU and its names in `nvidia-smi -L`")
        scaled = next(
            (precision for precision in SCALED_PRECISIONS if precision in self.peak_flops_per_s), None
        )
        if scaled and "bf16" not in self.peak_flops_per_s:
            fact = f"peak_flops_per_s of hardware={self.name} has {scaled} but no bf16"
            remedy = f"add bf16, in which an {scaled} run computes attention and the head"
            raise ConfigError(fact, remedy, setting="hardware.peak_flops_per_s")
        if self.nvlink_gpus % self.gpus_per_node:
            fact = f"hardware.nvlink_domain={self.nvlink_domain} with gpus_per_node={self.gpus_per_node}"
            remedy = f"give a multiple of {self.gpus_per_node}, or leave it out if links join only the GPUs of a node"
            raise ConfigError(fact, remedy, setting="hardware.nvlink_domain")
        if self.power_limit_w and not self.rated_power_w:
            fact = f"hardware={self.name} has power_limit_w={self.power_limit_w:g} without rated_power_w"
            raise ConfigError(fact, "add rated_power_w from the data sheet", setting="hardware.power_limit_w")
        if (self.power_limit_w or 0) > (self.rated_power_w or math.inf):
            fact = (
                f"hardware={self.name} has power_limit_w={self.power_limit_w:g} above "
                f"rated_power_w={self.rated_power_w:g}"
            )
            raise ConfigError(fact, "give a lower limit, or leave it out", setting="hardware.power_limit_w")

    def __hash__(self) -> int:
        """The hash of its name, since peak_flops_per_s is a dict; equal hardware is equal in all fields."""
        return hash(self.name)

    @property
    def has_gpus(self) -> bool:
        """Whether each rank has a GPU of its own."""
        return DEVICE_KINDS[self.device].has_gpus

    @property
    def is_rated(self) -> bool:
        """Whether the maker states peak rates, to which published runs are relative."""
        return DEVICE_KINDS[self.device].is_rated

    @property
    def shares_host(self) -> bool:
        """Whether ranks share the cores and the memory of their host."""
        return DEVICE_KINDS[self.device].shares_host

    @property
    def nvlink_gpus(self) -> int:
        """Number of accelerators that links of link_bytes_per_s join."""
        return self.nvlink_domain or self.gpus_per_node

    @property
    def clock_share(self) -> float:
        """Share of its usual compute rate that an accelerator keeps under its power limit; 1.0 without a lower one.

        The rate of its memory and its links stays.
        """
        rated_power_w = self.rated_power_w or math.inf
        limit_w = self.power_limit_w or rated_power_w
        return 1.0 if limit_w == rated_power_w else math.pow(limit_w / rated_power_w, CLOCK_POWER_EXPONENT)

    @property
    def gpu_at_limit(self) -> str:
        """The accelerator as profiles name it: `gpu`, with a lower power limit where there is one."""
        return f"{self.gpu} at {self.power_limit_w:g} W" if self.clock_share < 1 else self.gpu

    @property
    def compute_capability(self) -> int | None:
        """The compute capability of an NVIDIA GPU times ten, such as 90; None for AMD and unknown architectures."""
        maker_prefix, _, digits = (self.architecture or "").partition("_")
        return int(digits) if maker_prefix == "sm" else None

    @property
    def prefers_cudnn(self) -> bool | None:
        """Whether cuDNN has the faster attention, as on Hopper and Blackwell;
        None where the architecture is unknown.
        """
        return None if self.architecture is None else (self.compute_capability or 0) // 10 in (9, 10)

    @property
    def fp8_refusal(self) -> str | None:
        """Why the accelerator has no products of scaled fp8 numbers in torch.

        None where it has, where its architecture is unknown, and on CPUs.
        """
        if self.compute_capability is not None:
            has_fp8 = self.compute_capability >= 89
        else:
            has_fp8 = self.architecture is None or self.architecture.startswith(("gfx94", "gfx95", "gfx12"))
        needs_text = "precision=fp8 needs sm_89 or newer, or gfx942, gfx950 or gfx12"
        return None if has_fp8 else f"{needs_text}; {self.gpu} is {self.architecture}: use precision=bf16"

    def peak(self, precision: str, nodes: int, core_flops_per_s: float | None, cores: int) -> Peak:
        """Peak rate of one rank.

        It is the dense rate of the accelerator where there is one. On CPUs all simulated nodes share one host,
        so the peak of a rank is the measured rate of a core times cores / ranks on the host.

        Args:
            core_flops_per_s: fp32 rate of one core, measured with all cores busy; None when it was not measured.
            cores: cores of the host.

        Raises:
            ConfigError: the accelerator has no rate for this precision.
        """
        if rates := self.peak_flops_per_s:
            if precision == "fp8" and self.fp8_refusal:
                raise ConfigError(self.fp8_refusal, setting="kernel.precision")
            if precision not in rates:
                fact = f"peak_flops_per_s of hardware={self.name} has no rate for {precision}, only for "
                remedy = "choose another kernel.precision, or add the rate and its source to that file"
                raise ConfigError(f"{fact}{', '.join(rates)}", remedy, setting="hardware.peak_flops_per_s")
            source = self.source if self.is_rated else PEAK_GIVEN
            return Peak(flops_per_s=rates[precision], source=source)
        num_ranks = self.gpus_per_node * (nodes if self.simulated else 1)
        host_flops_per_s = cores * (core_flops_per_s or UNMEASURED_CPU_FLOPS_PER_S)
        source = "measured" if core_flops_per_s else PEAK_GUESSED
        return Peak(flops_per_s=host_flops_per_s / num_ranks, source=source)
