"""Compares losses: layouts of the same model and batch must have the same loss, or one has trained wrongly.

A loss is compared with the other losses of the sweep, so an attempt may become an outlier, or stop being one,
when new results come in. This changes only the state; the journal keeps what was measured.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
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

    attempts: tuple[AttemptState, ...]
    """The attempts, the smallest loss first."""
    tolerance: float
    """Largest relative difference between neighbouring losses."""

    @property
    def run_ids(self) -> frozenset[str]:
        """The run_ids of these attempts; repeats of a run count once."""
        return frozenset(attempt.key.run_id for attempt in self.attempts)

    def __str__(self) -> str:
        """The median loss and its spread, such as `6.93 +- 0.0001`."""
        losses = [_loss(attempt) for attempt in self.attempts]
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
        if _outvotes(most, others):
            for attempt in (a for group in others for a in group.attempts):
                found[attempt.key] = _reason(attempt, most)
    return dict(sorted(found.items()))


def disputed_attempts(state: SweepState) -> dict[AttemptKey, str]:
    """Ok attempts of layouts that differ in their loss without a majority -> the reason."""
    found: dict[AttemptKey, str] = {}
    for groups in loss_groups(state):
        enough = len(_run_ids(groups)) >= FEWEST
        if enough and len(groups) > 1 and not _outvotes(groups[0], groups[1:]):
            shown = ", ".join(f"{len(g.run_ids)} of them have {g}" for g in groups[:3])
            reason = f"layouts of this model and batch differ in their loss: {shown}"
            found |= {attempt.key: reason for group in groups for attempt in group.attempts}
    return found


def loss_groups(state: SweepState) -> list[list[LossGroup]]:
    """For each workload, the groups of ok attempts that have the same loss, the group of most layouts first.

    Losses are sorted, and neighbours within the tolerance belong to one group, however long the chain is.
    So a new attempt may join two groups into one, but never split a group.
    """
    comparable: dict[tuple[float, object], list[AttemptState]] = defaultdict(list)
    for _, attempt in sorted(state.attempts.items()):
        if attempt.result and attempt.result.status == Status.OK and attempt.result.loss_final is not None:
            try:
                comparable[_tolerance(attempt), _workload(attempt)].append(attempt)
            except (AttributeError, KeyError, TypeError):
                continue  # the claim of the attempt was lost or damaged
    return [_groups(attempts, tolerance) for (tolerance, _), attempts in comparable.items()]


def _groups(attempts: list[AttemptState], tolerance: float) -> list[LossGroup]:
    parts: list[list[AttemptState]] = []
    for attempt in sorted(attempts, key=_loss):
        loss = _loss(attempt)
        if parts and loss - _loss(parts[-1][-1]) <= tolerance * abs(loss):
            parts[-1].append(attempt)
        else:
            parts.append([attempt])
    groups = [LossGroup(attempts=tuple(part), tolerance=tolerance) for part in parts]
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


def _loss(attempt: AttemptState) -> float:
    assert attempt.result is not None
    assert attempt.result.loss_final is not None
    return attempt.result.loss_final


def _run_ids(groups: Iterable[LossGroup]) -> frozenset[str]:
    return frozenset[str]().union(*(group.run_ids for group in groups))


def _outvotes(most: LossGroup, others: list[LossGroup]) -> bool:
    enough = len(_run_ids([most, *others])) >= FEWEST
    return enough and len(most.run_ids) >= 2 * len(_run_ids(others))


def _reason(attempt: AttemptState, most: LossGroup) -> str:
    """Why an attempt is invalid: its loss and its step, and the loss of most layouts."""
    step = attempt.result.loss_step if attempt.result else None
    at = "" if step is None else f" at step {step}"
    others = len(most.run_ids - {attempt.key.run_id})
    return f"loss {most.text(_loss(attempt))}{at}; the other {others} layouts of this model and batch have {most}"
