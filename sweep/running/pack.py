"""Which attempts share an allocation, and how long it may take."""

import math
from collections.abc import Mapping, Sequence

from ultrabench.sweep.candidate import Cell
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.running.attempts import PlannedAttempt

START_S = 120.0
"""Seconds for the start of the agents, their rendezvous and the preflight."""
MARGIN = 1.5
ROUND_S = 300.0
"""Limits are rounded up to this, so that jobs of one shape are alike."""
RUN_LIMIT_FACTOR = 3.0
"""A run may take this many times its predicted duration, if that is more than measure.run_limit_s."""


CONTROL_SHARE = 0.1
"""Largest share of an allocation's time for its control run; where it would take more, the allocation is longer."""


def run_limit_s(todo: PlannedAttempt, config: SweepConfig) -> float:
    """Wall-clock limit of one attempt, in seconds."""
    predicted = RUN_LIMIT_FACTOR * todo.candidate.prediction.duration_s
    return max(config.measure.run_limit_s, predicted) * todo.patience


def allocation_limit_s(group: Sequence[PlannedAttempt], config: SweepConfig) -> float:
    """Wall-clock limit of an allocation: its predicted duration with a margin, and one slow run.

    A run that is cut off by the end of its allocation is run again, so the margin need not hold
    the limits of all runs together.
    """
    if config.launcher.time_minutes is not None:
        return 60.0 * config.launcher.time_minutes
    predicted = sum(t.candidate.prediction.duration_s for t in group)
    slowest = max(run_limit_s(t, config) for t in group)
    return ROUND_S * math.ceil((START_S + MARGIN * predicted + slowest) / ROUND_S)


def pack(
    todo: Sequence[PlannedAttempt], config: SweepConfig, control_s: Mapping[Cell, float] | None = None
) -> list[tuple[PlannedAttempt, ...]]:
    """The attempts in groups, one allocation each, in order.

    A group holds one number of nodes and at most one repeat of a run, of one model where a control
    layout is run beside them, and is filled up to launcher.allocation_minutes of predicted duration
    or launcher.pack runs.

    Args:
        control_s: predicted seconds of the control run of each cell; allocations are long enough to bear it.
    """
    control_s = control_s or {}
    groups: list[list[PlannedAttempt]] = []
    filled: dict[int, float] = {}
    latest: dict[tuple[object, ...], int] = {}
    minutes, most = config.launcher.allocation_minutes, config.launcher.pack
    for item in todo:
        model = item.candidate.shape.name if config.launcher.control else None
        kind = (item.candidate.nodes, item.key.repeat, model)
        at = latest.get(kind)
        duration = item.candidate.prediction.duration_s
        if at is not None:
            least_s = control_s.get(item.candidate.cell, 0.0) / CONTROL_SHARE
            over_time = filled[at] + duration > 60 * minutes and filled[at] >= least_s
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
