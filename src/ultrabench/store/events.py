"""The events of a sweep's journal: what each of them says, and how a line of a journal file holds it."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.record import canonical_json, from_dict, to_dict
from ultrabench.result import RunResult
from ultrabench.run import AttemptKey

SCHEMA_VERSION = 2
"""Version of journal lines and of sweep.json; new fields and new events keep it."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Start:
    """One start of a job."""

    restart: int = 0
    """How often the job was started before."""
    job_id: str = ""
    """Slurm's name of the job, such as 123_4; empty for local processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadingAgent:
    """The agent of the first node of an allocation, as it describes itself when it starts."""

    node: int = 0
    host: str = ""
    pid: int | None = None
    start_time: float | None = None
    """When the process started, in clock ticks since its host was booted."""
    job: Start | None = None
    """None for local processes."""
    journal: str = ""
    """Name of the journal file it writes and touches."""

    @property
    def start(self) -> Start:
        """The start of the job it runs in."""
        return self.job or Start()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """A launcher created the sweep or continued it."""

    generation: int
    """One more than the largest number of all launches, pauses and cancels before."""
    config: dict[str, Any]
    """The resolved configuration."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Who launched what from where."""
    kernel_digest: str | None = None
    reuse: str | None = None
    """The --reuse of the launch."""
    retry: tuple[AttemptKey, ...] = ()
    """Failed attempts that the user asked to have tried again."""
    max_gpu_hours: float | None = None
    """Budget of the launch; None: no limit."""
    work_dir: str | None = None
    """Where commands of the user run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The user paused the sweep, or resumed it."""

    generation: int
    on: bool = True
    """False when the sweep was resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The user cancelled the sweep."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationPlanned:
    """A launcher has written the files of an allocation that it is going to submit."""

    allocation: str
    nodes: int
    limit_s: float
    """Wall-clock limit of the allocation."""
    tasks: tuple[AttemptKey, ...]
    """Attempts that it may run, in this order."""
    control: str | None = None
    """run_id of its cell's control layout, when it begins with that."""
    by: dict[str, str] = field(default_factory=dict)
    """Who submits it: {user, cluster, host}; cluster is empty for local processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitting:
    """A launcher is about to submit an allocation."""

    allocation: str
    token: str = ""
    """Part of the job's name, by which the job can be found when the answer of sbatch is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The batch system has accepted an allocation."""

    allocation: str
    job: dict[str, Any] = field(default_factory=dict)
    """How to find it: {host, pid, start_time} locally, {job_id, name} on Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(Submitted):
    """A launcher has found a living allocation that another launcher submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationStarted:
    """The leading agent of an allocation runs."""

    allocation: str
    agent: LeadingAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The devices and links of an allocation were examined."""

    allocation: str
    restart: int = 0
    found: dict[str, Any]
    """Facts about each node, and what was measured on devices and links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEnded:
    """An allocation ended, or the batch system told how long it held its nodes."""

    allocation: str
    restart: int = 0
    """Which start of its job ended, where `job` is None."""
    job: Start | None = None
    reason: str
    source: str = ""
    """Who says so: agent, launcher or slurm."""
    elapsed_s: float | None = None
    """Seconds that the agents ran."""
    held_s: float | None = None
    """Seconds that the nodes were held, by the word of the batch system."""
    avoid: tuple[str, ...] = ()
    """Hosts on which nothing should run again."""

    def __post_init__(self) -> None:
        for seconds in (self.elapsed_s, self.held_s):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds} seconds")

    @property
    def start(self) -> Start:
        """The start of a job that ended."""
        return self.job or Start(restart=self.restart)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptEvent:
    """An event about one attempt."""

    run_id: str
    repeat: int
    attempt: int

    @property
    def key(self) -> AttemptKey:
        """The attempt it speaks of."""
        return AttemptKey(self.run_id, self.repeat, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(_AttemptEvent):
    """An allocation is the only one that may run an attempt."""

    allocation: str
    job: Start | None = None
    """None for local processes."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The RunSpec as JSON."""
    predicted: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_AttemptEvent):
    """The ranks of an attempt are being started."""

    allocation: str
    scratch: str | None = None
    """Node-local folder of the leading agent, where logs grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReached(_AttemptEvent):
    """All ranks of an attempt are in a new phase."""

    name: str
    at: float | None = None
    """When the last rank reached it, by the ranks' clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(_AttemptEvent):
    """An attempt ended with status ok."""

    allocation: str | None = None
    source: str = "agent"
    """Who says so: agent, slurm or launcher."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The RunSpec as JSON."""
    result: RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Result):
    """An attempt ended otherwise."""


ControlEvent = LaunchConfig | Pause | Cancel
AttemptEvent = Claimed | Started | PhaseReached | Result
AllocationEvent = AllocationPlanned | Submitting | Submitted | AllocationStarted | Preflight | AllocationEnded
Event = ControlEvent | AttemptEvent | AllocationEvent

EVENTS: dict[str, type[Event]] = {
    "config": LaunchConfig,
    "pause": Pause,
    "cancel": Cancel,
    "allocation_planned": AllocationPlanned,
    "submitting": Submitting,
    "submitted": Submitted,
    "adopted": Adopted,
    "allocation_started": AllocationStarted,
    "preflight": Preflight,
    "allocation_ended": AllocationEnded,
    "claimed": Claimed,
    "started": Started,
    "phase": PhaseReached,
    "result": Result,
    "failed": Failed,
}
"""The `event` of a journal line -> what it is."""
NAMES = {kind: name for name, kind in EVENTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a journal: an event, and who wrote it."""

    event: Event
    writer: str
    seq: int
    """Number of the line among those of its writer, from 0."""
    time: float
    """When it was written, by the writer's clock, in seconds since 1970."""
    digest: str = ""
    """Hash of the whole line."""


def encode(line: Line) -> bytes:
    """The text of a line, its newline included.

    Raises:
        ValueError: it holds what JSON has no word for, such as NaN.
    """
    head = {"v": SCHEMA_VERSION, "writer": line.writer, "seq": line.seq, "time": line.time}
    return canonical_json({**head, "event": NAMES[type(line.event)], **to_dict(line.event)}).encode() + b"\n"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_decode = json.JSONDecoder(parse_constant=_refuse).decode
DAMAGED = (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError, ConfigError)  # fmt: skip
"""What `decode` raises for text that is no event."""


def decode(text: bytes, path: object = "the journal") -> Line | None:
    """The line with this text; None for an event that only later versions know.

    Raises:
        SweepFolderError: it is of a newer schema; `path` is the file that holds it.
        DAMAGED: it is no event.
    """
    values: dict[str, Any] = _decode(text.decode())
    version, writer, seq, name = int(values["v"]), values["writer"], int(values["seq"]), values["event"]
    if version > SCHEMA_VERSION:
        raise SweepFolderError(
            f"{path} has schema {version}; this ultrabench reads up to {SCHEMA_VERSION}: upgrade it"
        )
    if name not in EVENTS:
        return None
    digest = hashlib.sha256(text).hexdigest()[:16]
    event = from_dict(EVENTS[name], values, skip_unknown=True)
    return Line(event=event, writer=str(writer), seq=seq, time=float(values["time"]), digest=digest)
