"""The causes of failures: the status of each, and what follows from it. `families.py` has the texts that show them."""

import re
from dataclasses import dataclass
from signal import SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGSEGV, SIGTERM, SIGUSR2

from ultrabench.result import Status, proves_node_fault

FIRST_TIER_OF_CONSEQUENCES = 3
"""The smallest tier of causes that the failure of another process, or of another rank, may have."""
_ENDED_STREAM = re.compile(r"EOFError\b")
"""An exception of a program whose input another process closed."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of failures."""

    name: str
    status: Status
    description: str
    """The cause in a few words, with which the reason of a result begins."""
    signals: tuple[int, ...] = ()
    """Signals that show the cause when ultrabench did not send them."""

    @property
    def tier(self) -> int:
        """Smaller for causes that come first, whichever rank failed first.

        Hardware is first, since its faults cause others. Then come failures of a rank itself, and then ends that
        something else may have caused: kills, exits without a word, ranks that left early, and communication last.
        """
        tier_by_name = {
            "foreign_memory": 1, "killed": FIRST_TIER_OF_CONSEQUENCES, "abort": FIRST_TIER_OF_CONSEQUENCES,
            "exit_code": 4, "exited_early": 5,
        }  # fmt: skip
        tier_by_status = {Status.NODE_FAIL: 0, Status.COMM_ERROR: 6}
        return tier_by_name.get(self.name, tier_by_status.get(self.status, 1))

    @property
    def proves_fault(self) -> bool:
        """Whether its text proves a fault of the node."""
        return proves_node_fault(self.status, self.name)

    @property
    def is_specific(self) -> bool:
        """Whether equal texts mean the same failure; False for failures that can happen to any rank of any run."""
        return self.status != Status.COMM_ERROR and self.name not in ("killed", "host_oom", "foreign_memory")


CAUSE_BY_NAME = {cause.name: cause for cause in (
    Cause("ecc_error", Status.NODE_FAIL, "uncorrectable GPU memory error"),
    Cause("xid", Status.NODE_FAIL, "a GPU failed"),
    Cause("gpu_unavailable", Status.NODE_FAIL, "a GPU cannot be used"),
    Cause("foreign_memory", Status.CRASH, "other processes used the GPU's memory"),
    Cause("cuda_oom", Status.OOM, "out of GPU memory"),
    Cause("host_oom", Status.OOM, "the host ran out of memory"),
    Cause("cpu_oom", Status.OOM, "out of memory"),
    Cause("non_finite_loss", Status.INVALID, "the loss is not finite"),
    Cause("replicas_differ", Status.INVALID, "replicas of the parameters differ"),
    Cause("option_ignored", Status.INVALID, "an option was ignored"),
    Cause("compile_cache", Status.CRASH, "processes disturbed each other in a compile cache"),
    Cause("disk_full", Status.CRASH, "a disk is full"),
    Cause("disk_error", Status.CRASH, "a disk cannot be used"),
    Cause("stale_file", Status.CRASH, "a network file system lost an open file"),
    Cause("download_failed", Status.CRASH, "a download failed"),
    Cause("missing_library", Status.CRASH, "a library is missing or incompatible"),
    Cause("import_error", Status.CRASH, "a module cannot be imported"),
    Cause("illegal_memory_access", Status.CRASH, "illegal memory access in a GPU kernel"),
    Cause("assertion", Status.CRASH, "an assertion failed"),
    Cause("no_interface", Status.CRASH, "NCCL found no network interface"),
    Cause("nccl_usage", Status.CRASH, "NCCL rejected a call"),
    Cause("bus_error", Status.CRASH, "bus error, often caused by a full /dev/shm", signals=(SIGBUS,)),
    Cause("segfault", Status.CRASH, "segmentation fault", signals=(SIGSEGV,)),
    Cause("killed", Status.CRASH, "killed from outside", signals=(SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGUSR2, SIGPIPE)),
    Cause("signal", Status.CRASH, "killed by a signal"),
    Cause("abort", Status.CRASH, "aborted", signals=(SIGABRT,)),
    Cause("exception", Status.CRASH, "exception"),
    Cause("port_taken", Status.CRASH, "its port was already in use"),
    Cause("exit_code", Status.CRASH, "ended with an error"),
    Cause("exited_early", Status.CRASH, "exited before it was done"),
    Cause("nccl_timeout", Status.COMM_ERROR, "NCCL timed out"),
    Cause("nccl_error", Status.COMM_ERROR, "NCCL failed"),
    Cause("gloo_error", Status.COMM_ERROR, "gloo failed"),
    Cause("connection_error", Status.COMM_ERROR, "a connection failed"),
)}  # fmt: skip
"""Name -> cause. Where ranks failed at the same time, the first one in this order counts."""


def tier_of(cause: Cause, line: str) -> int:
    """The tier of a failure with this cause, which this line shows."""
    is_exception = cause.name == "exception"
    return FIRST_TIER_OF_CONSEQUENCES if is_exception and _ENDED_STREAM.match(line) else cause.tier


def may_follow(cause: Cause, line: str) -> bool:
    """Whether the failure of another process, or of another rank, may have caused this one."""
    return tier_of(cause, line) >= FIRST_TIER_OF_CONSEQUENCES
