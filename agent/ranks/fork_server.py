"""A process that has imported the kernel and forks the ranks of a node on request, so that they start fast.

Run as `python -P -m ultrabench.agent.ranks.fork_server MODULE`, it imports MODULE once, unless that is
empty. Then it reads requests from stdin, one JSON object a line ({rank, env, log, cpus}), and forks a process
for each that calls MODULE.main(), or executes a program of the user ({..., command, cwd}). Its answers on
stdout are {ready}, {forked: rank, pid} and {exited: rank, code}. It never runs a tensor operation nor uses
CUDA, since a forked child would inherit broken threads or contexts.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ultrabench.processes import die_with_parent

Main = Callable[[], int] | None
"""The function that a forked rank calls; None where no module was imported."""
EXIT_POLL_S = 0.02
"""Seconds between two looks for ranks that have ended."""


def serve(module: str) -> None:
    """Serves until stdin closes."""
    die_with_parent(os.getppid())
    main: Main = importlib.import_module(module).main if module else None
    # Imported objects are never freed, so that the garbage collector of a child passes over them.
    gc.collect()
    gc.freeze()
    ranks: dict[int, int] = {}
    answers = os.dup(1)
    os.dup2(2, 1)
    _answer(answers, ready=True)
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], EXIT_POLL_S if ranks else None)
        _report_exits(ranks, answers)
        if not readable:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            _assert_forkable()
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_rank(request, main, server, answers)
            ranks[pid] = request["rank"]
            _answer(answers, forked=request["rank"], pid=pid)


def _answer(fd: int, **values: object) -> None:
    os.write(fd, json.dumps(values).encode() + b"\n")


def _report_exits(ranks: dict[int, int], answers: int) -> None:
    """Reports which of the ranks (pid -> rank) have ended."""
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _answer(answers, exited=ranks.pop(pid), code=os.waitstatus_to_exitcode(status))


def _assert_forkable() -> None:
    """Fails unless this process has one thread and no CUDA context: no other process may be forked."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"the fork server has {len(threads)} threads"
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "the fork server initialised CUDA"


def _become_rank(request: dict[str, Any], main: Main, server: int, answers: int) -> None:
    """Turns the forked child into a rank; it never returns."""
    program = request.get("command")
    code = 127 if program else 70
    try:
        die_with_parent(server)
        os.setpgid(0, 0)
        os.close(answers)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["cpus"]:
            os.sched_setaffinity(0, request["cpus"])
        if program:
            # Python ignores these; a program may rely on them.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(request["cwd"])
            os.execvpe(program[0], program, request["env"])
        assert main is not None
        os.environ.update(request["env"])
        code = main()
    except BaseException as error:
        print(f"cannot start {program[0]}: {error}" if program else traceback.format_exc(), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
