"""When and how much a launch submits again after the batch system did not take its jobs."""

from collections.abc import Set

from ultrabench.launchers.launcher import NotTakenError

FIRST_PAUSE_S = 1.0
"""Seconds to wait after the first refusal; each further wait is twice as long."""
MAX_PAUSE_S = 120.0
"""Longest time in seconds between two submissions."""
MAX_UNKNOWN_TRIES = 6
"""Number of refusals in unknown words after which a launch gives up from which the batch system never took a job."""


class Refusals:
    """The refusals since the batch system last took a job of a launch."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: seconds to wait in which no job of the sweep is alive."""
        self.latest: NotTakenError | None = None
        """The latest refusal; None if the batch system took what was submitted last."""
        self.max_jobs: int | None = None
        """Largest number of jobs in the next submission; None means no limit."""
        self._patience_s = patience_s
        self._num_pauses = self._num_unknown = 0
        self._retry_at = 0.0
        self._alive_names: Set[str] = frozenset()
        self._alone_since: float | None = None
        """When a job was first refused while none was alive."""

    def look(self, alive_names: Set[str], now_s: float) -> None:
        """Takes note of the living jobs of the sweep: when one has ended, the next one may be accepted."""
        if self._alive_names - alive_names:
            self._retry_at, self._num_pauses = now_s, 0
        self._alive_names = alive_names
        if alive_names:
            self._alone_since = None

    def rest(self) -> None:
        """Takes note that there is nothing to submit now, so that no time of waiting counts."""
        self._alone_since = None

    def may_submit(self, now_s: float) -> bool:
        """Whether it is time for the next submission."""
        return now_s >= self._retry_at

    def add(self, refusal: NotTakenError, num_jobs: int, now_s: float) -> None:
        """Takes note of the refusal of `num_jobs` jobs."""
        self.latest = refusal
        if refusal.fewer_may_fit and num_jobs > 1:
            self.max_jobs = num_jobs // 2
            return
        self.max_jobs = 1
        self._retry_at = now_s + min(FIRST_PAUSE_S * 2.0**self._num_pauses, MAX_PAUSE_S)
        self._num_pauses += 1
        self._num_unknown += not refusal.is_known
        if not self._alive_names and self._alone_since is None:
            self._alone_since = now_s

    def accept(self, num_jobs: int) -> None:
        """Takes note that the batch system took `num_jobs` jobs; if these were all, the next may be twice as many."""
        if self.max_jobs is not None and num_jobs >= self.max_jobs:
            self.max_jobs *= 2
        self.latest, self._alone_since = None, None
        self._num_pauses = self._num_unknown = 0

    def has_waited_enough(self, now_s: float) -> bool:
        """Whether the batch system has refused all jobs for longer than the patience, while none was alive."""
        return self._alone_since is not None and now_s - self._alone_since >= self._patience_s

    @property
    def are_unknown(self) -> bool:
        """Whether so many refusals in unknown words followed each other that a wrong setting is likely."""
        return self._num_unknown >= MAX_UNKNOWN_TRIES
