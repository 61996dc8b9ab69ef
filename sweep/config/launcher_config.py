"""The kinds of launchers, and the settings of the one that a sweep uses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any

from ultrabench.allowed import Count, Line, Positive, at_least, matching, one_of, require_allowed
from ultrabench.errors import ConfigError, require_known
from ultrabench.record import field_types, from_dict
from ultrabench.store.events import BY_BATCH_SYSTEM, BY_LAUNCHER

_HOUR = r"([01]\d|2[0-3]):[0-5]\d"
WINDOW_RULE = matching(f"{_HOUR}-{_HOUR}", "HH:MM-HH:MM, such as 19:00-07:00")
MEM_RULE = matching(
    r"(?i:\d+([kmgt]b?)?)", "a whole number with K, M, G or T, such as 500G, or 0 for all memory of a node"
)
SBATCH_TEXTS = ("partition", "account", "qos", "exclude", "gres", "mem")
"""Fields whose values are passed to sbatch as they are."""
CLUSTER_KEYS = frozenset({"name", "cpus", "python", "setup", "sbatch", "price_per_gpu_hour", *SBATCH_TEXTS})
"""Keys that the file of a cluster may have; configs/launcher/slurm.yaml uses all but the price."""
_SET_BY_ULTRABENCH = frozenset(
    {
        "array",
        "chdir",
        "error",
        "job-name",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
        "signal",
        "test-only",
        "time",
        "wait",
        "wrap",
    }
)
"""Options of sbatch that ultrabench sets itself and that a user must not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKind:
    """What distinguishes launchers; modules that do not belong to one ask for these properties, not for its name."""

    holds_nodes: bool
    """Whether its jobs hold nodes of a cluster, which have a price, a queue and other hosts, paths and libraries than
    this machine; runs of other launchers are processes of this machine."""
    survives_us: bool
    """Whether its jobs continue without the launch command, and Ctrl-C in that command does not end them."""
    submits_scripts: bool
    """Whether it submits scripts, which a user may see before."""
    source: str
    """Who reports the end of a job in the journal."""
    signal_lead_s: float
    """Seconds by which its signal before the time limit of a job may come too early."""


LAUNCHER_KINDS = {
    "local": LauncherKind(
        holds_nodes=False, survives_us=False, submits_scripts=False, source=BY_LAUNCHER, signal_lead_s=0.0
    ),
    "slurm": LauncherKind(  # up to 60 s by sbatch(1), --signal
        holds_nodes=True, survives_us=True, submits_scripts=True, source=BY_BATCH_SYSTEM, signal_lead_s=60.0
    ),
}
"""The values of launcher.name -> their properties."""
LOCAL_LAUNCHER, CLUSTER_LAUNCHER = (
    next(name for name, kind in LAUNCHER_KINDS.items() if kind.holds_nodes == is_of_cluster)
    for is_of_cluster in (False, True)
)
"""The launchers of this machine and of a cluster that a command uses where the user names none."""
ON_CLUSTER, WITH_SCRIPTS = (
    " or ".join(f"launcher={name}" for name, kind in LAUNCHER_KINDS.items() if has_property(kind))
    for has_property in (attrgetter("holds_nodes"), attrgetter("submits_scripts"))
)
"""What messages advise to a user who needs a cluster, or the script of a job."""


def launcher_kind(settings: Mapping[str, Any]) -> LauncherKind:
    """The kind of launcher with these settings, as a journal has them; that of a cluster where they have no name."""
    return LAUNCHER_KINDS.get(str(settings.get("name")), LAUNCHER_KINDS[CLUSTER_LAUNCHER])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """The settings of Slurm's own jobs, which are keys of `launcher` like those of LauncherConfig.

    Their defaults ask Slurm for nothing; the usual values are in configs/launcher/slurm.yaml.
    """

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    exclude: Line | None = None
    gres: Line | None = None
    """Value of --gres, which replaces the usual --gpus-per-node on hardware with GPUs."""
    mem: Annotated[str, MEM_RULE] | None = None
    """Value of --mem: the memory of a node."""
    cpus: Count | None = None
    """Value of --cpus-per-task; each node runs one task, the agent."""
    exclusive: bool = False
    nice: int | None = None
    requeue: bool = False
    """Whether Slurm may requeue jobs. Lost runs are tried again even without it."""
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

    def __post_init__(self) -> None:
        require_allowed(self, "launcher.")
        for pattern in self.environment:
            if not pattern or "=" in pattern:
                rule = "the name of a variable is not empty and has no '='"
                raise ConfigError(f"launcher.environment: {pattern!r:.60}; {rule}: give names only")
        for key in self.sbatch:
            if not re.fullmatch(r"[a-z][a-z-]*", key):
                raise ConfigError(
                    f"launcher.sbatch: {key!r}; write the name of the option in lower case, without leading dashes"
                )
            if key in _SET_BY_ULTRABENCH:
                advice = "use launcher.time_minutes=" if key == "time" else "leave it out"
                raise ConfigError(f"launcher.sbatch.{key}; ultrabench sets this option: {advice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """The chosen launcher and its settings; their usual values are in configs/launcher/.

    Fields with a default may be left out in the file of a launcher that holds no nodes.
    """

    name: Annotated[str, one_of(*LAUNCHER_KINDS)]
    pack: Count | None
    """Largest number of runs of one allocation. None means as many as fit into allocation_minutes; 1 means
    that there is no control run."""
    allocation_minutes: Positive
    """Minutes of predicted runs, with the control run, with which one allocation is filled."""
    heartbeat_s: Annotated[float, at_least(0.5)]
    """Seconds between two signs of life that the agents of one allocation send each other."""
    preflight: bool
    """Whether devices and links are measured at the start of every allocation."""
    control: bool
    """Whether every allocation begins with its cell's control layout. If so, only one allocation of each
    number of nodes is in flight until a run on that number of nodes has passed."""
    window: Annotated[str, WINDOW_RULE] | None
    """Local time of day in which nodes may be used, such as 19:00-07:00; None means always."""
    track: Annotated[str, one_of("mlflow", "wandb")] | None = None
    """Tracker to which ended runs are logged while a launcher follows the sweep; None means none."""
    max_jobs: Count = 1
    """Largest number of allocations that are queued or running at the same time."""
    max_nodes: Count | None = None
    """Largest number of nodes of all allocations together; None means a quarter of the partition."""
    time_minutes: Count | None = None
    """Time limit of an allocation in minutes; None means that it follows from the predictions."""
    python: tuple[Line, ...] = ()
    """The words of the command that starts Python on the nodes, such as `apptainer exec IMAGE python`."""
    grace_s: Annotated[float, at_least(0.0)] = 0.0
    """Seconds after which a job that the batch system does not know counts as lost."""
    refused_minutes: Annotated[float, at_least(0.0)] = 60.0
    """Minutes to wait while the batch system takes no jobs although it may later; time in which a job of the sweep is
    alive does not count."""
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    """The settings that only Slurm has."""

    def __post_init__(self) -> None:
        require_allowed(self, "launcher.")

    @property
    def holds_nodes(self) -> bool:
        """Whether its jobs hold nodes of a cluster, and are not processes of this machine."""
        return LAUNCHER_KINDS[self.name].holds_nodes

    @property
    def survives_us(self) -> bool:
        """Whether its jobs continue without the launch command."""
        return LAUNCHER_KINDS[self.name].survives_us

    @property
    def submits_scripts(self) -> bool:
        """Whether it submits scripts, which a user may see before."""
        return LAUNCHER_KINDS[self.name].submits_scripts

    @property
    def source(self) -> str:
        """Who reports the end of a job in the journal."""
        return LAUNCHER_KINDS[self.name].source

    @property
    def signal_lead_s(self) -> float:
        """Seconds by which its signal before the time limit of a job may come too early."""
        return LAUNCHER_KINDS[self.name].signal_lead_s

    @property
    def has_whole_nodes(self) -> bool:
        """Whether its jobs have their nodes alone, so that no other program computes there."""
        return self.slurm.exclusive

    @property
    def start_words(self) -> tuple[str, ...]:
        """The words of the commands that start agents on the nodes, where an image of a container may be named."""
        return (*self.python, *self.slurm.srun)

    @property
    def prepares_python(self) -> bool:
        """Whether its jobs may give Python other packages than this host has: by a container, or by PYTHONPATH."""
        job_texts = (*self.slurm.srun, *self.slurm.setup)
        return any("container" in text or "PYTHONPATH" in text for text in job_texts)


def read_launcher(values: dict[str, Any], cluster: dict[str, Any]) -> LauncherConfig:
    """The settings of the launcher; "" means null, and null means an empty list where a list is needed.

    The options of sbatch of the launcher are added to those of the cluster.

    Raises:
        ConfigError: a key is unknown or missing, or its value cannot be used.
    """
    settings = {key: None if value == "" else value for key, value in values.items()}
    # An account may be 1234.
    settings |= {k: str(settings[k]) for k in SBATCH_TEXTS if type(settings.get(k)) is int}
    settings |= {k: [] for k in ("python", "setup", "environment", "srun") if settings.get(k, ()) is None}
    if isinstance(settings.get("python"), str):
        settings["python"] = [settings["python"]]
    if "sbatch" in settings:
        options = [cluster.get("sbatch") or {}, settings["sbatch"] or {}]
        invalid = [mapping for mapping in options if not isinstance(mapping, dict)]
        settings["sbatch"] = invalid[0] if invalid else _sbatch_options(options[0] | options[1])
    slurm_keys = field_types(SlurmSettings).keys()
    keys = (field_types(LauncherConfig).keys() | slurm_keys) - {"slurm"}
    require_known("field of launcher", keys, *settings, setting="launcher")
    slurm_values = {key: value for key, value in settings.items() if key in slurm_keys}
    common_values = {key: value for key, value in settings.items() if key not in slurm_keys}
    slurm = from_dict(SlurmSettings, slurm_values, where="launcher")
    return from_dict(LauncherConfig, {**common_values, "slurm": slurm}, where="launcher")


def _sbatch_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of sbatch as texts: null and true mean one without a value, and false means that it is not given."""
    texts = {str(name): "" if value is None or value is True else value for name, value in options.items()}
    return {k: v if isinstance(v, list | dict) else str(v) for k, v in texts.items() if v is not False}
