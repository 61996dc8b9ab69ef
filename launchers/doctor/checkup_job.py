"""The job that looks at one node: it is submitted like the jobs of a sweep, and waited for."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrabench.errors import ClusterError
from ultrabench.launchers.doctor.check import Check, failed, passed
from ultrabench.launchers.doctor.checkup_folder import CheckupFolder
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.job import SlurmJob
from ultrabench.launchers.slurm.query import SlurmQuery
from ultrabench.launchers.slurm.script import JobScript, array_script
from ultrabench.launchers.slurm.states import Phase, pending_remedy
from ultrabench.launchers.slurm.submit import submit
from ultrabench.processes import own_name
from ultrabench.store.allocation import Allocation
from ultrabench.sweep.config import SweepConfig

LIMIT_S = 600.0
"""Time limit of the job in seconds; the first import of torch on a node may take minutes."""
PAUSE_S = 0.3
POLL_S = 3.0
"""Seconds between two questions to squeue."""
LATE_S = 30.0
"""Seconds for which the report may come later than the end of its job, because file systems lag."""
FAILED_S = 5.0
"""The same for a job that failed: it hardly wrote a report."""
END_S = 10.0
"""Seconds to wait for the end of a job whose report is here."""

_REFUSALS = {
    "timed out|no answer|contact": "try again: slurmctld is slow or away",
    "account": "set launcher.account=",
    "qos": "set launcher.qos=",
    "reservation": "set launcher.reservation=",
    "feature": "set launcher.constraint=",
    "memory": "set launcher.mem=",
    "partition": "set launcher.partition=",
    "node configuration|gres|processors": "set hardware.gpus_per_node=, launcher.gres= or launcher.cpus=",
}
"""What sbatch names when it refuses -> what to do; the first that fits."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a node reported, and when that was by the clock of this host."""

    report: dict[str, Any]
    earliest_s: float
    """The latest time at which the job had surely not begun."""
    latest_s: float
    """The time at which the report was here."""


def checkup_script(folder: CheckupFolder, config: SweepConfig) -> JobScript:
    """The job script of an allocation on one node, like a sweep's but for the module that runs."""
    allocation = Allocation(
        name="checkup.0", sweep_dir=str(folder.path), work_dir=os.getcwd(), nodes=1,
        gpus_per_node=config.hardware.gpus_per_node, simulated=config.hardware.simulated, threads=None,
        heartbeat_s=config.launcher.heartbeat_s, limit_s=LIMIT_S, kernel_digest="", tasks=(),
    )  # fmt: skip
    return array_script(
        [allocation],
        config.launcher,
        config.hardware,
        program=("ultrabench.agent.checkup", str(folder.path)),
        name=job_name(folder),
        comment=f"ultrabench doctor of {own_name()}: looks at one node, ends by itself",
    )


def job_name(folder: CheckupFolder) -> str:
    """Name of the job in squeue."""
    return f"ub-doctor-{folder.token[:8]}"


class CheckupJob:
    """One job, from its submission to its end."""

    def __init__(self, folder: CheckupFolder, config: SweepConfig, say: Say) -> None:
        self._folder, self._config, self._say = folder, config, say
        self._script = checkup_script(folder, config)
        self._query = SlurmQuery(poll_s=min(POLL_S, config.launcher.poll_s))
        self._log = folder.path / "allocations" / "checkup.0" / "job.log"
        self._number = ""
        self._job: SlurmJob | None = None
        self._over_since: float | None = None
        self._told = ""
        self._earliest_s = time.time()

    def run(self, wait_s: float) -> tuple[Check, Seen | None]:
        """Submits the job and waits; it is cancelled when it takes longer, or on Ctrl-C."""
        self._log.parent.mkdir(parents=True)
        self._earliest_s = time.time()
        try:
            self._number = submit(self._script, self._config.launcher.environment)
            self._say(f"submitted job {self._number} of one node; waiting up to {wait_s:.0f} s for it")
            return self._watch(wait_s)
        except CommandError as error:
            told = f"sbatch does not take a job of one node: {error}"
            found = (r for pattern, r in _REFUSALS.items() if re.search(pattern, told, re.IGNORECASE))
            remedy = next(found, "mend the launcher.* that it names, +launcher.sbatch.* among them")
            return failed("job", told, remedy), None
        finally:
            if self._over_since is None:
                self._cancel()

    def _cancel(self) -> None:
        """Cancels the job by number and by name, since the answer of sbatch may have been lost."""
        name = job_name(self._folder)
        try:
            self._query.cancel([self._number] if self._number else [], name=name)
        except ClusterError as error:
            self._say(f"job {self._number or name} could not be cancelled: {error}")

    def _watch(self, wait_s: float) -> tuple[Check, Seen | None]:
        submitted = time.monotonic()
        while True:
            report = self._folder.report()
            if report is not None:
                seen = Seen(report=report, earliest_s=self._earliest_s, latest_s=time.time())
                took_s = time.monotonic() - submitted
                self._wait_for_the_end()
                told = f"job {self._number} ran on {report['host']}; its report was here after {took_s:.0f} s"
                return passed("job", told), seen
            self._ask_squeue(submitted)
            now = time.monotonic()
            if self._over_since is not None and now - self._over_since > self._patience_s:
                return self._ended(), None
            if self._over_since is None and now - submitted > wait_s:
                return self._too_late(wait_s), None
            time.sleep(PAUSE_S)

    def _ask_squeue(self, submitted: float) -> None:
        """Asks squeue how the job is, and says so when that is new."""
        answer = self._query.jobs("")
        if answer is None or answer.stale:
            return
        asked = time.monotonic() - answer.age_s
        job = answer.find(f"{self._number}_0")
        phase = job.meaning.phase if job else None
        gone = job is None and asked - submitted > self._config.launcher.grace_s
        self._job = job or self._job
        if phase in (Phase.QUEUED, Phase.HELD):
            self._earliest_s = max(self._earliest_s, time.time() - answer.age_s)
        if (phase is Phase.OVER or gone) and self._over_since is None:
            self._over_since = time.monotonic()
        remedy = self._remedy()
        told = self._state() + (f": {remedy}" if remedy else "")
        if told != self._told:
            self._told = told
            self._say(told)

    def _state(self) -> str:
        """How the job is, such as `job 12 waits (Resources)`."""
        if self._job is None:
            return f"job {self._number} is not listed by squeue"
        job = self._job
        reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
        where = f" on {job.nodes}" if job.nodes else ""
        return f"job {self._number} {job.meaning.note}{where}{reason}"

    def _remedy(self) -> str | None:
        """What to do about a job that waits; None when it does not, or waiting is all it takes."""
        queued = self._job is not None and self._job.meaning.phase in (Phase.QUEUED, Phase.HELD)
        return pending_remedy(self._job.reason) if self._job is not None and queued else None

    @property
    def _patience_s(self) -> float:
        """Seconds to wait for the report of a job that is over."""
        late = LATE_S if self._job is not None and self._job.state == "COMPLETED" else FAILED_S
        return min(late, self._config.launcher.grace_s)

    def _wait_for_the_end(self) -> None:
        """Waits for the end of the job, so that nothing of it is left when its folder is removed."""
        end = time.monotonic() + END_S
        while self._over_since is None and time.monotonic() < end:
            self._ask_squeue(0.0)
            time.sleep(PAUSE_S)

    def _too_late(self, wait_s: float) -> Check:
        told = f"{self._state()}; not done after {wait_s:.0f} s, cancelled"
        if self._job is None or self._job.meaning.phase in (Phase.QUEUED, Phase.HELD):
            busy = f"the cluster is busy: give it time with --wait {max(3600, 3 * wait_s):.0f}"
            return failed("job", told, self._remedy() or busy)
        self._folder.keep = True
        slow = f"see {self._log}; if the node is only slow: --wait {max(LIMIT_S, 3 * wait_s):.0f}"
        return failed("job", told, slow)

    def _ended(self) -> Check:
        """The check of a job that is over and left no report; its folder stays as evidence."""
        self._folder.keep = True
        code, log = self._exit_code(), _lines(self._log)
        # srun tells afterwards that it has ended what was left.
        tail = [line for line in log or [] if not line.startswith("srun:")][-2:] or (log or [])[-2:]
        end = f"its log ends: {' | '.join(tail)}" if tail else "its log is empty"
        end = f"it wrote no {self._log}" if log is None else end
        told = f"{self._state()}; exit code {code or 'unknown'}, no report; {end}"
        return failed("job", told, _remedy_of(code, log, self._log, self._folder))

    def _exit_code(self) -> str | None:
        try:
            text = self._query.ask("scontrol", "--oneliner", "show", "job", f"{self._number}_0")
        except CommandError:
            return None
        found = re.search(r"\bExitCode=(\d+:\d+)", text)
        return found[1] if found else None


def _lines(log: Path) -> list[str] | None:
    """What the job wrote, without empty lines; None when there is no such file."""
    try:
        return [line.strip()[:200] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return None


def _remedy_of(code: str | None, log: list[str] | None, path: Path, folder: CheckupFolder) -> str:
    """What to do about a job that left no report."""
    text = "\n".join(log or [])
    if code == "73:0" or log is None:
        return f"{folder.results_dir} is not one folder for all nodes: choose a shared one with results_dir=FOLDER"
    if re.search(r"No module named .?ultrabench", text):
        return "the nodes need the same ultrabench: launcher.python= names a Python that has it, launcher.setup= loads it"
    if re.search(r"No such file|not found|execve|Permission denied", text):
        return f"a program is not on the nodes: set launcher.python=, launcher.setup= or launcher.srun=; see {path}"
    return f"see {path}; launcher.setup=, launcher.srun= and launcher.python= say what runs there"
