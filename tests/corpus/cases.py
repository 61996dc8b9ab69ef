"""The faults that are made for real, and what each has to be called."""

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One rank of `ranks` fails."""

    how: str
    fault: str
    status: str
    cause: str | None
    rank: int | None = 1
    """Whom the reason has to name; None: whichever."""
    ranks: int = 2
    signal: int = 0
    """Sent from outside to the last rank."""


def _in_step(fault: str, status: str, cause: str | None, how: str = "", **more: int | None) -> Case:
    return Case(how=how or f"rank 1 of a gloo program: {fault} in step 3", fault=fault, status=status,
                cause=cause, **more)  # type: ignore[arg-type]  # fmt: skip


CASES = {
    "exception": _in_step("exception", "crash", "exception", ranks=4),
    "key_error": _in_step("key_error", "crash", "exception"),
    "assertion": _in_step("assertion", "crash", "assertion"),
    "c_assertion": _in_step("c_assertion", "crash", "assertion"),
    "cpu_oom": _in_step("cpu_oom", "oom", "cpu_oom", ranks=4),
    "memory_error": _in_step("memory_error", "oom", "cpu_oom"),
    "bad_alloc": _in_step("bad_alloc", "oom", "cpu_oom"),
    "sigkill": _in_step("sigkill", "crash", "killed"),
    "sigkill_of_4": _in_step("sigkill", "crash", "killed", ranks=4),
    "sigterm": _in_step("sigterm", "crash", "killed"),
    "sigfpe": _in_step("sigfpe", "crash", "signal"),
    "segfault": _in_step("segfault", "crash", "segfault", ranks=4),
    "abort": _in_step("abort", "crash", "abort"),
    "bus_error": _in_step("bus_error", "crash", "bus_error"),
    "import_error": _in_step("import_error", "crash", "import_error"),
    "missing_library": _in_step("missing_library", "crash", "missing_library"),
    "undefined_symbol": _in_step("undefined_symbol", "crash", "missing_library"),
    "host_oom": _in_step("host_oom", "oom", "host_oom", "rank 1 takes 4 GiB in a memory cgroup of 1.5 GiB (by hand)"),
    "disk_full": _in_step("disk_full", "crash", "disk_full", "rank 1 writes to /dev/full"),
    "exit_early": _in_step("exit_early", "crash", "exited_early", ranks=4),
    "exit_3": _in_step("exit_3", "crash", "exit_code"),
    "refused": _in_step("refused", "comm_error", "connection_error", "rank 1 connects to a closed port",
                        rank=None),
    "late": _in_step("late", "comm_error", "gloo_error", "rank 1 sleeps longer than gloo waits", rank=None),
    "nan": _in_step("nan", "invalid", "non_finite_loss", "a loss that is no number", rank=None),
    "fine_after_errors": _in_step("caught_then_fine", "ok", None, "errors caught, logged and survived"),
    "killed_after_errors": _in_step("caught_then_killed", "crash", "killed",
                                    "errors caught and survived, then SIGKILL"),
    "exception_while_peers_sleep": _in_step("peers_sleep_exception", "crash", "exception"),
    "early_while_peers_sleep": _in_step("peers_sleep_exit_early", "crash", "exited_early",
                                        "rank 1 exits with 0 while its peers wait beyond the deadline"),
    "embedded_oom": Case("the embedded kernel with too low a limit of memory", "embedded_oom", "oom",
                         "cpu_oom", rank=None),
    "embedded_sigkill": Case("SIGKILL from outside to a rank of the embedded kernel", "embedded", "crash",
                             "killed", ranks=4, rank=3, signal=signal.SIGKILL),
    "embedded_segfault": Case("SIGSEGV from outside to a rank of the embedded kernel", "embedded", "crash",
                              "segfault", ranks=4, rank=3, signal=signal.SIGSEGV),
    "embedded_sigterm": Case("SIGTERM from outside to a rank of the embedded kernel", "embedded", "crash",
                             "killed", rank=1, signal=signal.SIGTERM),
    "embedded_abort": Case("SIGABRT from outside to a rank of the embedded kernel", "embedded", "crash",
                           "abort", rank=1, signal=signal.SIGABRT),
}  # fmt: skip
