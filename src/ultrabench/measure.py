"""The settings of configs/measure/: how many steps are measured, how precisely, and for how long."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from ultrabench.allowed import Count, Positive, above, at_least, between, one_of, require_allowed
from ultrabench.attention_type import FLOPS_FORMULAS
from ultrabench.errors import ConfigError
from ultrabench.step_time import MIN_SAMPLES

PARAM_STATE_BYTES = 12
"""Bytes of a parameter and its two moments in a checkpoint, in fp32."""
WRITE_BYTES_PER_S = 1e9
"""Bytes that a node writes to a file system in a second, for the price of a run; measured ones differ widely."""

FEW_WARMUP_STEPS = 2
"""Most steps before the measured ones in a start with few whole steps, unless the loss is compared later."""


PartialSteps = Annotated[
    Literal["off", "auto"] | tuple[int, int],
    Meta(description="off, auto or two numbers of micro-batches [g1, g2]"),
]
"""What measure.partial_steps may mean for a sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How runs are measured. It is no part of a run's identity; the usual values are in configs/measure/."""

    warmup_steps: Count
    """Smallest number of steps before the measured ones."""
    warmup_s: Annotated[float, at_least(0.0)] = 0.0
    """Shortest time of the warm-up in seconds, without the first step. In configuration files null means that of
    the hardware, which is 0 for programs of the user."""
    min_steps: int
    """Smallest number of measured steps; 6 or more are needed for an interval."""
    max_steps: int
    """Number of measured steps after which a run no longer waits for a narrower interval."""
    min_s: Annotated[float, at_least(0.0)] = 0.0
    """Shortest time of the measured steps together, in seconds. No number of steps ends a run before. In
    configuration files null means that of the hardware, as for `warmup_s`."""
    target_ci95_rel: Positive
    """A run stops when the half-width of the 95 % interval of its median step time, relative to that median,
    is below this."""
    loss_step: Count
    """The step whose loss is compared between layouts; every layout runs at least this many steps."""
    race: Annotated[float, above(1)] | None
    """A run stops early when its fastest step takes more than this many times the step time of the best run
    of its cell; at least two steps are measured before. None means that every run is measured to the end."""
    confirm: Annotated[int, between(1, 100)]
    """Number of independent measurements of each contender of a cell, each in another allocation."""
    deadline_floor_s: Positive
    """Shortest time in seconds without progress after which a run may count as hanging."""
    start_deadline_s: Positive
    """Longest time in seconds without progress until the first step ends, and while a run is traced."""
    run_limit_s: Positive
    """Wall-clock limit of one attempt in seconds. It is three times the predicted duration where that is
    longer, and doubles after each time-out."""
    log_mib_per_rank: Positive
    """MiB of each rank's log that are kept when a run fails, half of them from its beginning. The same limit
    holds for each file of evidence of a hang."""
    flops_formula: Annotated[str, one_of(*FLOPS_FORMULAS)]
    """The formula that counts the FLOPs of a token, which MFU follows from; the latest launch's formula counts."""

    max_foreign_load: Annotated[float, between(0, 1)] | None = 0.1
    """Share of a node's cores that other programs may use during the steps; beyond it the number is suspect, and so
    it is if somebody else uses a GPU of the run. None means that neither is judged. In configuration files auto means
    `max_foreign_load` of the kind of device. The default is for sweeps that began before there was this key."""

    checkpoint: bool = False
    """Whether each run saves and loads its sharded state after the measured steps."""
    checkpoint_folder: Annotated[str, Meta(min_length=1, description="a folder")] | None = None
    """Folder that all nodes see, in which the state is saved and removed again; None means that of the sweep."""
    checkpoint_limit_s: Positive = 600.0
    """Longest time in seconds of all saves and loads of a run; after it they are given up, and the steps stand."""

    partial_steps: PartialSteps | None = "off"
    """Whether runs are measured by steps of fewer micro-batches, from which the time of a whole step follows: off, auto
    (the layout chooses how many, if that saves much), or the two numbers of micro-batches of such steps. None means
    that the strategy of the sweep decides. The default is for sweeps that began before there was this key."""

    @property
    def priced_steps(self) -> int:
        """Number of measured steps of a run, or turns of parts, for its price."""
        return (self.min_steps + self.max_steps) // 2

    def priced_s(self, step_time_s: float, wider_s: float = 0.0, p_wider: float = 0.0) -> float:
        """Seconds of all steps of a run for its price, if a step takes `step_time_s`.

        Args:
            wider_s: seconds of a turn of the wider slice by which parts of steps may be measured after max_steps turns.
            p_wider: how likely that is.
        """
        warmup_s = max(self.warmup_steps * step_time_s, self.warmup_s)
        return warmup_s + self._priced_measured_s(step_time_s, wider_s, p_wider, self.min_s)

    def _priced_measured_s(self, step_time_s: float, wider_s: float, p_wider: float, min_s: float) -> float:
        """Seconds of measured steps for the price, at least `min_s`; the other arguments are those of `priced_s`."""
        usual_s = max(self.priced_steps * step_time_s, min_s)
        longest_s = max(self.max_steps * step_time_s, min_s) + self.priced_steps * wider_s
        return usual_s + p_wider * (longest_s - usual_s)

    @property
    def few_steps(self) -> "Measure":
        """How few whole steps are measured: the fewest that have an interval.

        Each of them is the mean of many micro-batches, so that its noise is small, and the start is as warm after the
        first ones as after as many seconds of others. They reach the step whose loss is compared.
        """
        warmup_steps = max(min(self.warmup_steps, FEW_WARMUP_STEPS), self.loss_step - MIN_SAMPLES)
        return replace(self, warmup_steps=warmup_steps, min_steps=MIN_SAMPLES, max_steps=MIN_SAMPLES)

    def priced_beside_parts_s(
        self, step_time_s: float, turn_s: float, wider_s: float = 0.0, p_wider: float = 0.0
    ) -> float:
        """Seconds of all steps of a run for its price, if a start measures few whole steps and then turns of parts; the
        other arguments are those of `priced_s`.
        """
        parts_s = self._priced_measured_s(turn_s, wider_s, p_wider, min_s=0.0)
        return self.few_steps.priced_s(step_time_s) + parts_s

    def checkpoint_s(self, num_params: int, nodes: int) -> float:
        """Seconds of two saves and a load of the state for the price of a run."""
        return min(self.checkpoint_limit_s, 3 * PARAM_STATE_BYTES * num_params / nodes / WRITE_BYTES_PER_S)

    def __post_init__(self) -> None:
        require_allowed(self, "measure.")
        if not 6 <= self.min_steps <= self.max_steps:
            fact = f"measure.min_steps={self.min_steps}, measure.max_steps={self.max_steps}"
            raise ConfigError(f"{fact}; needs 6 <= min_steps <= max_steps (an interval needs 6 samples)")
        if isinstance(self.partial_steps, tuple) and not 0 < self.partial_steps[0] < self.partial_steps[1]:
            fact = f"measure.partial_steps={[*self.partial_steps]}; needs [g1, g2] with 0 < g1 < g2"
            raise ConfigError(fact, "give two numbers of micro-batches, the smaller one first, such as [4,8]")
        if self.warmup_steps + self.min_steps < self.loss_step:
            steps_text = f"warmup_steps={self.warmup_steps} and min_steps={self.min_steps}"
            max_loss_step = self.warmup_steps + self.min_steps
            raise ConfigError(
                f"measure.loss_step={self.loss_step} is never reached with {steps_text}; use at most {max_loss_step}"
            )
