"""How far the ranks of one attempt have come and how they ended, from the events that their nodes send."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import Any, Literal

from ultrabench.agent.diagnose.addresses import AddressBook
from ultrabench.agent.diagnose.log_record import LogRecord, record_of
from ultrabench.log_patterns import OBSERVED_EVENT
from ultrabench.measure import Measure
from ultrabench.partial_step import PartTimes, part_times
from ultrabench.record import from_dict

_PART_FIELDS = {"turn", "gas", "whole_gas", "seconds"}
"""The fields of the report line of a part of a step."""
RankEvent = dict[str, Any]
"""An event of one rank: {rank, line} is a line of its report, {rank, microbatches, step, part} its progress, {rank,
code, oom_killed, disk_full} its exit, {rank, log} the record of its log, which follows the exit, and {rank,
evidence} the evidence of a hang, and {rank, stack} what a rank wrote when it was aborted.
An exit may have the end of the log instead of its record, as `tail`."""

SURE_STATES = ("T", "Z")
"""States of a process in which it cannot go on, whatever other ranks do: it is stopped, or it is dead."""
NO_EVIDENCE: dict[str, Any] = {"state": "?", "wchan": "", "stack": (), "groups": ()}
"""The evidence of a rank that its node has not examined."""

MAX_KEPT_PARAMS = 20
"""Numbers of parameters in the log of a rank that are remembered."""
MIN_PARAMS = 1000
"""Smallest number in a log that is taken for the number of parameters of a model."""
MAX_KEPT_STEPS = 10_000
"""Steps of a rank that are remembered and stored; further ones are signs of progress only."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankProgress:
    """What one rank reported and how it ended."""

    number: int = 0
    host: str = ""
    starter: "RankProgress | None" = None
    """The rank whose exit code and log are those of this one, because one command started all ranks of their node; None
    for a rank that has its own, as the first rank of such a node."""
    phase: str = "start"
    phase_began_s: float | None = None
    """When the phase began, by the rank's clock."""
    phase_since_s: float = 0.0
    """When the leader learned of the phase, in seconds for which it has run."""
    microbatches: int = 0
    """Micro-batches that its device has finished."""
    step: int = 0
    part: str = ""
    """The part of the step that the rank is in; empty if the rank does not report it."""
    last_progress_s: float = 0.0
    """When the rank last made progress or was started, in seconds for which the leader has run."""
    gaps_s: dict[str, float] = field(default_factory=dict)
    """Longest time without progress after the first step, in seconds: `optimizer`, `steady` for the rest."""
    first_gaps_s: dict[str, float] = field(default_factory=dict)
    """Longest time without progress in the first step, in seconds; it also compiles, allocates and connects."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The report lines of its first MAX_KEPT_STEPS steps."""
    memory_report: dict[str, Any] = field(default_factory=dict)
    """What it reported about its memory, in bytes: peaks, limits, and what was free at the start."""
    resident_bytes: int | None = None
    """The largest resident set of a process of a program of the user, on CPUs; None where nobody has measured it."""
    mfus: list[float] = field(default_factory=list)
    """MFU that its log shows, as fractions in order, at most MAX_KEPT_STEPS of them."""
    losses: list[dict[str, Any]] = field(default_factory=list)
    """What lines of kernel.loss_line show, in order: {loss} or {loss, step}, at most MAX_KEPT_STEPS of them."""
    printed_params: list[int] = field(default_factory=list)
    """Numbers of parameters that its log shows, each once, at most MAX_KEPT_PARAMS of them."""
    flops_per_token: float | None = None
    """FLOPs of a token that its log shows, by kernel.flops_per_token."""
    misread_text: str | None = None
    """Why a pattern of the kernel misreads its log; None if none does."""
    launch_problem: str | None = None
    """Why the command of its node trains other ranks than the layout has; None if it does not."""
    num_unread: int = 0
    """Number of lines that match kernel.step_line but have no time that can be read."""
    num_untimed: int = 0
    """Number of lines of steps that arrived together with the first one, and none after them."""
    num_repeats: int = 0
    """Number of lines of its log that match kernel.step_line but repeat a step."""
    lines_per_step: float = 1.0
    """How many lines of its log show the same step."""
    uncounted_stride: int = 1
    """The number of steps of a line of its log, where it counts as one."""
    are_of_one_step: bool = False
    """Whether words of its log say that times are those of one step."""
    num_parts: int = 0
    """Number of lines of its log whose time is that of a part of a step."""
    options_read_back: dict[str, str] = field(default_factory=dict)
    """Option -> value that it read back from the objects of its first step; empty until then."""
    done_line: dict[str, Any] = field(default_factory=dict)
    """The report line by which it says that it is done; empty until then."""
    checkpoint_line: dict[str, Any] = field(default_factory=dict)
    digest: dict[str, Any] = field(default_factory=dict)
    """What its device computed in a preflight, as `device_digest.digest_of` reads it; empty in other tasks."""
    """The report line with its measured checkpoint, or with the message of its failure; empty until then."""
    error_line: dict[str, Any] = field(default_factory=dict)
    """The report line with its first error; empty if it has reported none."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    killed_by_us: bool = False
    was_aborted: bool = False
    """Whether its node was ordered to end it by SIGABRT, to see its stack."""
    oom_killed: bool = False
    """Linux killed processes on its node for lack of memory during the run: it, a child of it, or another rank."""
    full_folder_text: str | None = None
    """Which node-local folder was full when the rank failed, and its free space; None if none was."""
    tail: str = ""
    """The end of the rank's log."""
    log: LogRecord | None = None
    """What its log shows about failures; None until its node has read it."""
    failed_at_s: float | None = None
    """When the leader learned of its failure, in seconds for which it has run."""
    evidence: dict[str, Any] = field(default_factory=lambda: NO_EVIDENCE)
    """What the node found when it examined a rank that hangs: {state, wchan, stack, groups}.

    `state` is R (runs), S (sleeps), D (waits for a device or disk), T (is stopped), Z (is dead) or ? (unknown),
    `wchan` the kernel function in which the rank sleeps, `stack` the frames of its main thread as
    `function (file:line)`, innermost first. `aborted` is there if the rank was ended to see its stack.
    `groups` has {group, ranks, entered, started, finished, ops} for each process group,
    and is empty if the rank did not answer.
    """

    def reported_values(self, event: Literal["memory", "done"]) -> dict[str, Any]:
        """The latest value of each field of the lines of this event; empty until there is one."""
        return {"memory": self.memory_report, "done": self.done_line}[event]

    @property
    def name(self) -> str:
        """The rank and its host, as messages name them."""
        return f"rank {self.number} on {self.host}"

    @property
    def has_ended(self) -> bool:
        """Whether it has ended before its run was examined."""
        return self.code is not None and not self.was_aborted

    @property
    def ended_well(self) -> bool:
        """Whether it reported that it was done, or exited with 0; what it did after that does not matter."""
        return bool(self.done_line) or (not self.error_line and self.code == 0)

    @property
    def last_text(self) -> str:
        """How it ended, as a text: its error with the traceback, or the end of its log."""
        error = self.error_line
        return f"{error.get('traceback', '')}\n{error.get('message', '')}" if error else self.tail

    @property
    def log_record(self) -> LogRecord:
        """What its log shows about failures; if its node has not read it, what the end of the log shows."""
        return self.log or record_of(self.tail)

    @property
    def gap_kind(self) -> str:
        """The key of `gaps_s` under which its time without progress counts now."""
        return "optimizer" if self.part == "optimizer" else "steady"

    def record_observed(self, line: dict[str, Any]) -> None:
        """Records what its log shows beside steps; some programs reset their peaks, so the largest one counts."""
        for memory_key in line.keys() & {"allocated_bytes", "reserved_bytes"}:
            self.memory_report[memory_key] = max(line[memory_key], self.memory_report.get(memory_key, 0))
        if (number := round(line.get("params", 0))) >= MIN_PARAMS and number not in self.printed_params:
            self.printed_params = [*self.printed_params, number][:MAX_KEPT_PARAMS]
        self.flops_per_token = line.get("flops_per_token", self.flops_per_token)
        self.resident_bytes = line.get("resident_bytes", self.resident_bytes)
        if "mfu" in line and len(self.mfus) < MAX_KEPT_STEPS:
            self.mfus.append(line["mfu"])
        if "loss" in line and len(self.losses) < MAX_KEPT_STEPS:
            self.losses.append({key: line[key] for key in ("loss", "step") if key in line})
        if "late_loss" in line and self.steps:
            self.steps[-1].setdefault("loss", line["late_loss"])
        self.misread_text = self.misread_text or line.get("misread")
        self.launch_problem = self.launch_problem or line.get("launch_problem")
        self.num_unread += line.get("unread", 0)
        self.num_untimed = line.get("untimed", self.num_untimed)
        self.num_repeats = line.get("repeats", self.num_repeats)
        self.lines_per_step = line.get("lines_per_step", self.lines_per_step)
        self.uncounted_stride = line.get("uncounted_stride", self.uncounted_stride)
        self.are_of_one_step = line.get("are_of_one_step", self.are_of_one_step)
        self.num_parts = line.get("parts", self.num_parts)

    @property
    def reserved_bytes(self) -> int | None:
        """Its peak of reserved bytes as it reported it, else its largest resident set."""
        reported_bytes: int | None = self.memory_report.get("reserved_bytes")
        return self.resident_bytes if reported_bytes is None else reported_bytes

    @property
    def num_steps(self) -> int:
        """Number of the steps that it has done; a line of a log may be for several."""
        return sum(step.get("count", 1) for step in self.steps)

    def measured_steps(self, measure: Measure) -> list[dict[str, Any]]:
        """The report lines of the measured steps, of whole ones alone if there are any."""
        steps = self._all_measured_steps(measure)
        return [step for step in steps if "whole_gas" not in step] or steps

    def _all_measured_steps(self, measure: Measure) -> list[dict[str, Any]]:
        """The report lines of the measured steps; where a program does not mark them, all after warm-up."""
        marked = [s for s in self.steps if "measured" in s]
        if marked:
            return [s for s in marked if s["measured"]]
        num_steps_until = accumulate(step.get("count", 1) for step in self.steps)
        first_steps = (
            end - step.get("count", 1) for end, step in zip(num_steps_until, self.steps, strict=True)
        )
        is_measured = (first >= measure.warmup_steps for first in first_steps)
        return [*compress(self.steps, is_measured)]

    def measured_step_times_s(self, measure: Measure) -> list[float]:
        """Seconds of the measured steps; those of the whole step by each turn where parts of steps are measured."""
        steps = self.measured_steps(measure)
        if any("whole_gas" in step for step in steps[:1]):
            parts = self.part_times(measure)
            return parts.whole_step_times_s if parts else []
        return self.measured_seconds(measure)

    def measured_seconds(self, measure: Measure) -> list[float]:
        """Seconds of the measured steps as they ran, also where they are parts of a step."""
        return [s["seconds"] for s in self.measured_steps(measure) if "seconds" in s]

    def part_times(self, measure: Measure) -> PartTimes | None:
        """The measured parts of steps; None where there are none, and before the first turn."""
        steps = [s for s in self._all_measured_steps(measure) if s.keys() >= _PART_FIELDS]
        if not steps:
            return None
        parts = ((step["turn"], step["gas"], step["seconds"]) for step in steps)
        return part_times(parts, steps[0]["whole_gas"], measure.min_steps)


class MeasuredPhase:
    """Whether the ranks of a node are in measured steps, by the same rule as `RankProgress.measured_step_times_s`."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps, self._num_steps_by_rank = warmup_steps, Counter[int]()
        self.is_measuring = False
        """Whether the latest step is a measured one, so that warm-up is over; no part of a step after whole ones."""
        self._has_whole_steps = False

    @property
    def has_steps(self) -> bool:
        """Whether some rank has reported a step."""
        return bool(self._num_steps_by_rank)

    def observe(self, step_events: Sequence[RankEvent]) -> None:
        """Takes the steps that ranks have reported, the latest last."""
        for event in step_events:
            self._num_steps_by_rank[event["rank"]] += event["line"].get("count", 1)
        if step_events:
            is_warm = max(self._num_steps_by_rank.values()) > self._warmup_steps
            line = step_events[-1]["line"]
            is_part, is_measured = "whole_gas" in line, line.get("measured", is_warm)
            self._has_whole_steps |= is_measured and not is_part
            self.is_measuring = is_measured and not (is_part and self._has_whole_steps)


def reporting_rank(ranks: Sequence[RankProgress]) -> RankProgress:
    """The rank whose steps count: rank 0 if it reports its steps, else the lowest rank whose log has them all.

    Where several ranks log steps, the last step of some may not have arrived yet, and only some may know the loss.
    """
    logging_ranks = [rank for rank in ranks if rank.steps and "measured_by" in rank.steps[0]]
    if not logging_ranks or (ranks[0].steps and ranks[0] not in logging_ranks):
        return ranks[0]
    most_lines = max(len(rank.steps) for rank in logging_ranks)
    complete_ranks = [rank for rank in logging_ranks if len(rank.steps) >= most_lines - 1]
    with_loss = (rank for rank in complete_ranks if math.isfinite(rank.steps[-1].get("loss", math.nan)))
    return next(with_loss, complete_ranks[0])


class AttemptProgress:
    """The progress of all ranks of one attempt, from the events that their nodes send.

    The leader's time is the number of seconds for which it has run, so that no deadline counts a time in which it was
    stopped.
    """

    def __init__(
        self,
        num_ranks: int,
        hosts: Sequence[str],
        now_s: float = 0.0,
        address_book: AddressBook | None = None,
        *,
        starts_ranks: bool = False,
    ) -> None:
        """Each of the `hosts`, in their order, has an equal share of the ranks.

        Args:
            now_s: the leader's time.
            starts_ranks: whether one command starts all ranks of a host, so that they have one exit code and one log.
        """
        self.hosts = hosts
        self.address_book = address_book or AddressBook(hosts)
        rank_hosts = (hosts[n * len(hosts) // num_ranks] for n in range(num_ranks))
        self.ranks = [
            RankProgress(number=n, host=host, last_progress_s=now_s) for n, host in enumerate(rank_hosts)
        ]
        for rank in self.ranks if starts_ranks else ():
            starter = self.ranks[rank.number - rank.number % (num_ranks // len(hosts))]
            rank.starter = None if rank is starter else starter
        self.environment: dict[str, Any] = {}
        self.store_port: int | None = None
        """The port of rank 0's store; None again after it was sent to the other ranks."""
        self.probe_rates: dict[str, Any] = {}
        """Rates of devices and links, from a preflight or from a run that only measures them."""
        self.started_s = now_s
        """When the ranks were started, by the leader's time."""
        self.started_at = time.time()
        self.monotonic_start_s = time.monotonic()
        """When the ranks were started, by a clock that also counts the time for which the leader was stopped."""
        self.first_step_s: float | None = None
        """When the first step was reported, by the leader's time."""
        self.has_reported = False
        """Whether some rank has reported something; until then the only deadline is the time limit."""
        self.fault: str | None = None
        """Which rank reported something invalid, and what; the run is then invalid."""

    def add(self, events: list[RankEvent], now_s: float = 0.0) -> None:
        """Records the events of a node's ranks; `now_s` is the leader's time."""
        for event in events:
            try:
                self._record_event(event, now_s)
                fault = event.get("line", {}).get("fault")
            except Exception as error:  # an invalid event fails this run only, not the allocation
                fault = f"invalid data: {type(error).__name__}: {error}"
            if fault:
                self.fault = self.fault or f"rank {event['rank']} reported {fault}"

    def _record_event(self, event: RankEvent, now_s: float) -> None:
        rank = self.ranks[event["rank"]]
        if "evidence" in event:
            rank.evidence = event["evidence"]
            return
        if "stack" in event:
            rank.evidence = {**rank.evidence, "stack": event["stack"], "aborted": True}
            return
        if "log" in event:
            rank.log = from_dict(LogRecord, event["log"])
            rank.tail = rank.log.tail
            return
        if event.get("line", {}).get("event") == OBSERVED_EVENT:
            rank.record_observed(event["line"])
            return
        if rank.steps or "code" not in event:  # the whole life of a rank that reports nothing is no gap
            gaps_s = rank.gaps_s if rank.steps else rank.first_gaps_s
            gaps_s[rank.gap_kind] = max(gaps_s.get(rank.gap_kind, 0.0), now_s - rank.last_progress_s)
        rank.last_progress_s = now_s
        if "code" in event:
            for started_rank in (rank, *(r for r in self.ranks if r.starter is rank)):
                started_rank.code = event["code"]
            if "tail" in event:
                rank.tail, rank.log = event["tail"], record_of(event["tail"])
            rank.oom_killed = event.get("oom_killed", False)
            rank.full_folder_text = None if rank.killed_by_us else event.get("disk_full")
        elif "microbatches" in event:
            rank.microbatches, rank.step, rank.part = event["microbatches"], event["step"], event["part"]
        else:
            self._record_line(rank, event["line"], now_s)
        self.has_reported = self.has_reported or "code" not in event
        if rank.code or rank.error_line:
            rank.failed_at_s = rank.failed_at_s or now_s

    def _record_line(self, rank: RankProgress, line: dict[str, Any], now_s: float) -> None:
        event_name = line.get("event")
        if event_name == "phase":
            rank.phase, rank.phase_began_s, rank.phase_since_s = line.get("name", ""), line.get("time"), now_s
            if not rank.steps:
                rank.first_gaps_s = {}
        elif event_name == "step":
            self.first_step_s = self.first_step_s or now_s
            if len(rank.steps) < MAX_KEPT_STEPS:
                rank.steps.append(line)
        elif event_name == "memory":
            rank.memory_report |= line
        elif event_name == "ran":
            rank.options_read_back = line.get("options", {})
        elif event_name == "done":
            rank.done_line = line
        elif event_name == "digest":
            rank.digest = {name: value for name, value in line.items() if name != "event"}
        elif event_name == "checkpoint":
            rank.checkpoint_line = line
        elif event_name == "error":
            rank.error_line = rank.error_line or line
        elif event_name == "store":
            self.store_port = line.get("port")
        elif event_name == "environment":
            self.environment = line
        elif event_name == "probe":
            self.probe_rates = {name: value for name, value in line.items() if name not in ("event", "time")}

    @property
    def positions(self) -> list[tuple[object, ...]]:
        """How far each rank has come; if the list has changed, a rank has made progress."""
        return [(r.phase, len(r.steps), r.step, r.part, r.microbatches, r.code) for r in self.ranks]

    @property
    def longest_gap_s(self) -> float:
        """Longest time without progress of any single rank, in seconds, of the kinds that count now.

        The time in which all ranks together make no progress would be far too short to compare with.
        While a rank is in the optimizer both kinds count, since its GPU may still finish micro-batches. The
        first step of a rank counts only until its second step is complete.
        """
        gap_kinds = {"steady", *(rank.gap_kind for rank in self.running_ranks)}
        rank_gaps_s = [rank.gaps_s for rank in self.ranks]
        rank_gaps_s += [rank.first_gaps_s for rank in self.ranks if len(rank.steps) < 2]
        return max(gaps_s.get(kind, 0.0) for gaps_s in rank_gaps_s for kind in gap_kinds)

    @property
    def reporter(self) -> RankProgress:
        """The rank whose steps count, as `reporting_rank` says."""
        return reporting_rank(self.ranks)

    @property
    def running_ranks(self) -> list[RankProgress]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.code is None]

    @property
    def has_unread_logs(self) -> bool:
        """Whether the logs of ranks that failed are still being read."""
        return any(rank.code and rank.log is None and not rank.starter for rank in self.ranks)

    @property
    def launch_problem(self) -> str | None:
        """Why the command of some node trains other ranks than the layout has; None if none does."""
        return next((rank.launch_problem for rank in self.ranks if rank.launch_problem), None)

    @property
    def has_failed(self) -> bool:
        """Whether a rank reported an error or invalid values, ended with an exit code other than 0,
        or was started wrongly.
        """
        has_fault = self.fault is not None or self.launch_problem is not None
        return has_fault or any(rank.error_line or rank.code for rank in self.ranks)
