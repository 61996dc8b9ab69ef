"""How an attempt ended, and the facts that were measured."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The end of an attempt; `rejected` and `skipped` mark candidates that were never attempted."""

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


CAUSES = (
    "ecc_error", "xid", "gpu_unavailable", "foreign_memory", "cuda_oom", "host_oom", "cpu_oom", "non_finite_loss",
    "disk_full", "missing_library", "import_error", "illegal_memory_access", "assertion", "nccl_usage", "port_taken", "bus_error",
    "segfault", "killed", "signal", "abort", "exception", "exit_code", "exited_early", "nccl_timeout", "nccl_error",
    "gloo_error", "connection_error", "hang", "time_limit", "stopped", "node_failure", "preempted", "unmeasured",
    "wrong_gpu", "replicas_differ", "bad_report",
)  # fmt: skip
"""What `RunResult.cause` may be; docs/failures.md explains each."""

ANSWERS = frozenset({Status.OK, Status.OOM, Status.SKIPPED, Status.REJECTED})
"""Ends that leave nothing to mend: a sweep with only these exits 0."""

SLOWER = "slower_than_best"
"""`RunResult.stopped` of a run that was ended early, because the best run of its cell is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The facts of one attempt; what follows from them (mfu, rates) is computed when collected."""

    status: Status
    reason: str | None = None
    """One line of evidence for anything but ok."""
    cause: str | None = None
    """What failed, more exactly than the status: cuda_oom, host_oom, import_error, segfault, ..."""
    fingerprint: str | None = None
    """Equal for the same failure wherever it happens: a hash of it without numbers, paths and ranks."""
    confirmed: bool | None = None
    """Whether an oom is sure: memory was free when the run began, and the allocator recorded the failed request."""
    suspects: tuple[str, ...] = ()
    """Hosts that a failure points at."""
    measured_by: str | None = None
    """report: the program's own report file; log: read from its log by a pattern."""
    stopped: str | None = None
    """Why measuring ended: interval, max_steps, program, slower_than_best or time_limit."""
    ci_reached: bool | None = None
    step_times_s: tuple[float, ...] = ()
    """Seconds of each measured step in order, without warm-up."""
    rank_step_times_s: dict[str, float] = field(default_factory=dict)
    """Rank -> its median measured step, of the fastest and the slowest rank; empty if only one tells."""
    loss_final: float | None = None
    """Loss at the step that all layouts of a cell have in common."""
    loss_step: int | None = None
    """The step at which `loss_final` was taken."""
    hardware_flops_per_step: float | None = None
    """Operations executed, all ranks together; None where nobody counted."""
    peak_mem_allocated_bytes: int | None = None
    """Largest peak of allocated bytes of all ranks."""
    peak_mem_reserved_bytes: int | None = None
    """Largest peak of reserved bytes of all ranks; on CPUs of the resident set."""
    peak_mem_reserved_rank0_bytes: int | None = None
    init_time_s: float | None = None
    """Seconds from the start of the ranks to the end of the first step."""
    started_at: float | None = None
    """Start of the attempt in seconds since 1970, UTC."""
    duration_s: float | None = None
    """Seconds from the start of the ranks until all of them were gone."""
    sm_clock_hz: float | None = None
    """Median over the GPUs and the seconds in which steps were made; None where no driver tells."""
    throttled: str | None = None
    """What slowed the clocks of a GPU meanwhile, a power cap left out; None: nothing, or nobody tells."""
    hostnames: tuple[str, ...] = ()
    gpu_name: str | None = None
    torch_version: str | None = None
    cuda_version: str | None = None
    nccl_version: str | None = None
    driver_version: str | None = None
    omp_num_threads: int | None = None
    env_id: str | None = None
    kernel_digest: str | None = None
    probe: dict[str, Any] = field(default_factory=dict)
    """Rates of devices and links, of a run that measured these instead of training."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Exit codes and signals by rank, last lines, phase: what the classification rests on."""
