"""Runs forked processes that end together: the first failure or the time-out ends all of them."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ultrabench.processes import die_with_parent

KILL_WAIT_S = 0.5
"""Seconds in which the memory of a killed process is freed, so that its end is known."""
_fork_context = multiprocessing.get_context("fork")


class ChildError(RuntimeError):
    """A forked process failed or did not end in time; the message names it."""


def run_forked(functions: Mapping[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Runs each function in its own child process; returns the value of each function, by its name.

    Raises:
        ChildError: a function raised an exception, its process was killed, or it took longer than `timeout_s`.
    """
    num_threads = len(os.listdir("/proc/self/task"))
    # A lock that another thread holds during the fork would stay locked in the child forever.
    assert num_threads == 1, f"{num_threads} threads before a fork; OPENBLAS_NUM_THREADS=1?"
    deadline_s, value_by_name = time.monotonic() + timeout_s, dict.fromkeys(functions)
    name_by_pipe, children = dict[Any, str](), {}
    try:
        for name, function in functions.items():
            receive_pipe, send_pipe = _fork_context.Pipe(duplex=False)
            name_by_pipe[receive_pipe] = name
            children[name] = _fork_context.Process(target=_run_child, args=(function, send_pipe, os.getpid()))
            children[name].start()
            send_pipe.close()
        while name_by_pipe:
            ready_pipes = wait(name_by_pipe, deadline_s - time.monotonic())
            if not ready_pipes:
                raise ChildError(f"still running after {timeout_s:g} s: {', '.join(name_by_pipe.values())}")
            for pipe in ready_pipes:
                name = name_by_pipe.pop(pipe)
                error, value_by_name[name] = _receive_answer(pipe, children[name])
                if error is not None:
                    # The peers of a process that is killed fail at once, and may be heard before it has ended.
                    time.sleep(KILL_WAIT_S)
                    kills = ((n, _exit_text(c)) for n, c in children.items() if (c.exitcode or 0) < 0)
                    raise ChildError(": ".join(next(kills, (name, error))))
    finally:
        for child in children.values():
            child.kill()
            child.join()
    return value_by_name


def _run_child(function: Callable[[], Any], send_pipe: Connection, parent_pid: int) -> None:
    """Runs `function` in a child, and sends its error or its value."""
    die_with_parent(parent_pid)
    os.dup2(2, 1)  # only answers may go to stdout
    try:
        send_pipe.send((None, function()))
    except BaseException as error:
        send_pipe.send((traceback.format_exception_only(error)[-1].strip(), None))


def _receive_answer(pipe: Any, child: BaseProcess) -> tuple[str | None, Any]:
    """The error and the value that a child has sent; how the child ended if it sent nothing."""
    try:
        error, value = pipe.recv()
    except (EOFError, OSError):
        child.join()
        return _exit_text(child), None
    return error, value


def _exit_text(child: BaseProcess) -> str:
    """How a process ended: the name of the signal that killed it, or its exit code."""
    exit_code = child.exitcode or 0
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
