"""How far the ranks of one attempt have come and how they ended, from the events that their nodes send."""

import time
from dataclasses import dataclass, field
from typing import Any

from ultrabench.measure import Measure

RankEvent = dict[str, Any]
"""About one rank: {rank, line} a line of its report, {rank, microbatches, step, part} its progress,
{rank, code, tail, oom_killed} its exit with the end of its log, {rank, found} what it did when it hung."""

MAX_STEPS = 10_000
"""Steps of a rank that are remembered and stored; further ones are signs of progress only."""


@dataclass(slots=True, kw_only=True)
class RankProgress:
    """What one rank reported and how it ended."""

    phase: str = "start"
    phase_at: float | None = None
    """When the phase began, by the rank's clock."""
    microbatches: int = 0
    """Micro-batches that its device has finished."""
    step: int = 0
    part: str = ""
    """Part of the step that it is in; empty where the rank does not report it."""
    moved: float | None = None
    """When it last made progress, by this process's monotonic clock."""
    gaps_s: dict[str, float] = field(default_factory=dict)
    """Longest time without progress since its first step: in the optimizer, and elsewhere (steady)."""
    first_gaps_s: dict[str, float] = field(default_factory=dict)
    """Longest time without progress in its first step, which compiles, allocates and connects."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The report lines of its first MAX_STEPS steps."""
    memory: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    killed_by_us: bool = False
    oom_killed: bool = False
    """It died of SIGKILL, and the kernel's out-of-memory killer acted on its node while it ran."""
    tail: str = ""
    """End of its log."""
    failed_at: float | None = None
    """When its failure first became known, by the leader's monotonic clock."""
    found: dict[str, Any] | None = None
    """What its node found when it looked at the rank before killing it."""

    @property
    def kind(self) -> str:
        """The kind that its present silence counts as: in the optimizer, or elsewhere (steady)."""
        return "optimizer" if self.part == "optimizer" else "steady"

    def slowest_s(self, kind: str) -> float:
        """Longest silence of this kind so far, from the end of the first step on.

        Until one more step is complete, the silences of the first step count too.
        """
        first = self.first_gaps_s.get(kind, 0.0) if len(self.steps) < 2 else 0.0
        return max(first, self.gaps_s.get(kind, 0.0))

    def measured_steps(self, measure: Measure) -> list[float]:
        """Seconds of the measured steps; where a program does not mark them, all after warm-up."""
        marked = [s for s in self.steps if "measured" in s]
        steps = [s for s in marked if s["measured"]] if marked else self.steps[measure.warmup_steps :]
        return [float(s["seconds"]) for s in steps if "seconds" in s]

    def move(self, now: float, started: float) -> None:
        """Notes a sign of progress of a rank started at `started`, before its content is taken in."""
        gaps = self.gaps_s if self.steps else self.first_gaps_s
        since = started if self.moved is None else self.moved
        gaps[self.kind] = max(gaps.get(self.kind, 0.0), now - since)
        self.moved = now


class AttemptProgress:
    """The progress of all ranks of one attempt, and when any of them last made progress."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [RankProgress() for _ in range(world_size)]
        self.environment: dict[str, Any] = {}
        self.port: int | None = None
        """The port of rank 0's store, until it is passed on to the other ranks."""
        self.probe: dict[str, Any] = {}
        """What a preflight measured, or a run that is a probe."""
        self.started = time.monotonic()
        self.started_at = time.time()
        self.moved = self.started
        """When a rank last made progress, by this process's monotonic clock."""
        self.first_step: float | None = None
        self.spoke = False
        """Some rank has reported something; a program that reports nothing only has its time limit."""
        self.fault: str | None = None
        """Which rank reported something that makes no sense; such a run is invalid."""

    def add(self, events: list[RankEvent], now: float | None = None) -> None:
        """Takes in what a node tells of its ranks; `now` is by the monotonic clock, if it is not the present."""
        now = time.monotonic() if now is None else now
        for event in events:
            try:
                self._take(event, now)
            except Exception as error:  # whatever it is, it costs this run and not its allocation
                self._blame(event, f"what cannot be taken in: {type(error).__name__}: {error}")

    def _blame(self, event: RankEvent, what: str) -> None:
        self.fault = self.fault or f"rank {event['rank']} reported {what}"

    def _take(self, event: RankEvent, now: float) -> None:
        rank = self.ranks[event["rank"]]
        if "found" in event:
            rank.found = event["found"]
            return
        self.moved = now
        rank.move(now, self.started)
        if "code" in event:
            rank.code, rank.tail = event["code"], event.get("tail", "")
            rank.oom_killed = event.get("oom_killed", False) and not rank.killed_by_us
            if rank.code:
                rank.failed_at = rank.failed_at or time.monotonic()
            return
        self.spoke = True
        if "microbatches" in event:
            rank.microbatches, rank.step, rank.part = event["microbatches"], event["step"], event["part"]
            return
        if "fault" in event["line"]:
            self._blame(event, event["line"]["fault"])
        self._take_line(rank, event["line"], now)

    def allow_pause(self, pause_s: float) -> None:
        """Does not count `pause_s`, in which this process was stopped, as silence of the ranks."""
        now = time.monotonic()
        self.moved = min(now, self.moved + pause_s)
        for rank in self.ranks:
            if rank.moved is not None:
                rank.moved = min(now, rank.moved + pause_s)

    def _take_line(self, rank: RankProgress, line: dict[str, Any], now: float) -> None:
        event = line.get("event")
        if event == "phase":
            rank.phase, rank.phase_at = str(line.get("name")), line.get("time")
            if not rank.steps:
                rank.first_gaps_s = {}
        elif event == "step":
            if len(rank.steps) < MAX_STEPS:
                rank.steps.append(line)
            if self.first_step is None:
                self.first_step = now
        elif event == "memory":
            rank.memory |= line
        elif event == "done":
            rank.done = line
        elif event == "error":
            rank.error = rank.error or line
            rank.failed_at = rank.failed_at or time.monotonic()
        elif event == "store" and "port" in line:
            self.port = int(line["port"])
        elif event == "environment":
            self.environment = line
        elif event == "probe":
            self.probe = {k: v for k, v in line.items() if k not in ("event", "time")}

    @property
    def slowest_gap_s(self) -> float:
        """Longest silence of any rank so far, of the kinds that running ranks may be in.

        Each rank is held against the silences of single ranks: all together they are hardly ever silent.
        In the optimizer both kinds count, since a GPU may still be finishing micro-batches.
        """
        kinds = {"steady", *(self.ranks[i].kind for i in self.running)}
        return max(rank.slowest_s(kind) for rank in self.ranks for kind in kinds)

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [i for i, r in enumerate(self.ranks) if r.code is None]

    @property
    def failed(self) -> bool:
        """Some rank reported an error or nonsense, or ended with an exit code other than 0."""
        return self.fault is not None or any(r.error is not None or r.code for r in self.ranks)

    @property
    def phase(self) -> str:
        """The phase of rank 0."""
        return self.ranks[0].phase
