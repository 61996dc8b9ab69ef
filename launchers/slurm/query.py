"""Asks Slurm about our jobs: seldom, with a time-out, and for a limited time if Slurm does not answer."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ultrabench.errors import ClusterError
from ultrabench.launchers.slurm import job as slurm_job
from ultrabench.launchers.slurm.command import CommandError, ask
from ultrabench.launchers.slurm.job import SACCT_FORMAT, SQUEUE_FORMAT, SlurmJob, sacct_jobs, squeue_jobs

FRESH_S = 2.0
"""Smallest number of seconds between two calls of squeue, even urgent ones."""
MOST_BACK_OFF_S = 300.0
IDS_A_COMMAND = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of squeue."""

    jobs: dict[str, SlurmJob]
    """Jobs by job_id; a job that has ended is listed until MinJobAge seconds after its end."""
    age_s: float
    """Seconds since squeue was called; a job that was submitted later cannot be in the answer."""
    error: str | None = None
    """Why the latest call failed, so that this is the answer of an earlier call; None if it did not fail."""

    def find(self, job_id: str) -> SlurmJob | None:
        """The job with this id, or the array that was cancelled as a whole before this element started."""
        return slurm_job.find(self.jobs, job_id)

    @property
    def stale(self) -> bool:
        """Whether Slurm did not answer the latest call."""
        return self.error is not None


class SlurmQuery:
    """Runs every query and cancellation of one launcher."""

    def __init__(
        self,
        user: str | None = None,
        *,
        poll_s: float = 30.0,
        timeout_s: float = 20.0,
        budget_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`user` is a name or number, by default ours; Slurm may fail to answer for `budget_s` seconds."""
        self.user = user or str(os.getuid())
        self._poll_s, self._timeout_s, self._budget_s, self._clock = poll_s, timeout_s, budget_s, clock
        self._jobs: dict[str, SlurmJob] | None = None
        self._asked_at = self._answered_at = self._failing_since = -float("inf")
        self._failures = 0
        self._error: str | None = None
        self._sacct_from = -float("inf")
        self._looked_up: dict[str, float] = {}
        self._accounts: dict[str, SlurmJob] = {}

    def ask(self, *words: str) -> str:
        """The output of a Slurm program, as the function `ask` returns it."""
        return ask(words, self._timeout_s)

    def jobs(self, prefix: str, *, fresh: bool = False) -> Answer | None:
        """Our jobs whose names begin with `prefix`; None until Slurm has answered for the first time.

        squeue is called again after `poll_s` seconds, with `fresh` after FRESH_S; while it fails, this time
        doubles after each call. Between calls, and if a call fails, the previous answer is returned.

        Raises:
            ClusterError: squeue has failed for longer than the budget.
        """
        now = self._clock()
        pause = FRESH_S if fresh and not self._failures else self._poll_s
        if self._failures > 1:
            pause = max(pause, min(self._poll_s * 2.0 ** (self._failures - 1), MOST_BACK_OFF_S))
        if now - self._asked_at >= pause:
            self._poll(now)
        if self._jobs is None:
            return None
        jobs = {i: job for i, job in self._jobs.items() if job.name.startswith(prefix)}
        return Answer(jobs=jobs, age_s=self._clock() - self._answered_at, error=self._error)

    def _poll(self, now: float) -> None:
        self._asked_at = now
        try:
            # Given a user, slurmctld looks up only the jobs of that user. Names or ids would not reduce its
            # work, and squeue fails for an id that slurmctld has forgotten.
            text = self.ask(
                "squeue", f"--user={self.user}", "--states=all", "--all", "--array", "--noheader",
                f"--format={SQUEUE_FORMAT}",
            )  # fmt: skip
            self._jobs = squeue_jobs(text)
        except (CommandError, ValueError) as error:
            self._failing_since = self._failing_since if self._failures else now
            self._failures, self._error = self._failures + 1, f"{error}"
            failing_s = self._clock() - self._failing_since
            if failing_s >= self._budget_s:
                raise ClusterError(
                    f"{error}, and so for {failing_s / 60:.0f} minutes; running jobs go on, and the same "
                    "command continues the sweep when Slurm answers again"
                ) from error
        else:
            self._failures, self._error, self._answered_at = 0, None, now

    def accounting(self, job_ids: Iterable[str]) -> dict[str, SlurmJob]:
        """Jobs, arrays or elements that squeue no longer lists, by sacct, in answers at most `poll_s` old.

        The result is empty while sacct does not answer; after a failure it is asked again every 5 minutes.
        sacct shows changes some seconds later than squeue.
        """
        now, wanted = self._clock(), set(job_ids)
        # The query is for whole arrays, since sacct does not know an element that has not started.
        arrays = sorted({job_id.partition("_")[0] for job_id in wanted})
        due = [i for i in arrays if now - self._looked_up.get(i, -float("inf")) >= self._poll_s]
        for some in _chunks(due):
            found = self._sacct(some)
            if found is None:
                return {}
            old = {i: job for i, job in self._accounts.items() if job.array_id not in some}
            self._accounts = old | found
            self._looked_up |= dict.fromkeys(some, now)
        jobs = {i: job for i, job in self._accounts.items() if job.array_id in wanted}
        named = ((job_id, slurm_job.find(self._accounts, job_id)) for job_id in wanted)
        return jobs | {job_id: job for job_id, job in named if job}

    def _sacct(self, arrays: Sequence[str]) -> dict[str, SlurmJob] | None:
        if self._clock() < self._sacct_from:
            return None
        try:
            return sacct_jobs(
                self.ask(
                    "sacct", "--parsable2", "--noheader", "--allocations", f"--format={SACCT_FORMAT}",
                    "--jobs=" + ",".join(arrays),
                )
            )  # fmt: skip
        except (CommandError, ValueError):
            self._sacct_from = self._clock() + MOST_BACK_OFF_S
            return None

    def cancel(
        self, job_ids: Iterable[str] = (), *, name: str | None = None, pending_only: bool = False
    ) -> None:
        """Ends jobs, arrays or elements of arrays, by number or by name; it ignores those already over.

        Raises:
            ClusterError: scancel failed, or with `pending_only` squeue did.
        """
        ids = set(job_ids)
        if pending_only:
            ids, name = self._waiting(ids, name), None
        targets = [tuple(slurm_job.collapse(some)) for some in _chunks(sorted(ids))]
        if name is not None:
            targets.append((f"--user={self.user}", f"--name={name}"))
        failed: CommandError | None = None
        for target in targets:
            try:
                self.ask("scancel", *target)
            except CommandError as error:
                lines = [line for line in error.complaints.splitlines() if line.strip()]
                if not lines or not all(_ALREADY_OVER.search(line) for line in lines):
                    failed = error
        if failed:
            raise ClusterError(f"{failed}; the jobs may run on: `squeue --me` shows them") from failed

    def _waiting(self, job_ids: set[str], name: str | None) -> set[str]:
        """The jobs with these ids or this name that hold no nodes at this moment.

        `scancel --state=PENDING 123_4` cannot be used, since it cancels all waiting elements of the array
        (tried with Slurm 22.05).
        """
        self._poll(self._clock())
        if self._error is not None or self._jobs is None:
            raise ClusterError(f"{self._error}; nothing was cancelled")
        return {
            job_id
            for job_id, job in self._jobs.items()
            if job.waits and (job_id in job_ids or job.array_id in job_ids or job.name == name)
        }


_ALREADY_OVER = re.compile("invalid job id|already complet|already finish|no longer pending", re.IGNORECASE)


def _chunks(items: Sequence[str]) -> Iterator[Sequence[str]]:
    return (items[i : i + IDS_A_COMMAND] for i in range(0, len(items), IDS_A_COMMAND))
