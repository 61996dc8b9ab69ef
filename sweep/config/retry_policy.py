"""The settings of configs/retry/: how often each kind of failure is tried again."""

from dataclasses import dataclass
from typing import Annotated

from ultrabench.allowed import Count, at_least, between, require_allowed
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.result import CAUSES, RunResult, Status

OUTSIDE = frozenset({Status.NODE_FAIL, Status.PREEMPTED, Status.LOST, Status.CANCELLED})
"""Statuses of failures that are not the run's fault. Those of one launch are counted together."""
Attempts = Annotated[int, between(0, 100)]
"""Number of further attempts that the configuration may allow."""
FAILURES = frozenset(Status) - {Status.OK, Status.SKIPPED, Status.REJECTED}
ATTEMPTS = (*sorted(FAILURES), "suspect")
"""Keys of retry.attempts: the statuses of failures, and `suspect` for an ok run whose number is in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The settings of configs/retry/, whose files explain each of them."""

    attempts: dict[str, Attempts]
    causes: dict[str, Attempts]
    backoff_s: Annotated[float, at_least(0.0)]
    backoff_max_s: Annotated[float, at_least(0.0)]
    max_excluded: Annotated[int, at_least(0)]
    forgive: tuple[str, ...]
    breaker: Count | None

    def __post_init__(self) -> None:
        require_allowed(self, "retry.")
        if strangers := sorted(self.attempts.keys() - {*ATTEMPTS}):
            raise ConfigError(unknown_name("status in retry.attempts", strangers[0], ATTEMPTS))
        if strangers := sorted(self.causes.keys() - {*CAUSES}):
            raise ConfigError(unknown_name("cause in retry.causes", strangers[0], CAUSES))
        if missing := sorted({*ATTEMPTS} - self.attempts.keys()):
            raise ConfigError(f"retry.attempts lacks {', '.join(missing)}; give a number for each status")

    def kind(self, result: RunResult) -> str:
        """The name under which a failure is counted: its cause, `outside`, or its status."""
        if result.cause in self.causes:
            return str(result.cause)
        return "outside" if result.status in OUTSIDE else result.status.value

    def allowed(self, result: RunResult) -> int:
        """How many more attempts a run may have after failures of this kind."""
        return self.causes.get(str(result.cause), self.attempts.get(result.status.value, 0))
