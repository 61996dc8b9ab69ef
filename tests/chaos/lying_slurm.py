"""Faults of the host of a launcher: a wrong clock, and false answers of sbatch, squeue and sacct."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import MissedError, jobs, one_of

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

CLOCK = Path(__file__).parent / "clock.py"
OFFSET_S = 1800
LIES_S = 14.0
"""Seconds for which squeue lists no jobs; they are longer than every grace period of a launcher."""
SUBMITS_S = 40.0
"""Seconds within which a launcher that has just started submits its first job, if it has any."""
HANGS_S = 3.0
"""Seconds after which an sbatch that hangs is killed."""
UNKNOWN_S = 70.0
"""Seconds for which squeue then fails; a launcher searches a job without a number for less time."""
DOUBLE_SBATCH = 'if [ -e $FLAG ]; then $REAL "$@" > /dev/null; echo $$ >> $HITS; fi\nexec $REAL "$@"'
HANGING_SBATCH = (
    'if [ -e $FLAG ]; then $REAL "$@" > /dev/null; echo $$ >> $HITS; exec sleep 90; fi\nexec $REAL "$@"'
)
FAILING_SQUEUE = (
    'if [ -e $FLAG ]; then echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi\n'
    "touch $FLAG.over\n"
    'exec $REAL "$@"'
)
EMPTY_SQUEUE = 'if [ -e $FLAG ]; then echo $$ >> $HITS; exit 0; fi\nexec $REAL "$@"'
LYING_SACCT = (
    'if [ -e $FLAG ]; then $REAL "$@" | sed -E "s/\\|(RUNNING|PENDING|COMPLETING)\\|/|COMPLETED|/"; exit 0; fi\n'
    'exec $REAL "$@"'
)


class Wrappers:
    """Programs that replace Slurm's on the PATH of one launcher, and lie while a flag file exists."""

    def __init__(self, campaign: "Campaign", fault: Fault, scripts: dict[str, str]) -> None:
        self.folder = campaign.bench.folder / f"bin.{fault.number}"
        self.folder.mkdir(exist_ok=True)
        self.flag, self.hits = self.folder / "flag", self.folder / "hits"
        self.hits.unlink(missing_ok=True)  # an earlier try may have left it
        for program, script in scripts.items():
            path = self.folder / program
            path.write_text(
                f"#!/bin/bash\nREAL={shutil.which(program)}\nFLAG={self.flag}\nHITS={self.hits}\n{script}\n"
            )
            path.chmod(0o755)
        self.flag.touch()

    def pids(self) -> list[int]:
        """The pids of the calls that got a false answer, in order."""
        return [int(word) for word in self.hits.read_text().split()] if self.hits.exists() else []

    def stop(self) -> None:
        """Makes the wrappers do what Slurm's programs do from now on."""
        self.flag.unlink(missing_ok=True)

    def wait_for_answer(self) -> None:
        """Waits until squeue is called again; the longer it has failed, the less often it is called."""
        answered, end = self.flag.with_name("flag.over"), time.monotonic() + UNKNOWN_S
        while not answered.exists() and time.monotonic() < end:
            time.sleep(0.1)


def clock_offset(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Continues the sweep with a launcher on a host whose clock is half an hour behind or ahead."""
    offset_s = OFFSET_S if fault.share % 2 else -OFFSET_S
    campaign.kill_launchers()
    campaign.launch(program=[str(CLOCK), str(offset_s)])
    return {"target": f"a launcher whose clock is {offset_s:+d} s off"}


def double_submission(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """For some seconds every submission is made twice, or is made and never answered.

    Raises:
        MissedError: nothing was submitted in time.
    """
    hangs = fault.share >= 50
    scripts = {"sbatch": HANGING_SBATCH, "squeue": FAILING_SQUEUE} if hangs else {"sbatch": DOUBLE_SBATCH}
    wrappers = Wrappers(campaign, fault, scripts)
    squeue_fails = wrappers.folder / "squeue"
    if hangs:  # a launcher first has to see its jobs, so squeue works until sbatch is called
        squeue_fails.rename(wrappers.folder / "squeue.later")
    campaign.kill_launchers()
    campaign.launch(path=wrappers.folder)
    try:
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        if not hangs:
            time.sleep(HANGS_S)
            return {"target": f"{len(wrappers.pids())} submissions made twice", "costs": 0}
        (wrappers.folder / "squeue.later").rename(squeue_fails)
        _let_hang(wrappers)
    finally:
        wrappers.stop()
    wrappers.wait_for_answer()
    return {
        "target": f"{len(wrappers.pids())} submissions whose answer was lost while squeue failed",
        "costs": 0,
    }


def _let_hang(wrappers: Wrappers) -> None:
    """Makes each call of sbatch hang for a while, and every call of squeue fail."""
    end, killed = time.monotonic() + UNKNOWN_S, 0
    while time.monotonic() < end:
        time.sleep(HANGS_S)
        for pid in wrappers.pids()[killed:]:
            killed += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def empty_squeue(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """For some seconds squeue lists no jobs; in half of the cases sacct also says they are completed."""
    scripts = {"squeue": EMPTY_SQUEUE} | ({"sacct": LYING_SACCT} if fault.share % 2 else {})
    one_of(lambda: jobs(campaign.sweep), fault)
    wrappers = Wrappers(campaign, fault, scripts)
    campaign.kill_launchers()
    campaign.launch(path=wrappers.folder)
    try:
        one_of(wrappers.pids, fault)
        time.sleep(LIES_S)
        waiting = len(jobs(campaign.sweep, states="PD"))
    finally:
        wrappers.stop()
    told = "squeue lists nothing" + ", sacct calls all jobs completed" * (fault.share % 2)
    if not wrappers.pids():
        raise MissedError("squeue was not asked")
    # A waiting job gives no sign of life, so it may be submitted again if both programs say that it is over.
    return {"target": told, "costs": waiting if fault.share % 2 else 0}
