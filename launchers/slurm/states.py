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


class Outlook(StrEnum):
    """Whether a reason why a job waits, or is refused, goes away."""

    USUAL = "usual"  # as in every queue, it passes without anybody's help
    PASSES = "passes"  # it passes when other jobs end, or when nodes, partitions or services are back
    STAYS = "stays"  # it passes only if the job, its settings or the limits of the site change


class PendingReason(NamedTuple):
    """What a reason of Slurm means to the user."""

    outlook: Outlook
    matter: str
    """What is the matter with the job, its partition or its nodes."""
    remedy: str
    """What to do; empty if the job starts without anybody's help."""


_USUAL, _PASSES, _STAYS = Outlook.USUAL, Outlook.PASSES, Outlook.STAYS
# The first pattern that matches the beginning of the reason counts. The codes are those of Slurm 22.05 to 25.11
# (`job_reason_string`, later job_state_reason.c); a sentence of slurmctld (`state_desc` of a job) may replace a code.
_PENDING_REASONS = (
    (r"(none|null|n/a)?$", _USUAL, "Slurm has not said why yet", ""),
    (r"priority$|resources$|scheddefer|nodes? busy", _USUAL, "other jobs come first or use the nodes", ""),
    (r"prolog|cleaning|begintime|jobarraytasklimit|fedjoblock", _USUAL,
     "it starts soon, or at the time that it asks for", ""),
    (r"dependency$", _USUAL, "it starts when the jobs have ended that it depends on", ""),
    (r"reservation$", _USUAL, "its reservation has not begun, or other jobs use it", ""),
    (r"jobhelduser", _STAYS, "held by its owner", "`scontrol release` it"),
    (r"jobheldadmin", _STAYS, "held by the administrators", "ask them, or cancel it"),
    (r"job requeued in held state", _STAYS,
     "held after a requeue, by an administrator (`scontrol requeuehold`) or a rule for exit codes",
     "ask the administrators whether to wait, to `scontrol release` it or to cancel it"),
    (r"jobholdmaxrequeue|.*\bheld\b", _STAYS,
     "held after a failed start", "report the node, then `scontrol release` it"),
    (r"partitiondown", _PASSES, "the partition is down", "wait for the administrators or set launcher.partition="),
    (r"partitioninactive", _PASSES,
     "the partition starts no jobs", "wait for the administrators or set launcher.partition="),
    (r"partitionnodelimit", _STAYS, "more nodes than one job may have there", "lower launcher.max_nodes="),
    (r"partitiontimelimit", _STAYS, "longer than jobs may run there", "lower launcher.time_minutes="),
    (r"partitionconfig", _STAYS,
     "no node of the partition has what the job asks for",
     "lower launcher.cpus= or launcher.mem=, or set launcher.partition="),
    (r"nodes required for job are", _PASSES,
     "too few nodes are up, because others are down, drained, rebooting or reserved for partitions of higher"
     " priority (`sinfo -R`)",
     "wait until they are back, or lower launcher.max_nodes="),
    (r"reqnodenotavail.*maint", _PASSES,
     "nodes are reserved for maintenance", "wait, or lower launcher.time_minutes="),
    (r"reqnodenotavail|nodedown|frontenddown|powernotavail|powerreserved|maxpoweredupnodes|"
     r"block(freeaction|maxerror)", _PASSES,
     "nodes are down, drained or reserved (`sinfo -R`)", "wait, or lower launcher.max_nodes="),
    (r"constraints|current node constraints", _PASSES,
     "no node with the requested features is available now", "wait, or set +launcher.sbatch.constraint="),
    (r"badconstraints", _STAYS,
     "no node has the requested features", "set +launcher.sbatch.constraint= or launcher.partition="),
    (r"(qos|assoc)maxwall", _STAYS,
     "longer than jobs of the QOS or account may run", "lower launcher.time_minutes="),
    (r"(qos|assoc)max\w+minutesperjob|job is at or exceeds .* max tres", _STAYS,
     "more hours than one job may use", "lower launcher.time_minutes="),
    (r"(qos|assoc)max\w+perjob", _STAYS,
     "more than one job of the QOS or account may have",
     "lower launcher.max_nodes= or set launcher.qos= or launcher.account="),
    (r"(qos|assoc)max\w+pernode", _STAYS, "more of a node than its QOS or account allows", "set launcher.qos="),
    (r"qosmin", _STAYS, "less than a job of its QOS must ask for", "set launcher.qos="),
    (r"(qos|assoc)grp(wall(?!run)|\w+(?<!run)minutes)|"
     r"associationtimelimit|qostimelimit|qosusagethreshold|job is at or exceeds", _PASSES,
     "the hours of the account or QOS are used up", "set launcher.account= or launcher.qos="),
    (r"invalidaccount|accountnotallowed|job's account", _STAYS,
     "its account may not run there", "set launcher.account="),
    (r"invalidqos|qosnotallowed|job's qos", _STAYS, "its QOS may not be used there", "set launcher.qos="),
    (r"maxmemperlimit", _STAYS, "more memory than jobs may have there", "lower launcher.mem="),
    (r"(qos|assoc)(grp|max)submit|maxsubmitjobs", _PASSES,
     "the account, QOS or user has as many queued and running jobs as allowed", "wait until some end"),
    (r"(qos|assoc)(grp|max)|max\w+per(user|account)|"
     r"association(job|resource)limit|qos(job|resource)limit|accountingpolicy", _PASSES,
     "the account, QOS or user has as many jobs or resources in use as allowed", "wait until other jobs end"),
    (r"reservationdeleted|reservation .*(deleted|ended)|reservationinvalid", _STAYS,
     "its reservation no longer exists", "cancel the job and set +launcher.sbatch.reservation="),
    (r"dependencyneversatisfied", _STAYS, "it depends on a job that failed", "cancel it"),
    (r"deadline", _STAYS, "it cannot end before its deadline", "set +launcher.sbatch.deadline="),
    (r"licenses|mpiportsbusy|nvidiaimexchannels", _PASSES,
     "licenses, ports or channels that it needs are in use", "wait until other jobs end"),
    (r"burst ?buffer(resources|stagein)|.*stage-(in|out) in progress", _PASSES,
     "its burst buffer is not ready yet", "wait"),
    (r"burst ?buffer|burst buffer/", _STAYS,
     "an operation of its burst buffer failed", "ask the administrators, or cancel it"),
    (r"joblaunchfailure|systemfailure|nonzeroexitcode|timelimit|inactivelimit|raisedsignal|outofmemory", _PASSES,
     "its latest start failed for this reason", "wait until it starts again, or cancel it"),
)  # fmt: skip


def pending_reason(reason: str) -> PendingReason | None:
    """The meaning of a reason why a job waits or is refused; None if ultrabench does not know it.

    `reason` is what squeue prints: a code or a sentence, with or without parentheses.
    """
    plain_reason = reason.strip().strip("()").replace("_", " ").lower()
    matches = (
        PendingReason(outlook, matter, remedy)
        for pattern, outlook, matter, remedy in _PENDING_REASONS
        if re.match(pattern, plain_reason)
    )
    return next(matches, None)


def pending_remedy(reason: str) -> str | None:
    """A line that says what to do about a job that waits for this reason; None if it waits as in every queue."""
    meaning = pending_reason(reason)
    if meaning is None:
        return (
            "ultrabench does not know this reason; `scontrol show job` says more, or ask the administrators"
        )
    return None if meaning.outlook is Outlook.USUAL else f"{meaning.matter}: {meaning.remedy}"
