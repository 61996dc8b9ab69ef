"""How long the jobs of a sweep hold nodes, from the first job to the last, if none has to wait in a queue."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ultrabench.sweep.candidate import CellKey
from ultrabench.sweep.running.price import PlannedJob


class Schedule(NamedTuple):
    """When the last job of a sweep ends, and how many nodes its jobs hold."""

    end_s: float
    """Seconds from the first job to the end of the last one."""
    most_nodes: int
    """Largest number of nodes that jobs hold at the same time."""


def schedule(
    jobs: Sequence[PlannedJob],
    gpus_per_node: int,
    *,
    max_jobs: int,
    max_nodes: float = math.inf,
    one_by_one: bool = False,
    gpu_hours_of: Callable[[PlannedJob], float] = lambda job: job.gpu_hours,
) -> Schedule:
    """The schedule in which each job starts as soon as the limits allow.

    Args:
        max_jobs: largest number of jobs at a time.
        max_nodes: largest number of nodes of these jobs together; a larger job runs alone.
        one_by_one: whether the jobs of a cell follow each other, since each depends on the results of those before it.
        gpu_hours_of: the GPU hours of a job.
    """
    waiting, running, busy_cells = [*jobs], list[tuple[float, int, CellKey]](), set[CellKey]()
    now_s, num_free_nodes, most_nodes = 0.0, max_nodes, 0
    while waiting or running:
        started_indices = list[int]()
        for index, job in enumerate(waiting):
            if len(running) >= max_jobs:
                break
            cell = job.attempts[-1].candidate.cell
            if (running and job.nodes > num_free_nodes) or (one_by_one and cell in busy_cells):
                continue
            duration_s = 3600 * gpu_hours_of(job) / (gpus_per_node * job.nodes)
            heapq.heappush(running, (now_s + duration_s, job.nodes, cell))
            num_free_nodes -= job.nodes
            busy_cells.add(cell)
            started_indices.append(index)
        for index in reversed(started_indices):
            del waiting[index]
        most_nodes = max(most_nodes, sum(num_nodes for _, num_nodes, _ in running))
        now_s, num_nodes, cell = heapq.heappop(running)
        num_free_nodes += num_nodes
        busy_cells.discard(cell)
    return Schedule(now_s, most_nodes)
