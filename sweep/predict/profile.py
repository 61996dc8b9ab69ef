"""A profile: how well one training framework uses hardware, and how far to trust predictions made with it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, NewType

from ultrabench.allowed import one_of, require_allowed
from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import INDEPENDENT
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.profile_errors import SD_80, ProfileErrors, kind_of
from ultrabench.sweep.predict.time_constants import (
    FLAG_CONSTANTS,
    TimeConstants,
    with_changes,
    with_factors,
    with_flags,
)
from ultrabench.variant import FLAGS

FRAMEWORKS = ("ultrabench", "nanotron", "megatron")
REGIMES = ("fast", "fast_pipeline", "slow", "slow_pipeline", "slow_many_nodes")
"""Kinds of runs whose step times scatter differently: by the links between nodes, and with a pipeline or without."""
MANY_NODES = 32
"""Number of nodes from which runs on slow links are a regime of their own."""
LOG_WIDTH_PER_STEP = 0.09
"""What a step beyond the runs of a fit adds to each end of the interval of log(measured / predicted),
by root of squares.

With 0.09 the interval of a fit to the playbook's runs on one node holds 78 to 86 % of the others at
each distance up to 8."""
KNOB_STEPS = 5
"""Steps to a value of a knob whose constants nobody gave, which alone widen log(measured / predicted) by 0.2 at each
end. It is an assumption: few single knobs of published recipes change step times by more than 20 %."""
GPU_STEPS = 6
"""Steps to another GPU: one H100 is 20 to 32 % slower than constants of another tell,
where their power limits differ."""


axes_of = attrgetter(*INDEPENDENT)
"""The values of a layout's axes by which runs are like or unlike those of a fit."""
_KNOB_PREFIX = f"{FLAGS}."

DividedRun = NewType("DividedRun", RunSpec)
"""A run whose pp_layout says how the program of a profile divides layers. Forms of prediction take no other one, so
that no caller can forget to ask the profile: `Profile.as_divided` makes it."""


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
    stages: Annotated[str, one_of("cost", "even")] = "cost"
    """How the program divides layers among pipeline stages where the axis pp_layout is auto."""
    prior: str = ""
    """Name of the profile from which the fit of the constants started; empty where they were not fitted."""
    time: TimeConstants
    flags: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Knob of a program -> its value -> constants of `time` that this value changes -> what they are then. A value
    without constants, such as `{none: {}}`, is known to change none."""
    flag_runs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Knob -> its value -> the number of runs that its constants were fitted to; those of other values are priors."""
    gpu_factors: dict[str, dict[str, float]] = field(default_factory=dict)
    """GPU, as `gpu` of its hardware -> constants of `time` -> factors by which that GPU multiplies them. The constants
    of other GPUs are those of `time`."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Constant of the framework's form of memory -> its value."""
    interval: dict[str, Quantiles]
    """Regime -> its quantiles; `all` stands for regimes that are not named."""
    errors: ProfileErrors | None = None
    """The errors on measured runs by factor, which move and widen intervals; None where nothing was compared."""
    quality: dict[str, Any] = field(default_factory=dict)
    """What predictions reached on rows that the constants were not fitted to; nothing was measured where empty."""
    measured: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Name in `features` -> its values in the runs that the constants were fitted to, of numbers the smallest and the
    largest; empty where they are not known."""

    def __post_init__(self) -> None:
        require_allowed(self, f"profile {self.name}: ")
        if "all" not in self.interval:
            advice = "give interval: {all: [LOW, HIGH]}, two quantiles of log(measured / predicted)"
            raise ConfigError(f"profile {self.name}: interval lacks the key all; {advice}")
        require_known(f"regime of profile {self.name}", ("all", *REGIMES), *self.interval)
        for regime_name, (low, high) in self.interval.items():
            if not low <= 0 <= high:
                rule = "must contain 0, because the interval contains the prediction"
                raise ConfigError(f"profile {self.name}: interval.{regime_name}=[{low}, {high}]; {rule}")

        self._require_flags()
        for gpu, factors in self.gpu_factors.items():
            where = f"profile {self.name}: gpu_factors.{gpu}"
            require_known(f"constant of time in {where}:", FLAG_CONSTANTS, *factors)
            try:
                with_factors(self.time, tuple(factors.items()))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error

    def _require_flags(self) -> None:
        """Raises ConfigError for a constant in `flags` that does not exist, has an impossible value, or that two
        knobs change."""
        where, knob_by_constant = f"profile {self.name}:", dict[str, str]()
        for knob, constants_by_value in self.flags.items():
            for value, constants in constants_by_value.items():
                kind = f"constant of time in {where} flags.{knob}.{value}:"
                require_known(kind, FLAG_CONSTANTS, *constants)
                try:
                    with_changes(self.time, tuple(constants.items()))
                except ConfigError as error:
                    raise ConfigError(f"{where} flags.{knob}.{value}: {error}") from error
                for name in constants:
                    if (other := knob_by_constant.setdefault(name, knob)) != knob:
                        fact = f"{where} flags.{other} and flags.{knob} both change {name}"
                        raise ConfigError(
                            fact, "leave it to one of them, so that their values can be combined"
                        )
        for knob, runs_by_value in self.flag_runs.items():
            for value in runs_by_value:
                if value not in self.flags.get(knob, {}):
                    raise ConfigError(
                        f"{where} flag_runs.{knob}.{value} has no constants in flags; leave it out"
                    )

    def time_of(self, spec: RunSpec, gpu: str) -> TimeConstants:
        """The constants of the step time of a run on this GPU, with what the values of its knobs change."""
        time = with_flags(self.time, self.flags, spec)
        factors = self.gpu_factors.get(gpu)
        return with_factors(time, tuple(factors.items())) if factors else time

    def _knob_values(self, spec: RunSpec, knob: str) -> tuple[Any, ...]:
        """The values of a knob that the constants are for: those with constants, those of the fit, and the first one in
        the flags of the kernel."""
        values = self.measured.get(f"{FLAGS}.{knob}", ())
        if knob not in spec.kernel.knobs and knob not in self.flags:
            return values
        first_values: tuple[str, ...] = ()
        if knob in spec.kernel.knobs:  # one that takes any value has only the value that its file sets
            first_values = spec.kernel.knob_choices(knob)[:1] or (spec.kernel.usual_knob_value(knob),)
        return tuple(dict.fromkeys((*first_values, *self.flags.get(knob, ()), *values)))

    def knowledge(self, knob: str, value: str, usual_value: str) -> str | None:
        """What predictions know of a value of a knob: its constants are fitted or prior, or it is the usual one or one
        of runs of the fit, which those of `time` are for; None: nothing."""
        if value in self.flags.get(knob, {}):
            return "fitted" if value in self.flag_runs.get(knob, {}) else "prior"
        return "usual" if value in (usual_value, *self.measured.get(f"{FLAGS}.{knob}", ())) else None

    def as_divided(self, spec: RunSpec) -> DividedRun:
        """The run with the layers of its stages as the program divides them, where its layout does not say it."""
        if self.stages == "cost" or spec.layout.pp == 1 or spec.layout.pp_layout != "auto":
            return DividedRun(spec)
        return DividedRun(replace(spec, layout=replace(spec.layout, pp_layout=self.stages)))

    def quantiles(self, regime: str) -> Quantiles:
        """The quantiles of a regime."""
        return self.interval.get(regime) or self.interval["all"]

    def interval_of(self, spec: RunSpec, gpu: str, links: Network) -> Quantiles:
        """The quantiles of a run on these links.

        They are wider the more steps it is beyond the runs of the fit, and by the errors of its kind.
        """
        low, high = self.quantiles(regime(spec, links))
        spread = 0.0
        compared = self._compared(spec, gpu)
        if self.errors is not None:
            spread = self.errors.spread_of(kind_of(spec, gpu, links.nvlink_gpus))
            compared = (feature for feature in compared if not self.errors.has_feature(*feature[:2]))
        num_steps = sum(steps_beyond(*feature) for feature in compared)
        if not (num_steps or spread):
            return Quantiles(low, high)
        log_width = math.sqrt(LOG_WIDTH_PER_STEP**2 * num_steps + (SD_80 * spread) ** 2)
        return Quantiles(-math.hypot(low, log_width), math.hypot(high, log_width))

    def unmeasured(self, spec: RunSpec, gpu: str) -> dict[str, tuple[int | str, str]]:
        """The features of a run that the constants are not for -> its value, and the values that they are for, such as
        `0 to 1` or `H100-SXM`."""
        return {
            feature: (value, _fitted_text(fitted_values))
            for feature, value, fitted_values in self._compared(spec, gpu)
            if steps_beyond(feature, value, fitted_values) and not self._is_measured_knob(feature, value)
        }

    def _is_measured_knob(self, feature: str, value: int | str) -> bool:
        """Whether runs that gave the errors of the profile had this value of a knob."""
        is_knob = feature.partition(".")[0] == FLAGS
        return is_knob and self.errors is not None and self.errors.has_feature(feature, value)

    def _compared(self, spec: RunSpec, gpu: str) -> Iterator[tuple[str, int | str, tuple[Any, ...]]]:
        """Name and value of each feature of a run whose values in the fit are known, with these values."""
        for feature, value in features(spec, gpu).items():
            fitted_values = self.measured.get(feature, ())  # of numbers the smallest and the largest
            if feature.startswith(_KNOB_PREFIX):
                fitted_values = self._knob_values(spec, feature.removeprefix(_KNOB_PREFIX))
            if fitted_values:
                yield feature, value, fitted_values


@lru_cache(maxsize=4096)
def _fitted_text(fitted_values: tuple[Any, ...]) -> str:
    """The values, or the smallest and the largest number, that the runs of a fit had, in words."""
    separator = ", " if any(isinstance(fitted, str) for fitted in fitted_values) else " to "
    return separator.join(dict.fromkeys(map(str, fitted_values)))


@lru_cache(maxsize=4096)
def steps_beyond(feature: str, value: int | str, fitted_values: tuple[Any, ...]) -> float:
    """How far a value is from those that the runs of a fit had: the doublings of a number, the difference of ZeRO
    stages, GPU_STEPS for another GPU, KNOB_STEPS for another value of a knob, and 1 for another word; 0 between the
    smallest and the largest."""
    if not fitted_values or any(isinstance(compared, str) for compared in (value, *fitted_values)):
        if value in fitted_values:
            return 0.0
        return KNOB_STEPS if feature.startswith(f"{FLAGS}.") else GPU_STEPS if feature == "gpu" else 1.0
    nearest_fitted = min(max(value, min(fitted_values)), max(fitted_values))
    if feature == "zero_stage":
        return float(abs(value - nearest_fitted))
    return abs(math.log2(value / nearest_fitted))


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class FittedAxes:
    """The values of axes in the runs of a fit."""

    values: tuple[tuple[Any, ...], ...]
    """Those of each axis of INDEPENDENT; empty where they are not known."""


fitted_axes = lru_cache(maxsize=64)(FittedAxes)
"""Makes one object of equal values, so that predictors on all numbers of nodes share the steps that follow."""


@lru_cache(maxsize=16384)
def steps_of_axes(values: tuple[int | str, ...], fitted: FittedAxes) -> float:
    """How far the values of all axes of INDEPENDENT are from those that the runs of a fit had, where they are known."""
    axes = zip(INDEPENDENT, values, fitted.values, strict=True)
    return sum([steps_beyond(axis, value, of_fit) for axis, value, of_fit in axes if of_fit])


def features(spec: RunSpec, gpu: str) -> dict[str, int | str]:
    """The values by which a run is like or unlike those that a profile was fitted to; `gpu` names the accelerator."""
    values: dict[str, int | str] = {"gpu": gpu, "nodes": spec.nodes, "seq_len": spec.workload.seq_len}
    values |= {"precision": spec.kernel.precision, "experts": "some" if spec.shape.num_experts else "none"}
    values |= zip(INDEPENDENT, axes_of(spec.layout), strict=True)
    if not (spec.variant or spec.kernel.knobs):
        return values
    return values | {f"{_KNOB_PREFIX}{knob}": str(value) for knob, value in spec.flag_values.items()}


def regime(spec: RunSpec, links: Network) -> str:
    """The regime of a run on these links."""
    if links.slow and spec.nodes >= MANY_NODES:
        return "slow_many_nodes"
    return ("slow" if links.slow else "fast") + ("_pipeline" if spec.layout.pp > 1 else "")
