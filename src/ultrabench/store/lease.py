"""The sign of life of a launcher: a small file in the sweep's folder that a thread of its own renews.

The thread renews the lease also while the launcher waits for sbatch, sacct or another disk.
A launcher that is suspended renews nothing: its lease lapses, and it notices that when it wakes.
"""

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.processes import own_name, pid_namespace, start_time, state_of
from ultrabench.record import from_dict, to_dict
from ultrabench.store.folder import SweepFolder, mtime_s, write_whole

RENEW_S = 10.0
"""Seconds between two renewals of a lease."""
LAPSE_S = 90.0
"""Seconds without a renewal after which a lease has lapsed; file servers may show a renewal up to a minute late."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """The launcher that holds a lease."""

    host: str
    boot_id: str
    """Changes whenever the host starts."""
    pid_namespace: int
    """A pid has a meaning only on its host and in this namespace."""
    pid: int
    start_ticks: int
    """When the process started, in clock ticks since the boot of its host."""
    user: str

    def __str__(self) -> str:
        """The launcher as messages name it."""
        if not self.pid:
            return f"a launcher on {self.host}"
        return f"process {self.pid} on {self.host}"

    def visible_life(self) -> bool | None:
        """Whether the process runs, where this process can tell; None where it cannot.

        A process is not always visible: /proc may hide those of others, and a pid means nothing on another host or in
        another namespace. But a signal reaches hidden processes, too, so that the answer that there is no such process
        is certain. A stopped process neither works nor is gone.
        """
        if not self.boot_id or (self.boot_id, self.pid_namespace) != (_boot_id(), _own_namespace()):
            return None
        if (start_ticks := start_time(self.pid)) is not None:
            is_same = start_ticks == self.start_ticks
            return None if is_same and state_of(self.pid) in "Tt" else is_same
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return False if isinstance(error, ProcessLookupError) else None
        return None


_UNREADABLE_HOLDER = LeaseHolder(
    host="an unknown host", boot_id="", pid_namespace=0, pid=0, start_ticks=0, user=""
)
"""Stands for the launcher of another user whose lease cannot be read: only its renewals tell whether it lives."""


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _own_namespace() -> int | None:
    """The PID namespace of this process; None where /proc shows another one, so that pids mean nothing here."""
    try:
        return pid_namespace()
    except (ClusterError, OSError):
        return None


def _seconds_since_boot() -> float:
    """A clock that runs also while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The lease of this process on a sweep, from its making until `release` or the end of the process."""

    def __init__(self, folder: SweepFolder, name: str) -> None:
        """Takes the lease.

        Args:
            name: name of the launcher's journal, of which there is only one.

        Raises:
            OSError: the file cannot be written.
        """
        self.path = folder.leases / f"{name}.json"
        self._renewed_at = _seconds_since_boot()
        holder = LeaseHolder(
            host=socket.gethostname().split(".")[0], boot_id=_boot_id(), pid_namespace=pid_namespace(),
            pid=os.getpid(), start_ticks=start_time(os.getpid()) or 0, user=own_name(),
        )  # fmt: skip
        folder.leases.mkdir(exist_ok=True)
        self._content = json.dumps(to_dict(holder))
        write_whole(self.path, self._content)
        stop = threading.Event()
        # The thread holds no reference to the lease, so that a lease that nobody holds any more ends.
        self.release = weakref.finalize(self, _release, self.path, stop)
        threading.Thread(
            target=_renew_until, args=(stop, weakref.ref(self)), name="lease", daemon=True
        ).start()

    def renew(self) -> None:
        """Shows others that this launcher is alive; a lease that lapsed meanwhile,
        as on a disk that hung, stays lapsed.

        Raises:
            OSError: the file cannot be written, or is gone with the folder.
        """
        os.utime(self.path)
        if not self.has_lapsed():
            self._renewed_at = _seconds_since_boot()

    def renew_lapsed(self) -> None:
        """Takes the lease again after it lapsed, also if somebody removed its file meanwhile.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(self.path, self._content)
        self._renewed_at = _seconds_since_boot()

    def has_lapsed(self) -> bool:
        """Whether others may have taken this launcher for dead, such as while it was suspended."""
        return _seconds_since_boot() - self._renewed_at > LAPSE_S


def _renew_until(stop: threading.Event, lease_ref: "weakref.ref[Lease]") -> None:
    """Renews a lease every RENEW_S until it is released; a lapsed one is left to the launcher, which renews it."""
    while not stop.wait(RENEW_S):
        lease = lease_ref()
        if lease is None:
            return
        if not lease.has_lapsed():
            with contextlib.suppress(OSError):  # a disk that fails may recover
                lease.renew()
        del lease


def _release(path: Path, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(OSError):
        path.unlink()


def living_launchers(
    folder: SweepFolder, own_lease: Lease | None = None, *, writes: bool = False
) -> list[LeaseHolder]:
    """The launchers that follow a sweep now, beside the one that holds the lease `own_lease`.

    A lease is alive if its process is seen to run, or if it was renewed less than LAPSE_S ago and its process is not
    known to be gone.

    Args:
        writes: whether a file may be written to learn the time of the file server, whose clock may differ from ours.
    """
    paths = [
        path for path in sorted(folder.leases.glob("*.json")) if own_lease is None or path != own_lease.path
    ]
    now_s = _file_server_now_s(folder) if paths and (writes or own_lease) else time.time()
    return [holder for path in paths if (holder := _living_holder(path, now_s))]


def lives(folder: SweepFolder, name: str) -> bool:
    """Whether the launcher whose journal has this name follows a sweep now."""
    path = folder.leases / f"{name}.json"
    return path.exists() and _living_holder(path, _file_server_now_s(folder)) is not None


def _living_holder(path: Path, now_s: float) -> LeaseHolder | None:
    """The holder of a lease; None if the lease has lapsed, was released, or its holder is known to be gone."""
    try:
        with path.open("rb") as file:  # opening it makes a file server show its latest time
            content, renewed_at = file.read(), os.fstat(file.fileno()).st_mtime
        holder = from_dict(LeaseHolder, json.loads(content), skip_unknown=True)
    except PermissionError:
        holder, renewed_at = _UNREADABLE_HOLDER, mtime_s(path)
    except (OSError, ValueError, TypeError, RecursionError, ConfigError):
        return None
    life = holder.visible_life()
    is_renewed = now_s - renewed_at < LAPSE_S
    return holder if life or (life is None and is_renewed) else None


def _file_server_now_s(folder: SweepFolder) -> float:
    """The time by the clock that gives files their times; that of this host where the folder cannot be written."""
    path = folder.leases / f".now-{os.getpid()}-{threading.get_ident()}"
    try:
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
