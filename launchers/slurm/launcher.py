"""Runs allocations as Slurm jobs; those with the same nodes and time limit share a job array."""

import contextlib
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ultrabench.errors import ClusterError, ConfigError, SweepFolderError, counted
from ultrabench.host_list import expand_hosts
from ultrabench.launchers.launcher import Allocations, NotTakenError, Say, own_origin
from ultrabench.launchers.slurm.job import JobIdentity, SlurmJob, find_job
from ultrabench.launchers.slurm.query import (
    Answer,
    CommandError,
    NoAnswerError,
    NotStartedError,
    SlurmQuery,
    ask,
    failed_hosts,
    unstarted_hosts,
)
from ultrabench.launchers.slurm.refusal import (
    Failure,
    failure_of,
    is_by_accounting,
    is_by_partition,
    limit_of,
)
from ultrabench.launchers.slurm.script import JOB_PREFIX, array_name, array_script, job_name
from ultrabench.launchers.slurm.site import Site, partition_nodes
from ultrabench.launchers.slurm.states import Phase, pending_remedy
from ultrabench.result import Status
from ultrabench.store.allocation import JOB_LOG, Allocation, read_allocation
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.jobs_seen import Job, JobEnd, JobLimits, JobsSeen
from ultrabench.store.state import AllocationState
from ultrabench.sweep.config.launcher_config import SlurmSettings
from ultrabench.sweep.config.sweep_config import SweepConfig

TIMEOUT_S = 60.0
"""Seconds for an answer of sbatch."""
END_GRACE_S = 10.0
"""Seconds after the end of a job for which files of its agents may still change, since file systems lag."""
STALE_ACCOUNTING_S = 300.0
"""Seconds for which a job still counts as active if sacct says so but squeue no longer lists it."""
STUCK_S = 300.0
"""Seconds for which a job may hold its nodes after its end before the user is told."""
_JOB_NUMBER = re.compile(r"Submitted batch job (\d+)(?: on cluster \S+)?|(\d+)(?:;\S+)?", re.ASCII)
"""A whole line in which sbatch names the job, without or with --parsable; other lines are those of a site's wrapper."""
UNKNOWN_CLUSTER = "slurm"
"""Stands for the name of a cluster that does not give its name, or has not been asked for it."""
NO_JOBS = JobLimits(max_jobs=0)
"""The limits of a launcher that only ends jobs."""
INHERITED_VARIABLES = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "SLURM_CONF",
    "MODULEPATH", "MODULESHOME", "MODULES_*", "LOADEDMODULES*", "_LMFILES_*", "LMOD_*", "__LMOD_*",
    "_ModuleTable*", "BASH_ENV", "BASH_FUNC_module*", "BASH_FUNC_ml*", "BASH_FUNC__module_raw*",
    "NCCL_*", "FI_*", "UCX_*", "GLOO_*", "OFI_*",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH*", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_*",
)  # fmt: skip
"""Names of variables that jobs inherit; * stands for any ending.

Programs need them to be found, `module` needs them (in bash it is a function in the environment), or they
configure collectives and torch. All others are left out: access tokens of a login shell do not belong in a job, and
sbatch would take SLURM_* and SBATCH_* of an enclosing job for options.
"""


def inherited_env(environ: Mapping[str, str], extra_names: Iterable[str] = ()) -> dict[str, str]:
    """The variables of `environ` that a job inherits; `extra_names` adds names to INHERITED_VARIABLES."""
    patterns = (*INHERITED_VARIABLES, *extra_names)
    return {k: v for k, v in environ.items() if any(fnmatchcase(k, pattern) for pattern in patterns)}


def submit(path: Path, script: str, extra_names: Iterable[str]) -> str | None:
    """Writes `script` to the file `path` and submits it.

    Args:
        extra_names: names of variables that the job inherits in addition to INHERITED_VARIABLES.

    Returns:
        The job number of the array; None if sbatch did not fail, but its output names no job, or several.

    Raises:
        CommandError: sbatch refused the job, failed, or did not end in time; the job may have been submitted
            nevertheless.
    """
    path.parent.mkdir(exist_ok=True)
    write_whole(path, script)
    try:
        answer = ask("sbatch", str(path), timeout_s=TIMEOUT_S, environ=inherited_env(os.environ, extra_names))
    except CommandError as error:
        messages = [line.partition("error: ")[2] for line in error.complaints if "error: " in line]
        messages = messages or [line for line in error.complaints if line.startswith("sbatch:")]
        if isinstance(error, NoAnswerError):
            messages = [str(error), *messages]
        raise type(error)("; ".join(dict.fromkeys(messages)) or str(error)) from error
    matches = (_JOB_NUMBER.fullmatch(line.strip()) for line in answer.splitlines())
    job_ids = {match[1] or match[2] for match in matches if match}
    return job_ids.pop() if len(job_ids) == 1 else None


class SlurmLauncher:
    """Submits, finds and ends allocations that are elements of job arrays."""

    look_pause_s = 1.0
    module: tuple[str, ...] = ()
    """The Python module that runs on each node, and its arguments; our agent if empty."""

    def __init__(
        self,
        config: SweepConfig,
        folder: SweepFolder,
        limits: JobLimits = NO_JOBS,
        cluster: str = UNKNOWN_CLUSTER,
    ) -> None:
        self.limits, self.origin = limits, own_origin(cluster)
        self.query = SlurmQuery(config.launcher.slurm.poll_s)
        self._config, self._folder = config, folder
        self._unseen_at: dict[str, float] = {}
        """Allocation -> when squeue first did not list it or listed it as over."""
        self._ended_at: dict[str, float] = {}
        """Allocation -> when this launcher first saw its end in the journal."""
        self._late_since: dict[str, float] = {}
        """Allocation that has ended -> since when its job runs nevertheless, or when it was last ended for that."""
        self._completing_times: dict[str, tuple[float, float]] = {}
        """Job id -> when squeue first and last showed the job as COMPLETING, which Slurm does not count."""
        self._sought_since: dict[str, float] = {}
        """Allocation -> when it was first looked for; an earlier answer of squeue says nothing about it."""
        self._lost_hosts: dict[str, tuple[str, ...]] = {}
        """Job id -> the nodes that the job has lost; an end is looked at again until it is certain."""
        self._duplicate_ids: set[str] = set()
        """Jobs that were submitted twice by accident, and were cancelled for that."""
        self._accounting_since: dict[str, float] = {}
        """Allocation that is over -> when sacct was first asked for how long it held its nodes."""
        self._first_sweep_names: dict[str, str] = {}
        """Allocation that an earlier version planned -> the name that the sweep had then."""
        self._unanswered: set[str] = set()
        """Allocations of which sbatch did not say whether Slurm took them, and that squeue has not shown yet."""

    @property
    def _settings(self) -> SlurmSettings:
        """The settings that only Slurm has."""
        return self._config.launcher.slurm

    def submit(self, allocations: Sequence[Allocation], bad_hosts: Sequence[str], say: Say) -> dict[str, Job]:
        """Submits one array. If the answer of sbatch was lost, `observe` finds the jobs by their name.

        Of `bad_hosts`, the last are used nevertheless if too few others exist.

        Raises:
            NotTakenError: Slurm takes no such job now, or it is not known whether it has taken it.
            ConfigError: Slurm will never take such a job.
        """
        bad_hosts = self._spare_enough(bad_hosts, allocations[0].nodes, say)
        script = array_script(allocations, self._config, bad_hosts, self.module)
        first = allocations[0]
        name = job_name(Path(first.sweep_dir).name, first.sweep_id, array_name(first))
        path = self._folder.scripts / f"{name}.sh"
        try:
            job_id = submit(path, script, self._settings.environment)
        except CommandError as error:
            failure_by_type = {NoAnswerError: Failure.SILENT, NotStartedError: Failure.UNKNOWN}
            failure = failure_by_type.get(type(error)) or failure_of(str(error))
            if failure in (Failure.SILENT, Failure.UNCLEAR):
                self._unanswered |= {allocation.name for allocation in allocations}
            else:
                path.unlink(missing_ok=True)
            raise self._refusal(allocations[0], failure, str(error), bad_hosts) from error
        if job_id is None:
            self._unanswered |= {allocation.name for allocation in allocations}
            raise self._refusal(
                allocations[0], Failure.UNCLEAR, "its output does not name exactly one job", bad_hosts
            )
        return {a.name: _job(f"{job_id}_{i}", name) for i, a in enumerate(allocations)}

    def _refusal(
        self, allocation: Allocation, failure: Failure, complaint: str, bad_hosts: Sequence[str]
    ) -> ConfigError | NotTakenError:
        """The error that says what a failure of sbatch means for jobs like that of `allocation`.

        Args:
            complaint: the words of sbatch.
        """
        limit, exceeded_limit, waits_for = limit_of(complaint), None, _WAITS_FOR[failure]
        if failure is Failure.PASSING and is_by_accounting(complaint):
            exceeded_limit = self._exceeded_limit(allocation)
            waits_for = (
                limit.matter if limit else "a limit of the account, QOS or user allows no more jobs now"
            )
        elif failure is Failure.PASSING and is_by_partition(complaint):
            waits_for = self._partition_state()
        fact = f"sbatch did not accept a job of {counted(allocation.nodes, 'node')}: {complaint}"
        if failure is not Failure.FINAL and exceeded_limit is None:
            return NotTakenError(
                waits_for,
                fact,
                may_exist=failure in (Failure.SILENT, Failure.UNCLEAR),
                is_known=failure in (Failure.PASSING, Failure.SILENT),
                fewer_may_fit=is_by_accounting(complaint),
            )
        remedy = (
            "fix launcher.* (ultrabench doctor says how) or the cluster, then launch again; results are kept"
        )
        if unknown_hosts := self._unknown_hosts() if "node name" in complaint.lower() else ():
            names = ",".join(unknown_hosts)
            fact += (
                f"; launcher.exclude={self._settings.exclude} names nodes that Slurm does not list: {names}"
            )
            remedy = f"remove {names} from launcher.exclude, then launch again; results are kept"
        elif bad_hosts:
            remedy = f"to use excluded nodes again, set retry.forgive=[{','.join(bad_hosts)}], or {remedy}"
        return ConfigError(
            "; ".join(filter(None, (fact, exceeded_limit, limit and f"{limit.matter}: {limit.remedy}"))),
            remedy,
        )

    def _spare_enough(self, bad_hosts: Sequence[str], num_nodes: int, say: Say) -> Sequence[str]:
        """The first of `bad_hosts`, as far as the partition has enough other nodes for a job of `num_nodes`.

        sbatch would refuse a job that excludes too many, or the job would wait for ever.
        Nodes that Slurm does not list are left out.
        """
        if not bad_hosts:
            return ()
        known_hosts, usable_hosts = partition_nodes(self._settings)
        # sbatch refuses names of nodes that were removed from the cluster, which no job can get anyway.
        bad_hosts = [host for host in bad_hosts if not known_hosts or host in known_hosts]
        num_excluded = len(bad_hosts)
        while usable_hosts and num_excluded and len(usable_hosts - {*bad_hosts[:num_excluded]}) < num_nodes:
            num_excluded -= 1
        if used_again := bad_hosts[num_excluded:]:
            fact = (
                f"{counted(len(usable_hosts), 'node')} of the partition can be used, a job needs {num_nodes}"
            )
            say(f"{','.join(used_again)} cannot be avoided: {fact}")
        return bad_hosts[:num_excluded]

    def _unknown_hosts(self) -> tuple[str, ...]:
        """The nodes of launcher.exclude that Slurm does not list; none if it does not say."""
        known_hosts = partition_nodes(self._settings).known
        with contextlib.suppress(ConfigError):
            excluded_hosts = expand_hosts(self._settings.exclude or "")
            return tuple(host for host in excluded_hosts if known_hosts and host not in known_hosts)
        return ()

    def _exceeded_limit(self, allocation: Allocation) -> str | None:
        """The limit that a job exceeds even if no other job runs; None if Slurm shows none, or does not answer."""
        try:
            limits = Site().limits(*self._place)
        except (ClusterError, ConfigError):
            return None
        max_nodes, max_minutes, minutes = (
            limits.max_nodes,
            limits.job_minutes,
            math.ceil(allocation.limit_s / 60),
        )
        if max_nodes is not None and allocation.nodes > max_nodes:
            return f"partition, QOS and account limit a job to {counted(max_nodes, 'node')}"
        if max_minutes is not None and minutes > max_minutes:
            return f"partition, QOS and account limit a job to {max_minutes} minutes, it asks for {minutes}"
        return None

    @property
    def _place(self) -> tuple[str | None, str | None, str | None]:
        """Partition, account and QOS of the jobs; None stands for the site's default."""
        names = [
            self._settings.sbatch.get(key) or getattr(self._settings, key)
            for key in ("partition", "account", "qos")
        ]
        return names[0], names[1], names[2]

    def _partition_state(self) -> str:
        """What is the matter with the partition, such as `partition hopper is DRAIN`."""
        with contextlib.suppress(ClusterError, ConfigError):
            partition = Site().partition(self._place[0])
            if partition.state not in (None, "UP"):
                return f"partition {partition.name} is {partition.state}"
        return "its partition takes no jobs now"

    def _job_name(self, allocation: AllocationState) -> str:
        """The name of the job of an allocation, which it keeps when its sweep is renamed."""
        if recorded_name := (allocation.job or {}).get("name"):
            return str(recorded_name)
        sweep = allocation.sweep or self._first_sweep_name(allocation.name)
        return job_name(sweep, allocation.sweep_id, allocation.name.rpartition(".")[0])

    def _first_sweep_name(self, name: str) -> str:
        """The name that the sweep had when an earlier version planned this allocation."""
        if name not in self._first_sweep_names:
            sweep_path = self._folder.path
            with contextlib.suppress(SweepFolderError):
                sweep_path = Path(read_allocation(self._folder.allocations / name).sweep_dir)
            self._first_sweep_names[name] = sweep_path.name
        return self._first_sweep_names[name]

    def observe(self, allocations: Allocations) -> JobsSeen:
        """The jobs of the sweep by squeue or, for jobs that squeue has forgotten, by sacct.

        Raises:
            ClusterError: Slurm has not answered for a long time.
        """
        unended_names = {name for name, allocation in allocations.items() if allocation.ended is None}
        began_at = time.monotonic()
        self._sought_since = {n: self._sought_since.get(n, began_at) for n in unended_names}
        self._ended_at = {n: self._ended_at.get(n, began_at) for n in allocations.keys() - unended_names}
        self._unanswered -= {name for name, allocation in allocations.items() if allocation.agents}
        array_by_job_name = {self._job_name(a): name.rpartition(".")[0] for name, a in allocations.items()}
        answer = self.query.jobs(JOB_PREFIX, fresh=bool(self._unanswered))
        listed_jobs = defaultdict[str, list[SlurmJob]](list)
        for job in answer.jobs.values():
            if array := array_by_job_name.get(job.name):
                listed_jobs[f"{array}.{job.job_id.partition('_')[2]}"].append(job)
        self._unanswered &= unended_names - listed_jobs.keys()
        listed_names = [n for n in listed_jobs if n in allocations]
        jobs_by_name = {
            n: self._jobs_of_owner(allocations[n].start.job_id, listed_jobs[n], answer) for n in listed_names
        }
        # An allocation that was submitted twice has two jobs.
        living_jobs = {n: [job for job in jobs if not job.is_over] for n, jobs in jobs_by_name.items()}
        live_jobs = {n: jobs[0] for n, jobs in living_jobs.items() if jobs}
        queued_names = {n for n, job in live_jobs.items() if job.is_waiting}
        # Suspended jobs are left out, since their agents are stopped and give no sign of life.
        running_jobs = {n: job for n, job in live_jobs.items() if job.state == "RUNNING" and not answer.error}
        asked_at = time.monotonic() - answer.age_s
        stuck_notes = self._watch_completing(live_jobs.values(), asked_at)
        missing_names = {n for n in unended_names if n not in live_jobs and self._sought_since[n] <= asked_at}
        self._unseen_at = {n: self._unseen_at.get(n, asked_at) for n in missing_names}
        ends = {n: self._end_of(allocations[n], jobs_by_name.get(n), answer) for n in sorted(self._unseen_at)}
        certain_ends = {n: end for n, end in ends.items() if end}
        self._end_late_jobs({n: running_jobs[n] for n in running_jobs.keys() - unended_names}, asked_at)
        ended_allocations = {n: allocations[n] for n in allocations.keys() - live_jobs.keys() - unended_names}
        # An answer from before its end says nothing about whether a job has given its nodes back.
        leaving_names = {n for n, end in self._ended_at.items() if n in live_jobs or end > asked_at}
        return JobsSeen(
            alive=frozenset((unended_names | queued_names) - set(certain_ends)),
            queued=frozenset(queued_names),
            running=frozenset(running_jobs),
            leaving=frozenset(leaving_names - queued_names),
            ended_jobs=certain_ends,
            held_s={n: self._held_s(job) for n, job in live_jobs.items() if n not in queued_names},
            timed=self._ends_of_jobs(ended_allocations, jobs_by_name),
            jobs={n: _job(job.job_id, job.name) for n, job in live_jobs.items()},
            notes=(*_user_notes(answer, live_jobs), *stuck_notes, *self.query.foreign_job_notes.values()),
        )

    def _identity(self, allocation: AllocationState) -> JobIdentity:
        """What the job of an allocation must be; an id alone is no proof, since Slurm uses ids again."""
        cluster = "" if self.origin["cluster"] == UNKNOWN_CLUSTER else self.origin["cluster"]
        return JobIdentity(
            name=self._job_name(allocation), cluster=cluster, submitting_at=allocation.submitting_at
        )

    def _jobs_of_owner(self, owner_id: str, jobs: list[SlurmJob], answer: Answer) -> list[SlurmJob]:
        """The jobs of an allocation without those of an accidental second submission, which run nothing.

        Until an agent has claimed the allocation, all its jobs are returned, since any of them may claim it.
        """
        duplicates = [job for job in jobs if owner_id and job.job_id != owner_id]
        waiting_ids = {job.job_id for job in duplicates if job.is_waiting} - self._duplicate_ids
        if waiting_ids and not answer.error:
            self._duplicate_ids |= waiting_ids
            with contextlib.suppress(ClusterError):  # if it starts, it ends by itself
                self.query.cancel(waiting_ids)
        return [job for job in jobs if job not in duplicates]

    def _ends_of_jobs(
        self, ended: Allocations, jobs_by_name: Mapping[str, list[SlurmJob]]
    ) -> dict[str, JobEnd]:
        """Allocation that is over -> how its job ended, by squeue or else by sacct, if the journal does not say."""
        untimed_allocations = {n: a for n, a in ended.items() if a.agents and not a.timed}
        jobs = {n: jobs_by_name[n][-1] for n in untimed_allocations if jobs_by_name.get(n)}
        now_s, missing_names = time.monotonic(), untimed_allocations.keys() - jobs.keys()
        self._accounting_since = {n: self._accounting_since.get(n, now_s) for n in missing_names}
        recent_names = [n for n in missing_names if now_s - self._accounting_since[n] < STALE_ACCOUNTING_S]
        job_id_by_name = {n: untimed_allocations[n].start.job_id for n in recent_names}
        identities = {job_id: self._identity(untimed_allocations[n]) for n, job_id in job_id_by_name.items()}
        sacct_jobs = self.query.accounting(identities) if job_id_by_name else {}
        jobs |= {n: sacct_jobs[job_id] for n, job_id in job_id_by_name.items() if job_id in sacct_jobs}
        # Of a requeued job Slurm shows only the latest start.
        requeued = untimed_allocations.items() if self._settings.requeue else ()
        min_held_s = {n: allocation.end.elapsed_s or 0.0 for n, allocation in requeued if allocation.end}
        return {
            n: self._job_end(n, job, max(self._held_s(job), min_held_s.get(n, 0.0)))
            for n, job in jobs.items()
            if job.is_over
        }

    def _job_end(self, allocation_name: str, job: SlurmJob, held_s: float) -> JobEnd:
        """How a job ended, with the nodes that it lost."""
        reason = f"Slurm ended job {job.job_id}: {job.state}{job.reason_suffix}"
        if job.meaning.status == Status.NODE_FAIL and job.job_id not in self._lost_hosts:
            log_path = self._folder.allocations / allocation_name / JOB_LOG
            self._lost_hosts[job.job_id] = failed_hosts(log_path, job.nodes)
        lost_hosts = self._lost_hosts.get(job.job_id, ())
        reason += f", {','.join(lost_hosts)} failed" if lost_hosts else ""
        status, agent_gone = job.meaning.status or Status.LOST, job.meaning.agent_gone
        log_path = self._folder.allocations / allocation_name / JOB_LOG
        return JobEnd(
            status=status, reason=reason, held_s=held_s, agent_gone=agent_gone, failed_hosts=lost_hosts,
            unstarted_hosts=unstarted_hosts(log_path, job.nodes) if agent_gone else (), never_started=agent_gone,
        )  # fmt: skip

    def _watch_completing(self, jobs: Collection[SlurmJob], asked_at: float) -> list[str]:
        """Notes which active jobs still hold nodes after their end; returns messages about those that do so for long.

        Args:
            asked_at: when squeue showed these jobs.
        """
        for job in jobs:
            if job.state == "COMPLETING":
                first_at, _ = self._completing_times.get(job.job_id, (asked_at, asked_at))
                self._completing_times[job.job_id] = first_at, asked_at
            else:  # a requeued job has started again
                self._completing_times.pop(job.job_id, None)
        return [
            f"job {job.job_id} has ended, but Slurm has not freed {job.nodes} for {STUCK_S / 60:g} minutes"
            " (COMPLETING): until then it counts towards launcher.max_jobs and max_nodes. Ask the administrators"
            " whether the epilog or a process hangs there"
            for job in jobs
            if self._held_s(job) - job.elapsed_s >= STUCK_S
        ]

    def _held_s(self, job: SlurmJob) -> float:
        """Seconds for which a job held nodes, with those after its end, such as in an epilog,
        as squeue has shown them.
        """
        first_at, last_at = self._completing_times.get(job.job_id, (0.0, 0.0))
        return job.elapsed_s + (last_at - first_at)

    def _end_late_jobs(self, late_jobs: Mapping[str, SlurmJob], asked_at: float) -> None:
        """Ends the jobs of allocations that have ended, if they still run after `grace_s`.

        The time counts from the first answer in which a job runs: a job that was requeued may have started again,
        and its agents need some seconds to say so.
        """
        self._late_since = {name: self._late_since.get(name, asked_at) for name in late_jobs}
        grace_s = self._config.launcher.grace_s
        for name, job in late_jobs.items():
            is_too_late = asked_at - self._late_since[name] > grace_s
            if is_too_late and not self._settings.requeue:
                self._late_since[name] = asked_at
                with contextlib.suppress(ClusterError):  # a later look finds it again
                    self.query.cancel([job.job_id])

    def _end_of(
        self, allocation: AllocationState, listed_jobs: list[SlurmJob] | None, answer: Answer
    ) -> JobEnd | None:
        """The end of an allocation that squeue does not list as active; None while that is uncertain.

        The time for which its job was missing is counted between answers of squeue.
        """
        waited_s = time.monotonic() - answer.age_s - self._unseen_at[allocation.name]
        grace_s = self._config.launcher.grace_s
        if waited_s < (min(END_GRACE_S, grace_s) if listed_jobs else grace_s):
            return None
        job_id = allocation.start.job_id or (allocation.job or {}).get("job_id")
        identity = self._identity(allocation)
        job = listed_jobs[-1] if listed_jobs else find_job(answer.jobs, job_id) if job_id else None
        if job_id and (job is None or job.name != identity.name):
            job = self.query.accounting({job_id: identity}).get(job_id)
        if job is None:
            job_name = f"job {job_id}" if job_id else f"a job of {allocation.name}"
            return JobEnd(reason=f"Slurm does not know {job_name}")
        if not job.is_over:
            if waited_s < STALE_ACCOUNTING_S:
                return None
            return JobEnd(reason=f"squeue no longer lists job {job.job_id}, sacct says {job.state}")
        return self._job_end(allocation.name, job, self._held_s(job))

    def cancel(self, allocations: Allocations, *, queued_only: bool = False) -> dict[str, float]:
        """Ends all jobs of the arrays that hold `allocations`; their agents record how the runs ended."""
        for name in sorted({self._job_name(allocation) for allocation in allocations.values()}):
            self.query.cancel_named(name, pending_only=queued_only)
        return {}

    def end_frozen_job(self, allocation_name: str, job: Job) -> None:
        """Ends this array element; Slurm kills it after KillWait if it does not end by itself."""
        self.query.cancel([job["job_id"]])


_USUAL_STATES = {
    "RUNNING", "CONFIGURING", "COMPLETING", "POWER_UP_NODE", "STAGE_OUT", "SIGNALING", "RESIZING",
}  # fmt: skip
"""States of active jobs that need no message."""


_WAITS_FOR = {
    Failure.PASSING: "Slurm takes no jobs now",
    Failure.SILENT: "slurmctld did not answer sbatch",
    Failure.UNKNOWN: "sbatch failed",
    Failure.UNCLEAR: "sbatch did not say whether Slurm took the job",
    Failure.FINAL: "",
}
"""What has to change after a failure of sbatch, if nothing more is known."""


def _job(job_id: str, job_name: str) -> Job:
    return {"job_id": job_id, "name": job_name}


def _user_notes(answer: Answer, active_jobs: Mapping[str, SlurmJob]) -> tuple[str, ...]:
    """Messages about problems that the user has to solve, and about a Slurm that does not answer."""
    notes = [f"squeue does not answer ({answer.error}); retrying, jobs continue"] if answer.error else []
    for job in active_jobs.values():
        if job.meaning.phase is Phase.QUEUED:
            remedy = pending_remedy(job.reason)
            notes += [f"jobs are pending ({job.reason}): {remedy}"] if remedy else []
        elif job.state not in _USUAL_STATES:
            notes.append(f"job {job.job_id} {job.meaning.note}")
    return tuple(dict.fromkeys(notes))
