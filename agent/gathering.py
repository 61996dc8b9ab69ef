"""Everything the leader has heard about one attempt, from all ranks."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RankStory:
    """What one rank said and how it ended."""

    phase: str = "start"
    phase_at: float | None = None
    """When it began, by the rank's clock."""
    microbatches: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
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


class Gathering:
    """The stories of all ranks, and when anything last moved."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [RankStory() for _ in range(world_size)]
        self.environment: dict[str, Any] = {}
        self.port: int | None = None
        self.probe: dict[str, Any] = {}
        """What a preflight found."""
        self.started = time.monotonic()
        self.started_at = time.time()
        self.moved = self.started
        """When a rank last made progress."""
        self.first_step: float | None = None
        self.slowest_gap_s = 0.0
        """Longest time between two signs of progress after the first step."""

    def hear(self, news: list[dict[str, Any]]) -> None:
        """Takes in what a node says about its ranks."""
        for item in news:
            rank = self.ranks[item["rank"]]
            if "code" in item:
                rank.code, rank.tail = item["code"], item.get("tail", "")
                rank.oom_killed = item.get("oom_killed", False) and not rank.killed_by_us
                if rank.code:
                    rank.failed_at = rank.failed_at or time.monotonic()
                self._progress()
            elif "microbatches" in item:
                rank.microbatches, rank.spoke = item["microbatches"], True
                self._progress()
            else:
                rank.spoke = True
                self._line(rank, item["line"])
                self._progress()

    def _line(self, rank: RankStory, line: dict[str, Any]) -> None:
        event = line.get("event")
        if event == "phase":
            rank.phase, rank.phase_at = str(line.get("name")), line.get("time")
        elif event == "step":
            rank.steps.append(line)
            if self.first_step is None:
                self.first_step = time.monotonic()
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

    def _progress(self) -> None:
        now = time.monotonic()
        if self.first_step is not None:
            self.slowest_gap_s = max(self.slowest_gap_s, now - self.moved)
        self.moved = now

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [i for i, r in enumerate(self.ranks) if r.code is None]

    @property
    def failed(self) -> bool:
        """Some rank reported an error or ended with anything but 0."""
        return any(r.error is not None or r.code not in (None, 0) for r in self.ranks)

    @property
    def phase(self) -> str:
        """What rank 0 does."""
        return self.ranks[0].phase

    @property
    def spoke(self) -> bool:
        """Some rank has reported something; a silent program can only be watched by its limit."""
        return any(r.spoke for r in self.ranks)
