"""Faults by which Slurm takes no jobs for a while: a partition that is away, limits that others use up,
a busy controller.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.chaos.fault import Fault
from tests.chaos.interference import SUBMITS_S, Wrappers
from tests.chaos.judge import allocation_events
from tests.chaos.target import AWAY_S, Hit, jobs, one_of
from tests.slurm.conftest import SETTINGS
from tests.slurm.sweeps import slurm_says

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

PARTITION_S = 15.0
"""Seconds for which a partition is away; jobs of a sweep end meanwhile, so that others are due."""
LIMITED_S = 20.0
"""Seconds for which another job of the account uses up a part of its limit."""
MAX_SUBMIT = 2
"""Largest number of queued and running jobs of the account meanwhile."""
BUSY_S = 10.0
"""Seconds for which the controller is busy, after the first submission that it did not take."""
LATE_S = 7
"""Seconds after its answer was lost at which a job appears; a launcher has given it up by then."""
MANY_JOBS = ("launcher.pack=2", "launcher.max_jobs=2")
"""Options of a launch that soon has jobs to submit again."""
STATES = ("DRAIN", "DOWN", "INACTIVE")
FAILED = 'echo "sbatch: error: Batch job submission failed: %s" >&2; exit 1'
TIMED_OUT = FAILED % "Socket timed out on send/recv operation"
BUSY = {
    "it timed out": TIMED_OUT,
    "it timed out, but had taken the job": f'$REAL "$@" > /dev/null 2>&1; {TIMED_OUT}',
    "it timed out, and took the job later": f'(sleep {LATE_S}; $REAL "$@") > /dev/null 2>&1 & {TIMED_OUT}',
    "nobody listened": FAILED % "Unable to contact slurm controller (connect failure)",
    "it took no jobs": FAILED % "Resource temporarily unavailable",
}
"""What is the matter with a controller -> what sbatch does."""
BUSY_SBATCH = 'if [ -e $FLAG ]; then echo $$ >> $HITS; %s; fi\nexec $REAL "$@"'
JOBS_AT_A_TIME = 8
"""Largest number of jobs in one submission of a campaign's sweeps (launcher.max_jobs)."""


@contextlib.contextmanager
def _no_launch_ends(campaign: "Campaign") -> Iterator[None]:
    """Reports a problem if a launcher ends with an error meanwhile, or in the seconds in which it
    would have given up.
    """
    launchers = campaign.living()
    yield
    time.sleep(2.0)
    for launcher in launchers:
        if launcher.poll() not in (None, 0, 1):
            campaign.complain(f"a launcher ended with {launcher.returncode} although the refusals passed")


def _submit_often(campaign: "Campaign", fault: Fault) -> None:
    """Makes another launcher, which submits more and smaller jobs, follow the sweep, and waits for a running job."""
    campaign.kill_launchers()
    campaign.launch(*MANY_JOBS)
    one_of(lambda: jobs(campaign.sweep), fault, patience_s=SUBMITS_S)


def _num_refused(campaign: "Campaign") -> int:
    """The number of allocations that were recorded as refused."""
    return sum(event.get("code") == "refused" for event in allocation_events(campaign.folder / "journal"))


def _partition_away(campaign: "Campaign", fault: Fault) -> Hit:
    """Sets the partition to a state in which it starts or takes no jobs, and back."""
    _submit_often(campaign, fault)
    state, num_before = STATES[fault.share % len(STATES)], _num_refused(campaign)
    with _no_launch_ends(campaign):
        campaign.cluster.run("scontrol", "update", "partitionname=hopper", f"state={state}")
        try:
            time.sleep(PARTITION_S)
        finally:
            campaign.cluster.run("scontrol", "update", "partitionname=hopper", "state=UP")
    return {"target": f"partition hopper {state}, {_num_refused(campaign) - num_before} refusals"}


def _submit_limit(campaign: "Campaign", fault: Fault) -> Hit:
    """Limits the jobs of the account, while another job of it runs."""
    _enforce_limits(campaign)
    _submit_often(campaign, fault)
    num_before, account = _num_refused(campaign), ("modify", "account", "research", "set")
    with _no_launch_ends(campaign):
        other = slurm_says(
            "sbatch", "--parsable", "--mem=50", "-o", "/dev/null", "--wrap", f"sleep {LIMITED_S:.0f}"
        )
        slurm_says("sacctmgr", "-i", *account, f"GrpSubmitJobs={MAX_SUBMIT}")
        try:
            time.sleep(LIMITED_S)
        finally:
            slurm_says("sacctmgr", "-i", *account, "GrpSubmitJobs=-1")
            slurm_says("scancel", "--name=wrap")
    return {
        "target": f"{MAX_SUBMIT} jobs of the account, beside job {other.strip()}, "
        f"{_num_refused(campaign) - num_before} refusals"
    }


def _enforce_limits(campaign: "Campaign") -> None:
    """Makes the cluster enforce limits of accounts, from now on."""
    conf = campaign.cluster.folder / "slurm.conf"
    if "AccountingStorageEnforce" not in conf.read_text():
        conf.write_text(f"{conf.read_text()}AccountingStorageEnforce=limits\n")
        # It is shut down properly, since a killed controller forgets the jobs of its last seconds.
        campaign.cluster.run("scontrol", "shutdown", "slurmctld")
        time.sleep(AWAY_S)
        campaign.cluster.tool("up", *SETTINGS)


def _busy_controller(campaign: "Campaign", fault: Fault) -> Hit:
    """For some seconds slurmctld takes no jobs, or takes them without an answer, at once or late."""
    trouble, script = [*BUSY.items()][fault.share % len(BUSY)]
    with Wrappers(campaign, fault, {"sbatch": BUSY_SBATCH % script}) as wrappers, _no_launch_ends(campaign):
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        time.sleep(BUSY_S)
    num_tries = len(wrappers.pids())
    if "later" in trouble:
        time.sleep(LATE_S)
    # A job that appears after it was given up runs nothing.
    costs = JOBS_AT_A_TIME * num_tries if "later" in trouble else 0
    return {"target": f"slurmctld at {num_tries} submissions: {trouble}", "costs": costs}


STRIKES = {
    "partition_away": _partition_away, "submit_limit": _submit_limit, "busy_controller": _busy_controller,
}  # fmt: skip
"""Kind of fault -> the function that injects it, like the table of failures.py."""
