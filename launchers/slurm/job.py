"""A job, or an element of an array, as Slurm's programs print it."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ultrabench.launchers.slurm.states import JobState, Phase, job_state
from ultrabench.result import Status

SQUEUE_OPTIONS = ("--states=all", "--all", "--array", "--noheader", "--format=%i|%A|%T|%M|%N|%r|%j")
"""Options of squeue for all jobs in the form that `squeue_jobs` reads."""
_SACCT_COLUMNS = "JobID,JobIDRaw,State,Elapsed,NodeList,Submit,UID,Cluster,JobName"
SACCT_OPTIONS = ("--parsable2", "--noheader", "--allocations", "--duplicates", f"--format={_SACCT_COLUMNS}")
"""Options of sacct for the form that `sacct_jobs` reads, with older jobs of the same id."""
CLOCKS_DIFFER_S = 300.0
"""Seconds by which the clocks of slurmctld and of launchers may differ."""
_ROW_START = re.compile(r"\d+(_(\d+|\[[^|]*\]))?(\+\d+)?\|")
_EMPTY_TEXTS = {"None", "None assigned", "(null)", "n/a", "N/A"}
"""What Slurm prints where there are no nodes, or no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job, or one element of an array, as squeue or sacct shows it."""

    job_id: str
    """"123", or "123_4" for an element of an array."""
    name: str
    state: str
    reason: str = ""
    """Why the job waits or failed, in the words of squeue; empty if squeue or sacct does not say."""
    nodes: str = ""
    """The nodes of the job, such as gpu[01-04]; empty before it starts."""
    elapsed_s: float = 0.0
    """Seconds for which the job ran; Slurm counts neither the time in which it was suspended nor its epilog."""
    submitted_at: float | None = None
    """When it was submitted, in seconds since 1970, by Slurm's clock; None if Slurm does not say."""
    uid: str = ""
    cluster: str = ""

    @property
    def array_id(self) -> str:
        """The job number that sbatch printed; all elements of an array share it."""
        return self.job_id.partition("_")[0]

    @property
    def meaning(self) -> JobState:
        """What the state of the job means to us."""
        return job_state(self.state)

    @property
    def is_waiting(self) -> bool:
        """Whether the job is queued, perhaps on hold, and so has no nodes."""
        return self.meaning.phase in (Phase.QUEUED, Phase.HELD)

    @property
    def reason_suffix(self) -> str:
        """The reason as an addition to a message, such as ` (Priority)`; empty if there is none."""
        return f" ({self.reason})" if self.reason else ""

    @property
    def nodes_suffix(self) -> str:
        """The nodes as an addition to a message, such as ` on gpu[01-04]`; empty if there are none."""
        return f" on {self.nodes}" if self.nodes else ""

    @property
    def description(self) -> str:
        """The state of the job in words, such as `job 12 waits (Resources)`."""
        return f"job {self.array_id} {self.meaning.note}{self.nodes_suffix}{self.reason_suffix}"

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good."""
        return self.meaning.phase is Phase.OVER


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What tells a job of this launcher from others with the same id, which Slurm uses again."""

    name: str
    cluster: str = ""
    """Cluster of the launcher; empty if unknown."""
    submitting_at: float | None = None
    """When the launcher was about to submit it, in seconds since 1970; None if the journal does not say."""

    def difference(self, job: SlurmJob, now_s: float) -> str | None:
        """Why a row is about another job; None if it is about this one. Columns that are empty do not decide."""
        values_by_column = {"name": (job.name, self.name), "user": (job.uid, str(os.getuid()))}
        values_by_column["cluster"] = (job.cluster.lower(), self.cluster.lower())
        for column, (their_value, our_value) in values_by_column.items():
            if their_value and our_value and their_value != our_value:
                return f"has {column} {their_value} instead of {our_value}"
        if self.submitting_at is None:
            return None
        earliest_at = self.submitting_at - CLOCKS_DIFFER_S
        if job.submitted_at is not None and job.submitted_at < earliest_at:
            return f"was submitted before {datetime.fromtimestamp(earliest_at):%Y-%m-%d %H:%M:%S}"
        is_too_long = job.elapsed_s > now_s - earliest_at
        return "ran for longer than the time since its submission" if is_too_long else None


def duration_s(text: str) -> float | None:
    """The seconds of a duration as Slurm writes it; None for UNLIMITED, NONE and similar words.

    Slurm writes MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text.strip())
    if not match:
        return None
    days, *time_parts = match.groups()
    time_numbers = [int(part) for part in time_parts if part]
    if days is None and len(time_numbers) < 3:
        time_numbers.insert(0, 0)
    hours, minutes, seconds = (*time_numbers, 0, 0)[:3]
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def _epoch_s(text: str) -> float | None:
    """Seconds since 1970 of a time that Slurm prints as such a number, or in its usual format; None for others."""
    with contextlib.suppress(ValueError, OverflowError):
        return float(text) if text.isdigit() else datetime.fromisoformat(text).timestamp()
    return None


def _parse_rows(text: str, num_columns: int) -> Iterator[list[str]]:
    """The rows, each from a job id to a job name; the name may contain `|` and even line breaks."""
    is_in_row = False
    for line in text.split("\n"):
        fields = line.split("|", num_columns - 1)
        if _ROW_START.match(line) and len(fields) == num_columns:
            is_in_row = True
            yield fields
        elif line.strip() and (_ROW_START.match(line) or not is_in_row):
            raise ValueError(f"unexpected output: {line.strip()[:80]!r}")


def _array_elements(job: SlurmJob) -> Iterator[SlurmJob]:
    """The jobs of one row; array elements that have not started share a row, such as `123_[4-7,9%2]`."""
    array_id, bracket, ranges_text = job.job_id.partition("_[")
    if not bracket:
        yield job
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", ranges_text.partition("%")[0]):
        for index in range(int(first), int(last or first) + 1, int(step or 1)):
            yield replace(job, job_id=f"{array_id}_{index}")


def squeue_jobs(text: str) -> dict[str, SlurmJob]:
    """Jobs by job_id from what squeue prints with SQUEUE_OPTIONS.

    Raises:
        ValueError: the text has another form.
    """
    return {job.job_id: job for row in _parse_rows(text, 7) for job in _array_elements(_job_of(row))}


def sacct_jobs(text: str) -> list[SlurmJob]:
    """Jobs from what sacct prints with SACCT_OPTIONS; of rows with the same id the latest comes last.

    Raises:
        ValueError: the text has another form.
    """
    # The row of a range may still list elements that now have their own row, and a requeued job may have a
    # row for each start, so the last submission counts.
    rows = sorted(_parse_rows(text, 9), key=lambda row: ("[" not in row[0], row[5]))
    jobs = (
        replace(_job_of(row), reason="", submitted_at=_epoch_s(row[5]), uid=row[6], cluster=row[7])
        for row in rows
    )
    return [element for job in jobs for element in _array_elements(job)]


def _job_of(row: Sequence[str]) -> SlurmJob:
    job_id, _, state, elapsed_text, nodes, reason, *_, name = row
    nodes, reason = ("" if text in _EMPTY_TEXTS else text for text in (nodes, reason))
    elapsed_s = duration_s(elapsed_text) or 0.0
    return SlurmJob(job_id=job_id, name=name, state=state, reason=reason, nodes=nodes, elapsed_s=elapsed_s)


def find_job(jobs: Mapping[str, SlurmJob], job_id: str) -> SlurmJob | None:
    """The job with this id; array elements that were cancelled before they started share the array's row.

    A single element that was cancelled before its start has no row at all (tried with Slurm 22.05).
    """
    job, array_job = jobs.get(job_id), jobs.get(job_id.partition("_")[0])
    if job is None and array_job and array_job.meaning.status is Status.CANCELLED:
        return replace(array_job, job_id=job_id)
    return job


def collapsed_ids(job_ids: Iterable[str]) -> list[str]:
    """The ids as few arguments for scancel: the elements of one array become `123_[4,6]`."""
    indices_by_id: dict[str, list[int]] = {}
    for array_id, _, index in (job_id.partition("_") for job_id in job_ids):
        indices_by_id.setdefault(array_id, []).extend([int(index)] if index else [])
    ids_and_indices = (
        (array_id, ",".join(map(str, sorted(indices)))) for array_id, indices in sorted(indices_by_id.items())
    )
    return [f"{array_id}_[{indices}]" if indices else array_id for array_id, indices in ids_and_indices]
