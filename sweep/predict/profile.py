"""A profile: how well one training framework uses hardware, and how far to trust predictions made with it."""

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from ultrabench.allowed import one_of, require_allowed
from ultrabench.errors import ConfigError, require_known
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.time_constants import TimeConstants

FRAMEWORKS = ("ultrabench", "nanotron", "megatron")
REGIMES = ("fast", "fast_pipeline", "slow", "slow_pipeline", "slow_many_nodes")
"""Kinds of runs whose step times scatter differently: by the links between nodes, and with a pipeline or without."""
MANY_NODES = 32
"""Number of nodes from which runs on slow links are a regime of their own."""


class Quantiles(NamedTuple):
    """The interval around a predicted step time in which 80 % of the measured ones are expected."""

    low: float
    """10 % quantile of log(measured / predicted)."""
    high: float
    """90 % quantile of log(measured / predicted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The constants of one framework on one kind of cluster, from configs/profiles/NAME.yaml or a file of the user."""

    name: str
    framework: Annotated[str, one_of(*FRAMEWORKS)]
    """The program whose memory and communication the forms of the prediction describe."""
    source: str
    """Where the constants come from."""
    date: str
    """When they were found, YYYY-MM-DD."""
    prior: str = ""
    """Name of the profile from which the fit of the constants started; empty where they were not fitted."""
    time: TimeConstants
    memory: dict[str, Any] = field(default_factory=dict)
    """Constant of the framework's form of memory -> its value."""
    interval: dict[str, Quantiles]
    """Regime -> its quantiles; `all` stands for regimes that are not named."""
    quality: dict[str, Any] = field(default_factory=dict)
    """What predictions reached on rows that the constants were not fitted to; nothing was measured where empty."""
    measured: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Name in `features` -> its values in the runs that the constants were fitted to, of numbers the smallest and the
    largest; empty where they are not known."""

    def __post_init__(self) -> None:
        require_allowed(self, f"profile {self.name}: ")
        if "all" not in self.interval:
            advice = "give interval: {all: [LOW, HIGH]}, quantiles of log(measured / predicted)"
            raise ConfigError(f"profile {self.name}: interval lacks all; {advice}")
        require_known(f"regime of profile {self.name}", ("all", *REGIMES), *self.interval)
        for name, (low, high) in self.interval.items():
            if not low <= 0 <= high:
                rule = "must enclose 0, since the interval contains the prediction"
                raise ConfigError(f"profile {self.name}: interval.{name}=[{low}, {high}]; {rule}")

    def quantiles(self, regime: str) -> Quantiles:
        """The quantiles of a regime."""
        return self.interval.get(regime) or self.interval["all"]

    def unmeasured(self, spec: RunSpec, gpu: str) -> list[str]:
        """The features of a run that no run of the fit had, such as `zero_stage=3 (0 to 1)`."""
        found = []
        for name, value in features(spec, gpu).items():
            known = self.measured.get(name, (value,))
            are_numbers = bool(known) and all(isinstance(each, int | float) for each in (*known, value))
            if not min(known) <= value <= max(known) if are_numbers else value not in known:
                told = (" to " if are_numbers else ", ").join(dict.fromkeys(map(str, known)))
                found.append(f"{name}={value} ({told})")
        return found


def features(spec: RunSpec, gpu: str) -> dict[str, int | str]:
    """The values by which a run is like or unlike those that a profile was fitted to; `gpu` names the accelerator."""
    axes = ("tp", "pp", "cp", "zero_stage", "mbs", "pp_schedule", "recompute")
    run: dict[str, int | str] = {"gpu": gpu, "nodes": spec.nodes, "seq_len": spec.workload.seq_len}
    return run | {"precision": spec.kernel.precision} | {name: getattr(spec.layout, name) for name in axes}


def regime(spec: RunSpec, links: Network) -> str:
    """The regime of a run on these links."""
    if links.slow and spec.nodes >= MANY_NODES:
        return "slow_many_nodes"
    return ("slow" if links.slow else "fast") + ("_pipeline" if spec.layout.pp > 1 else "")
