"""Logs the runs of a sweep into a tracker as they end.

`python -P -m ultrabench.analysis.studies.export.live KIND FOLDER` reads the journal of the sweep in FOLDER until its
standard input ends, logs what is left, and ends, too. It is a process of its own with the lowest priority: what a
tracker's library does, and a tracker that is away, slow or broken, reaches no run and no launcher.
A failure becomes one line of tracking.log in the folder of the sweep; then it waits, and tries again.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.studies.export.tracked_runs import TrackedRun, tracked_runs
from ultrabench.analysis.studies.export.trackers import Tracker, first_line, log_results, open_tracker
from ultrabench.errors import UltrabenchError
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalReader
from ultrabench.store.state import Fold

POLL_S = 2.0
"""Seconds between two looks at the journal."""
ANSWER_DEADLINE_S = 60.0
"""Seconds after which a tracker that does not answer counts as away."""
FIRST_RETRY_WAIT_S, MAX_RETRY_WAIT_S = 10.0, 300.0
"""Seconds to wait after a failure; each further one in a row doubles them, up to the longest."""
EXIT_DEADLINE_S = 300.0
"""Seconds after the end of standard input after which the process exits, whatever the library does."""


@dataclass(slots=True)
class LiveExport:
    """Logs the runs of one sweep, and remembers which."""

    tracker_kind: str
    folder: SweepFolder
    journal: JournalReader
    sweep_state: Fold = field(default_factory=Fold)
    logged_runs: dict[str, TrackedRun] = field(default_factory=dict)
    """run_id -> the run as it was logged."""
    num_logged_attempts: int = 0
    """Number of attempts that had ended when all was logged."""
    tracker: Tracker | None = None
    latest_failure: str = ""
    """The latest failure, until all is logged."""
    retry_wait_s: float = 0.0
    """Seconds to wait before the next try."""

    def log(self, *, is_last: bool) -> bool:
        """Logs what is new and, the last time, page and table; returns False after a failure, which it notes."""
        try:
            self._log(is_last)
        except Exception as error:
            self._note_failure(first_line(error))
            return False
        self.retry_wait_s, self.latest_failure = 0.0, ""
        return True

    def _log(self, is_last: bool) -> None:
        attempts = self.sweep_state.add(self.journal.poll()).attempts.values()
        num_ended = sum(attempt.result is not None for attempt in attempts)
        if num_ended == self.num_logged_attempts and not (is_last and num_ended):
            return
        table = collect([self.folder], lambda message: None)
        for run in tracked_runs(table, has_ranks=False):
            if self.logged_runs.get(run.run_id) != run:
                with _deadline(ANSWER_DEADLINE_S):
                    self._open_tracker().log(run)
                self.logged_runs[run.run_id] = run
        if is_last:
            with _deadline(ANSWER_DEADLINE_S):
                log_results(self._open_tracker(), (), table, self.folder.name)
        self.num_logged_attempts = num_ended

    def _open_tracker(self) -> Tracker:
        self.tracker = self.tracker or open_tracker(self.tracker_kind, None, self.folder.path.parent)
        return self.tracker

    def _note_failure(self, failure: str) -> None:
        self.retry_wait_s = min(max(FIRST_RETRY_WAIT_S, 2 * self.retry_wait_s), MAX_RETRY_WAIT_S)
        if failure != self.latest_failure:
            self.latest_failure = failure
            with (self.folder.path / "tracking.log").open("a") as log_file:
                log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.tracker_kind}: {failure}\n")


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises UltrabenchError in the body when it takes longer."""

    def raise_error(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise UltrabenchError(f"no answer within {seconds:.0f} s")

    signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(tracker_kind: str, sweep_path: Path) -> int:
    """Follows a sweep until standard input ends; returns 0 if all was logged at last."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it runs only on cores that would be idle
    live_export = LiveExport(tracker_kind, SweepFolder(sweep_path), JournalReader(sweep_path / "journal"))
    while not select.select([sys.stdin], [], [], max(POLL_S, live_export.retry_wait_s))[0]:
        live_export.log(is_last=False)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    exit_timer = threading.Timer(EXIT_DEADLINE_S, os._exit, (1,))
    exit_timer.daemon = True
    exit_timer.start()
    return 0 if live_export.log(is_last=True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
