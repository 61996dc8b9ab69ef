"""Which attempts share an allocation, and how long it may take."""

from collections.abc import Sequence

from ultrabench.sweep.config import SweepConfig
from ultrabench.sweep.decide import Todo

RUN_LIMIT_FACTOR = 3.0
"""A run may take this many times its predicted duration, if that is more than measure.run_limit_s."""


def run_limit_s(todo: Todo, config: SweepConfig, steps: int) -> float:
    """Wall-clock limit of one attempt, in seconds."""
    predicted = RUN_LIMIT_FACTOR * todo.candidate.duration_s(steps)
    return max(config.measure.run_limit_s, predicted) * todo.patience


def pack(todo: Sequence[Todo], config: SweepConfig, steps: int) -> list[tuple[Todo, ...]]:
    """The attempts in groups, one allocation each, in order.

    A group holds one number of nodes and at most one repeat of a run, and is filled up to
    launcher.allocation_minutes of predicted duration or launcher.pack runs.
    """
    groups: list[list[Todo]] = []
    filled: dict[int, float] = {}
    latest: dict[tuple[int, int], int] = {}
    minutes, most = config.launcher.allocation_minutes, config.launcher.pack
    for item in todo:
        kind = (item.candidate.nodes, item.key.repeat)
        at = latest.get(kind)
        duration = item.candidate.duration_s(steps)
        if at is not None:
            over_time = filled[at] + duration > 60 * minutes
            over_count = most is not None and len(groups[at]) >= most
            if over_time or over_count:
                at = None
        if at is None:
            at = latest[kind] = len(groups)
            groups.append([])
            filled[at] = 0.0
        groups[at].append(item)
        filled[at] += duration
    return [tuple(group) for group in groups]
