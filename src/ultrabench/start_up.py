"""How long programs take to start, learnt from the runs that have started, and what follows for the next ones.

A start is everything from the start of the ranks to the end of the first step: imports, connections, compilation. The
first run of a program is priced by a constant of the device, all others by what the runs before them have measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_low

from ultrabench.result import SLOWER, RunResult, Status
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


def with_measured_times(task: Task, results: Sequence[RunResult]) -> Task:
    """The task with the start, the duration and the limit that follow from runs in its allocation, if they are longer.

    Its launcher knew no run, or only those that had ended before. A run that is measured to its end is expected to
    take as long as the middle one of those before it, so that the end of the allocation does not cut it off.
    """
    start_s = max(task.predicted_start_s, expected_start_s(results, task.predicted_start_s))
    whole_runs_s = [
        r.duration_s for r in results if r.status == Status.OK and r.stopped != SLOWER and r.duration_s
    ]
    usual_s = median_low(whole_runs_s) if whole_runs_s else 0.0
    duration_s = max(task.predicted_duration_s + start_s - task.predicted_start_s, usual_s)
    if duration_s == task.predicted_duration_s:
        return task
    return replace(
        task,
        predicted_start_s=start_s,
        predicted_duration_s=duration_s,
        limit_s=max(task.limit_s, LIMIT_FACTOR * duration_s),
    )
