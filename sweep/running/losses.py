"""Compares losses: layouts of the same model and batch must have the same loss, or one has trained wrongly.

A loss is compared with the other losses of the sweep, so an attempt may become an outlier, or stop being one,
when new results come in. This changes only the state; the journal keeps what was measured.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState

FEWEST = 3
"""Smallest number of comparable layouts among which one can be an outlier."""
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-6, "fp64": 1e-9}
"""Precision -> largest relative difference of two losses that count as equal; the order of sums causes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGroup:
    """A group of attempts with the same loss."""

    losses: Mapping[AttemptKey, float]
    """The losses of the attempts, the smallest first."""
    tolerance: float
    """Largest relative difference between neighbouring losses."""

    @property
    def run_ids(self) -> frozenset[str]:
        """The run_ids of these attempts; repeats of a run count once."""
        return frozenset(key.run_id for key in self.losses)

    def __str__(self) -> str:
        """The median loss and its spread, such as `6.93 +- 0.0001`."""
        losses = [*self.losses.values()]
        spread = (losses[-1] - losses[0]) / 2
        return self.text(median(losses)) + (f" +- {spread:.1g}" if spread else "")

    def text(self, loss: float) -> str:
        """A loss with one digit more than losses within the tolerance have in common."""
        return f"{loss:.{2 - math.floor(math.log10(self.tolerance))}g}"


def with_loss_outliers(state: SweepState) -> SweepState:
    """A copy of `state` in which the results of `invalid_attempts` have the status `invalid`."""
    attempts = dict(state.attempts)
    for key, reason in invalid_attempts(state).items():
        held = attempts[key]
        assert held.result is not None
        attempts[key] = replace(held, result=replace(held.result, status=Status.INVALID, reason=reason))
    return replace(state, attempts=attempts)


def invalid_attempts(state: SweepState) -> dict[AttemptKey, str]:
    """Ok attempts whose loss differs from that of most layouts of their model and batch -> the reason.

    An attempt is invalid only where there are at least three layouts and two thirds of them agree.
    """
    found = {}
    for most, *others in loss_groups(state):
        if _agreed(most, others):
            for key, loss in (item for group in others for item in group.losses.items()):
                result = state.attempts[key].result
                at = f" at step {result.loss_step}" if result and result.loss_step is not None else ""
                number = len(most.run_ids - {key.run_id})
                told = f"loss {most.text(loss)}{at}; the other {number} layouts of this model and batch"
                found[key] = f"{told} have {most}"
    return dict(sorted(found.items()))


def disputed_attempts(state: SweepState) -> dict[AttemptKey, str]:
    """Ok attempts of layouts that differ in their loss without a majority -> the reason."""
    found: dict[AttemptKey, str] = {}
    for groups in loss_groups(state):
        if not _agreed(groups[0], groups[1:]):
            shown = ", ".join(f"{len(g.run_ids)} of them have {g}" for g in groups[:3])
            reason = f"layouts of this model and batch differ in their loss: {shown}"
            found |= {key: reason for group in groups for key in group.losses}
    return found


def loss_groups(state: SweepState) -> list[list[LossGroup]]:
    """For each workload, the groups of ok attempts that have the same loss, the group of most layouts first.

    Workloads with fewer than three layouts are left out. Losses are sorted, and neighbours within the tolerance
    belong to one group, however long the chain is. So a new attempt may join two groups into one, but never
    split a group.
    """
    comparable: dict[tuple[float, object], dict[AttemptKey, float]] = defaultdict(dict)
    for key, attempt in sorted(state.attempts.items()):
        if attempt.result and attempt.ok and attempt.result.loss_final is not None:
            try:
                comparable[_tolerance(attempt), _workload(attempt)][key] = attempt.result.loss_final
            except (AttributeError, KeyError, TypeError):
                continue  # the claim of the attempt was lost or damaged
    return [
        _groups(losses, tolerance)
        for (tolerance, _), losses in comparable.items()
        if len({key.run_id for key in losses}) >= FEWEST
    ]


def _groups(losses: Mapping[AttemptKey, float], tolerance: float) -> list[LossGroup]:
    parts: list[dict[AttemptKey, float]] = []
    latest = -math.inf
    for key, loss in sorted(losses.items(), key=lambda item: item[1]):
        if not parts or loss - latest > tolerance * abs(loss):
            parts.append({})
        parts[-1][key] = latest = loss
    groups = [LossGroup(losses=part, tolerance=tolerance) for part in parts]
    return sorted(groups, key=lambda group: -len(group.run_ids))


def _tolerance(attempt: AttemptState) -> float:
    """The tolerance of the precision; programs of the user have that of bf16, as they may round losses."""
    kernel = (attempt.spec or {})["kernel"]
    return TOLERANCE[kernel["precision"] if kernel["kind"] == "embedded" else "bf16"]


def _workload(attempt: AttemptState) -> object:
    """Everything that decides a loss: model, batch, program, versions and step.

    Raises:
        TypeError: the claim holds something that cannot be hashed.
    """
    spec, result = attempt.spec or {}, attempt.result
    shape = frozenset(item for item in spec["shape"].items() if item[0] != "name")
    kernel = (spec["kernel"]["name"], spec["kernel"]["precision"])
    return shape, frozenset(spec["workload"].items()), kernel, result and (result.env_id, result.loss_step)


def _agreed(most: LossGroup, others: Iterable[LossGroup]) -> bool:
    """Whether at least two thirds of the layouts belong to the group of most layouts."""
    return len(most.run_ids) >= 2 * len(frozenset[str]().union(*(group.run_ids for group in others)))
