"""Asks Slurm's programs with a time-out; about our jobs it asks seldom, and not for ever if Slurm is silent."""

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.host_list import expand_hosts
from ultrabench.launchers.slurm.job import (
    CLOCKS_DIFFER_S,
    SACCT_OPTIONS,
    SQUEUE_OPTIONS,
    JobIdentity,
    SlurmJob,
    collapsed_ids,
    find_job,
    sacct_jobs,
    squeue_jobs,
)

QUERY_TIMEOUT_S = 20.0
"""Seconds after which a Slurm program is killed, if its caller gives no other time."""
_KEPT_NAMES = {"SLURM_CONF", "SLURM_JWT"}
_OPTION_NAME = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SCONTROL|SACCTMGR)_")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
"""What srun prints when slurmctld reports that nodes of the job have failed (`_node_fail_handler` of Slurm)."""
_TASK_FAILURE = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: Exited with exit code", re.MULTILINE)
"""What srun prints of tasks that failed by themselves; those that it then kills have other lines."""
MIN_SQUEUE_PAUSE_S = 2.0
"""Smallest number of seconds between two calls of squeue, even urgent ones."""
MAX_BACK_OFF_S = 300.0
"""Longest time in seconds between two calls of a program that fails."""
MAX_FAILING_S = 1800.0
"""Seconds for which squeue may fail in a row."""
MAX_IDS_PER_COMMAND = 200
"""Largest number of job ids that one command gets."""


class CommandError(Exception):
    """A Slurm program failed, timed out or printed an invalid answer; it never leaves `launchers`."""

    def __init__(self, message: str, complaints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.complaints = complaints
        """The lines that the program wrote to stderr, without empty ones."""


class NotStartedError(CommandError):
    """A Slurm program could not be started."""


class NoAnswerError(CommandError):
    """A Slurm program did not answer in time."""


def ask(*command: str, timeout_s: float = QUERY_TIMEOUT_S, environ: Mapping[str, str] | None = None) -> str:
    """The output of a Slurm program.

    Args:
        environ: all environment variables of the program; by default ours without those that change the
            output of Slurm's programs or the cluster they ask.

    Raises:
        CommandError: the program cannot be started, fails, or was killed after `timeout_s`.
    """
    if environ is None:
        environ = {k: v for k, v in os.environ.items() if k in _KEPT_NAMES or not _OPTION_NAME.match(k)}
        environ |= {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}  # 0: squeue prints long ranges in full
        environ["SLURM_TIME_FORMAT"] = "%s"  # seconds since 1970, in whatever time zone
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise NotStartedError(f"{command[0]}: {error.strerror}") from error
    with process:
        try:
            answer, stderr_text = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise NoAnswerError(
                f"{command[0]}: no answer within {timeout_s:g} s", _lines(error.stderr)
            ) from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        complaints = _lines(stderr_text)
        last_line = complaints[-1][:200] if complaints else "no message"
        raise CommandError(f"{command[0]}: {last_line} (exit {process.returncode})", complaints)
    return answer


def _lines(text: str | bytes | None) -> list[str]:
    """The lines of a text without empty ones."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    return [line.strip() for line in text.splitlines() if line.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of squeue."""

    jobs: dict[str, SlurmJob]
    """Jobs by job_id; a job that has ended is listed until MinJobAge seconds after its end."""
    age_s: float
    """Seconds since squeue was called; infinite if it has never answered, and then there are no jobs.

    A job that was submitted later than this cannot be in the answer.
    """
    error: str | None = None
    """Why the latest call failed, so that this is the answer of an earlier call; None if it did not fail."""


class SlurmQuery:
    """Runs every query and cancellation of one launcher."""

    def __init__(self, poll_s: float) -> None:
        """`poll_s` is the usual number of seconds between two calls of squeue."""
        self._poll_s, self._user_option = poll_s, f"--user={os.getuid()}"
        self._jobs: dict[str, SlurmJob] = {}
        self._asked_at = self._answered_at = self._failing_since = -math.inf
        """When squeue was last called, when it last answered, and since when it fails, by the monotonic clock."""
        self._num_failures = 0
        self._error: str | None = None
        self._sacct_retry_at = -math.inf
        self._accounted_at: dict[str, float] = {}
        self._accounting_rows: dict[str, list[SlurmJob]] = {}
        """Job number -> rows of sacct with this number, the latest last."""
        self.foreign_job_notes: dict[str, str] = {}
        """Job id -> the message that sacct shows only another job with this id."""

    def jobs(self, name_prefix: str, *, fresh: bool = False) -> Answer:
        """Our jobs whose names begin with `name_prefix`.

        squeue is called again after `poll_s` seconds, with `fresh` after MIN_SQUEUE_PAUSE_S; while it fails, this time
        doubles after each call. Between calls, and if a call fails, the previous answer is returned.

        Raises:
            ClusterError: squeue has failed for longer than MAX_FAILING_S.
        """
        back_off_s = min(self._poll_s * 2.0 ** (self._num_failures - 1), MAX_BACK_OFF_S)
        pause_s = MIN_SQUEUE_PAUSE_S if fresh and not self._num_failures else max(self._poll_s, back_off_s)
        if time.monotonic() - self._asked_at >= pause_s:
            self._poll()
        jobs = {job_id: job for job_id, job in self._jobs.items() if job.name.startswith(name_prefix)}
        return Answer(jobs=jobs, age_s=time.monotonic() - self._answered_at, error=self._error)

    def _poll(self) -> None:
        self._asked_at = now_s = time.monotonic()
        try:
            # Given a user, slurmctld looks up only the jobs of that user. Names or ids would not reduce its
            # work, and squeue fails for an id that slurmctld has forgotten.
            self._jobs = squeue_jobs(ask("squeue", self._user_option, *SQUEUE_OPTIONS))
        except (CommandError, ValueError) as error:
            self._failing_since = self._failing_since if self._num_failures else now_s
            self._num_failures, self._error = self._num_failures + 1, f"{error}"
            failing_s = time.monotonic() - self._failing_since
            if failing_s >= MAX_FAILING_S:
                problem = f"{error}, for {failing_s / 60:.0f} minutes now; running jobs continue"
                raise ClusterError(f"{problem}; run the same command again when Slurm answers") from error
        else:
            self._num_failures, self._error, self._answered_at = 0, None, now_s

    def accounting(self, identities: Mapping[str, JobIdentity]) -> dict[str, SlurmJob]:
        """Jobs that squeue no longer lists, by sacct, in answers at most `poll_s` old.

        Rows about other jobs with the same ids are left out. The result is empty while sacct does not answer;
        after a failure it is asked again every 5 minutes. sacct shows changes some seconds later than squeue.
        """
        now_s = time.monotonic()
        # The query is for whole arrays, since sacct does not know an element that has not started.
        array_ids = sorted({i.partition("_")[0] for i in identities})
        due_ids = [i for i in array_ids if now_s - self._accounted_at.get(i, -math.inf) >= self._poll_s]
        for chunk in _id_chunks(due_ids):
            if now_s < self._sacct_retry_at:
                return {}
            try:
                rows = sacct_jobs(ask("sacct", *SACCT_OPTIONS, f"--jobs={','.join(chunk)}"))
            except (CommandError, ValueError):
                self._sacct_retry_at = now_s + MAX_BACK_OFF_S
                return {}
            self._accounting_rows |= {i: [row for row in rows if row.array_id == i] for i in chunk}
            self._accounted_at |= dict.fromkeys(chunk, now_s)
        return {i: job for i, identity in identities.items() if (job := self._accounted_job(i, identity))}

    def _accounted_job(self, job_id: str, identity: JobIdentity) -> SlurmJob | None:
        """The latest row of sacct about this job; `foreign_job_notes` says if there are only rows about others."""
        rows, now_s = self._accounting_rows.get(job_id.partition("_")[0], []), time.time()
        job = find_job({row.job_id: row for row in rows if not identity.difference(row, now_s)}, job_id)
        if job is None and (other_job := find_job({row.job_id: row for row in rows}, job_id)):
            self.foreign_job_notes[job_id] = (
                f"sacct shows another job {job_id}, which {identity.difference(other_job, now_s)}: "
                "its state and hours do not"
                f" count, because Slurm reuses job ids. If it is {identity.name} after all, correct the clocks: those"
                f" of this host and of Slurm may differ by at most {CLOCKS_DIFFER_S / 60:g} minutes"
            )
        return job

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Ends jobs, arrays or elements of arrays; it ignores those already over.

        Raises:
            ClusterError: scancel failed.
        """
        self._scancel(*(collapsed_ids(chunk) for chunk in _id_chunks(sorted(job_ids))))

    def cancel_named(self, name: str, *, pending_only: bool) -> None:
        """Ends all our jobs with this name, or only those that hold no nodes.

        Raises:
            ClusterError: scancel failed, or with `pending_only` squeue did.
        """
        if not pending_only:
            self._scancel([self._user_option, f"--name={name}"])
            return
        # `scancel --state=PENDING 123_4` cannot be used, since it cancels all waiting elements of the array
        # (tried with Slurm 22.05).
        self._poll()
        if self._error is not None:
            raise ClusterError(f"{self._error}; nothing was cancelled")
        self.cancel(job_id for job_id, job in self._jobs.items() if job.is_waiting and job.name == name)

    def _scancel(self, *targets: Sequence[str]) -> None:
        """Runs scancel once for each of the targets, even if it fails for one of them."""
        failure: CommandError | None = None
        for target in targets:
            try:
                ask("scancel", *target)
            except CommandError as error:
                if not error.complaints or not all(map(_ALREADY_OVER.search, error.complaints)):
                    failure = error
        if failure:
            raise ClusterError(f"{failure}; the jobs may still run: `squeue --me` shows them") from failure


def unstarted_hosts(log_path: Path, nodes: str) -> tuple[str, ...]:
    """The nodes of a job that ended with an error before its agents wrote anything, or those that srun names.

    Args:
        log_path: the log of the job.
        nodes: the nodes of the job, such as gpu[01-04].
    """
    with contextlib.suppress(OSError, ConfigError):
        job_hosts = expand_hosts(nodes)
        log_text = log_path.read_text(errors="replace") if log_path.exists() else ""
        named_hosts = {host for text in _TASK_FAILURE.findall(log_text) for host in expand_hosts(text)}
        return tuple(host for host in job_hosts if host in named_hosts) or job_hosts
    return ()


def failed_hosts(log_path: Path, nodes: str) -> tuple[str, ...]:
    """The nodes that a job has lost; empty where that is unknown.

    The last line of srun about a failed node names them. Where srun itself ran on that node,
    they are the nodes that are down now.

    Args:
        log_path: the log of the job.
        nodes: the nodes of the job, such as gpu[01-04].
    """
    with contextlib.suppress(OSError, CommandError):
        if host_lists := _NODE_FAILURE.findall(log_path.read_text(errors="replace")):
            return tuple(ask("scontrol", "show", "hostnames", host_lists[-1]).split())
        options = ("--noheader", "--Node", "--states=down,fail", "--format=%N", f"--nodes={nodes}")
        return tuple(sorted({*ask("sinfo", *options).split()})) if nodes else ()
    return ()


_ALREADY_OVER = re.compile("invalid job id|already complet|already finish|no longer pending", re.IGNORECASE)


def _id_chunks(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (job_ids[i : i + MAX_IDS_PER_COMMAND] for i in range(0, len(job_ids), MAX_IDS_PER_COMMAND))
