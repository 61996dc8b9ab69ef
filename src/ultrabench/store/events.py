"""The events of a sweep's journal, and how they are written as lines of a journal file."""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, get_args

import msgspec

import ultrabench
from ultrabench.allowed import at_least, require_allowed, require_safe_names
from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.record import non_default_values
from ultrabench.result import RunResult, is_date
from ultrabench.run import AttemptKey, AttemptRecord

SCHEMA_VERSION = 2
"""Version of journal lines and of sweep.json; new fields and new events do not change it."""
Seconds = Annotated[float, at_least(0.0)]

BY_AGENT, BY_LAUNCHER, BY_BATCH_SYSTEM = "agent", "launcher", "slurm"
"""Who reports the end of an attempt or an allocation; journals have the last word for every batch system."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Start:
    """One start of a job."""

    restart: int = 0
    """Number of earlier starts of the job."""
    job_id: str = ""
    """Job id of Slurm, such as 123_4; empty for local processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadingAgent:
    """The agent of the first node of an allocation, as it describes itself when it starts."""

    node: int = 0
    host: str = ""
    pid: int | None = None
    start_time: float | None = None
    """When the process started, in clock ticks since the boot of its host."""
    job: Start = Start()
    """The start of the job in which it runs; an empty one for local processes."""
    journal: str = ""
    """Name of the journal file that it writes and touches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Event: a launcher created the sweep or continued it."""

    generation: int
    """Number of this event, one more than the largest of all earlier launches, pauses and cancels."""
    config: dict[str, Any]
    """The resolved configuration."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Who launched what, and from where."""
    kernel_digest: str | None = None
    reuse: str | None = None
    """Value of the option --reuse of the launch."""
    retry: tuple[AttemptKey, ...] = ()
    """Failed attempts that the user wants to have tried again."""
    max_gpu_hours: float | None = None
    """Budget of the sweep in GPU hours; None means no limit."""
    work_dir: str | None = None
    """Folder in which commands of the user run."""
    sweep_id: str = ""
    """Id of the sweep; empty in lines of earlier versions."""
    asked_gpu_hours: tuple[float, float, float] | None = None
    """GPU hours of the whole sweep that the user was asked about, used ones included, and the ends of their interval;
    None if the user was not asked, as by `sweep resume`, and in lines of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Event: the user paused or resumed the sweep."""

    generation: int
    on: bool = True
    """Whether the sweep was paused; False when it was resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Event: the user cancelled the sweep."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationPlanned:
    """Event: a launcher has written the files of an allocation that it will submit."""

    allocation: str
    nodes: int
    limit_s: float
    """Wall-clock limit of the allocation."""
    tasks: tuple[AttemptKey, ...]
    """Attempts that the allocation may run, in this order."""
    control: str | None = None
    """run_id of its control run, if it begins with one."""
    variant: dict[str, Any] = field(default_factory=dict)
    """The container and the interpreter of its agents, where the sweep lists several."""
    by: dict[str, str] = field(default_factory=dict)
    """Who submits it: {user, cluster, host}; cluster is empty for local processes."""
    sweep_id: str = ""
    """Id of the sweep; empty in lines of earlier versions."""
    sweep: str = ""
    """Name of the sweep at that time, which the job bears; empty in lines of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Event: the folder turned out to be a copy, and got an id of its own; the jobs belong to the original."""

    copy_of: str
    """Id of the sweep whose folder was copied."""
    allocations: tuple[str, ...]
    """Allocations of the original that the journal held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitting:
    """Event: a launcher is about to submit an allocation."""

    allocation: str
    token: str = ""
    """Part of the job's name that finds the job when the answer of sbatch is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Event: the batch system has accepted an allocation."""

    allocation: str
    job: dict[str, Any] = field(default_factory=dict)
    """The job of the allocation: {host} locally, {job_id, name} on Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(Submitted):
    """Event: a launcher has found a living allocation that another launcher submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationStarted:
    """Event: the leading agent of an allocation runs."""

    allocation: str
    agent: LeadingAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Event: the devices and links of an allocation were measured."""

    allocation: str
    restart: int = 0
    found: dict[str, Any]
    """Facts about each node, and the measured rates of devices and links."""


class EndCode(StrEnum):
    """Why an allocation ended, as far as something follows from it."""

    PAUSED = "paused"
    OUTSIDE_WINDOW = "outside_window"
    REFUSED = "refused"  # the batch system did not take it, but may take another one later
    OTHER = "other"


class Ending(NamedTuple):
    """Why the agents end their allocation."""

    reason: str
    code: EndCode = EndCode.OTHER
    failed_on: tuple[str, ...] = ()
    """Hosts on which nothing could start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEnded:
    """Event: an allocation ended, or the batch system reported how long it held its nodes."""

    allocation: str
    job: Start = Start()
    """The start of the job that ended; an empty one for local processes and before the first start."""
    reason: str
    code: EndCode = EndCode.OTHER
    source: str = ""
    """Who reports the end: agent, launcher or slurm."""
    elapsed_s: Seconds | None = None
    """Seconds for which the agents ran."""
    held_s: Seconds | None = None
    """Seconds for which the nodes were held, as the batch system reports them."""
    avoid: tuple[str, ...] = ()
    """Hosts on which nothing should run again."""
    failed_on: tuple[str, ...] = ()
    """Hosts on which no agent started or the preflight failed, so that later jobs use others first."""

    def __post_init__(self) -> None:
        require_allowed(self)


@dataclass(frozen=True, kw_only=True)
class Claimed(AttemptRecord):
    """Event: an allocation has claimed an attempt, so that no other allocation may run it."""

    allocation: str
    job: Start | None = None
    """The start of the job that claimed it; None for local processes."""
    spec: msgspec.Raw
    """The RunSpec as JSON text; few readers need it, and decoding it takes longer than the rest of the line."""
    predicted: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Started(AttemptRecord):
    """Event: the ranks of an attempt are being started."""

    allocation: str
    scratch: str | None = None
    """Node-local folder of the leading agent, in which logs are written."""


@dataclass(frozen=True, kw_only=True)
class Phase(AttemptRecord):
    """Event: rank 0 of an attempt has reached a new phase, or has measured further steps in it."""

    name: str
    at: float | None = None
    """When rank 0 reached the phase, in seconds since 1970, by its clock."""
    steps: int | None = None
    """Number of steps that were measured so far; None before the first one."""
    step_time_s: float | None = None
    """Median of these steps in seconds."""


@dataclass(frozen=True, kw_only=True)
class Result(AttemptRecord):
    """Event: an attempt ended with status ok."""

    allocation: str | None = None
    source: str = BY_AGENT
    """How far the report is trusted: agent; slurm, a requeued agent or a launcher of a cluster; launcher."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The RunSpec as JSON; empty where an event Claimed has it."""
    result: RunResult


@dataclass(frozen=True, kw_only=True)
class Failed(Result):
    """Event: an attempt ended with another status than ok."""


@dataclass(frozen=True, kw_only=True)
class Reread(AttemptRecord):
    """Event: a launch with other patterns has read the kept log of an attempt again, or could not."""

    generation: int
    """The generation of the launch; of several such events the latest counts."""
    patterns: dict[str, Any]
    """Option of LOG_OPTIONS -> its value by which `result` was read; empty if no kept log gives one, so that the run is
    tried again."""
    result: RunResult
    """The result in place of the one that the agent reported."""


ControlEvent = Launched | Pause | Cancel
AttemptEvent = Claimed | Started | Phase | Result | Failed | Reread
AllocationEvent = (
    AllocationPlanned | Submitting | Submitted | Adopted | AllocationStarted | Preflight | AllocationEnded
)
Event = ControlEvent | AttemptEvent | AllocationEvent | Copied

NAMES = {kind: re.sub(r"(?<=.)(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Event)}
"""Class of an event -> value of `event` in a journal line, such as `allocation_planned`."""
EVENTS: dict[str, type[Event]] = {name: kind for kind, name in NAMES.items()}


class Line(msgspec.Struct, frozen=True):
    """A line of a journal: an event, its writer and its time."""

    event: Event
    writer: str
    seq: int
    """Number of the line among those of its writer, counted from 0."""
    time: float
    """When the line was written, in seconds since 1970, by the clock of its writer; 0 if that is no date."""
    checksum: int = 0
    """CRC-32 of the whole line, which orders lines of one writer and number that differ."""


def _json_values(value: Any) -> Any:
    """What json.JSONEncoder writes for a value that is no JSON: a record or JSON text."""
    return json.loads(bytes(value)) if isinstance(value, msgspec.Raw) else non_default_values(value)


_encoder = json.JSONEncoder(
    default=_json_values, allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":")
)


def encode(line: Line) -> bytes:
    """The bytes of a line, with its newline; fields that have their default are left out.

    Raises:
        ValueError: the event holds a value that JSON cannot express, such as NaN.
    """
    head = {"v": SCHEMA_VERSION, "writer": line.writer, "seq": line.seq, "time": line.time}
    values = {**head, "event": NAMES[type(line.event)], **non_default_values(line.event)}
    # Halves of surrogate pairs, which are no UTF-8, become question marks.
    return with_checksum(_encoder.encode(values).encode(errors="replace"))


def with_checksum(text: bytes) -> bytes:
    """The bytes of a line, with its newline, whose JSON object without a checksum is `text`."""
    return b"%s%s%08x%s\n" % (text[:-1], _CHECKSUM, zlib.crc32(text[:-1]), _LINE_END)


_CHECKSUM, _LINE_END = b',"crc":"', b'"}'
"""What surrounds the checksum of a line, its last field: the CRC-32 of all that stands before it, as 8 hex digits."""


def _checksum(text: bytes) -> int:
    """The CRC-32 of a line; raises ValueError if the line holds none or another one."""
    body, mark, tail = text.rpartition(_CHECKSUM)  # in a text its quotes would have backslashes
    body_crc = zlib.crc32(body)
    if tail != b"%08x%s" % (body_crc, _LINE_END):
        raise ValueError("the checksum of the line is missing or wrong")
    return zlib.crc32(mark + tail, body_crc)


_SAFE_NAMES_OF: dict[str, Callable[[Any], Iterable[str | None]]] = {
    **dict.fromkeys(("launched", "pause", "cancel", "submitting", "preflight"), lambda event: ()),
    "allocation_planned": lambda event: (event.sweep_id or None, event.sweep or None),
    "copied": lambda event: event.allocations,
    **dict.fromkeys(("claimed", "started", "phase"), lambda event: (event.run_id,)),
    **dict.fromkeys(
        ("result", "failed", "reread"),
        lambda event: (event.run_id, *event.result.suspect_hosts, *event.result.began_on),
    ),
    **dict.fromkeys(("submitted", "adopted"), lambda event: map(str, event.job.values())),
    "allocation_started": lambda event: (event.agent.journal or None, event.agent.job.job_id or None),
    "allocation_ended": lambda event: (*event.avoid, *event.failed_on),
}
"""Name of each event -> what gives the texts of the event, beside its allocation,
that become parts of paths or of commands."""


class _Version(msgspec.Struct):
    """The only field that lines of all schemas have."""

    v: int


class _Head(_Version):
    """The fields of a line beside those of its event."""

    writer: str
    seq: int
    time: float
    event: str


_version_of = msgspec.json.Decoder(_Version).decode
_head_of = msgspec.json.Decoder(_Head).decode
Decoders = Mapping[str, Callable[[bytes], Any]]
DECODERS: Decoders = {name: msgspec.json.Decoder(kind).decode for name, kind in EVENTS.items()}
"""Name of an event, as in journal lines -> what makes the event of the text of a line."""
_FIRST_EVENT = re.compile(rb'"event":"(\w+)"')
"""The name of the event in a line that `encode` has written; no earlier field of an event holds such a text."""
DAMAGED = (ConfigError, RecursionError, ValueError)
"""Exceptions that `decode` raises for text that is no event."""


def decode(text: bytes, path: object = "the journal", decoders: Decoders | None = None) -> Line | None:
    """The line that `text` holds; None for an event that only later versions know, or that is not in `decoders`.

    Args:
        decoders: name of each event that is read -> what decodes it, such as an entry of `DECODERS`;
            None means DECODERS.

    Raises:
        SweepFolderError: the line has a newer schema; the message names `path`, the file that holds it.
        DAMAGED: the text is no event.
    """
    if decoders is not None and (name := _FIRST_EVENT.search(text)) and name[1].decode() not in decoders:
        return None  # without reading it, since most lines of a sweep are of other events
    try:
        head = _head_of(text)
    except msgspec.ValidationError:
        _require_known(_version_of(text).v, path)
        raise
    _require_known(head.v, path)
    if (decode_event := (DECODERS if decoders is None else decoders).get(head.event)) is None:
        return None
    checksum, event = _checksum(text), decode_event(text)
    allocation = getattr(event, "allocation", None) or None  # empty where the event has none
    require_safe_names((allocation, *_SAFE_NAMES_OF[head.event](event)))
    return Line(event, head.writer, head.seq, head.time if is_date(head.time) else 0.0, checksum)


def _require_known(version: int, path: object) -> None:
    if version > SCHEMA_VERSION:
        raise SweepFolderError(
            f"{path} has schema {version}; ultrabench {ultrabench.__version__} reads up to "
            f"{SCHEMA_VERSION}: upgrade ultrabench"
        )
