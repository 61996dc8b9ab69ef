"""The settings of configs/launcher/: how allocations are packed, submitted and watched."""

import math
import re
from dataclasses import dataclass, field, fields

from ultrabench.errors import ConfigError, unknown_name

LAUNCHERS = ("local", "slurm")
TEXTS = ("partition", "account", "qos", "exclude", "gres", "mem")
"""Fields whose values are passed to sbatch as they are."""
_OURS = frozenset({"array", "chdir", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode",
                   "output", "parsable", "signal", "test-only", "time", "wait", "wrap"})  # fmt: skip
"""Options of sbatch that ultrabench sets itself and that a user must not change."""


def moved_to_sbatch(key: str) -> ConfigError | None:
    """The error for a `key` that is an option of sbatch and no setting of ultrabench; None for others."""
    if key.removeprefix("launcher.") not in ("reservation", "constraint"):
        return None
    return ConfigError(
        f"{key} is no setting, but an option of sbatch; write +launcher.sbatch.{key.removeprefix('launcher.')}=VALUE, or "
        "in the file of a cluster sbatch: {NAME: VALUE}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """The chosen launcher and its settings; their usual values are in configs/launcher/.

    Fields that have a default here are used by Slurm only, and the default asks Slurm for nothing.
    """

    name: str
    pack: int | None
    """Largest number of runs of one allocation. None means as many as fit into allocation_minutes; 1 means
    that there is no control run."""
    allocation_minutes: float
    """Minutes of predicted runs with which one allocation is filled."""
    heartbeat_s: float
    """Seconds between two signs of life that the agents of one allocation send each other."""
    preflight: bool
    """Whether devices and links are measured at the start of every allocation."""
    control: bool
    """Whether every allocation begins with its cell's control layout. If so, only one allocation of each
    number of nodes is in flight until a run on that number of nodes has passed."""
    window: str | None
    """Local time of day in which nodes may be used, such as 19:00-07:00; None means always."""
    max_jobs: int = 1
    """Largest number of allocations that are queued or running at the same time."""
    max_nodes: int | None = None
    """Largest number of nodes of all allocations together; None means a quarter of the partition."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclude: str | None = None
    gres: str | None = None
    """Value of --gres, which replaces the usual --gpus-per-node on hardware with GPUs."""
    mem: str | None = None
    cpus: int | None = None
    """Value of --cpus-per-task; each node runs one task, the agent."""
    time_minutes: int | None = None
    """Time limit of an allocation in minutes; None means that it follows from the predictions."""
    exclusive: bool = False
    nice: int | None = None
    requeue: bool = False
    """Whether Slurm may requeue jobs. Lost runs are tried again even without it."""
    python: tuple[str, ...] = ()
    """The words of the command that starts Python on the nodes, such as `apptainer exec IMAGE python`."""
    setup: tuple[str, ...] = ()
    """Shell lines that run before the agents start, such as `module load cuda`."""
    environment: tuple[str, ...] = ()
    """Names of more variables that jobs inherit; a * at the end of a name stands for any ending."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """More options of sbatch: name without dashes -> value."""
    srun: tuple[str, ...] = ()
    """More arguments of srun."""
    poll_s: float = 0.5
    """Shortest time in seconds between two queries of Slurm about jobs."""
    grace_s: float = 0.0
    """Seconds after which a job that Slurm does not know counts as lost."""

    def __post_init__(self) -> None:
        if self.name not in LAUNCHERS:
            raise ConfigError(unknown_name("launcher.name", self.name, LAUNCHERS))
        least = {"pack": 1, "max_jobs": 1, "max_nodes": 1, "cpus": 1, "time_minutes": 1, "heartbeat_s": 0.5,
                 "poll_s": 0.5, "grace_s": 0.0}  # fmt: skip
        for key, minimum in least.items():
            value = getattr(self, key)
            if value is not None and not minimum <= value < math.inf:
                raise ConfigError(f"launcher.{key}={value}; must be >= {minimum}")
        if not 0 < self.allocation_minutes < math.inf:
            raise ConfigError(f"launcher.allocation_minutes={self.allocation_minutes:g}; must be > 0")
        if self.window is not None and not _WINDOW.fullmatch(self.window):
            raise ConfigError(f"launcher.window={self.window!r}; write HH:MM-HH:MM, such as 19:00-07:00")
        self._require_one_line()
        for key in self.sbatch:
            if not re.fullmatch(r"[a-z][a-z-]*", key):
                raise ConfigError(f"launcher.sbatch.{key}; write an option's name without dashes in front")
            if key in _OURS:
                instead = "use launcher.time_minutes=" if key == "time" else "leave it out"
                raise ConfigError(f"launcher.sbatch.{key}; ultrabench sets that itself: {instead}")

    def _require_one_line(self) -> None:
        """Raises ConfigError when a value holds a line break, which would add a line to the job script."""
        for f in fields(self):
            value = getattr(self, f.name)
            texts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            )
            for text in texts:
                if isinstance(text, str) and ("\n" in text or "\r" in text or "\0" in text):
                    raise ConfigError(f"launcher.{f.name}={text!r}; a value must be one line")


_WINDOW = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")
