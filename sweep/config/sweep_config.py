"""The configuration of a sweep, as frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, product
from typing import Annotated, Any

from msgspec import Meta

from ultrabench.allowed import Count, NonNegative, at_least, between, matching, one_of, require_allowed
from ultrabench.errors import ConfigError, counted, require_known
from ultrabench.hardware import Hardware
from ultrabench.host_list import expand_hosts
from ultrabench.kernel_config import KernelConfig
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.result import CAUSES, FAILURES, OUTER_FAILURES, RunResult
from ultrabench.run import Workload
from ultrabench.sweep.config.launcher_config import LauncherConfig
from ultrabench.sweep.config.options import Options
from ultrabench.sweep.predict.profile import Profile
from ultrabench.variant import CONTAINER_WORD

NumFurtherAttempts = Annotated[int, between(0, 100)]
"""Number of further attempts that the configuration may allow."""
ATTEMPT_KEYS = (*sorted(FAILURES), "suspect")
"""Keys of retry.attempts: the statuses of failures, and `suspect` for an ok run whose number is suspect."""


OUTSIDE = "outside"
"""The name under which failures are counted together that are not the run's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The settings of configs/retry/, whose files explain each of them."""

    attempts: dict[str, NumFurtherAttempts]
    causes: dict[str, NumFurtherAttempts]
    backoff_s: Annotated[float, at_least(0.0)]
    backoff_max_s: Annotated[float, at_least(0.0)]
    max_excluded: Annotated[int, at_least(0)]
    forgive: tuple[str, ...]
    breaker: Count | None

    def __post_init__(self) -> None:
        require_allowed(self, "retry.")
        require_known("status in retry.attempts", ATTEMPT_KEYS, *self.attempts)
        require_known("cause in retry.causes", CAUSES, *self.causes)
        if missing := sorted({*ATTEMPT_KEYS} - self.attempts.keys()):
            raise ConfigError(f"retry.attempts lacks {', '.join(missing)}; give a number for each status")
        _ = self.forgiven  # raises ConfigError for what is no list of hosts

    @property
    def forgiven(self) -> frozenset[str]:
        """The nodes that are never excluded; `forgive` may hold ranges such as gpu[01-04]."""
        return frozenset(host for text in self.forgive for host in expand_hosts(text))

    def kind(self, result: RunResult) -> str:
        """The name under which a failure is counted: its cause, OUTSIDE, or its status."""
        if result.cause in self.causes:
            return str(result.cause)
        return OUTSIDE if result.status in OUTER_FAILURES else result.status.value

    def allowed(self, result: RunResult) -> int:
        """How many more attempts a run may have after failures of this kind."""
        return self.causes.get(str(result.cause), self.attempts.get(result.status.value, 0))


WEAK = "weak"
"""The scaling in which each node keeps its part of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLayout:
    """One entry of `sweep.layouts`: a layout, and the cells in which it runs."""

    name: str
    """The entry as messages name it, such as `sweep.layouts[0] {tp: 2, mbs: 1}`."""
    layout: Mapping[str, tuple[Any, ...]]
    """Axis -> its only value, for each axis except dp; gas is there only if the entry gives it."""
    cell: Mapping[str, Any]
    """Part of a cell, such as nodes -> its value; an entry without any runs in all cells."""

    def runs_in(self, cell: Any) -> bool:
        """Whether the layout runs in this cell, a `CellKey`."""
        return all(getattr(cell, key) == value for key, value in self.cell.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of the number of nodes and of each axis of a layout; candidates are their combinations."""

    nodes: tuple[int, ...]
    layout: Mapping[str, tuple[Any, ...]]
    """Axis -> its values, for every axis except dp, which follows from the others.

    gas is always gbs / (dp * mbs); when values of gas are given, layouts with another gas are left out.
    The pp_schedule auto means 1f1b, or afab where gas < pp. virtual_stages is used by interleaved only.
    The dp_shard all means all dp*cp ranks, node those of them that are on one node. The pp, mbs, ep or virtual_stages
    auto means several values: those that divide the GPUs, the batch, the experts or the layers.
    """
    listed: tuple[ListedLayout, ...] = ()
    """The only layouts, whose values are not combined; empty where a sweep lists values of axes."""


def scaled_gbs(gbs: int, nodes: int, min_nodes: int, scaling: str) -> Fraction:
    """The global batch on `nodes` nodes, of a sweep whose `gbs` is that of its `min_nodes` number of nodes."""
    return Fraction(gbs * nodes, min_nodes) if scaling == WEAK else Fraction(gbs)


SWEEP_NAME = matching(
    r"(?!.*\.parquet\Z)[A-Za-z0-9_][A-Za-z0-9_.+=@, -]{0,99}",
    "a text of at most 100 ASCII characters that starts with a letter, a digit or '_', contains only these, spaces "
    "and .+=@,- and does not end in .parquet, which names a file",
)
"""Names that a sweep may have. A name is also used for folders, Slurm jobs and commands that users copy."""
LAYOUTS_SETTING = "sweep.layouts"
"""The key of a sweep that lists single layouts in place of axes."""
LIST_LAYOUTS_REMEDY = (
    "to list layouts, edit the sweep file that this writes: ultrabench sweep plan --top 2 --write NAME"
)
"""How a sweep that combines values of axes is replaced by one that lists layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """The complete configuration of one sweep."""

    name: Annotated[str, SWEEP_NAME]
    results_dir: Annotated[str, Meta(min_length=1, description="a folder")]
    cluster: str
    price_per_gpu_hour: NonNegative | None = None
    """Price of an hour of one GPU of the cluster, in any currency; None: unknown."""
    hardware: Hardware
    kernel: KernelConfig
    launcher: LauncherConfig
    measure: Measure
    models: tuple[ModelShape, ...]
    workload: Workload
    axes: Axes
    options: Options
    """What the sweep varies beside layouts; workload and kernel have the first values."""
    retry: RetryPolicy
    strategy: Annotated[str, one_of("exhaustive", "adaptive")] = "exhaustive"
    """Which runs of a cell are made: all, or those that are worth it after what was measured so far."""
    batch: Count = 1
    """Number of runs of a cell that the adaptive strategy makes at the same time."""
    max_runs: Count | None = None
    """Largest number of runs, which are chosen to cover many pairs of axis values; None means all runs."""
    scaling: Annotated[str, one_of("strong", WEAK)] = "strong"
    """Whether gbs is the same on all numbers of nodes, or grows with them from that of the smallest number."""
    repeats: Annotated[int, between(1, 1000)] = 1
    trace: bool = False
    """Whether each run traces some more steps after the measured ones."""
    profile: Profile
    """The constants of the predictions."""
    max_p_oom: Annotated[float, between(0, 1)] = 1.0
    """Runs with a larger predicted probability of running out of memory are left out; 1 leaves out none."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """The composed configuration as JSON values, kept for the record; secrets are redacted."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """The given secrets of kernel.env, which must be written only to the file for secrets."""

    def __post_init__(self) -> None:
        require_allowed(self)
        if self.strategy == "adaptive" and not self.kernel.trains:
            problem = "sweep.strategy=adaptive with kernel=probe"
            raise ConfigError(problem, "a probe trains nothing: leave it out", setting="sweep.strategy")
        start_text = "".join(self.launcher.start_words)
        if "container" in self.options.values and CONTAINER_WORD not in start_text:
            advice = "launcher.srun=['--container-image={container}'] (pyxis) or, for example, "
            advice += "launcher.python=[apptainer,exec,'{container}',python]"
            problem = f"sweep.container has no effect: no command contains {CONTAINER_WORD}; set {advice}"
            raise ConfigError(problem, setting="sweep.container")
        for nodes, gbs in product(sorted({*self.axes.nodes}), self.options.values.get("gbs", ())):
            if (scaled := self.gbs_on(nodes, gbs)).denominator > 1:
                smallest_text = counted(min(self.axes.nodes), "node")
                problem = (
                    f"sweep.scaling=weak with gbs={gbs} on {smallest_text} gives "
                    f"gbs={float(scaled):g} on {nodes} nodes"
                )
                raise ConfigError(f"{problem}; use a multiple of {scaled.denominator}", setting="sweep.gbs")
        if not self.models:
            advice = "name at least one (see ultrabench configs model)"
            raise ConfigError("sweep.models is empty", advice, setting="sweep.models")
        if self.trace and not self.kernel.trains_itself:
            advice = "only ultrabench's own kernel writes traces; use the profiler of your program"
            raise ConfigError(f"trace=true with kernel={self.kernel.name}; {advice}")
        if self.measure.checkpoint and not self.kernel.trains_itself:
            advice = "only ultrabench's own kernel saves its state; your own program can report the event checkpoint"
            raise ConfigError(f"measure.checkpoint=true with kernel={self.kernel.name}; {advice}")
        if not self.kernel.trains_itself and (self.measure.warmup_s or self.measure.min_s):
            problem = f"measure.warmup_s={self.measure.warmup_s:g}, measure.min_s={self.measure.min_s:g}"
            advice = "only ultrabench's own kernel measures by seconds; set measure.warmup_steps and measure.max_steps"
            raise ConfigError(f"{problem} with kernel={self.kernel.name}; {advice}")
        for model, second in combinations(self.models, 2):
            if replace(model, name=second.name) == second:
                raise ConfigError(f"models {model.name} and {second.name} are the same model; name it once")
            if model.name == second.name:
                raise ConfigError(f"sweep.models: two models are called {model.name}; rename one of them")

    @property
    def shares_devices(self) -> bool:
        """Whether other programs may compute on the devices of runs, as on the cores of a laptop;
        Slurm may give whole nodes.
        """
        return self.hardware.shares_host and not self.launcher.has_whole_nodes

    def gbs_on(self, nodes: int, gbs: int) -> Fraction:
        """The global batch on this number of nodes for a value of gbs."""
        return scaled_gbs(gbs, nodes, min(self.axes.nodes), self.scaling)
