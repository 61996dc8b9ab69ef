"""Everything the leader has heard about one attempt, from all ranks."""

import time
from dataclasses import dataclass, field
from typing import Any

MOST_STEPS = 10_000
"""Steps of a rank that are remembered and stored; further ones are signs of progress only."""


@dataclass(slots=True, kw_only=True)
class RankStory:
    """What one rank said and how it ended."""

    phase: str = "start"
    phase_at: float | None = None
    """When it began, by the rank's clock."""
    microbatches: int = 0
    """Finished on the device."""
    step: int = 0
    part: str = ""
    """Of the step; empty where the rank does not tell."""
    moved: float | None = None
    """When it last made progress, by this process's monotonic clock."""
    gaps_s: dict[str, float] = field(default_factory=dict)
    """Its longest silences since its first step: in the optimizer, and elsewhere (steady)."""
    first_gaps_s: dict[str, float] = field(default_factory=dict)
    """The same up to the end of its first step, which compiles, allocates and connects."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Its first MOST_STEPS."""
    memory: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    killed_by_us: bool = False
    oom_killed: bool = False
    """The kernel's out-of-memory killer struck its node while it ran, and it died of SIGKILL."""
    tail: str = ""
    """End of its log."""
    failed_at: float | None = None
    """When it was first heard to have failed, by the leader's time.monotonic()."""
    spoke: bool = False
    found: dict[str, Any] | None = None
    """What its node found when it looked at the rank before killing it."""

    @property
    def kind(self) -> str:
        """Which deadline holds now: that of the optimizer, or the steady one."""
        return "optimizer" if self.part == "optimizer" else "steady"

    def slowest_s(self, kind: str) -> float:
        """Longest silence so far, from the end of the first step on.

        Until one more step is complete, the first one stands for all.
        """
        first = self.first_gaps_s.get(kind, 0.0) if len(self.steps) < 2 else 0.0
        return max(first, self.gaps_s.get(kind, 0.0))

    def move(self, now: float, started: float) -> None:
        """Notes a sign of progress of a rank started at `started`, before what it tells is taken in."""
        gaps = self.gaps_s if self.steps else self.first_gaps_s
        since = started if self.moved is None else self.moved
        gaps[self.kind] = max(gaps.get(self.kind, 0.0), now - since)
        self.moved = now


class Gathering:
    """The stories of all ranks, and when anything last moved."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [RankStory() for _ in range(world_size)]
        self.environment: dict[str, Any] = {}
        self.port: int | None = None
        self.probe: dict[str, Any] = {}
        """What a preflight found, or a run that is a probe."""
        self.started = time.monotonic()
        self.started_at = time.time()
        self.moved = self.started
        """When a rank last made progress."""
        self.first_step: float | None = None
        self.fault: str | None = None
        """Which rank reported what cannot be understood; such a run is invalid."""

    def hear(self, news: list[dict[str, Any]], now: float | None = None) -> None:
        """Takes in what a node says about its ranks; `now` by the monotonic clock, if it is not that."""
        now = time.monotonic() if now is None else now
        for item in news:
            try:
                self._take(item, now)
            except Exception as error:  # whatever it is, it costs this run and not its allocation
                self._blame(item, f"what cannot be taken in: {type(error).__name__}: {error}")

    def _blame(self, item: dict[str, Any], what: str) -> None:
        self.fault = self.fault or f"rank {item['rank']} reported {what}"

    def _take(self, item: dict[str, Any], now: float) -> None:
        rank = self.ranks[item["rank"]]
        if "found" in item:
            rank.found = item["found"]
            return
        self.moved = now
        rank.move(now, self.started)
        if "code" in item:
            rank.code, rank.tail = item["code"], item.get("tail", "")
            rank.oom_killed = item.get("oom_killed", False) and not rank.killed_by_us
            if rank.code:
                rank.failed_at = rank.failed_at or time.monotonic()
            return
        rank.spoke = True
        if "microbatches" in item:
            rank.microbatches, rank.step, rank.part = item["microbatches"], item["step"], item["part"]
        else:
            if "fault" in item["line"]:
                self._blame(item, item["line"]["fault"])
            self._line(rank, item["line"], now)

    def excuse(self, away_s: float) -> None:
        """Leaves time out of all silences in which this agent was not there to hear anything."""
        now = time.monotonic()
        self.moved = min(now, self.moved + away_s)
        for rank in self.ranks:
            if rank.moved is not None:
                rank.moved = min(now, rank.moved + away_s)

    def _line(self, rank: RankStory, line: dict[str, Any], now: float) -> None:
        event = line.get("event")
        if event == "phase":
            rank.phase, rank.phase_at = str(line.get("name")), line.get("time")
            if not rank.steps:
                rank.first_gaps_s = {}
        elif event == "step":
            if len(rank.steps) < MOST_STEPS:
                rank.steps.append(line)
            if self.first_step is None:
                self.first_step = now
        elif event == "memory":
            rank.memory = {**rank.memory, **line}
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

        Each rank is held against the ranks' own silences: together they are hardly ever silent.
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
        """Some rank reported an error or nonsense, or ended with anything but 0."""
        return self.fault is not None or any(
            r.error is not None or r.code not in (None, 0) for r in self.ranks
        )

    @property
    def phase(self) -> str:
        """What rank 0 does."""
        return self.ranks[0].phase

    @property
    def spoke(self) -> bool:
        """Some rank has reported something; a silent program can only be watched by its limit."""
        return any(r.spoke for r in self.ranks)
