"""Starts, finds and kills processes of this host: which are alive, who started them, and none is left behind."""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ultrabench.errors import ClusterError

TAG_VARIABLE = "ULTRABENCH_TAG"
"""Variable set in all processes of an agent: allocation:node:agent pid:agent start time:PID namespace."""

SCRATCH_PREFIX = "ultrabench-"
"""First part of the names of the node-local folders of agents, in the folder for temporary files."""
EMPTY_WALKS = 2
"""Number of walks through /proc in a row that must find no process; one walk easily misses a forking process."""
EMPTY_LOOKS = 5
"""Number of looks in a row at the children of this process that must find no child."""
MAX_LOOKS = 300
"""Number of such looks after which children that do not end are left."""
KILL_LIMIT_S = 10.0
"""Seconds after which processes that do not end although they were killed are left."""
LOOK_INTERVAL_S = 0.002
"""Seconds between two such looks or walks."""

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the PID namespace of a host outside all containers (PROC_PID_INIT_INO of Linux)."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def thread_variables(num_threads: int) -> dict[str, str]:
    """The variables that limit a process and its libraries to this number of threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))


def die_with_parent(parent_pid: int, death_signal: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent ends; exits at once if the parent is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


MAX_COUNTED_GAP_S = 0.5
"""Largest number of seconds between two calls of a `RunningClock` that it counts; beyond it the process was stopped."""


class RunningClock:
    """Counts the seconds for which this process has run, so that limits do not count those for which it was stopped.

    A job may be suspended, a node paused, and a disk may block its caller. Then the time between two looks at the
    clock is long, and only a short part of it counts.
    """

    def __init__(self) -> None:
        self._last_call_s, self._run_time_s = time.monotonic(), 0.0

    def __call__(self) -> float:
        """The seconds for which this process has run since the clock was made, if the clock is called often."""
        now_s = time.monotonic()
        self._run_time_s += min(now_s - self._last_call_s, MAX_COUNTED_GAP_S)
        self._last_call_s = now_s
        return self._run_time_s


def become_subreaper() -> None:
    """Makes this process the parent of those of its descendants whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_time(pid: int) -> int | None:
    """Start time of `pid` in clock ticks since boot; None when the process is gone or a zombie.

    Pid and start time together name one process for ever, because pids are used again.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _proc_text(pid: int, file_name: str) -> str:
    """The text of the file `file_name` of /proc/PID; empty when the process is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/{file_name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when the process is gone or a zombie."""
    fields = _proc_text(pid, "stat").rpartition(")")[2].split()
    return [] if not fields or fields[0] in "ZX" else fields


def state_of(pid: int) -> str:
    """The state of a process as /proc shows it, such as R, S, D or T; `?` when it is gone or a zombie."""
    return (_stat_fields(pid) or "?")[0]


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the process with `pid` and start time `start_ticks` still runs."""
    return start_time(pid) == start_ticks


def busy_share(sleep_s: float) -> float:
    """The share of this machine's cores that is used while this process sleeps for `sleep_s`, from 0 to 1."""
    ticks_before = core_ticks()
    time.sleep(sleep_s)
    spent_ticks = [after - before for after, before in zip(core_ticks(), ticks_before, strict=True)]
    return 1 - (spent_ticks[3] + spent_ticks[4]) / max(sum(spent_ticks), 1)


def core_ticks() -> list[int]:
    """Ticks that all cores together spent as user, nice, system, idle, iowait, irq, softirq and steal."""
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def cpu_ticks(pid: int) -> int:
    """Ticks of CPU time of a process and of those of its children that have ended; 0 when it is gone."""
    return sum(map(int, _stat_fields(pid)[11:15]))


def user_name(uid: int) -> str:
    """Name of a user, or `user NUMBER` where the system has no name for the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def own_name() -> str:
    """Name of the user of this process, as `user_name` gives it."""
    return user_name(os.getuid())


def own_processes() -> Iterator[int]:
    """Pids of all processes of this user except this process."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == os.getuid():
                    yield int(entry.name)


def command_line(pid: int) -> list[str]:
    """Program and arguments of the process `pid`; empty when it is gone."""
    return _proc_text(pid, "cmdline").split("\0")[:-1]


def tag_of(pid: int) -> str | None:
    """The tag in the environment with which `pid` was started; None when there is none."""
    return variables_of(pid).get(TAG_VARIABLE)


def variables_of(pid: int) -> dict[str, str]:
    """The environment variables with which `pid` was started; empty when the process is gone or another user's."""
    entries = (entry.partition("=") for entry in _proc_text(pid, "environ").split("\0"))
    return {name: value for name, separator, value in entries if separator}


def parent_of(pid: int) -> int | None:
    """The pid of the parent of `pid`; None when the process is gone or a zombie."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def tagged(matches: Callable[[str], bool]) -> list[int]:
    """Pids of living processes of this user whose tag `matches` accepts."""
    tagged_pairs = ((pid, tag) for pid in own_processes() if (tag := tag_of(pid)) is not None)
    return [pid for pid, tag in tagged_pairs if matches(tag) and start_time(pid) is not None]


def descendants(ancestor_pid: int) -> set[int]:
    """Pids of living processes that descend from `ancestor_pid`, whatever their session, user or environment.

    For a subreaper these are all processes that were started under it, because orphans become its children.
    """
    return descendants_of_each({0: ancestor_pid})[0]


def descendants_of_each(pid_by_rank: Mapping[int, int]) -> dict[int, set[int]]:
    """Rank -> pids of the living processes that descend from its process, with one reading of /proc for all."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    parent_by_pid = {pid: int(fields[1]) for pid in pids if (fields := _stat_fields(pid))}
    descendants_by_rank = dict[int, set[int]]()
    for rank, ancestor_pid in pid_by_rank.items():
        descendant_pids, newest_pids = set[int](), {ancestor_pid}
        while newest_pids:
            newest_pids = {pid for pid, parent_pid in parent_by_pid.items() if parent_pid in newest_pids}
            descendant_pids |= newest_pids
        descendants_by_rank[rank] = descendant_pids
    return descendants_by_rank


def peak_resident_bytes(pid: int) -> int:
    """The largest resident set that a process has had; 0 when it is gone. Its file has KiB."""
    peak_text = _proc_text(pid, "status").partition("\nVmHWM:")[2].split(maxsplit=1)
    return 1024 * int(peak_text[0]) if peak_text else 0


def pids_text(pids: Iterable[int]) -> str:
    """A text for messages about processes that cannot be killed, such as `1234 (python, state D)`."""
    programs = [(pid, Path((command_line(pid) or ["?"])[0]).name) for pid in sorted(pids)]
    return ", ".join(f"{pid} ({program}, state {state_of(pid)})" for pid, program in programs)


def kill_until_gone(find: Callable[[], list[int]], on_round: Callable[[], None] = lambda: None) -> list[int]:
    """SIGKILLs the processes whose pids `find` returns, until it returns nothing several times in a row.

    `find` is called again after each round, because a process may start new ones before it dies.

    Args:
        on_round: called after each round.

    Returns:
        The pids that are still alive after KILL_LIMIT_S seconds.
    """
    running_clock, num_empty = RunningClock(), 0
    while True:
        pids = find()
        num_empty = 0 if pids else num_empty + 1
        if num_empty == EMPTY_WALKS or (running_clock() > KILL_LIMIT_S and pids):
            return pids
        for pid in pids:
            _kill(pid)
        on_round()
        time.sleep(0.02 if pids else LOOK_INTERVAL_S)


def kill_children(spared_pids: set[int]) -> set[int]:
    """SIGKILLs and reaps the children of this process, again and again without a pause until none are left.

    The children of a subreaper include the orphans of its descendants. A program may fork, leave its session
    and end, again and again. Then its newest process is among these children for some milliseconds only,
    which is too short for a walk through /proc, but long enough for this.

    Args:
        spared_pids: children that stay alive, or whose exit somebody else (a subprocess.Popen) waits for.

    Returns:
        The pids of all children that were killed.
    """
    killed_pids, num_empty, children_file = set[int](), 0, f"task/{os.getpid()}/children"
    for _ in range(MAX_LOOKS):
        pids = map(int, _proc_text(os.getpid(), children_file).split())
        child_pids = [pid for pid in pids if pid not in spared_pids]
        num_empty = 0 if child_pids else num_empty + 1
        if num_empty == EMPTY_LOOKS:
            break
        if num_empty:
            time.sleep(LOOK_INTERVAL_S)
        killed_pids.update(child_pids)
        for pid in child_pids:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return killed_pids


def _kill(pid: int) -> None:
    """SIGKILLs a process, or its whole group if it leads one, so that a fork under way is killed, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid != os.getpgrp():
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def pid_namespace() -> int:
    """Number of the PID namespace of this process; a pid has a meaning only inside its namespace.

    Raises:
        ClusterError: /proc shows another namespace, so that no process can be found in it.
    """
    if os.readlink("/proc/self") != str(os.getpid()):
        raise ClusterError(
            "/proc shows another PID namespace; mount the container's own /proc (--mount-proc)"
        )
    return os.stat("/proc/self/ns/pid").st_ino


def make_scratch() -> Path:
    """Makes a node-local folder that bears the identity of this process, so that others can clean it up."""
    return Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{_identity_text('-')}-"))


def own_tag(allocation_name: str, node_index: int) -> str:
    """The tag of the processes that this process starts for a node of an allocation."""
    return f"{allocation_name}:{node_index}:{_identity_text(':')}"


def _identity_text(separator: str) -> str:
    """Pid, start time and PID namespace of this process, which together name it for ever."""
    pid = os.getpid()
    return separator.join(map(str, (pid, start_time(pid), pid_namespace())))


def clean_up_after_the_dead() -> None:
    """Kills the processes that dead agents have left behind, and removes the folders of these agents."""
    kill_until_gone(lambda: tagged(is_orphaned))
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*-*-*-*"):
        if _is_dead(folder.name.removeprefix(SCRATCH_PREFIX).split("-")[:3]):
            shutil.rmtree(folder, ignore_errors=True)


def is_orphaned(tag: str) -> bool:
    """Whether the agent that made `tag` is gone."""
    return _is_dead(tag.split(":")[2:])


def _is_dead(identity_parts: list[str]) -> bool:
    """Whether a process of this PID namespace is gone; False for other namespaces, where nothing is known."""
    if len(identity_parts) != 3 or not all(part.isdigit() for part in identity_parts):
        return False
    pid, start_ticks, namespace = map(int, identity_parts)
    return namespace == pid_namespace() and not is_alive(pid, start_ticks)


def run_python(*arguments: str, timeout_s: float, python: str = sys.executable) -> str:
    """The output of an interpreter with these arguments, in a process that does not import from the working folder.

    Raises:
        ClusterError: it cannot be started, takes too long, or fails; the message is the last line of stderr.
    """
    command = [python, "-P", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise ClusterError((error.stderr.strip().splitlines() or ["no message"])[-1]) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"no answer within {timeout_s:.0f} s") from error
    except OSError as error:
        raise ClusterError(str(error)) from error
