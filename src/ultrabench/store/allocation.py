"""An allocation is one job that runs many tasks one after another on the same nodes."""

import json
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.record import from_dict, to_dict
from ultrabench.run import Task
from ultrabench.store.folder import write_whole

END_REQUEST = "end-requested"
"""File in the folder of an allocation by which a launcher says that the SIGTERM it sends is from the user."""
JOB_LOG = "job.log"
"""File in the folder of an allocation to which its job on Slurm writes."""
PROBE_LIMIT_S = 300.0
"""Time limit of a preflight in seconds; importing torch may take a minute on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The description of an allocation for its agents, which is written before the job is submitted."""

    name: str
    sweep_dir: str
    """Absolute path of the sweep's folder."""
    sweep_id: str = ""
    """Id of the sweep; empty if an earlier version wrote the file."""
    work_dir: str
    """Folder in which commands of the user run: the one where `sweep launch` was started."""
    nodes: int
    gpus_per_node: int
    simulated: bool
    """Whether all nodes are processes of one host."""
    threads: int | None
    """OMP_NUM_THREADS of a rank; None means the cores of the node divided by its ranks."""
    heartbeat_s: float
    limit_s: float
    """Wall-clock limit of the whole allocation."""
    kernel_digest: str
    git_commit: str | None = None
    """Commit of ultrabench when the allocation was submitted."""
    preflight: bool = False
    """Whether devices and links are measured before the first task."""
    control: str | None = None
    """run_id of the control run, if it is the first task; it may also be repeated between others."""
    window: str | None = None
    """Time of day in which runs may start, such as 19:00-07:00, in the launcher's time zone."""
    utc_offset_s: int | None = None
    """Seconds by which the launcher's clock is ahead of UTC; None in files of earlier versions,
    which mean local time."""
    by: dict[str, str] = field(default_factory=dict)
    """Who submitted it and where: {user, cluster, host}; cluster is empty for local processes."""
    tasks: tuple[Task, ...]

    @property
    def warning_s(self) -> float:
        """Seconds before its limit at which the job is told to end, so that its agents can write results."""
        return min(90.0, self.limit_s / 4)

    @property
    def probe(self) -> Task:
        """The preflight as a task; its index is -1."""
        run_id = f"preflight-{self.name}"
        task = next((task for task in self.tasks if task.spec.shape.num_experts), self.tasks[0])
        return replace(
            task, run_id=run_id, repeat=0, attempt=0, probe=True, limit_s=PROBE_LIMIT_S, checkpoint=None
        )

    def task(self, task_index: int) -> Task:
        """The task with this index; the preflight has index -1."""
        return self.probe if task_index < 0 else self.tasks[task_index]

    @property
    def folder(self) -> Path:
        """The folder of this allocation inside that of the sweep."""
        return Path(self.sweep_dir) / "allocations" / self.name

    def write(self) -> None:
        """Writes allocation.json, and a secret that only this user can read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "secret", secrets.token_hex(16), mode=0o600)
        write_whole(self.folder / "allocation.json", json.dumps(to_dict(self)))


def read_allocation(folder: Path) -> Allocation:
    """The allocation that the allocation.json in `folder` describes.

    Raises:
        SweepFolderError: the file cannot be read.
    """
    try:
        values = json.loads((folder / "allocation.json").read_text(), object_hook=_with_new_names)
        return from_dict(Allocation, values)
    except (OSError, TypeError, ValueError, ConfigError) as error:
        raise SweepFolderError(f"cannot read {folder}/allocation.json: {error}") from error


def _with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """An object of allocation.json; version 0.2.0 wrote `profile` in place of `traced` into its tasks."""
    if "limit_s" in values and "spec" in values and "profile" in values:
        values["traced"] = values.pop("profile")
    return values


def utc_offset_s(now_s: float) -> int:
    """Seconds by which the clock of this process is ahead of UTC at `now_s` (seconds since 1970)."""
    return time.localtime(now_s).tm_gmtoff


def offset_text(offset_s: int) -> str:
    """An offset as messages name it, such as UTC+02:00."""
    hours, minutes = divmod(abs(offset_s) // 60, 60)
    return f"UTC{'-' if offset_s < 0 else '+'}{hours:02}:{minutes:02}"


def window_text(window: str | None, offset_s: int | None, now_s: float) -> str:
    """A window as messages name it, with both time zones where the launcher's differs from that of this process."""
    local_offset_s = utc_offset_s(now_s)
    if offset_s is None or offset_s == local_offset_s:
        return str(window)
    return f"{window} {offset_text(offset_s)}, the time zone of the launcher; here it is {offset_text(local_offset_s)}"


def is_in_window(window: str | None, now_s: float, offset_s: int | None = None) -> bool:
    """Whether `now_s` (seconds since 1970) is inside a window such as 19:00-07:00.

    The first minute belongs to the window and the last does not. A window with equal ends is the whole day.

    Args:
        offset_s: seconds by which the clock that the window means is ahead of UTC; None means the local one.
    """
    if window is None:
        return True
    begin_minute, end_minute = (60 * int(text[:2]) + int(text[3:]) for text in window.split("-"))
    offset_s = utc_offset_s(now_s) if offset_s is None else offset_s
    minute = int(now_s + offset_s) // 60 % 1440
    return (minute - begin_minute) % 1440 < ((end_minute - begin_minute) % 1440 or 1440)
