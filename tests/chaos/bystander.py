"""Faults of people who look at a sweep that is not theirs, or from where its jobs are not."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import MissedError, jobs, one_of
from tests.slurm.conftest import Cluster
from tests.slurm.sweeps import slurm_says

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

LOOKS_S = 12.0
"""Seconds that somebody looks: longer than a launcher waits before it buries the dead."""
STRANGER = 65534
"""Number of the user that everybody has and nobody is."""
SETTINGS = ("--nodes", "4", "--gpus", "0", "--no-accounting")
"""Of the second cluster."""


class OtherCluster:
    """A second cluster on this machine, which is brought up when it is first needed."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def environment(self) -> dict[str, str]:
        """Of somebody who works on its login node."""
        if self._cluster is None:
            self._cluster = Cluster(Path(tempfile.mkdtemp(prefix="ultrabench-other-")))
            self._cluster.tool("up", *SETTINGS)
        return {"SLURM_CONF": str(self._cluster.folder / "slurm.conf")}

    def clean(self) -> bool:
        """Whether no job of its own is left."""
        return self._cluster is None or self._cluster.clean()

    def jobs(self) -> list[str]:
        """Jobs that are not over."""
        return [] if self._cluster is None else self._cluster.jobs()

    def close(self) -> None:
        """Takes it down."""
        if self._cluster is not None:
            self._cluster.tool("down")
            self._cluster = None


def other_user(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Another user, who may read and write everything, looks at a sweep that nobody follows.

    Raises:
        MissedError: nothing runs, or nobody can be somebody else here.
    """
    if os.getuid() != 0 or not shutil.which("setpriv"):
        raise MissedError("only root can become another user, by setpriv")
    one_of(lambda: jobs(campaign.sweep), fault)
    campaign.kill_launchers()
    capability = "+dac_override"
    become = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups",
              f"--inh-caps={capability}", f"--ambient-caps={capability}"]  # fmt: skip
    with _onlookers(campaign, fault) as start:
        start([*become, *campaign.bench.command("sweep", "status", campaign.sweep, "--watch")])
        start([*become, *campaign.bench.command("sweep", "status", campaign.sweep)])
    _blame(campaign)
    campaign.launch()
    return {"target": f"status by user {STRANGER}"}


def _blame(campaign: "Campaign") -> None:
    """Tells what the other user did: who looks writes nothing and submits nothing."""
    written = [path for path in campaign.folder.rglob("*") if path.lstat().st_uid == STRANGER]
    if written:
        names = sorted(str(path.relative_to(campaign.folder)) for path in written)
        campaign.complain(f"status by another user wrote {len(written)} files, such as {names[0]}")
    submitted = slurm_says("squeue", "-h", "-r", "-t", "all", "-o", "%i %j", f"--user={STRANGER}").split("\n")
    mine = [line for line in submitted if f"ub-{campaign.sweep}-" in line]
    if mine:
        campaign.complain(f"status by another user submitted {len(mine)} jobs, such as {mine[0]}")


def other_cluster(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Somebody on the login node of a second cluster watches a sweep of this one, or launches it, too."""
    environment = campaign.other.environment()
    one_of(lambda: jobs(campaign.sweep), fault)
    launches = fault.share % 2
    if fault.share % 4 < 2:  # whoever looks finds nobody who follows it
        campaign.kill_launchers()
    words = campaign.launch_words() if launches else ["sweep", "status", campaign.sweep, "--watch"]
    with _onlookers(campaign, fault) as start:
        start(campaign.bench.command(*words), environment)
    if not campaign.living():
        campaign.launch()
    return {"target": f"{'launch' if launches else 'status --watch'} on another cluster"}


@contextlib.contextmanager
def _onlookers(campaign: "Campaign", fault: Fault) -> Iterator[Any]:
    """Gives what starts a command; all of them end after a while, with everything they have started."""
    log = campaign.bench.folder / f"onlooker.{fault.number}.log"
    started: list[subprocess.Popen[bytes]] = []

    def start(words: list[str], more: dict[str, str] | None = None) -> None:
        with log.open("ab") as file:
            environment = {**os.environ, **(more or {})}
            started.append(
                subprocess.Popen(
                    words,
                    cwd=campaign.bench.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )

    try:
        yield start
        time.sleep(LOOKS_S)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
