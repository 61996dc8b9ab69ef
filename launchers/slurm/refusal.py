"""What the words of a failed sbatch mean: whether Slurm may take the same job later, and whether it has taken it.

The words are those of slurm_errno.c of Slurm 22.05 to 25.11. Before them sbatch prints the reason of a limit that
accounting enforces, such as AssocGrpSubmitJobsLimit.
"""

import re
from enum import StrEnum

from ultrabench.launchers.slurm.states import Outlook, PendingReason, pending_reason


class Failure(StrEnum):
    """What is known after sbatch has failed."""

    FINAL = "final"  # refused, and would be refused again
    PASSING = "passing"  # refused, but not for ever
    SILENT = "silent"  # slurmctld was slow or away, so that it may have taken the job
    UNKNOWN = "unknown"  # refused with words that are not in the tables below
    UNCLEAR = "unclear"  # neither refused by slurmctld nor known; it may have taken the job


_NOT_SENT = re.compile(
    r"connect failure|connection refused|no route to host|network is (down|unreachable)", re.IGNORECASE
)
"""Troubles of the connection before slurmctld could take the job; they pass."""
_SILENT = re.compile(
    r"timed out|no answer within|unable to contact|zero bytes|incomplete packet|not all data|entire message|"
    r"communication (connection|shutdown) failure|message (send|receive) failure|unexpected message|"
    r"connection (reset|closed)|broken pipe",
    re.IGNORECASE,
)
"""Troubles of the connection, after some of which slurmctld may have taken the job."""
_PASSING = re.compile(
    r"temporar|try again|retry|queue full|standby mode|rate limit|(presently|submissions) disabled|nodes "
    r"are busy|immediate execution|"
    r"violates accounting/qos policy|partition not available|partition in down state|not available now|"
    r"required node not available|down, drained or reserved|reservation (is in use|not usable)|usage threshold|"
    r"licenses currently|burst buffer resource limit|ports are in use|writing script|authentication|"
    r"unable to connect to database|being set|MaxSubmitJob|MaxJobsPer",
    re.IGNORECASE,
)
"""Refusals that pass with time, or when other jobs end."""
_FINAL = re.compile(
    r"invalid|not permitted|not available|violates|unrecognized|unable to open|not found|more processors|"
    r"access/permission denied|cannot be satisfied",
    re.IGNORECASE,
)
"""Refusals that would occur again, if they match no other pattern."""
_ACCOUNTING = re.compile("accounting/qos policy|MaxSubmitJob|MaxJobsPer", re.IGNORECASE)
"""Refusals because of a limit that accounting enforces."""
_BY_SLURMCTLD = "Batch job submission failed:"
"""What sbatch prints before the words with which slurmctld has refused a job, or before a trouble of the connection."""


def limit_of(complaint: str) -> PendingReason | None:
    """The meaning of the limit of accounting that sbatch names in a line of its own; None if it names none."""
    codes = (
        text for text in complaint.split("; ") if re.fullmatch(r"\w+", text) and is_by_accounting(complaint)
    )
    return next((meaning for code in codes if (meaning := pending_reason(code))), None)


def failure_of(complaint: str) -> Failure:
    """What follows from the words of sbatch; its lines are separated by semicolons."""
    if limit := limit_of(complaint):
        return Failure.FINAL if limit.outlook is Outlook.STAYS else Failure.PASSING
    _, is_by_slurmctld, last_words = complaint.rpartition(_BY_SLURMCTLD)
    if _SILENT.search(last_words) and not _NOT_SENT.search(last_words):
        return Failure.SILENT
    if _PASSING.search(last_words) or _NOT_SENT.search(last_words):
        return Failure.PASSING
    if _FINAL.search(complaint):
        return Failure.FINAL
    return Failure.UNKNOWN if is_by_slurmctld else Failure.UNCLEAR


def is_by_accounting(complaint: str) -> bool:
    """Whether sbatch refuses a job because of a limit of accounting, so that fewer or smaller jobs may be accepted."""
    return bool(_ACCOUNTING.search(complaint))


def is_by_partition(complaint: str) -> bool:
    """Whether sbatch refuses a job because of the state of its partition."""
    return bool(re.search("partition (not available|in down state)", complaint, re.IGNORECASE))
