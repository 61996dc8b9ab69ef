"""The state of a sweep: a pure fold over its journal, whatever the order of the events."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ultrabench.errors import UltrabenchError
from ultrabench.record import canonical_json, from_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.journal import Event


class AttemptKey(NamedTuple):
    """Name of one try of one repeat of a run."""

    run_id: str
    repeat: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.run_id}.{self.repeat}.{self.attempt}"


Start = tuple[str, int]
"""One start of a job: its id (empty for local processes) and how often it was restarted before."""


def start_of(job: Mapping[str, Any], restart: Any = 0) -> Start:
    """The start that an agent names as its job, {job_id, restart}; without a job, `restart` counts."""
    return str(job.get("job_id") or ""), int(job.get("restart") or restart or 0)


@dataclass(slots=True, kw_only=True)
class AttemptState:
    """What is known of one attempt."""

    key: AttemptKey
    allocation: str | None = None
    job: dict[str, Any] | None = None
    """The job it ran in: {job_id, restart}; None for local processes."""
    spec: dict[str, Any] | None = None
    """The RunSpec as JSON, from the claim."""
    predicted: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    scratch: str | None = None
    """Node-local folder of the leading agent, where logs grow."""
    phase: str | None = None
    result: RunResult | None = None
    """None while it is running (or vanished without a word yet)."""
    time: float | None = None
    """When it was claimed, by the claimer's clock; for display only."""


@dataclass(slots=True, kw_only=True)
class AllocationState:
    """What is known of one allocation."""

    name: str
    nodes: int = 1
    tasks: tuple[AttemptKey, ...] = ()
    limit_s: float = 0.0
    submission: tuple[str, int] = ("", 0)
    """Name and line number of the launcher's journal that told of its submission; later ones have larger numbers."""
    by: dict[str, Any] = field(default_factory=dict)
    """Who submitted it: {user, cluster, host}; empty where that was not written down."""
    job: dict[str, Any] | None = None
    """How to find it: {host, pid, start_time} locally, {job_id, name} on Slurm."""
    control: str | None = None
    """run_id of its cell's control layout, when it began with that."""
    agents: tuple[dict[str, Any], ...] = ()
    """Leading agents that started: {node, host, pid, start_time, job}."""
    preflight: dict[str, Any] = field(default_factory=dict)
    """What its devices and links could do when it started."""
    ends: dict[Start, dict[str, Any]] = field(default_factory=dict)
    """How each start of a job of it ended: {reason, elapsed_s, held_s, avoid, source}."""

    @property
    def start(self) -> Start:
        """The latest start of the job that owns this allocation; ("", 0) before the first."""
        jobs = (agent.get("job") or {} for agent in self.agents)
        return max((start_of(job) for job in jobs), key=lambda s: (s[1], s[0]), default=("", 0))

    @property
    def end(self) -> dict[str, Any] | None:
        """How it ended; None while it may be alive.

        Once agents have started, only the end of their own latest start counts: a second job of this
        allocation, or an earlier start, may end when it likes.
        """
        if self.agents:
            return self.ends.get(self.start) or self.ends.get(("", self.start[1]))
        return min(self.ends.values(), key=_first_word, default=None)

    @property
    def ended(self) -> str | None:
        """Why it ended; None while it may be alive."""
        return None if self.end is None else str(self.end["reason"])

    @property
    def timed(self) -> bool:
        """Whether the batch system has told how long its nodes were held until its end."""
        return self.end is not None and self.end["held_s"] is not None

    @property
    def held_s(self) -> float:
        """Seconds its nodes were held, by the batch system's word, else by the agents'.

        An end that nobody timed counts to the limit if agents had started, else nothing.
        """
        told: dict[int, list[float]] = {}
        for (_, restart), end in self.ends.items():
            seconds = (end["held_s"], end["elapsed_s"])
            told.setdefault(restart, []).extend(s for s in seconds if s is not None)
        return sum(max(known, default=self.limit_s if self.agents else 0.0) for known in told.values())


@dataclass(slots=True, kw_only=True)
class SweepState:
    """Everything a journal says."""

    attempts: dict[AttemptKey, AttemptState] = field(default_factory=dict)
    allocations: dict[str, AllocationState] = field(default_factory=dict)
    generation: int = 0
    """Largest number of a config, pause or cancel event; the next one takes one more."""
    config: dict[str, Any] | None = None
    """The latest config event."""
    paused: bool = False
    cancelled: bool = False
    """Cancelled and not launched again since."""
    retried: frozenset[AttemptKey] = frozenset()
    """Failed attempts that the user asked to have tried again."""

    def attempts_of(self, run_id: str) -> list[AttemptState]:
        """The attempts of one run, by repeat and attempt."""
        return [a for k, a in sorted(self.attempts.items()) if k.run_id == run_id]


Voice = tuple[str, int, str]
"""Who said something: writer, seq and a digest of the line, which decides between two lines of one number."""

_DAMAGED = (
    ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError, UltrabenchError,
)  # fmt: skip
_PRECEDENCE = {"agent": 2, "slurm": 1, "launcher": 0}


def fold(events: Iterable[Event]) -> SweepState:
    """The state after `events`; commutative and idempotent."""
    return Fold().add(events)


class Fold:
    """A state that grows with its journal, and keeps nothing of it that the state does not say.

    What can be said twice has a fixed precedence: an agent's result, an agent's failure, what Slurm
    says, what a launcher concludes; of anything else the largest (writer, seq, text) counts, whenever
    it is heard. Time stamps decide nothing, since clocks differ.
    """

    def __init__(self) -> None:
        self.state = SweepState()
        """Changed in place by `add`."""
        self.heard = 0
        """Number of events added."""
        self._ends: dict[AttemptKey, tuple[int, str]] = {}
        self._controls: dict[tuple[int, str], Event] = {}
        self._told: dict[tuple[AttemptKey | str, str], Voice] = {}
        """Field of an attempt or an allocation -> whose word it is."""

    def add(self, events: Iterable[Event]) -> SweepState:
        """The state with `events`, which may come again and in any order."""
        for event in events:
            self.heard += 1
            try:
                text = json.dumps(
                    event, sort_keys=True
                )  # a damaged event may hold what is no JSON, such as NaN
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                self._take(event, (str(event["writer"]), int(event["seq"]), digest))
            except _DAMAGED:
                continue  # a line that was damaged and is JSON all the same says nothing
        _fold_controls(self.state, self._controls)
        return self.state

    def _take(self, event: Event, by: Voice) -> None:
        name = event["event"]
        if name in ("config", "pause", "cancel"):
            _retried(event)
            self._controls[int(event["generation"]), canonical_json(event)] = event
        elif name in ("claimed", "started", "phase", "result", "failed"):
            key = attempt_key(event)
            result = _result(event) if name in ("result", "failed") else None
            told = _attempt_fields(event)
            attempt = self.state.attempts.setdefault(key, AttemptState(key=key))
            self._put(key, attempt, by, told)
            if result:
                _fold_end(attempt, self._ends, result, event)
        elif isinstance(event.get("allocation"), str):
            held = AllocationState(name=event["allocation"])
            held = self.state.allocations.setdefault(held.name, held)
            self._put(held.name, held, by, _allocation_fields(event))
            _fold_allocation(held, event)

    def _put(self, owner: AttemptKey | str, target: object, by: Voice, told: dict[str, Any]) -> None:
        """Sets fields; None says nothing, and a larger (writer, seq, text) stands."""
        for name, value in told.items():
            if value is not None and self._told.get((owner, name), by) <= by:
                self._told[owner, name] = by
                setattr(target, name, value)


def attempt_key(event: Event) -> AttemptKey:
    """The attempt an event speaks of."""
    return AttemptKey(str(event["run_id"]), int(event["repeat"]), int(event["attempt"]))


def _attempt_fields(event: Event) -> dict[str, Any]:
    """What an event says of an attempt, its end left out."""
    told = {"allocation": _text_or_none(event.get("allocation")), "spec": _object(event.get("spec"))}
    match event["event"]:
        case "claimed":
            job, predicted = _object(event.get("job")), _object(event.get("predicted"))
            return told | {"job": job, "predicted": predicted, "time": event.get("time")}
        case "started":
            return told | {"started": True, "scratch": event.get("scratch")}
        case "phase":
            return told | {"phase": event["name"]}
    return told


def _fold_end(
    attempt: AttemptState, ends: dict[AttemptKey, tuple[int, str]], result: RunResult, event: Event
) -> None:
    """Higher precedence wins; between equals the smaller text, so that order never matters."""
    weight = 10 if event["event"] == "result" else _PRECEDENCE.get(event.get("source", "agent"), 0)
    rank = (-weight, canonical_json(event))
    if rank <= ends.get(attempt.key, rank):
        ends[attempt.key] = rank
        attempt.result = result


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) and value else None


def _result(event: Event) -> RunResult:
    """The result an event carries; fields of later versions are passed over."""
    known = {f.name for f in fields(RunResult)}
    return from_dict(RunResult, {k: v for k, v in event["result"].items() if k in known})


def _allocation_fields(event: Event) -> dict[str, Any]:
    """What an event says of an allocation, what adds up left out."""
    match event["event"]:
        case "allocation_planned":
            tasks = tuple(AttemptKey(r, int(p), int(a)) for r, p, a in event["tasks"])
            nodes, limit_s = int(event["nodes"]), float(event["limit_s"])
            by = _object(event.get("by"))
            return {
                "tasks": tasks,
                "nodes": nodes,
                "limit_s": limit_s,
                "control": event.get("control"),
                "by": by,
            }
        case "submitting":
            return {"submission": (str(event["writer"]), int(event["seq"]))}
        case "submitted" | "adopted":
            return {"job": _object(event["job"])}
    return {}


def _fold_allocation(allocation: AllocationState, event: Event) -> None:
    """Takes in what adds up: agents, starts, ends, and the preflight of the latest start."""
    kind = event["event"]
    if kind == "allocation_started":
        agent = event["agent"]
        start_of(agent.get("job") or {})  # refuses what is no start
        agents = {canonical_json(a): a for a in (*allocation.agents, agent)}
        allocation.agents = tuple(agents[k] for k in sorted(agents))
    elif kind == "preflight":
        told = {"restart": int(event.get("restart", 0)), **event["found"]}
        found = [f for f in (allocation.preflight, told) if f]
        allocation.preflight = max(found, key=lambda f: (f["restart"], canonical_json(f)))
    elif kind == "allocation_ended":
        start, end = start_of(_object(event.get("job")) or {}, event.get("restart")), _end(event)
        held = allocation.ends.get(start, end)
        seconds = [e["held_s"] for e in (held, end) if e["held_s"] is not None]
        first = min(held, end, key=_first_word)
        allocation.ends[start] = {**first, "held_s": max(seconds, default=None)}


def _end(event: Event) -> dict[str, Any]:
    return {
        "reason": str(event["reason"]),
        "elapsed_s": _seconds(event.get("elapsed_s")),
        "held_s": _seconds(event.get("held_s")),
        "avoid": [str(node) for node in event.get("avoid") or ()],
        "source": str(event.get("source")),
    }


def _seconds(value: Any) -> float | None:
    seconds = None if value is None else float(value)
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(value)
    return seconds


def _first_word(end: dict[str, Any]) -> tuple[int, str]:
    """The agent's word on its own end comes first, then a launcher's; who only tells the time comes last."""
    weight = {"agent": 0, "launcher": 1}.get(end["source"], 2)
    return (weight, canonical_json(end | {"held_s": None}))


def _fold_controls(state: SweepState, controls: dict[tuple[int, str], Event]) -> None:
    """The latest word of each kind counts; a later launch lifts a cancel, not a pause."""
    retried: set[AttemptKey] = set()
    state.paused = state.cancelled = False
    for (generation, _), event in sorted(controls.items(), key=lambda control: control[0]):
        state.generation = max(state.generation, generation)
        if event["event"] == "pause":
            state.paused = bool(event.get("on", state.paused))
        elif event["event"] == "cancel":
            state.cancelled = True
        else:
            state.config, state.cancelled = event, False
            retried.update(_retried(event))
    state.retried = frozenset(retried)


def _retried(event: Event) -> set[AttemptKey]:
    """The failed attempts that a config event asks to try again."""
    return {AttemptKey(str(r), int(p), int(a)) for r, p, a in event.get("retry", [])}


def final_attempts(state: SweepState) -> dict[tuple[str, int], AttemptState]:
    """The attempt that stands for each (run_id, repeat): the ok one, else the latest."""
    final: dict[tuple[str, int], AttemptState] = {}
    for key, attempt in sorted(state.attempts.items()):
        held = final.get((key.run_id, key.repeat))
        if held is None or not (held.result and held.result.status == Status.OK):
            final[key.run_id, key.repeat] = attempt
    return final
