"""The state of a sweep, computed from its journal; the order in which events are read does not matter."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from ultrabench.batch_system import NO_CLUSTER
from ultrabench.device_digest import DatedDigest, dated_digests
from ultrabench.record import T, canonical_json, raw_json, to_dict
from ultrabench.result import STOPPED, RunResult, Status
from ultrabench.run import AttemptKey, AttemptRecord
from ultrabench.store import events


class Nodes(msgspec.Struct):
    """What a claim says of the nodes of its run."""

    nodes: int
    gpus_per_node: int


@dataclass(slots=True, kw_only=True)
class AttemptState:
    """What the journal says about one attempt."""

    key: AttemptKey
    allocation: str | None = None
    job: events.Start | None = None
    """The start of the job in which it ran; None for local processes."""
    spec_json: msgspec.Raw = field(default_factory=msgspec.Raw)
    """The RunSpec as JSON text, which `spec_as` decodes; empty if the claim is missing."""
    predicted: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    scratch: str | None = None
    """Node-local folder of the leading agent, in which logs are written."""
    phase: str | None = None
    steps: int | None = None
    """Number of steps that a running attempt has measured, as far as its agent has reported."""
    step_time_s: float | None = None
    """Median of these steps in seconds."""
    result: RunResult | None = None
    """None while the attempt runs, or is lost and nobody has reported that yet; that of `reread`, if there is one."""
    reported: RunResult | None = None
    """The result as the agent or the batch system has reported it."""
    reread: events.Reread | None = None
    """What the latest launch with other patterns has read in its log; None if no launch has read it again."""
    time: float | None = None
    """When it was claimed, in seconds since 1970, by the clock of the claimer; for display only."""

    def spec_as(self, hint: type[T]) -> T | None:
        """What the claim says of the run, as far as `hint` asks for it; None where it is missing or damaged."""
        try:
            return msgspec.json.decode(self.spec_json, type=hint)
        except msgspec.DecodeError:
            return None

    @property
    def ok(self) -> RunResult | None:
        """Its result if it ended with the status ok, else None."""
        return self.result if self.result and self.result.status is Status.OK else None


@dataclass(slots=True, kw_only=True)
class AllocationState:
    """What the journal says about one allocation."""

    name: str
    nodes: int = 1
    tasks: tuple[AttemptKey, ...] = ()
    limit_s: float = 0.0
    submission: tuple[str, int] = ("", 0)
    """Name of the launcher's journal and number of its line about the submission; they order submissions."""
    submitting_at: float | None = None
    """When it was about to be submitted, in seconds since 1970, by the clock of its launcher; None if unknown."""
    by: dict[str, Any] = field(default_factory=dict)
    """Who submitted it: {user, cluster, host}; empty where the journal does not say so."""
    job: dict[str, Any] | None = None
    """The job of the allocation: {host} locally, {job_id, name} on Slurm."""
    control: str | None = None
    """run_id of its control run, if it begins with one."""
    variant: dict[str, Any] = field(default_factory=dict)
    """The container and the interpreter of its agents, where the sweep lists several."""
    sweep_id: str = ""
    """Id of the sweep that planned it; empty if an earlier version did."""
    sweep: str = ""
    """Name of the sweep when it was planned, which its job bears; empty if an earlier version planned it."""
    is_copied: bool = False
    """Whether it belongs to another sweep, of whose folder this one is a copy: then its job is none of ours."""
    agents: tuple[events.LeadingAgent, ...] = ()
    """Leading agents that started, the latest start last."""
    preflight: dict[str, Any] = field(default_factory=dict)
    """Facts and rates of its devices and links at its latest start."""
    preflight_at: float | None = None
    """When these were written, in seconds since 1970, by the clock of their writer; None if there are none."""
    ends: dict[events.Start, events.AllocationEnded] = field(default_factory=dict)
    """Start of a job of the allocation -> how that start ended."""

    @property
    def start(self) -> events.Start:
        """The latest start of the job that owns this allocation; an empty Start before the first."""
        return max((agent.job for agent in self.agents), default=events.Start())

    @property
    def end(self) -> events.AllocationEnded | None:
        """How the allocation ended; None while it may be alive.

        When agents have started, only the end of their latest start counts, because a second job of this
        allocation, or an earlier start, may end at any time.
        """
        if self.agents:
            end = self.ends.get(self.start) or self.ends.get(events.Start(restart=self.start.restart))
        else:
            end = min(self.ends.values(), key=_most_trusted, default=None)
        return end or (self._copied_end if self.is_copied else None)

    @property
    def _copied_end(self) -> events.AllocationEnded:
        """The end of an allocation whose folder was copied while it was open."""
        reason = "the folder of the sweep was copied: the job belongs to the original"
        return events.AllocationEnded(
            allocation=self.name, reason=reason, source=events.BY_LAUNCHER, held_s=0.0
        )

    @property
    def ended(self) -> str | None:
        """Why the allocation ended; None while it may be alive."""
        return None if self.end is None else self.end.reason

    def cluster(self, sweep_cluster: str | None) -> str | None:
        """The cluster that its sweep names, or the name that Slurm has for it where the sweep names none (`local`)."""
        return self.by.get("cluster") or sweep_cluster if sweep_cluster == NO_CLUSTER else sweep_cluster

    @property
    def timed(self) -> bool:
        """Whether the batch system has reported how long its nodes were held until its end."""
        return self.end is not None and self.end.held_s is not None

    @property
    def held_s(self) -> float:
        """Seconds for which its nodes were held, as the batch system or else the agents report.

        Only the batch system knows for how long a job was suspended and its nodes ran other jobs. An end
        without a reported time counts as the whole time limit if agents had started, else as 0.
        """
        default_s = self.limit_s if self.agents else 0.0
        seconds_by_restart: dict[int, list[float]] = {}
        for start, end in self.ends.items():
            lasted_s = end.elapsed_s if end.held_s is None else end.held_s
            seconds_by_restart.setdefault(start.restart, []).extend([] if lasted_s is None else [lasted_s])
        return sum(max(seconds, default=default_s) for seconds in seconds_by_restart.values())


@dataclass(slots=True, kw_only=True)
class SweepState:
    """Everything that the journal of a sweep says."""

    attempts: dict[AttemptKey, AttemptState] = field(default_factory=dict)
    """Sorted by key."""
    allocations: dict[str, AllocationState] = field(default_factory=dict)
    generation: int = 0
    """Largest generation of all launch, pause and cancel events; the next event gets one more."""
    launched: events.Launched | None = None
    """The latest launch."""
    asked_gpu_hours: tuple[float, float, float] | None = None
    """GPU hours that the latest launch that asked has asked about, and the ends of their interval."""
    paused: bool = False
    cancelled: bool = False
    """Whether the sweep was cancelled and has not been launched again since."""
    retried: frozenset[AttemptKey] = frozenset()
    """Failed attempts that the user wants to have tried again."""
    suspect_losses: dict[AttemptKey, str] = field(default_factory=dict)
    """Ok attempts whose loss may be wrong -> the reason; `with_loss_outliers` finds them."""

    def node_facts(self) -> list[dict[str, Any]]:
        """What the latest preflight of each host found."""
        allocations = sorted(self.allocations.values(), key=lambda a: a.submitting_at or 0.0)
        all_facts = (facts for allocation in allocations for facts in allocation.preflight.get("nodes") or ())
        return [*{str(facts["host"]): facts for facts in all_facts}.values()]

    def digests(self) -> list[DatedDigest]:
        """What the GPUs computed in all preflights."""
        return [
            dated
            for allocation in self.allocations.values()
            for dated in dated_digests(
                allocation.preflight.get("nodes"), allocation.name, allocation.preflight_at
            )
        ]

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration of the latest launch; empty when there was no launch."""
        return self.launched.config if self.launched else {}

    def by_run(self) -> dict[str, list[AttemptState]]:
        """run_id -> the attempts of the run, sorted by repeat and attempt."""
        attempts: dict[str, list[AttemptState]] = {}
        for key, attempt in self.attempts.items():
            attempts.setdefault(key.run_id, []).append(attempt)
        return attempts


_Level = tuple[Any, ...]
"""Precedence of a line of the journal for a field; the largest counts."""
_TRUST = {events.BY_AGENT: 3, events.BY_BATCH_SYSTEM: 2}


def trust(status: str, cause: str | None, source: str) -> int:
    """The precedence of a report of a result by its source; a higher one wins,
    and a failure that a launcher reports has 0.

    An agent that a signal ends does not know who sent it, and Slurm does.
    """
    if status == Status.CANCELLED and cause == STOPPED:
        return min(1, _TRUST.get(source, 0))
    return 4 if status == Status.OK else _TRUST.get(source, 0)


def fold(lines: Iterable[events.Line]) -> SweepState:
    """The state that `lines` give; their order and repeated lines make no difference."""
    return Fold().add(lines)


class Fold:
    """Computes a state from the lines of a journal as they are added.

    Reports of a result have a fixed precedence: an agent's result, an agent's failure, what Slurm reports,
    an agent's report that a signal ended it, what a launcher concludes. For everything else the line with the largest
    (writer, seq, checksum) counts. Time stamps decide nothing, because clocks differ.
    """

    def __init__(self) -> None:
        self.state = SweepState()
        """The state, which `add` changes in place."""
        self.num_lines = 0
        """Number of lines that were added."""
        self._controls: dict[tuple[int, str], events.ControlEvent] = {}
        self._levels: dict[AttemptKey | str, dict[str, _Level]] = defaultdict(dict)
        """Attempt or allocation -> field -> precedence of the line that set the field."""

    def add(self, lines: Iterable[events.Line]) -> SweepState:
        """Adds `lines`, in any order and any number of times, and returns the state."""
        num_before = len(self.state.attempts)
        for line in lines:
            self.num_lines += 1
            match line.event:
                case AttemptRecord() as event:
                    self._add_to_attempt(event, line)
                case events.Launched() | events.Pause() | events.Cancel() as event:
                    # In one generation a cancel sorts after a launch, and a pause after a resume.
                    self._controls[event.generation, canonical_json(to_dict(event))] = event
                case events.Copied() as event:
                    for name in event.allocations:
                        self._allocation(name).is_copied = True
                case event:
                    self._add_to_allocation(event, line)
        if len(attempts := self.state.attempts) > num_before:  # sorted here, so that others sort fast
            self.state.attempts = {key: attempts[key] for key in sorted(attempts, key=tuple)}
        self._apply_controls()
        return self.state

    def _add_to_attempt(self, event: events.AttemptEvent, line: events.Line) -> None:
        level, key = (line.writer, line.seq, line.checksum), event.key
        attempt, levels = self.state.attempts.get(key), self._levels[key]
        if attempt is None:
            attempt = self.state.attempts[key] = AttemptState(key=key)
        match event:
            case events.Phase():
                _set(attempt, levels, level, "phase", event.name)
            case events.Started():
                _set(attempt, levels, level, "started", True)
            case events.Claimed():
                _set(attempt, levels, level, "time", line.time)
                _set(attempt, levels, level, "spec_json", event.spec)
            case events.Result():
                trust_level = trust(event.result.status, event.result.cause, event.source)
                _set(attempt, levels, (trust_level, line.checksum), "reported", event.result)
                if event.spec:
                    _set(attempt, levels, level, "spec_json", raw_json(event.spec))
            case events.Reread():
                _set(attempt, levels, (event.generation, line.checksum), "reread", event)
        attempt.result = attempt.reread.result if attempt.reread else attempt.reported
        for name in _names_shared(type(event), AttemptState):
            _set(attempt, levels, level, name, getattr(event, name))

    def _allocation(self, name: str) -> AllocationState:
        """What the journal says about an allocation, to which more is added."""
        return self.state.allocations.setdefault(name, AllocationState(name=name))

    def _add_to_allocation(self, event: events.AllocationEvent, line: events.Line) -> None:
        level, levels = (line.writer, line.seq, line.checksum), self._levels[event.allocation]
        allocation = self._allocation(event.allocation)
        match event:
            case events.AllocationPlanned() | events.Submitted():
                for name in _names_shared(type(event), AllocationState):
                    _set(allocation, levels, level, name, getattr(event, name))
            case events.Submitting():
                _set(allocation, levels, level, "submission", (line.writer, line.seq))
                _set(allocation, levels, level, "submitting_at", line.time)
            case events.Preflight():
                _set(allocation, levels, (event.restart, line.checksum), "preflight", event.found)
                _set(allocation, levels, (event.restart, line.checksum), "preflight_at", line.time)
            case events.AllocationStarted():
                agents = {repr(agent): agent for agent in (*allocation.agents, event.agent)}
                allocation.agents = tuple(sorted(agents.values(), key=lambda a: (a.job, repr(a))))
            case events.AllocationEnded():
                _add_end(allocation.ends, event)

    def _apply_controls(self) -> None:
        """Applies launches, pauses and cancels in order; a later launch lifts a cancel, but not a pause."""
        state = self.state
        state.paused = state.cancelled = False
        for (generation, _), event in sorted(self._controls.items(), key=lambda control: control[0]):
            state.generation = max(state.generation, generation)
            match event:
                case events.Pause():
                    state.paused = event.on
                case events.Cancel():
                    state.cancelled = True
                case events.Launched():
                    state.launched, state.cancelled = event, False
                    state.asked_gpu_hours = event.asked_gpu_hours or state.asked_gpu_hours
                    state.retried |= frozenset(event.retry)


_names_shared: Callable[[Any, Any], list[str]] = functools.cache(
    lambda event, state: [f.name for f in fields(event) if f.name != "result" and hasattr(state, f.name)]
)
"""Names of the fields that a class of events and a class of states have both, without the result."""


def _set(state: object, levels: dict[str, _Level], level: _Level, name: str, value: Any) -> None:
    """Sets a field, unless a line of higher precedence has set it or the value is empty."""
    if (value or value not in (None, {})) and levels.get(name, level) <= level:
        levels[name] = level
        setattr(state, name, value)


def _add_end(ends: dict[events.Start, events.AllocationEnded], end: events.AllocationEnded) -> None:
    """Adds an end; of several ends of one start the most trusted counts, with the longest time and the hosts of all."""
    reports = (ends.get(end.job, end), end)
    held_s = max((e.held_s for e in reports if e.held_s is not None), default=None)
    avoid = tuple(sorted({host for report in reports for host in report.avoid}))
    failed_on = tuple(sorted({host for report in reports for host in report.failed_on}))
    end = min(reports, key=_most_trusted)
    ends[end.job] = replace(end, held_s=held_s, avoid=avoid, failed_on=failed_on)


def _most_trusted(end: events.AllocationEnded) -> tuple[int, str]:
    """Sort key, smallest first: an end that the agent reports, then a launcher's, then the batch system's."""
    return {events.BY_AGENT: 0, events.BY_LAUNCHER: 1}.get(end.source, 2), repr(
        replace(end, held_s=None, avoid=(), failed_on=())
    )


def final_attempts(state: SweepState) -> dict[tuple[str, int], AttemptState]:
    """(run_id, repeat) -> the attempt that counts for it: the ok one, else the latest."""
    attempt_by_repeat: dict[tuple[str, int], AttemptState] = {}
    for key, attempt in state.attempts.items():
        earlier_attempt = attempt_by_repeat.get((key.run_id, key.repeat))
        if earlier_attempt is None or not earlier_attempt.ok:
            attempt_by_repeat[key.run_id, key.repeat] = attempt
    return attempt_by_repeat


def with_lost(state: SweepState) -> SweepState:
    """A copy of `state` in which attempts without a result are `lost` if their allocation has ended.

    The next launch records them as lost. Their results were not written, or the lines of these are damaged.
    """
    ended_names = {name for name, allocation in state.allocations.items() if allocation.ended is not None}
    attempts = dict(state.attempts)
    for key, attempt in attempts.items():
        if attempt.result is None and attempt.allocation in ended_names:
            reason = f"{attempt.allocation} has ended, and the journal has no result"
            attempts[key] = replace(attempt, result=RunResult(status=Status.LOST, reason=reason))
    return replace(state, attempts=attempts)
