"""Faults of people who look at the sweep of another user, or who work on another cluster than its jobs."""

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
"""Seconds for which somebody looks; a launcher records dead allocations as lost in less time."""
STRANGER = 65534
"""Id of the user `nobody`, which exists on every system."""
SETTINGS = ("--nodes", "4", "--gpus", "0", "--no-accounting")
"""Options of the second cluster."""


class OtherCluster:
    """A second cluster on this machine, which is started when it is first needed."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def environment(self) -> dict[str, str]:
        """The environment variables of a user on the login node of this cluster."""
        if self._cluster is None:
            self._cluster = Cluster(Path(tempfile.mkdtemp(prefix="ultrabench-other-")))
            self._cluster.tool("up", *SETTINGS)
        return {"SLURM_CONF": str(self._cluster.folder / "slurm.conf")}

    def clean(self) -> bool:
        """Whether this cluster has no jobs."""
        return self._cluster is None or self._cluster.clean()

    def jobs(self) -> list[str]:
        """The jobs of this cluster that are not over."""
        return [] if self._cluster is None else self._cluster.jobs()

    def close(self) -> None:
        """Stops the cluster."""
        if self._cluster is not None:
            self._cluster.tool("down")
            self._cluster = None


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
    with _onlookers(campaign, fault) as start:
        start([*become, *campaign.bench.command("sweep", "status", campaign.sweep, "--watch")])
        start([*become, *campaign.bench.command("sweep", "status", campaign.sweep)])
    _blame(campaign)
    campaign.launch()
    return {"target": f"status by user {STRANGER}"}


def _blame(campaign: "Campaign") -> None:
    """Reports a problem for everything that the other user wrote or submitted, which must be nothing."""
    written = [path for path in campaign.folder.rglob("*") if path.lstat().st_uid == STRANGER]
    if written:
        names = sorted(str(path.relative_to(campaign.folder)) for path in written)
        campaign.complain(f"status by another user wrote {len(written)} files, such as {names[0]}")
    submitted = slurm_says("squeue", "-h", "-r", "-t", "all", "-o", "%i %j", f"--user={STRANGER}").split("\n")
    mine = [line for line in submitted if f"ub-{campaign.sweep}-" in line]
    if mine:
        campaign.complain(f"status by another user submitted {len(mine)} jobs, such as {mine[0]}")


def other_cluster(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Somebody on the login node of a second cluster watches a sweep of the first one, or launches it too."""
    environment = campaign.other.environment()
    one_of(lambda: jobs(campaign.sweep), fault)
    launches = fault.share % 2
    if fault.share % 4 < 2:  # in these cases no launcher follows the sweep meanwhile
        campaign.kill_launchers()
    words = campaign.launch_words() if launches else ["sweep", "status", campaign.sweep, "--watch"]
    with _onlookers(campaign, fault) as start:
        start(campaign.bench.command(*words), environment)
    if not campaign.living():
        campaign.launch()
    return {"target": f"{'launch' if launches else 'status --watch'} on another cluster"}


@contextlib.contextmanager
def _onlookers(campaign: "Campaign", fault: Fault) -> Iterator[Any]:
    """Yields a function that starts commands; at the end all of them and their children are ended."""
    log = campaign.bench.folder / f"onlooker.{fault.number}.log"
    started: list[subprocess.Popen[bytes]] = []

    def start(words: list[str], more: dict[str, str] | None = None) -> None:
        with log.open("ab") as file:
            environment = {**os.environ, **(more or {})}
            started.append(
                subprocess.Popen(
                    words, cwd=campaign.bench.folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=file, start_new_session=True,
                )
            )  # fmt: skip

    try:
        yield start
        time.sleep(LOOKS_S)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
