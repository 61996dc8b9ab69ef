"""How allocations are packed, submitted and watched: the values of configs/launcher/."""

import math
import re
from dataclasses import dataclass, field, fields

from ultrabench.errors import ConfigError, unknown_name

LAUNCHERS = ("local", "slurm")
TEXTS = ("partition", "account", "qos", "exclude", "gres", "mem")
"""Names and sizes in Slurm's own words."""
_OURS = frozenset({"array", "chdir", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode",
                   "output", "parsable", "signal", "test-only", "time", "wait", "wrap"})  # fmt: skip
"""Options of sbatch that ultrabench sets itself; a user may not change them."""


def moved_to_sbatch(key: str) -> ConfigError | None:
    """The error for `key` if it is an option of sbatch that is no setting of its own."""
    if key.removeprefix("launcher.") not in ("reservation", "constraint"):
        return None
    return ConfigError(
        f"{key} is no setting, but an option of sbatch; write +launcher.sbatch.{key.removeprefix('launcher.')}=VALUE, or "
        "in the file of a cluster sbatch: {NAME: VALUE}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """Which launcher, and what it may do; the usual values stand in configs/launcher/.

    Fields with a value here are for Slurm alone, and the value asks for nothing.
    """

    name: str
    pack: int | None
    """Most runs of one allocation; None: as many as fit allocation_minutes; 1: no control run."""
    allocation_minutes: float
    """Predicted duration that one allocation is filled up to."""
    heartbeat_s: float
    """How often the agents of one allocation show each other that they are alive."""
    preflight: bool
    """Measure devices and links at the start of every allocation."""
    control: bool
    """Begin every allocation with its cell's control layout; until a run of a node count has
    passed, only one allocation of that node count is submitted."""
    window: str | None
    """Local time of day in which nodes may be used, such as 19:00-07:00; None: always."""
    max_jobs: int = 1
    """Most allocations that are queued or running at a time."""
    max_nodes: int | None = None
    """Most nodes that all allocations hold together; None: a quarter of the partition."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclude: str | None = None
    gres: str | None = None
    """Used instead of --gpus-per-node, which hardware with GPUs asks for otherwise."""
    mem: str | None = None
    cpus: int | None = None
    """--cpus-per-task; one task, the agent, runs on each node."""
    time_minutes: int | None = None
    """Time limit of an allocation; None: it follows from the predictions."""
    exclusive: bool = False
    nice: int | None = None
    requeue: bool = False
    """Let Slurm start jobs again itself; lost runs are tried again without it."""
    python: tuple[str, ...] = ()
    """Python on the nodes; words before it, such as `apptainer exec IMAGE`, are kept apart."""
    setup: tuple[str, ...] = ()
    """Shell lines before the agents start, such as `module load cuda`."""
    environment: tuple[str, ...] = ()
    """Names of further variables that jobs inherit; a trailing * stands for any ending."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch, without the dashes."""
    srun: tuple[str, ...] = ()
    """Further arguments of srun."""
    poll_s: float = 0.5
    """Least seconds between two questions to Slurm about jobs."""
    grace_s: float = 0.0
    """Seconds after which a job that Slurm does not know is given up."""

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
        """Raises when a value holds a line break, which would start another line of the job script."""
        for f in fields(self):
            value = getattr(self, f.name)
            texts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            )
            for text in texts:
                if isinstance(text, str) and ("\n" in text or "\r" in text or "\0" in text):
                    raise ConfigError(f"launcher.{f.name}={text!r}; a value must be one line")


_WINDOW = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")
