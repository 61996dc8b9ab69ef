"""Finds the targets of faults: agents and ranks on the simulated nodes, and the jobs they belong to."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.chaos.fault import Fault
from tests.slurm.sweeps import slurm_says
from ultrabench.processes import TAG_VARIABLE, command_line, own_processes, start_time

FORK_SERVER = "ultrabench.agent.ranks.fork_server"
PROGRAM = Path(__file__).parent / "program.py"
PATIENCE_S = 15.0
"""Seconds for which a fault waits until it finds a target."""
AWAY_S = 5.0
"""Seconds for which disks are full or read-only, and controllers are down."""
T = TypeVar("T")
Hit = dict[str, Any]
"""What a fault hit: `target` in words, `allocations` whose attempt it may have ended, and `costs`, the number
of jobs it may cost, if that is not one for each of them."""


class MissedError(Exception):
    """A fault found no target."""


def one_of(
    find: Callable[[], Sequence[T]], fault: Fault, pause_s: float = 0.1, patience_s: float = PATIENCE_S
) -> T:
    """The target that the fault's `share` chooses among those that are found.

    Raises:
        MissedError: no target was found in time.
    """
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if targets := find():
            return targets[fault.share * len(targets) // 100]
        time.sleep(pause_s)
    raise MissedError("there was nothing to hit")


def wait_for(ready: Callable[[], object], seconds: float) -> None:
    """Waits until `ready` holds, at most so many seconds."""
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.1)


def send(number: signal.Signals, pid: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Target(NamedTuple):
    """A process of an allocation that a fault can hit."""

    pid: int
    role: str
    """The role of the process: leader, follower or rank."""
    allocation: str
    host: str

    def __str__(self) -> str:
        return f"{self.role} {self.pid} of {self.allocation} on {self.host}"


class Job(NamedTuple):
    """A job of a sweep."""

    allocation: str
    job_id: str
    nodes: str


def processes(folder: Path, role: str) -> list[Target]:
    """The living processes of this role that belong to sweeps in `folder`, in a stable order."""
    targets = []
    for pid in own_processes():
        words, env = command_line(pid), environment(pid)
        if words[1:4] == ["-P", "-m", "ultrabench.agent"] and words[4].startswith(f"{folder}/"):
            process_role = "leader" if env.get("SLURM_NODEID") == "0" else "follower"
            name = f"{Path(words[4]).name}.{env.get('SLURM_ARRAY_TASK_ID')}"
        elif _is_rank(pid, words) and TAG_VARIABLE in env:
            process_role, name = "rank", env[TAG_VARIABLE].split(":")[0]
            if not any(folder.glob(f"results/*/allocations/{name}")):
                continue
        else:
            continue
        if process_role == role and start_time(pid) is not None:
            targets.append(Target(pid, process_role, name, env.get("SLURMD_NODENAME", "?")))
    return sorted(targets, key=lambda t: (t.allocation, t.host, t.pid))


def fork_servers(folder: Path) -> list[Target]:
    """The fork servers of the agents of sweeps in `folder`, in a stable order."""
    agents = {agent.pid: agent for role in ("leader", "follower") for agent in processes(folder, role)}
    parents = {pid: parent_of(pid) for pid in own_processes() if FORK_SERVER in command_line(pid)}
    return [
        agents[parent]._replace(pid=pid, role="fork server")
        for pid, parent in sorted(parents.items())
        if parent in agents
    ]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # proc(5)
    return 0


def _is_rank(pid: int, words: list[str]) -> bool:
    """Whether a process runs the program of these tests, or was forked from the fork server into its own group."""
    with contextlib.suppress(ProcessLookupError):
        return str(PROGRAM) in words or (FORK_SERVER in words and os.getpgid(pid) == pid)
    return False


def environment(pid: int) -> dict[str, str]:
    """The environment variables with which a process was started."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def jobs(sweep: str, *options: str, states: str = "R,CF") -> list[Job]:
    """The jobs of a sweep in these states, by default those that run."""
    text = slurm_says("squeue", "-h", "-r", "-t", states, "-o", "%j.%K|%i|%N", *options)
    rows = [line.split("|") for line in sorted(text.splitlines()) if line.startswith(f"ub-{sweep}-")]
    # A job name ends with the id of the sweep and the two parts of the name of the allocation.
    return [Job("-".join(name.split("-")[-2:]), job_id, nodes) for name, job_id, nodes in rows]


def nodes_at_work(sweep: str) -> list[str]:
    """The nodes that run jobs of a sweep."""
    return hosts(",".join(job.nodes for job in jobs(sweep) if job.nodes))


def hosts(names: str) -> list[str]:
    """The nodes that Slurm writes as a list such as gpu[01-03]; none for `None assigned`."""
    return slurm_says("scontrol", "show", "hostnames", names).split() if names and " " not in names else []


def writers_at_rest(journal: Path) -> list[Path]:
    """The journal files whose process has ended."""
    pids = {path: path.stem.rsplit("-", 2)[1] for path in sorted(journal.glob("*-*-*-*.jsonl"))}
    return [path for path, pid in pids.items() if not os.path.exists(f"/proc/{pid}") and path.stat().st_size]
