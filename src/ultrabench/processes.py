"""Processes of this host: who is alive, who belongs to whom, and how all of them end."""

import ctypes
import os
import pwd
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TAG_VARIABLE = "ULTRABENCH_TAG"
"""Set in every process an agent starts: allocation:node:agent pid:agent start time."""

SCRATCH_PREFIX = "ultrabench-"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def thread_variables(threads: int) -> dict[str, str]:
    """The environment that gives a process and its libraries so many threads."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends (now, if it already has)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its own children."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_time(pid: int) -> int | None:
    """Start of `pid` in clock ticks since boot, or None when it is gone (or a zombie).

    With the pid it names a process for good: pids come round again, start times do not.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty for one that is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def alive(pid: int, started: int) -> bool:
    """Whether the process that had `pid` and start time `started` still runs."""
    return start_time(pid) == started


def own_name() -> str:
    """Of the user, by number where nobody has written down the name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def own_processes() -> Iterator[int]:
    """Pids of this user, this process left out."""
    user = os.getuid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if entry.stat().st_uid == user:
                    yield int(entry.name)
            except OSError:
                continue


def command_line(pid: int) -> list[str]:
    """Arguments of `pid`; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def tag_of(pid: int) -> str | None:
    """The tag in the environment `pid` was started with."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    start = f"{TAG_VARIABLE}=".encode()
    for item in raw.split(b"\0"):
        if item.startswith(start):
            return item[len(start) :].decode(errors="replace")
    return None


def tagged(wanted: Callable[[str], bool]) -> list[int]:
    """Living processes of this user whose tag `wanted` accepts."""
    found = []
    for pid in own_processes():
        tag = tag_of(pid)
        if tag is not None and wanted(tag) and start_time(pid) is not None:
            found.append(pid)
    return found


def descendants(ancestor: int) -> set[int]:
    """Living processes that descend from `ancestor`, whatever session, user or environment they have.

    Of a subreaper that is all that was ever started under it: orphans become its own children.
    """
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}
    found, new = set[int](), {ancestor}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def described(pids: Iterable[int]) -> str:
    """What a person needs to know of processes that stay: `1234 (python, state D)`."""
    stats = [(pid, (command_line(pid) or ["?"])[0], (_stat(pid) or ["?"])[0]) for pid in sorted(pids)]
    return ", ".join(f"{pid} ({Path(program).name}, state {state})" for pid, program, state in stats)


def kill_until_gone(
    find: Callable[[], list[int]], *, patience_s: float = 10.0, meanwhile: Callable[[], None] = lambda: None
) -> list[int]:
    """SIGKILLs what `find` returns until it returns nothing; gives back what would not die.

    New children of the dying are found by asking again, so that no tree outgrows the killing.
    """
    end = time.monotonic() + patience_s
    while True:
        pids = find()
        if not pids or time.monotonic() > end:
            return pids
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        meanwhile()
        time.sleep(0.02)


def reap_adopted(known: set[int]) -> None:
    """Collects ended children that were adopted, so that they do not stay as zombies.

    Args:
        known: children whose exit somebody else (a subprocess.Popen) waits for.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return
    for pid in (int(c) for c in children):
        if pid not in known and start_time(pid) is None:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def make_scratch() -> Path:
    """A node-local folder of this process, whose name tells when nobody needs it any more."""
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{pid}-{start_time(pid)}-"))


def clean_up_after_the_dead() -> None:
    """Kills what agents that are no more have left running, and removes their folders."""
    kill_until_gone(lambda: tagged(orphaned), patience_s=5.0)
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*-*-*"):
        pid, started, _ = folder.name.removeprefix(SCRATCH_PREFIX).split("-", 2)
        if pid.isdigit() and started.isdigit() and not alive(int(pid), int(started)):
            shutil.rmtree(folder, ignore_errors=True)


def orphaned(tag: str) -> bool:
    """Whether the agent that made `tag` is gone."""
    _, _, identity = tag.partition(":")
    parts = identity.split(":")
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return False
    return not alive(int(parts[1]), int(parts[2]))
