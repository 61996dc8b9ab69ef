"""Translates Slurm's states of jobs, and its reasons why jobs wait, into ours.

Sources: squeue(1), sacct(1), slurm.schedmd.com/job_state_codes.html and job_reason_codes.html.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from ultrabench.result import Status


class Phase(StrEnum):
    """The phase of a job in its life."""

    QUEUED = "queued"  # holds no node
    RUNNING = "running"  # holds nodes or may hold them, so processes of it may run
    HELD = "held"  # queued, but will not start until somebody releases it
    OVER = "over"  # ended for good; holds nothing


class JobState(NamedTuple):
    """What a state of Slurm means to us."""

    phase: Phase
    note: str
    status: Status | None = None
    """Status of an attempt that the job did not finish; None unless the job is over."""
    agent_gone: bool = False
    """Whether the leading agent failed without a word, as when a run or an OOM killer ends it."""


# A flag (CONFIGURING, COMPLETING, ...) hides the base state of a job, so each flag is read as "may hold
# nodes", except the flags that Slurm sets only on waiting jobs.
_MEANINGS = {
    "PENDING": JobState(Phase.QUEUED, "is pending"),
    "REQUEUE_FED": JobState(Phase.QUEUED, "goes back to the queue of its federation"),
    "EXPEDITING": JobState(Phase.QUEUED, "goes back to the head of the queue"),
    "REQUEUE_HOLD": JobState(Phase.HELD, "went back to the queue and is held there"),
    "SPECIAL_EXIT": JobState(Phase.HELD, "went back to the queue by a rule of the site and is held there"),
    "RESV_DEL_HOLD": JobState(Phase.HELD, "is held because its reservation was deleted"),
    "RUNNING": JobState(Phase.RUNNING, "is running"),
    "CONFIGURING": JobState(Phase.RUNNING, "has nodes that are not ready yet"),
    "POWER_UP_NODE": JobState(Phase.RUNNING, "has nodes that are being powered up"),
    "COMPLETING": JobState(Phase.RUNNING, "is ending; some of its processes may be left"),
    "REQUEUED": JobState(Phase.RUNNING, "goes back to the queue; some of its processes may be left"),
    "STAGE_OUT": JobState(Phase.RUNNING, "is copying its files back"),
    "SUSPENDED": JobState(Phase.RUNNING, "is suspended; its processes are kept"),
    "STOPPED": JobState(Phase.RUNNING, "is stopped; its processes are kept"),
    "SIGNALING": JobState(Phase.RUNNING, "is being signalled"),
    "RESIZING": JobState(Phase.RUNNING, "is being resized"),
    "UPDATE_DB": JobState(Phase.RUNNING, "is being written to the accounting database"),
    "COMPLETED": JobState(Phase.OVER, "ended by itself", Status.LOST),
    "FAILED": JobState(Phase.OVER, "ended with an error", Status.LOST, agent_gone=True),
    "OUT_OF_MEMORY": JobState(Phase.OVER, "was killed for using too much host memory", Status.OOM),
    "CANCELLED": JobState(Phase.OVER, "was cancelled", Status.CANCELLED),
    "TIMEOUT": JobState(Phase.OVER, "reached its time limit", Status.CANCELLED),
    "DEADLINE": JobState(Phase.OVER, "could not end before its deadline", Status.CANCELLED),
    "REVOKED": JobState(Phase.OVER, "was started by another cluster of the federation", Status.CANCELLED),
    "PREEMPTED": JobState(Phase.OVER, "was preempted", Status.PREEMPTED),
    "NODE_FAIL": JobState(Phase.OVER, "lost a node", Status.NODE_FAIL),
    "BOOT_FAIL": JobState(Phase.OVER, "had a node that did not boot", Status.NODE_FAIL),
    "LAUNCH_FAILED": JobState(Phase.OVER, "could not be started on its nodes", Status.NODE_FAIL),
    "RECONFIG_FAIL": JobState(Phase.OVER, "had a node that could not be configured", Status.NODE_FAIL),
}


def job_state(state: str) -> JobState:
    """The meaning of a state in the long form of squeue and sacct, such as `RUNNING` or `CANCELLED by 1000`.

    An unknown state counts as running, so that a job that may still run is not submitted a second time.
    """
    unknown_note = f"is in state {state.strip() or '(none)'}, which ultrabench does not know"
    base_state = (state.upper().split() or [""])[0].rstrip("+")
    return _MEANINGS.get(base_state, JobState(Phase.RUNNING, unknown_note))


# The first pattern that matches the beginning of the reason counts. Limits that are shared with other jobs,
# also our own (Grp, PerUser, PerAccount, numbers of jobs), are left out, since they pass when those jobs end.
_PENDING_REMEDIES = (
    (r"jobhelduser", "held by its owner: `scontrol release` it"),
    (r"jobheldadmin", "held by the administrators: ask them, or cancel it"),
    (r"job requeued in held state", "held after a requeue, by an administrator (`scontrol requeuehold`) or a rule for exit"
     " codes: ask the administrators whether to wait, to `scontrol release` it or to cancel it"),
    (r"jobholdmaxrequeue|.*\bheld\b", "held after a failed start: report the node, then `scontrol release` it"),
    (r"partitiondown", "the partition is down: wait for the administrators or set launcher.partition="),
    (r"partitioninactive", "the partition starts no jobs: set launcher.partition="),
    (r"partitionnodelimit", "more nodes than one job may have there: lower launcher.max_nodes="),
    (r"partitiontimelimit", "longer than jobs may run there: lower launcher.time_minutes="),
    (r"partitionconfig", "no node of the partition has what the job asks for: lower launcher.cpus= or launcher.mem=, or set launcher.partition="),
    (r"(qos|assoc)maxwall", "longer than jobs of its QOS or account may run: lower launcher.time_minutes="),
    (r"(qos|assoc)max\w+minutesperjob", "more hours than one job may use: lower launcher.time_minutes="),
    (r"(qos|assoc)max\w+perjob", "more than one job of its QOS or account may have: lower"
     " launcher.max_nodes= or set launcher.qos= or launcher.account="),
    (r"(qos|assoc)max\w+pernode", "more of a node than its QOS or account allows: set launcher.qos="),
    (r"qosmin", "less than a job of its QOS must ask for: set launcher.qos="),
    (r"(qos|assoc)grp(wall(?!run)|\w+(?<!run)minutes)|associationtimelimit|qostimelimit|qosusagethreshold",
     "the hours of its account or QOS are used up: set launcher.account= or launcher.qos="),
    (r"invalidaccount|accountnotallowed", "its account may not run there: set launcher.account="),
    (r"invalidqos|qosnotallowed", "its QOS may not be used there: set launcher.qos="),
    (r"badconstraints", "no node has the requested features: set +launcher.sbatch.constraint= or launcher.partition="),
    (r"maxmemperlimit", "more memory than jobs may have there: lower launcher.mem="),
    (r"reqnodenotavail.*maint", "nodes are reserved for maintenance: wait, or lower launcher.time_minutes="),
    (r"reqnodenotavail|nodedown", "nodes are down or reserved (`sinfo -R`): wait, or lower launcher.max_nodes="),
    (r"reservationdeleted|reservation .*deleted", "its reservation no longer exists: cancel the job and set +launcher.sbatch.reservation="),
    (r"dependencyneversatisfied", "it depends on a job that failed: cancel it"),
)  # fmt: skip


def pending_remedy(reason: str) -> str | None:
    """A line that says what to do about a job that waits for this reason; None if it only has to wait.

    `reason` is what squeue prints: a code or a sentence, with or without parentheses.
    """
    plain_reason = reason.strip().strip("()").replace("_", " ").lower()
    return next((remedy for pattern, remedy in _PENDING_REMEDIES if re.match(pattern, plain_reason)), None)
