"""The settings of configs/launcher/: how allocations are packed, submitted and watched."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from ultrabench.allowed import Allowed, Count, Line, Positive, at_least, one_of, require_allowed
from ultrabench.errors import ConfigError

_HOUR = r"([01]\d|2[0-3]):[0-5]\d"
WINDOW = Allowed("HH:MM-HH:MM, such as 19:00-07:00", re.compile(f"{_HOUR}-{_HOUR}").fullmatch)
TEXTS = ("partition", "account", "qos", "exclude", "gres", "mem")
"""Fields whose values are passed to sbatch as they are."""
_OURS = frozenset({"array", "chdir", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode",
                   "output", "parsable", "signal", "test-only", "time", "wait", "wrap"})  # fmt: skip
"""Options of sbatch that ultrabench sets itself and that a user must not change."""


def moved_to_sbatch(key: str) -> ConfigError | None:
    """The error for a `key` that is an option of sbatch and no setting of ultrabench; None for others."""
    name = key.removeprefix("launcher.")
    if name not in ("reservation", "constraint"):
        return None
    advice = f"write +launcher.sbatch.{name}=VALUE, or in the file of a cluster sbatch: {{NAME: VALUE}}"
    return ConfigError(f"{key} is no setting, but an option of sbatch; {advice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """The chosen launcher and its settings; their usual values are in configs/launcher/.

    Fields that have a default here are used by Slurm only, and the default asks Slurm for nothing.
    """

    name: Annotated[str, one_of("local", "slurm")]
    pack: Count | None
    """Largest number of runs of one allocation. None means as many as fit into allocation_minutes; 1 means
    that there is no control run."""
    allocation_minutes: Positive
    """Minutes of predicted runs with which one allocation is filled."""
    heartbeat_s: Annotated[float, at_least(0.5)]
    """Seconds between two signs of life that the agents of one allocation send each other."""
    preflight: bool
    """Whether devices and links are measured at the start of every allocation."""
    control: bool
    """Whether every allocation begins with its cell's control layout. If so, only one allocation of each
    number of nodes is in flight until a run on that number of nodes has passed."""
    window: Annotated[str, WINDOW] | None
    """Local time of day in which nodes may be used, such as 19:00-07:00; None means always."""
    max_jobs: Count = 1
    """Largest number of allocations that are queued or running at the same time."""
    max_nodes: Count | None = None
    """Largest number of nodes of all allocations together; None means a quarter of the partition."""
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    exclude: Line | None = None
    gres: Line | None = None
    """Value of --gres, which replaces the usual --gpus-per-node on hardware with GPUs."""
    mem: Line | None = None
    cpus: Count | None = None
    """Value of --cpus-per-task; each node runs one task, the agent."""
    time_minutes: Count | None = None
    """Time limit of an allocation in minutes; None means that it follows from the predictions."""
    exclusive: bool = False
    nice: int | None = None
    requeue: bool = False
    """Whether Slurm may requeue jobs. Lost runs are tried again even without it."""
    python: tuple[Line, ...] = ()
    """The words of the command that starts Python on the nodes, such as `apptainer exec IMAGE python`."""
    setup: tuple[Line, ...] = ()
    """Shell lines that run before the agents start, such as `module load cuda`."""
    environment: tuple[Line, ...] = ()
    """Names of more variables that jobs inherit; a * at the end of a name stands for any ending."""
    sbatch: dict[str, Line] = field(default_factory=dict)
    """More options of sbatch: name without dashes -> value."""
    srun: tuple[Line, ...] = ()
    """More arguments of srun."""
    poll_s: Annotated[float, at_least(0.5)] = 0.5
    """Shortest time in seconds between two queries of Slurm about jobs."""
    grace_s: Annotated[float, at_least(0.0)] = 0.0
    """Seconds after which a job that Slurm does not know counts as lost."""

    def __post_init__(self) -> None:
        require_allowed(self, "launcher.")
        for key in self.sbatch:
            if not re.fullmatch(r"[a-z][a-z-]*", key):
                raise ConfigError(f"launcher.sbatch.{key}; write an option's name without dashes in front")
            if key in _OURS:
                instead = "use launcher.time_minutes=" if key == "time" else "leave it out"
                raise ConfigError(f"launcher.sbatch.{key}; ultrabench sets that itself: {instead}")
