"""What a batch system sets, sends and writes on the nodes of its jobs: variables, signals and lines of logs.

A process finds its own batch system by the variables of its job. Logs may hold the lines of any, so what reads logs
uses the texts of all.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSystem:
    """The traces of one batch system on the nodes of its jobs; texts of logs are regular expressions."""

    job_variable: str
    """The environment variable by which a process knows that it is in a job."""
    task_prefixes: tuple[str, ...]
    """Beginnings of the names of variables that ranks must not see; with them, programs would take a rank for a
    task of the job."""
    rank_variables: frozenset[str]
    """Variables with these beginnings that ranks see: their job, and where the commands of the batch system find it."""
    reason_by_signal: dict[int, str]
    """Signal -> why the batch system sends it to agents."""
    log_writers: str
    """The programs that write to the log of a job; their name and a colon begin a line."""
    task_ends: str
    """What its programs write, behind their name, when a task ended or while they end the others."""
    signal_writers: str
    """Beginnings of lines that end with the words of the signal that ended a task."""
    host_oom: str
    """The line that says that the memory of the node, or of the job on it, was exhausted."""


NO_CLUSTER = "local"
"""The name of the cluster of a sweep whose configuration names none."""
SLURM = BatchSystem(
    job_variable="SLURM_JOB_ID",
    task_prefixes=("SLURM_", "SBATCH_"),
    rank_variables=frozenset({"SLURM_JOB_ID", "SLURM_CONF"}),
    reason_by_signal={
        signal.SIGTERM: "scancel, preemption, a time limit or the loss of a node",
        signal.SIGUSR2: "the approaching time limit of the job",
    },
    log_writers="srun|slurmstepd",
    task_ends=r".*: tasks? [\d,-]+: |Terminating |Force Terminated |Job step aborted|\*\*\* |Step created|.*CANCELLED"
    r"|.*task_exit|.*First task exited",
    signal_writers="srun: error|slurmstepd",
    host_oom=r"[Dd]etected \d+ oom.kill event",
)
BATCH_SYSTEMS = (SLURM,)
LOG_WRITERS = "|".join(system.log_writers for system in BATCH_SYSTEMS)
TASK_ENDS = "|".join(system.task_ends for system in BATCH_SYSTEMS)
SIGNAL_WRITERS = "|".join(system.signal_writers for system in BATCH_SYSTEMS)
HOST_OOM = "|".join(system.host_oom for system in BATCH_SYSTEMS)


def batch_system_of(environ: Mapping[str, str]) -> BatchSystem | None:
    """The batch system in whose job a process with these environment variables runs; None outside of jobs."""
    return next((system for system in BATCH_SYSTEMS if system.job_variable in environ), None)
