"""Faults of people who look at the sweep of another user, or who work on another cluster than its jobs."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import MissedError, jobs, one_of
from tests.slurm.conftest import Cluster
from tests.slurm.sweeps import slurm_says

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

LOOKS_S = 12.0
"""Seconds for which somebody looks; a launcher records dead allocations as lost in less time."""
STRANGER = 65534
"""Id of the user `nobody`, which exists on every system."""
SETTINGS = ("--nodes", "4", "--gpus", "0", "--no-accounting")
"""Options of the second cluster."""


def other_user(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Another user, who may read and write everything, looks at a sweep that no launcher follows.

    Raises:
        MissedError: nothing runs, or programs cannot run as another user on this machine.
    """
    if os.getuid() != 0 or not shutil.which("setpriv"):
        raise MissedError("only root can become another user, by setpriv")
    one_of(lambda: jobs(campaign.sweep), fault)
    campaign.kill_launchers()
    capability = "+dac_override"
    become = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups",
              f"--inh-caps={capability}", f"--ambient-caps={capability}"]  # fmt: skip
    status = [*become, *campaign.bench.command("sweep", "status", campaign.sweep)]
    _look(campaign, fault, [[*status, "--watch"], status])
    _blame(campaign)
    campaign.launch()
    return {"target": f"status by user {STRANGER}"}


def _blame(campaign: "Campaign") -> None:
    """Reports a problem for everything that the other user wrote or submitted, which must be nothing."""
    written = [path for path in campaign.folder.rglob("*") if path.lstat().st_uid == STRANGER]
    submitted = slurm_says("squeue", "-h", "-r", "-t", "all", "-o", "%i %j", f"--user={STRANGER}").split("\n")
    mine = [line for line in submitted if f"ub-{campaign.sweep}-" in line]
    if written or mine:
        campaign.complain(
            f"status by another user wrote {sorted(map(str, written))[:5]}, submitted {mine[:5]}"
        )


def other_cluster(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Somebody on the login node of a second cluster watches a sweep of the first one, or launches it too."""
    if len(campaign.clusters) == 1:
        other = Cluster(Path(tempfile.mkdtemp(prefix="ultrabench-other-")))
        other.tool("up", *SETTINGS)
        campaign.clusters.append(other)
    one_of(lambda: jobs(campaign.sweep), fault)
    launches = fault.share % 2
    if fault.share % 4 < 2:  # in these cases no launcher follows the sweep meanwhile
        campaign.kill_launchers()
    words = campaign.launch_words() if launches else ["sweep", "status", campaign.sweep, "--watch"]
    conf = f"{campaign.clusters[1].folder}/slurm.conf"
    _look(campaign, fault, [campaign.bench.command(*words)], SLURM_CONF=conf)
    if not campaign.living():
        campaign.launch()
    return {"target": f"{'launch' if launches else 'status --watch'} on another cluster"}


def _look(campaign: "Campaign", fault: Fault, commands: list[list[str]], **variables: str) -> None:
    """Runs commands for some seconds, then ends them and their children."""
    where: dict[str, Any] = {"cwd": campaign.bench.folder, "env": {**os.environ, **variables}}
    with (campaign.bench.folder / f"onlooker.{fault.number}.log").open("ab") as log:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        started = [subprocess.Popen(c, start_new_session=True, **pipes, **where) for c in commands]
    try:
        time.sleep(LOOKS_S)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
