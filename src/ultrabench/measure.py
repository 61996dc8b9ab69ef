"""How a run is measured: how many steps, how precisely, and for how long."""

import math
from dataclasses import dataclass

from ultrabench.errors import ConfigError

MOST_CONFIRM = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Measuring policy, no part of a run's identity; the usual values stand in configs/measure/."""

    warmup_steps: int
    """Steps dropped before measuring."""
    min_steps: int
    """Measured steps at least; fewer give no interval."""
    max_steps: int
    """Measured steps at most."""
    target_ci95_rel: float
    """Stop when the half-width of the 95 % interval of the median step time is below this."""
    loss_step: int
    """The step whose loss is compared between layouts; every layout runs at least this many."""
    race: float | None
    """Stop a run whose fastest step, of two measured ones at least, takes longer than this many times
    the step of the best run of its cell; None: measure all of them to the end."""
    confirm: int
    """Independent measurements of the contenders of a cell, each in another allocation."""
    deadline_floor_s: float
    """No silence shorter than this is called a hang."""
    start_deadline_s: float
    """From the start of the ranks to the end of the first step, and while ranks look inside themselves,
    without any progress."""
    run_limit_s: float
    """Wall-clock limit of one attempt; three times the predicted duration where that is longer,
    and doubled after each time-out."""
    log_mib_per_rank: float
    """MiB that are kept of each rank's log when a run fails, half of them from its beginning; the same
    holds for each file of evidence of a hang."""

    @property
    def priced_steps(self) -> int:
        """Steps that a run is expected to take, for its price."""
        return self.warmup_steps + (self.min_steps + self.max_steps) // 2

    def __post_init__(self) -> None:
        if not 6 <= self.min_steps <= self.max_steps:
            raise ConfigError(
                f"measure.min_steps={self.min_steps}, measure.max_steps={self.max_steps}; "
                "needs 6 <= min_steps <= max_steps (an interval takes 6 samples)"
            )
        limits = (
            "target_ci95_rel",
            "deadline_floor_s",
            "start_deadline_s",
            "run_limit_s",
            "log_mib_per_rank",
        )
        for name in limits:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"measure.{name}={getattr(self, name)}; must be > 0, and finite")
        if self.race is not None and not 1 < self.race < math.inf:
            raise ConfigError(
                f"measure.race={self.race}; must be > 1, or null to measure every run to the end"
            )
        if not 1 <= self.confirm <= MOST_CONFIRM:
            raise ConfigError(f"measure.confirm={self.confirm}; must be 1 to {MOST_CONFIRM}")
        if self.warmup_steps < 1 or self.loss_step < 1:
            raise ConfigError("measure.warmup_steps and measure.loss_step must be >= 1")
        if self.warmup_steps + self.min_steps < self.loss_step:
            raise ConfigError(
                f"measure.loss_step={self.loss_step} is never reached with warmup_steps="
                f"{self.warmup_steps} and min_steps={self.min_steps}"
            )
