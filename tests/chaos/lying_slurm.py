"""Faults of the host of a launcher: a wrong clock, and false answers of sbatch, squeue and sacct."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import jobs, one_of

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
SBATCH = 'if [ -e $FLAG ]; then $REAL "$@" > /dev/null; echo $$ >> $HITS; %s; fi\nexec $REAL "$@"'
"""An sbatch that submits and then does something else; `:` submits again."""
FAILING_SQUEUE = (
    'if [ -e $FLAG ]; then if [ -e $HITS ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi\n'
    'else touch $FLAG.over; fi\nexec $REAL "$@"'
)
"""A squeue that works until the first submission, since a launcher first has to see its jobs."""
EMPTY_SQUEUE = 'if [ -e $FLAG ]; then echo $$ >> $HITS; exit 0; fi\nexec $REAL "$@"'
LYING_SACCT = (
    'if [ -e $FLAG ]; then $REAL "$@" | sed -E "s/\\|(RUNNING|PENDING|COMPLETING)\\|/|COMPLETED|/"; exit 0; fi\n'
    'exec $REAL "$@"'
)


class Wrappers:
    """Programs that replace Slurm's on the PATH of a launcher, which is started, and lie while a flag exists."""

    def __init__(self, campaign: "Campaign", fault: Fault, scripts: dict[str, str]) -> None:
        folder = campaign.bench.folder / f"bin.{fault.number}"
        folder.mkdir(exist_ok=True)
        self.flag, self.hits = folder / "flag", folder / "hits"
        self.hits.unlink(missing_ok=True)  # an earlier try may have left it
        for program, script in scripts.items():
            real = f"REAL={shutil.which(program)}\nFLAG={self.flag}\nHITS={self.hits}"
            (folder / program).write_text(f"#!/bin/bash\n{real}\n{script}\n")
            (folder / program).chmod(0o755)
        self.flag.touch()
        campaign.kill_launchers()
        campaign.launch(path=folder)

    def pids(self) -> list[int]:
        """The pids of the calls that got a false answer, in order."""
        return [int(word) for word in self.hits.read_text().split()] if self.hits.exists() else []

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
    hanging = {"sbatch": SBATCH % "exec sleep 90", "squeue": FAILING_SQUEUE}
    wrappers = Wrappers(campaign, fault, hanging if hangs else {"sbatch": SBATCH % ":"})
    what = "whose answer was lost while squeue failed" if hangs else "made twice"
    try:
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        if hangs:
            _let_hang(wrappers)
        else:
            time.sleep(HANGS_S)
    finally:
        wrappers.flag.unlink()
    if hangs:
        wrappers.wait_for_answer()
    return {"target": f"{len(wrappers.pids())} submissions {what}", "costs": 0}


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
    try:
        one_of(wrappers.pids, fault)
        time.sleep(LIES_S)
        waiting = len(jobs(campaign.sweep, states="PD"))
    finally:
        wrappers.flag.unlink()
    told = "squeue lists nothing" + ", sacct calls all jobs completed" * (fault.share % 2)
    # A waiting job gives no sign of life, so it may be submitted again if both programs say that it is over.
    return {"target": told, "costs": waiting if fault.share % 2 else 0}
