"""Runs allocations on this machine, with one agent process for each simulated node.

`python -P -m ultrabench.launchers.local FOLDER` starts the agents of one allocation in a new session, so that
they continue when the launcher ends.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from ultrabench import processes
from ultrabench.errors import ClusterError
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.launchers.launcher import Allocations, Say, own_origin
from ultrabench.machine_lock import holder
from ultrabench.oom_kills import num_oom_kills
from ultrabench.processes import clean_up_after_the_dead
from ultrabench.result import Status
from ultrabench.store.allocation import END_REQUEST, Allocation, read_allocation
from ultrabench.store.folder import SweepFolder, mtime_s
from ultrabench.store.jobs_seen import Job, JobEnd, JobLimits, JobsSeen
from ultrabench.store.state import AllocationState

SUBMIT_TIMEOUT_S = 60.0
"""Seconds for the start of the agents of an allocation."""
STOP_PATIENCE_S = 10.0
"""Seconds for agents to end by themselves before they are killed."""
LONGEST_WAIT_MIN = 7 * 24 * 60
"""Minutes for which agents may wait for the machine; from then on they keep their time limit themselves."""
GRACE_S = 3.0
"""Seconds without a process after which an allocation counts as ended."""
WARNING_S = 30
"""Seconds before the time limit at which submitit warns the agents."""
OWN_MODULES = {"ultrabench.agent", "ultrabench.launchers.local", "submitit.local._local"}
"""Modules of an allocation's processes: its agents, the process that starts them, submitit's controller."""


_ALLOCATION_IN_PATH = re.compile(r"/(?:.*/)?allocations/([^/]+)(?:/.*)?", re.DOTALL)
"""The name of an allocation in the absolute path of its folder, or of a file in it."""


class LocalLauncher:
    """Starts, finds and kills allocations that are processes of this host."""

    limits = JobLimits(max_jobs=1)  # two jobs at once would disturb each other's measurements
    look_pause_s = 0.3

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self.origin = own_origin()
        self._missing_since: dict[str, float] = {}
        self._oom_kills_before = num_oom_kills()
        """Number of processes that Linux had killed for lack of memory before the latest allocation was started."""

    def submit(self, allocations: Sequence[Allocation], bad_hosts: Sequence[str], say: Say) -> dict[str, Job]:
        """Starts the agents of each allocation; returns their host.

        Raises:
            ClusterError: the agents of an allocation could not be started.
        """
        self._oom_kills_before = num_oom_kills()
        for allocation in allocations:
            command = [sys.executable, "-P", "-m", "ultrabench.launchers.local", str(allocation.folder)]
            log_path = allocation.folder / "submit.err"
            try:
                subprocess.run(
                    command,
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log_path.open("wb"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=SUBMIT_TIMEOUT_S,
                    check=True,
                )
            except (subprocess.SubprocessError, OSError) as error:
                raise ClusterError(f"cannot start {allocation.name}: {error}; see {log_path}") from error
        return {allocation.name: {"host": socket.gethostname()} for allocation in allocations}

    def observe(self, allocations: Allocations) -> JobsSeen:
        """The allocations that are alive: they have a process on this host, or had one until GRACE_S ago.

        Processes are found by their command lines and not by remembered pids, so that this works after a
        launcher died and when the system reuses a pid.
        """
        unended_names = {name for name, allocation in allocations.items() if allocation.ended is None}
        present_names = self._pids_by_allocation().keys()
        if stragglers := present_names & (allocations.keys() - unended_names):  # such as frozen agents
            self._wait_and_kill(stragglers, GRACE_S)
        running_names, now_s = present_names & unended_names, time.monotonic()
        self._missing_since = {n: self._missing_since.get(n, now_s) for n in unended_names - running_names}
        lost_names = {n for n, since_s in self._missing_since.items() if now_s - since_s > GRACE_S}
        if lost_names:
            clean_up_after_the_dead()
        return JobsSeen(
            alive=frozenset(unended_names - lost_names),
            running=frozenset(running_names),
            ended_jobs={name: self._vanished_end(allocations[name]) for name in sorted(lost_names)},
            jobs={name: {"host": socket.gethostname()} for name in running_names},
            notes=self._wait_notes(allocations, running_names),
        )

    @staticmethod
    def _wait_notes(allocations: Allocations, running_names: Set[str]) -> tuple[str, ...]:
        """A message that names the allocation for which one of these waits, if any."""
        waiting_names = [name for name in running_names if not allocations[name].agents]
        if waiting_names and (lock_holder := holder()) and lock_holder.allocation not in running_names:
            return (f"another sweep is measuring on this machine: {lock_holder}; waiting until it ends",)
        return ()

    def _vanished_end(self, allocation: AllocationState) -> JobEnd:
        has_kills = bool(allocation.agents) and num_oom_kills() > self._oom_kills_before
        end = vanished_end(allocation.name, self._held_s(allocation), has_kills=has_kills)
        return replace(end, never_started=not allocation.agents)

    def _held_s(self, allocation: AllocationState) -> float:
        """Seconds from the time an allocation was written to its latest sign of life."""
        paths = [self._folder.journal / agent.journal for agent in allocation.agents if agent.journal]
        written_at = mtime_s(self._folder.allocations / allocation.name / "allocation.json")
        return max(0.0, *(mtime_s(path) - written_at for path in paths)) if paths and written_at else 0.0

    def cancel(self, allocations: Allocations, *, queued_only: bool = False) -> dict[str, float]:
        """Ends allocations: asks their agents to end, then kills those that do not.

        Local allocations are never queued, so that `queued_only` ends none.
        """
        if queued_only:
            return {}
        pids_by_name = self._pids_by_allocation()
        for name in allocations:
            with contextlib.suppress(OSError):
                (self._folder.allocations / name / END_REQUEST).touch()
        for pid in {pid for name in allocations for pid in pids_by_name[name]}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._wait_and_kill(allocations.keys(), STOP_PATIENCE_S)
        clean_up_after_the_dead()
        return {name: self._held_s(allocation) for name, allocation in allocations.items()}

    def _wait_and_kill(self, names: Set[str], patience_s: float) -> None:
        """Waits until these allocations have no process, and kills those that have one after `patience_s`."""
        deadline_s = time.monotonic() + patience_s
        while (living_names := names & self._pids_by_allocation().keys()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for name in living_names:
            self.end_frozen_job(name, {})

    def end_frozen_job(self, allocation_name: str, job: Job) -> None:
        """Kills the agents at once; Linux and `clean_up_after_the_dead` end their ranks."""
        processes.kill_until_gone(lambda: self._pids_by_allocation()[allocation_name])
        clean_up_after_the_dead()

    def _pids_by_allocation(self) -> defaultdict[str, list[int]]:
        """Allocation -> our processes that have its folder, or a file in it, as argument.

        The path in front of the name does not count: links, mounts and a new name give a folder other paths, and no two
        submissions share a name.
        """
        pids_by_name = defaultdict[str, list[int]](list)
        for pid in processes.own_processes():
            arguments = processes.command_line(pid)
            names = {match[1] for path in arguments if (match := _ALLOCATION_IN_PATH.fullmatch(path))}
            if names and OWN_MODULES & set(arguments) and processes.start_time(pid) is not None:
                for name in names:
                    pids_by_name[name].append(pid)
        return pids_by_name


def vanished_end(name: str, held_s: float, *, has_kills: bool) -> JobEnd:
    """The end of an allocation whose agents disappeared.

    Args:
        has_kills: whether Linux has killed processes for lack of memory since the allocation was started.
    """
    reason = f"the agents of {name} disappeared"
    if has_kills:
        reason += ", and Linux killed processes because the host ran out of memory"
    status = Status.OOM if has_kills else Status.LOST
    return JobEnd(status=status, reason=reason, certain=True, held_s=held_s)


def start_agents(allocation_folder: Path) -> None:
    """Starts one agent for each simulated node of an allocation, under a controller of submitit."""
    from submitit.local.local import start_controller  # only the process that starts agents needs submitit

    allocation = read_allocation(allocation_folder)
    num_gpus = allocation.gpus_per_node if DEVICE_KINDS[allocation.tasks[0].device].has_gpus else 0
    python = str(allocation.tasks[0].spec.variant.get("python", sys.executable))
    start_controller(
        folder=allocation_folder / "submitit",
        command=shlex.join([python, "-P", "-m", "ultrabench.agent", str(allocation_folder)]),
        tasks_per_node=allocation.nodes,
        cuda_devices=",".join(map(str, range(num_gpus))),
        timeout_min=allocation.limit_s / 60 + LONGEST_WAIT_MIN,
        signal_delay_s=WARNING_S,
    )


if __name__ == "__main__":
    start_agents(Path(sys.argv[1]))
