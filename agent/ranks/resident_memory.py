"""The largest resident set of each rank that is a program of the user, as Linux counts it."""

import time
from collections.abc import Iterator, Mapping

from ultrabench import processes

WALK_INTERVAL_S = 1.0
"""Seconds between two searches for descendants of ranks, which read all processes of the host."""


class ResidentMemory:
    """Reads the peaks of the ranks of a run: of the largest process among a rank and its descendants.

    Linux keeps the peak of a process only until its end, so it is read again and again. A program that starts the
    trainer as another process, such as a shell or torchrun, is small itself.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the ranks of the last run."""
        self._peak_by_rank = dict[int, int]()
        self._pids_by_rank = dict[int, set[int]]()
        self._walked_s = 0.0

    def grown(self, pid_by_rank: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Each rank whose peak has grown since the last call, and the peak in bytes.

        Args:
            pid_by_rank: the processes of the ranks that run, each of which has begun to execute its program.
        """
        if (now_s := time.monotonic()) - self._walked_s >= WALK_INTERVAL_S:
            self._walked_s = now_s
            self._pids_by_rank = processes.descendants_of_each(pid_by_rank)
        for rank, pid in pid_by_rank.items():
            pids = {pid, *self._pids_by_rank.get(rank, ())}
            peak_bytes = max(map(processes.peak_resident_bytes, pids))
            if peak_bytes > self._peak_by_rank.get(rank, 0):
                self._peak_by_rank[rank] = peak_bytes
                yield rank, peak_bytes
