"""The settings of configs/retry/: how often each kind of failure is tried again."""

import math
from dataclasses import dataclass

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.result import CAUSES, RunResult, Status

OUTSIDE = frozenset({Status.NODE_FAIL, Status.PREEMPTED, Status.LOST, Status.CANCELLED})
"""Statuses of failures that are not the run's fault. Those of one launch are counted together."""
MOST_ATTEMPTS = 100
"""Largest number of attempts that the configuration may allow."""
FAILURES = frozenset(Status) - {Status.OK, Status.SKIPPED, Status.REJECTED}
ATTEMPTS = (*sorted(FAILURES), "suspect")
"""Keys of retry.attempts: the statuses of failures, and `suspect` for an ok run whose number is in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The settings of configs/retry/, whose files explain each of them."""

    attempts: dict[str, int]
    causes: dict[str, int]
    backoff_s: float
    backoff_max_s: float
    max_excluded: int
    forgive: tuple[str, ...]
    breaker: int | None

    def __post_init__(self) -> None:
        for name in (*self.attempts, *ATTEMPTS):
            if name not in ATTEMPTS:
                raise ConfigError(unknown_name("status in retry.attempts", name, ATTEMPTS))
            if name not in self.attempts:
                raise ConfigError(
                    f"retry.attempts lacks {name}; it needs a number for each of {', '.join(ATTEMPTS)}"
                )
        numbers: dict[str, float] = {f"attempts.{k}": v for k, v in self.attempts.items()}
        numbers |= {f"causes.{k}": v for k, v in self.causes.items()}
        numbers |= {"backoff_s": self.backoff_s, "backoff_max_s": self.backoff_max_s,
                    "max_excluded": self.max_excluded}  # fmt: skip
        for name in self.causes:
            if name not in CAUSES:
                raise ConfigError(unknown_name("cause in retry.causes", name, CAUSES))
        for name, value in numbers.items():
            most = MOST_ATTEMPTS if "." in name else math.inf
            if not 0 <= value <= most or value == math.inf:
                limit = "must be finite and >= 0" if most == math.inf else f"must be 0 to {most:g}"
                raise ConfigError(f"retry.{name}={value}; {limit}")
        if self.breaker is not None and self.breaker < 1:
            raise ConfigError(f"retry.breaker={self.breaker}; must be >= 1")

    def kind(self, result: RunResult) -> str:
        """The name under which a failure is counted: its cause, `outside`, or its status."""
        if result.cause in self.causes:
            return str(result.cause)
        return "outside" if result.status in OUTSIDE else result.status.value

    def allowed(self, result: RunResult) -> int:
        """How many more attempts a run may have after failures of this kind."""
        if result.cause in self.causes:
            return self.causes[str(result.cause)]
        return self.attempts.get(result.status.value, 0)
