"""The result of an attempt: how it ended, and what was measured."""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeGuard

from ultrabench.column import (
    BYTES,
    FRACTION,
    HERTZ,
    LOST_STEPS,
    PEAK_FRACTION,
    SECONDS,
    WATTS,
    Better,
    Report,
    Source,
    column,
    columns_of,
)
from ultrabench.partial_step import Departure, screening_text
from ultrabench.step_time import ci95_rel, with_error


class Status(StrEnum):
    """How an attempt ended; `rejected` and `skipped` are for candidates that were never attempted."""

    OK = "ok"
    OOM = "oom"
    HANG = "hang"
    TIMEOUT = "timeout"
    COMM_ERROR = "comm_error"
    CRASH = "crash"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    LOST = "lost"
    INVALID = "invalid"
    SKIPPED = "skipped"
    REJECTED = "rejected"


class StatusTraits(NamedTuple):
    """What follows from a status, everywhere."""

    words: str
    """The status in words, for figures."""
    colour: str
    hatch: str
    """Hatch of its bars, so that they differ without colours, too."""
    decided_by: str
    """What may have caused it: run (the program and its layout), network, cluster, user, or plan (it never ran)."""
    answer: bool = False
    """Whether it needs no repair; a sweep whose runs have only such statuses exits with code 0."""
    pause: bool = False
    """Whether a pause before the next attempt may help."""
    passed_over: bool = False
    """Whether the breaker passes it over, since it does not mean that the cluster or the program is broken."""


STATUSES = {
    Status.OK: StatusTraits("ok", "#029e73", "", "run", answer=True),
    Status.OOM: StatusTraits("out of memory", "#de8f05", "xxx", "run", answer=True, passed_over=True),
    Status.CRASH: StatusTraits("crash", "#d55e00", "\\\\\\", "run", pause=True),
    Status.HANG: StatusTraits("hang", "#cc78bc", "...", "run", pause=True),
    Status.TIMEOUT: StatusTraits("time-out", "#fbafe4", "ooo", "run", passed_over=True),
    Status.COMM_ERROR: StatusTraits("communication error", "#ca9161", "+++", "network", pause=True),
    Status.NODE_FAIL: StatusTraits("node failure", "#ece133", "***", "cluster", pause=True),
    Status.INVALID: StatusTraits("invalid result", "#0173b2", "---", "run", pause=True),
    Status.LOST: StatusTraits("lost", "#56b4e9", "|||", "cluster"),
    Status.PREEMPTED: StatusTraits("preempted", "#949494", "x", "cluster", passed_over=True),
    Status.CANCELLED: StatusTraits("cancelled", "#5f5f5f", "//", "user", passed_over=True),
    Status.SKIPPED: StatusTraits("skipped", "#e4e4e4", "..", "plan", answer=True),
    Status.REJECTED: StatusTraits("rejected", "#f4f4f4", "", "plan", answer=True),
}  # fmt: skip
"""The only list of what follows from each status, in the order in which figures stack them."""

ANSWERS = frozenset(status for status, traits in STATUSES.items() if traits.answer)
"""Statuses that need no repair."""
FAILURES = frozenset(s for s, traits in STATUSES.items() if s != Status.OK and traits.decided_by != "plan")
"""The statuses of attempts that failed, which can be tried again."""
FAULTS = frozenset(s for s in FAILURES if STATUSES[s].decided_by == "run")
"""Failures that the training program or its layout may have caused."""
OUTER_FAILURES = frozenset(s for s in FAILURES if STATUSES[s].decided_by in ("cluster", "user"))
"""Failures that are not the run's fault. Those of one launch are counted together."""
INTERRUPTED = OUTER_FAILURES & frozenset(s for s, traits in STATUSES.items() if traits.passed_over)
"""Statuses of attempts that the cluster or the user ended; the next launch tries their runs again."""
PENDING, RUNNING = "pending", "running"
UNSETTLED = (PENDING, RUNNING)
"""Texts in place of the status of a run that has no result yet."""
NOT_TRIED = (None, Status.SKIPPED, Status.REJECTED)
"""Statuses of runs that were not measured, in the order of `tier`: None (the run waits), skipped, rejected."""


def state(status: str | None, attempt: int | None) -> str:
    """The status of a row of results, or pending or running where it has none."""
    return status or (PENDING if attempt is None else RUNNING)


def tier(status: str | None) -> int:
    """Place of a status in a ranking: 0 ok, 1 failed or out of memory, 2 waiting or running, 3 skipped, 4 rejected."""
    if status in UNSETTLED or status in NOT_TRIED:
        return 2 + NOT_TRIED.index(None if status in UNSETTLED else status)
    return 0 if status == Status.OK else 1


def outcome_order(status: str | None) -> tuple[int, bool]:
    """Sort key of a repeat; the status of the run is that of the repeat with the largest key: ok,
    else oom, else another.

    Of repeats with equal keys the latest counts.
    """
    return -tier(status), status == Status.OOM


STOPPED = "stopped"
"""Cause of a cancelled run whose agents were told to end."""

DISK_SLOW = "disk_slow"
"""Cause of a checkpoint that was given up after its limit; the run is ok."""

UNMEASURED = "unmeasured"
"""Cause of an invalid run whose program ended well without a step that counts."""

EXITED_EARLY = "exited_early"
"""Cause of a crash in which a rank ended with exit code 0 before it was done."""

NODE_FAILURE = "node_failure"
"""Cause of a failure that the node itself, or Slurm, reports."""

NOT_STARTED = "not_started"
"""Cause of an attempt whose job started no agent: lost while it is open why, a crash where its variant is at fault."""

AGENT_GONE = "agent_gone"
"""Cause of a node_fail or a lost run that only the end of an agent shows, which the run itself may have caused."""

CAUSES = (
    "ecc_error", "xid", "gpu_unavailable", "foreign_memory", "cuda_oom", "host_oom", "cpu_oom", "non_finite_loss",
    "disk_full", "missing_library", "import_error", "illegal_memory_access", "assertion", "nccl_usage", "port_taken",
    "bus_error",
    "segfault", "killed", "signal", "abort", "exception", "exit_code", EXITED_EARLY, "nccl_timeout", "nccl_error",
    "gloo_error", "connection_error", "hang", "time_limit", STOPPED, NODE_FAILURE, AGENT_GONE, "preempted", UNMEASURED,
    "wrong_gpu", "replicas_differ", "option_ignored", "bad_report", DISK_SLOW, "disk_error", "download_failed",
    "compile_cache", "stale_file", "no_interface", NOT_STARTED,
)  # fmt: skip
"""All values of `RunResult.cause` and `checkpoint_cause`; docs/reference/rules.md explains each of them."""


LOCATED_STATUSES = frozenset({Status.CRASH, Status.HANG, Status.COMM_ERROR, Status.NODE_FAIL, Status.OOM})
"""Statuses of failures that a node may have caused; what a program computes or how long it takes is no node's fault."""

_CIRCUMSTANTIAL_CAUSES = frozenset({AGENT_GONE, "gpu_unavailable"})
"""Causes of a node_fail that do not prove a fault of the node: the run itself may have ended its agent
or hidden its GPUs."""


def proves_node_fault(status: str, cause: str | None) -> bool:
    """Whether a failure with this status and cause proves a fault of its node,
    whatever other ranks and other nodes do.
    """
    return status == Status.NODE_FAIL and cause not in _CIRCUMSTANTIAL_CAUSES


TRANSIENT_CAUSES = frozenset({"port_taken", "compile_cache", "stale_file"})
"""Causes that pass by themselves, so that they say nothing about a node, and the run is tried once more."""


LATEST_DATE_S = 9223372036.0
"""The latest date that tables of results hold, in April 2262, in seconds since 1970."""
DATES_TEXT = "the years 1970 to 2262"


def is_date(seconds: float | None) -> TypeGuard[float]:
    """Whether a number of seconds since 1970 is a date that tables of results hold; a damaged one may be any number."""
    return seconds is not None and 0 <= seconds <= LATEST_DATE_S


class Doubt(NamedTuple):
    """Why the number of an ok run is in doubt: a code for programs, and a sentence for people."""

    code: str
    sentence: str


SIZE_DOUBT_CODES = frozenset({"other_batch", "other_architecture", "other_vocabulary"})
"""Codes of doubts about the sizes of a row only, not about what it measured."""


def doubt_text(doubts: Iterable[Doubt]) -> str | None:
    """All sentences as one text; None where there is no doubt."""
    return "; ".join(doubt.sentence for doubt in doubts) or None


SLOWER = "slower_than_best"
"""`RunResult.stopped` of a run that was stopped early, because the best run of its cell is faster."""


@dataclass(frozen=True, kw_only=True)  # no slots: msgspec sets defaults in them slowly
class RunResult:
    """The facts of one attempt; what follows from them, such as mfu, is computed by `ultrabench collect`."""

    status: Status = column("How the attempt ended; see docs/reference/rules.md.", default=MISSING)
    reason: str | None = column("One line of evidence for every status except ok.")
    cause: str | None = column("What failed, in more detail than the status: cuda_oom, segfault, ...")
    fingerprint: str | None = column("Hash of the failure, equal on all nodes and ranks.")
    """It is made without numbers, paths and ranks."""
    confirmed: bool | None = column(
        "For oom: whether the rank's memory record proves that the run, not another process, filled the "
        "memory."
    )
    """Memory was free at the start, and the allocator recorded the failed request."""
    suspect_hosts: tuple[str, ...] = column(
        "Hosts that this attempt alone makes suspects of the failure.", default=()
    )
    began_on: tuple[str, ...] = column(
        "Hosts on which the failure began, where a node can be at fault.", default=()
    )
    """Empty where that is unknown or where no node can be at fault."""
    measured_by: str | None = column(
        "Where step times come from: report (the program's report), log (times or rates in its log), "
        "arrival (of lines of its log)."
    )
    arrival_error_s: float = 0.0
    """How much the time of a step may be wrong because its line was seen later than written;
    0 unless arrival timed it."""
    log_doubts: dict[str, str] = field(default_factory=dict)
    """Code -> sentence of each doubt about how steps were read from a log."""
    source_mfu: float | None = column(
        "MFU that the program printed (kernel.mfu_line) or its publisher computed.",
        unit=PEAK_FRACTION,
        better=Better.HIGHER,
        follows_step_time=True,
    )
    """The median of what its log shows in the measured steps."""
    source_num_params: int | None = column(
        "Number of parameters that the program printed; see kernel.params."
    )
    """If the program prints several numbers, the one that is nearest to the number of parameters of the model."""
    source_flops_per_token: float | None = None
    """FLOPs of a token that the program prints."""
    stopped: str | None = column(
        "Why measuring ended: interval (narrow enough), max_steps, program (it ended), slower_than_best, "
        "time_limit."
    )
    ci_reached: bool | None = column("Whether the interval of the step time met its target.")
    step_times_s: tuple[float, ...] = ()
    """Seconds of each measured step in order, without warm-up."""
    measured_gas: str | None = column(
        "Micro-batches of the measured steps, such as 4,8, if the time of a whole step follows from them; "
        "null: whole steps were measured."
    )
    screened: bool | None = column(
        "Whether the number only chose which runs to measure again, by parts of steps or by few whole steps: "
        "such a row is not the best of its cell. null: it was measured in full."
    )
    extrapolation_error_rel: float | None = column(
        "How much the time of a whole step may differ from the straight line through the measured parts, "
        "relative to it; step_time_ci95_rel of a run without whole steps holds it. null: no parts.",
        unit=FRACTION,
    )
    parts_step_time_s: float | None = column(
        "Time of a whole step by the parts that were measured after whole steps in the same start.",
        unit=SECONDS,
        better=Better.LOWER,
    )
    parts_ci95_rel: float | None = column(
        "Half the 95 % interval of the time of a whole step by the turns of parts, as a fraction of it, without "
        "extrapolation_error_rel. null: no parts.",
        unit=FRACTION,
        better=Better.LOWER,
    )
    departure: float | None = None
    """How much more time a further micro-batch takes in larger parts, as a fraction, by a third size; None where no
    third size was measured, or in too few turns."""
    departure_error: float | None = None
    """The standard error of the departure."""
    part_times_s: dict[str, float] = field(default_factory=dict)
    """Micro-batches -> median seconds of the measured steps with as many."""
    rank_step_times_s: dict[str, float] = field(default_factory=dict)
    """Rank -> its median step time, for the fastest and the slowest rank; empty if only one rank reports."""
    loss_final: float | None = column(
        "Loss at step measure.loss_step, which all layouts of a cell reach; not the last loss.",
        better=Better.LOWER,
        short="loss",
    )
    loss_step: int | None = None
    """The step at which `loss_final` was taken."""
    ran: dict[str, str] = field(default_factory=dict)
    """Option -> its value in the first step of rank 0, read back from what trained; empty for other programs."""
    gradient_norm: float | None = column("Norm of the gradient of the first step.")
    """The norm before clipping."""
    hardware_flops_per_step: float | None = None
    """Floating-point operations of one step, all ranks together; None where they were not counted."""
    graphs: int | None = column(
        "Most graphs that torch.compile made on a rank; 0: layers ran eagerly.",
        report=Report("done", "graphs"),
    )
    attention: str | None = column("Attention kernel that ran: cudnn, flash, flash3 or math.")
    peak_mem_allocated_bytes: int | None = column(
        "Largest allocated memory of all ranks.",
        unit=BYTES,
        better=Better.LOWER,
        report=Report("memory", "allocated_bytes"),
    )
    peak_mem_reserved_bytes: int | None = column(
        "Largest reserved memory of all ranks; on CPUs the largest resident set.",
        unit=BYTES,
        better=Better.LOWER,
        short="memory",
    )
    peak_mem_reserved_rank0_bytes: int | None = column(
        "Reserved memory of rank 0, as other benchmarks publish it.", unit=BYTES, better=Better.LOWER
    )
    allocator_retries: int | None = column(
        "Times that a rank's allocator found its GPU full and freed unused memory, which is slow.",
        better=Better.LOWER,
        report=Report("memory", "allocator_retries"),
    )
    checkpoint_save_s: float | None = column(
        "Time that the slowest rank takes to save parameters and optimizer synchronously; null here and "
        "in the next six columns: see checkpoint_cause.",
        unit=SECONDS,
        better=Better.LOWER,
    )
    checkpoint_load_s: float | None = column(
        "Time to load the checkpoint, maybe from the page cache, which is faster than storage.",
        unit=SECONDS,
        better=Better.LOWER,
    )
    checkpoint_async_blocking_s: float | None = column(
        "Time by which an asynchronous save delays the next training step.", unit=SECONDS, better=Better.LOWER
    )
    checkpoint_async_s: float | None = column(
        "Total time of the asynchronous save.", unit=SECONDS, better=Better.LOWER
    )
    checkpoint_async_lost_steps: float | None = column(
        "Extra time of the steps during the asynchronous save, divided by step_time_s; excludes "
        "checkpoint_async_blocking_s.",
        unit=LOST_STEPS,
        better=Better.LOWER,
    )
    checkpoint_bytes: int | None = column("Bytes of the files of one save.", unit=BYTES, better=Better.LOWER)
    checkpoint_cause: str | None = column(
        "Why an ok run has no checkpoint numbers: disk_full, disk_slow or another cause."
    )
    """One of CAUSES."""
    checkpoint_reason: str | None = column("One line of evidence for checkpoint_cause.")
    init_time_s: float | None = column(
        "Time from the start of the ranks to the end of the first step.", unit=SECONDS, better=Better.LOWER
    )
    started_at: float | None = None
    """Start of the attempt in seconds since 1970, UTC."""
    duration_s: float | None = column(
        "Time from the start of the ranks until all have exited.",
        unit=SECONDS,
        better=Better.LOWER,
        short="duration",
    )
    sm_clock_hz: float | None = column(
        "Median SM clock during the measured steps.", unit=HERTZ, better=Better.HIGHER
    )
    """The median over all GPUs and all seconds of these steps."""
    throttled: str | None = None
    """What slowed a GPU's clock during the measured steps, except a power cap; None: nothing or unknown."""
    power_w_mean: float | None = column(
        "Mean power of a GPU during the measured steps.", unit=WATTS, better=Better.LOWER
    )
    foreign_load: float | None = column(
        "Largest fraction of a node's cores that other programs used during the steps.", unit=FRACTION
    )
    foreign_gpu_processes: str | None = column(
        "Other processes on the GPUs during the steps; null: none or unknown."
    )
    hostnames: tuple[str, ...] = column("Hosts in node order.", default=())
    gpu_name: str | None = column("Name of the accelerator, as its driver reports it.")
    torch_version: str | None = column("Version of torch.")
    cuda_version: str | None = column("Version of CUDA.")
    nccl_version: str | None = column("Version of NCCL.")
    driver_version: str | None = column("Version of the GPU driver.")
    omp_num_threads: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that rank 0 saw and that configure CUDA, NCCL and torch; values of secrets are redacted."""
    env_id: str | None = column(
        "Hash of the environment: env, program, GPU, torch, CUDA, NCCL, driver, variables."
    )
    kernel_digest: str | None = column("Hash of the program's sources.")
    probe: dict[str, Any] = field(default_factory=dict)
    """Rates of devices and links, for a run that measured these instead of training."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Facts from which status and cause follow: exit code or signal of each rank, last lines, phase."""

    @property
    def step_time_ci95_rel(self) -> float | None:
        """Half-width of the 95 % interval of the median step time, relative to the median; None if it is unknown.

        That of a run measured in parts is the interval of the straight line through them, with the error of that line.
        """
        if self.measured_gas is not None:
            return self.parts_interval_rel
        return ci95_rel(self.step_times_s, self.arrival_error_s)

    @property
    def line_departure(self) -> Departure | None:
        """The departure from a straight line that the run has measured; None if it has measured none."""
        if self.departure is None or self.departure_error is None:
            return None
        return Departure(value=self.departure, error=self.departure_error)

    @property
    def is_partial(self) -> bool:
        """Whether parts of steps were measured, and no whole step."""
        return self.measured_gas is not None

    @property
    def is_screened(self) -> bool:
        """Whether its number only chose whether the run was measured again, so that it is not the best of its cell."""
        return bool(self.screened)

    @property
    def measured_text(self) -> str:
        """What an ok start measured, such as `whole steps`."""
        in_full = "whole steps" if self.parts_step_time_s is None else "few whole steps, then parts"
        return self.screening_text or in_full

    @property
    def screening_text(self) -> str | None:
        """What an ok start measured that only screened its run; None where the run was measured in full."""
        return screening_text(self.measured_gas) if self.is_screened else None

    @property
    def parts_interval_rel(self) -> float | None:
        """Half the 95 % interval of the step time by parts, relative to it, with the error of the straight line."""
        return with_error(self.parts_ci95_rel, self.extrapolation_error_rel)

    @property
    def environment(self) -> tuple[object, ...]:
        """What distinguishes the environments of one sweep: all that is observed except the driver."""
        software = self.torch_version, self.cuda_version, self.nccl_version, self.kernel_digest
        return self.gpu_name, *software, tuple(sorted(self.variables.items()))


RESULT_COLUMNS = columns_of(RunResult, source=Source.RESULT)
"""Field of a result -> the column of results that shows it unchanged."""
