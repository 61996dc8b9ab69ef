"""How long programs take to start, learnt from the runs that have started, and what follows for the next ones.

A start is everything from the start of the ranks to the end of the first step: imports, connections, compilation. The
first run of a program is priced by a constant of the device, all others by what the runs before them have measured.
"""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median_low

from ultrabench.result import RunResult, Status
from ultrabench.run import Task

LIMIT_FACTOR = 3.0
"""A run may take this many times its expected duration, and its start this many times the expected one, if that is more
than the limits of the configuration."""
_OUT_OF_TIME = (Status.TIMEOUT, Status.CANCELLED)
"""Statuses of runs that would have continued."""


def expected_start_s(results: Iterable[RunResult], predicted_s: float) -> float:
    """Seconds that a start is expected to take after these results of the same program on equally many nodes.

    The middle start counts, of two middle ones the shorter, since a first run may fill the caches of compilers. While
    no run has reached its first step, a start is at least as long as the longest run that ended without one because
    its time was over.

    Args:
        predicted_s: the seconds where no result says more.
    """
    starts_s, unfinished_starts_s = list[float](), [predicted_s]
    for result in results:
        if result.init_time_s is not None:
            starts_s.append(result.init_time_s)
        elif result.status in _OUT_OF_TIME and result.duration_s is not None:
            unfinished_starts_s.append(result.duration_s)
    return median_low(starts_s) if starts_s else max(unfinished_starts_s)


def with_measured_start(task: Task, results: Iterable[RunResult]) -> Task:
    """The task with the duration and the limit that follow from the starts of runs in its allocation, if they are longer.

    Its launcher knew no start, or only those of runs that had ended before.
    """
    excess_s = expected_start_s(results, task.predicted_start_s) - task.predicted_start_s
    if excess_s <= 0:
        return task
    duration_s = task.predicted_duration_s + excess_s
    return replace(
        task,
        predicted_start_s=task.predicted_start_s + excess_s,
        predicted_duration_s=duration_s,
        limit_s=max(task.limit_s, LIMIT_FACTOR * duration_s),
    )
