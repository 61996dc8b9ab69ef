"""How far the ranks of one attempt have come and how they ended, from the events that their nodes send."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ultrabench.log_patterns import OBSERVED
from ultrabench.measure import Measure

RankEvent = dict[str, Any]
"""About one rank: {rank, line} a line of its report, {rank, microbatches, step, part} its progress,
{rank, code, tail, oom_killed, disk_full} its exit with the end of its log, {rank, found} what it did when it hung."""

NO_EVIDENCE: dict[str, Any] = {"state": "?", "wchan": "", "stack": (), "groups": ()}
"""What is known of a rank that its node has not examined."""

MAX_STEPS = 10_000
"""Steps of a rank that are remembered and stored; further ones are signs of progress only."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankProgress:
    """What one rank reported and how it ended."""

    number: int = 0
    host: str = ""
    phase: str = "start"
    phase_at: float | None = None
    """When the phase began, by the rank's clock."""
    phase_since: float = 0.0
    """When the phase became known, in seconds for which the leader has run."""
    microbatches: int = 0
    """Micro-batches that its device has finished."""
    step: int = 0
    part: str = ""
    """The part of the step that the rank is in; empty if the rank does not report it."""
    moved: float = 0.0
    """When the rank last made progress or was started, in seconds for which the leader has run."""
    gaps_s: dict[str, float] = field(default_factory=dict)
    """Longest time without progress after the first step, in seconds: `optimizer`, `steady` for the rest."""
    first_gaps_s: dict[str, float] = field(default_factory=dict)
    """Longest time without progress in the first step, in seconds; it also compiles, allocates and connects."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The report lines of its first MAX_STEPS steps."""
    memory: dict[str, Any] = field(default_factory=dict)
    mfus: list[float] = field(default_factory=list)
    """MFU that its log shows, as fractions in order, at most MAX_STEPS of them."""
    ran: dict[str, str] = field(default_factory=dict)
    """The options that it read back from the objects of its first step; empty before."""
    done: dict[str, Any] = field(default_factory=dict)
    """The report line by which it says that it is done; empty before."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """The report line with its measured checkpoint, or with the message of its failure; empty before."""
    error: dict[str, Any] = field(default_factory=dict)
    """The line of its report with its first error; empty without one."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    killed_by_us: bool = False
    oom_killed: bool = False
    """The rank died of SIGKILL, and Linux killed processes on its node for lack of memory during the run."""
    disk_full: str | None = None
    """Which node-local folder was full when it failed, and what it had left; None if none was."""
    tail: str = ""
    """The end of the rank's log."""
    failed_at: float | None = None
    """When its failure first became known, in seconds for which the leader has run."""
    evidence: dict[str, Any] = field(default_factory=lambda: NO_EVIDENCE)
    """What the node found when it examined a rank that hangs: {state, wchan, stack, groups}.

    `state` is R (runs), S (sleeps), D (waits for a device or disk), T (is stopped), Z (is dead) or ?
    (unknown), `wchan` the kernel function in which the rank sleeps, `stack` the frames of its main
    thread as `function (file:line)`, innermost first. `groups` has {group, ranks, entered, started,
    finished, ops} for each process group, and is empty if the rank did not answer.
    """

    @property
    def name(self) -> str:
        """The rank and its host, as messages name them."""
        return f"rank {self.number} on {self.host}"

    @property
    def ended_well(self) -> bool:
        """It reported that it was done, or exited with 0; what it did after that does not matter."""
        return bool(self.done) or (not self.error and self.code == 0)

    @property
    def last_text(self) -> str:
        """The text that tells how it ended: its error with the traceback, or the end of its log."""
        error = self.error
        return f"{error.get('traceback', '')}\n{error.get('message', '')}" if error else self.tail

    @property
    def kind(self) -> str:
        """The key of `gaps_s` under which the time without progress is counted now."""
        return "optimizer" if self.part == "optimizer" else "steady"

    def observe(self, line: dict[str, Any]) -> None:
        """Records what its log shows beside steps; some programs reset their peaks, so the largest one counts."""
        for name in line.keys() & {"allocated_bytes", "reserved_bytes"}:
            self.memory[name] = max(line[name], self.memory.get(name, 0))
        if "mfu" in line and len(self.mfus) < MAX_STEPS:
            self.mfus.append(line["mfu"])

    def measured_steps(self, measure: Measure) -> list[float]:
        """Seconds of the measured steps; where a program does not mark them, all after warm-up."""
        marked = [s for s in self.steps if "measured" in s]
        steps = [s for s in marked if s["measured"]] if marked else self.steps[measure.warmup_steps :]
        return [s["seconds"] for s in steps if "seconds" in s]


class MeasuredPhase:
    """Whether the ranks of a node are in measured steps, by the same rule as `RankProgress.measured_steps`."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps, self._num_steps = warmup_steps, Counter[int]()
        self.lasts = False
        """Whether the latest step counts, so that warm-up is over."""

    def observe(self, steps: Sequence[RankEvent]) -> None:
        """Takes the steps that ranks have reported, the latest last."""
        self._num_steps.update(event["rank"] for event in steps)
        if steps:
            is_warm = max(self._num_steps.values()) > self._warmup_steps
            self.lasts = steps[-1]["line"].get("measured", is_warm)


class AttemptProgress:
    """The progress of all ranks of one attempt, from the events that their nodes send.

    The leader's time are the seconds for which it has run, so that no deadline counts the time for which it stood still.
    """

    def __init__(self, ranks: int, hosts: Sequence[str], now: float = 0.0) -> None:
        """Each of the `hosts`, in their order, has an equal share of the ranks; `now` is the leader's time."""
        self.hosts = hosts
        rank_hosts = (hosts[number * len(hosts) // ranks] for number in range(ranks))
        self.ranks = [RankProgress(number=n, host=host, moved=now) for n, host in enumerate(rank_hosts)]
        self.environment: dict[str, Any] = {}
        self.port: int | None = None
        """The port of rank 0's store; None again after the other ranks have been told."""
        self.probe: dict[str, Any] = {}
        """Rates of devices and links, from a preflight or from a run that only measures them."""
        self.started = now
        """When the ranks were started, by the leader's time."""
        self.started_at = time.time()
        self.monotonic_start = time.monotonic()
        """When the ranks were started, by a clock that also counts the time for which the leader was stopped."""
        self.first_step: float | None = None
        self.spoke = False
        """Some rank has reported something; until then the only deadline is the time limit."""
        self.fault: str | None = None
        """Which rank reported something invalid, and what; the run is then invalid."""

    def add(self, events: list[RankEvent], now: float = 0.0) -> None:
        """Records the events of a node's ranks; `now` is the leader's time."""
        for event in events:
            try:
                self._take(event, now)
                fault = event.get("line", {}).get("fault")
            except Exception as error:  # it must fail this run only, not the allocation
                fault = f"invalid data: {type(error).__name__}: {error}"
            if fault:
                self.fault = self.fault or f"rank {event['rank']} reported {fault}"

    def _take(self, event: RankEvent, now: float) -> None:
        rank = self.ranks[event["rank"]]
        if "evidence" in event:
            rank.evidence = event["evidence"]
            return
        if event.get("line", {}).get("event") == OBSERVED:
            rank.observe(event["line"])
            return
        gaps = rank.gaps_s if rank.steps else rank.first_gaps_s
        gaps[rank.kind] = max(gaps.get(rank.kind, 0.0), now - rank.moved)
        rank.moved = now
        if "code" in event:
            rank.code, rank.tail = event["code"], event.get("tail", "")
            rank.oom_killed = event.get("oom_killed", False) and not rank.killed_by_us
            rank.disk_full = None if rank.killed_by_us else event.get("disk_full")
        elif "microbatches" in event:
            rank.microbatches, rank.step, rank.part = event["microbatches"], event["step"], event["part"]
        else:
            self._take_line(rank, event["line"], now)
        self.spoke = self.spoke or "code" not in event
        if rank.code or rank.error:
            rank.failed_at = rank.failed_at or now

    def _take_line(self, rank: RankProgress, line: dict[str, Any], now: float) -> None:
        event = line.get("event")
        if event == "phase":
            rank.phase, rank.phase_at, rank.phase_since = line.get("name", ""), line.get("time"), now
            if not rank.steps:
                rank.first_gaps_s = {}
        elif event == "step":
            self.first_step = self.first_step or now
            if len(rank.steps) < MAX_STEPS:
                rank.steps.append(line)
        elif event == "memory":
            rank.memory |= line
        elif event == "ran":
            rank.ran = line.get("options", {})
        elif event == "done":
            rank.done = line
        elif event == "checkpoint":
            rank.checkpoint = line
        elif event == "error":
            rank.error = rank.error or line
        elif event == "store":
            self.port = line.get("port")
        elif event == "environment":
            self.environment = line
        elif event == "probe":
            self.probe = {k: v for k, v in line.items() if k not in ("event", "time")}

    @property
    def positions(self) -> list[tuple[object, ...]]:
        """How far each rank is; a list that has changed means that a rank has moved."""
        return [(r.phase, len(r.steps), r.step, r.part, r.microbatches, r.code) for r in self.ranks]

    @property
    def slowest_gap_s(self) -> float:
        """Longest time without progress of any single rank, in seconds, of the kinds that count now.

        The time in which all ranks together make no progress would be far too short to compare with.
        While a rank is in the optimizer both kinds count, since its GPU may still finish micro-batches. The
        first step of a rank counts only until its second step is complete.
        """
        kinds = {"steady", *(rank.kind for rank in self.running)}
        gaps = [rank.gaps_s for rank in self.ranks]
        gaps += [rank.first_gaps_s for rank in self.ranks if len(rank.steps) < 2]
        return max(gap_s.get(kind, 0.0) for gap_s in gaps for kind in kinds)

    @property
    def running(self) -> list[RankProgress]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.code is None]

    @property
    def failed(self) -> bool:
        """Whether some rank reported an error or invalid values, or ended with an exit code other than 0."""
        return self.fault is not None or any(rank.error or rank.code for rank in self.ranks)
