"""Runs forked processes that end together: the first failure or the time-out ends all of them."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from ultrabench.processes import die_with_parent

_POLL_S = 0.005


def run_forked(bodies: Mapping[str, Callable[[], None]], folder: Path, timeout_s: float) -> str | None:
    """Runs each body in its own child process; returns the first error, or None.

    A child that raises leaves its error message in `folder`.
    """
    running = {_fork(body, folder / f"{name}.failed"): name for name, body in bodies.items()}
    end, error = time.monotonic() + timeout_s, None
    while running and error is None:
        time.sleep(_POLL_S)
        for pid, name in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
            if done and status and error is None:
                error = f"{name}: {_last_words(folder / f'{name}.failed', status)}"
        if time.monotonic() > end and error is None:
            error = f"no end after {timeout_s:g} s: {', '.join(running.values())}"
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return error


def _fork(body: Callable[[], None], last_words: Path) -> int:
    """Forks a child that runs `body` and exits; returns its pid."""
    threads = len(os.listdir("/proc/self/task"))
    # A lock that another thread holds during the fork would stay locked in the child forever.
    assert threads == 1, f"{threads} threads before a fork; OPENBLAS_NUM_THREADS=1?"
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        os.dup2(2, 1)  # only answers may go to stdout
        body()
        code = 0
    except BaseException as error:
        last_words.write_text(traceback.format_exception_only(error)[-1].strip())
    finally:
        os._exit(code)


def _last_words(path: Path, status: int) -> str:
    if path.exists():
        return path.read_text()
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
