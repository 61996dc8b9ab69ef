"""The agent's side of the fork server: it requests ranks and receives their exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrabench.processes import thread_variables

KERNEL_MODULE = "ultrabench.kernel.worker"
"""The module that the fork server imports; the agent itself never imports torch."""
Cpus = tuple[int, ...]
"""Numbers of CPUs in ascending order."""


class ForkServer:
    """The fork server of this node; it is started again if it has died."""

    def __init__(self, log: Path, env: dict[str, str], module: str = "") -> None:
        """`module` is imported before ranks are forked; without it all ranks have to be programs."""
        self._log = log
        self._module = module
        self._env = {**env, **thread_variables(1)}
        self._process: subprocess.Popen[bytes] | None = None
        self._alive: set[int] = set()
        self._ready = False
        self.rank_pids: dict[int, int] = {}
        """Rank -> the process that was forked last for it."""

    @property
    def pid(self) -> int | None:
        """Pid of the server; None before the first start."""
        return self._process.pid if self._process else None

    def start(self) -> subprocess.Popen[bytes]:
        """The process of the server, which is started unless it runs."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-m", "ultrabench.agent.ranks.fork_server", self._module]
            pipe = subprocess.PIPE
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(command, env=self._env, stdin=pipe, stdout=pipe, stderr=log)
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            self._alive, self._ready = set(), False
        return self._process

    def fork(
        self, rank: int, env: dict[str, str], log: Path, cpus: Cpus | None = None, **program: Any
    ) -> None:
        """Requests one rank, bound to `cpus` if given; `exits` reports its end.

        Args:
            env: variables besides those of the server; for a program, all variables.
            program: `command` and `cwd` of the program that the rank executes, if it is one.
        """
        server = self.start().stdin
        assert server is not None
        self._alive.add(rank)
        request = {"rank": rank, "env": env, "log": str(log), "cpus": cpus, **program}
        with contextlib.suppress(BrokenPipeError):  # `exits` reports a dead server
            server.write(json.dumps(request).encode() + b"\n")
            server.flush()

    def exits(self) -> Iterator[tuple[int, int]]:
        """Each rank that has ended since the last call, and its exit code: negative for a signal."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        ended = self._process.poll() is not None
        # An answer is shorter than PIPE_BUF, so that it is in the pipe as a whole or not at all.
        for line in iter(self._process.stdout.readline, b""):
            answer: dict[str, Any] = json.loads(line)
            self._ready = self._ready or "ready" in answer
            if "forked" in answer:
                self.rank_pids[answer["forked"]] = answer["pid"]
            if "exited" in answer:
                self._alive.discard(answer["exited"])
                yield answer["exited"], answer["code"]
        if ended:
            # Linux kills the ranks when their server dies. A server that never became ready has forked
            # none, and its log tells why it died.
            code = -signal.SIGKILL if self._ready else self._process.returncode
            for rank in sorted(self._alive):
                yield rank, code
            self._alive.clear()

    def stop(self) -> None:
        """Kills the server; Linux then kills the ranks that it forked."""
        if self._process is not None:
            # Leaving the block closes the pipes, even one with a request that nobody has read.
            with contextlib.suppress(BrokenPipeError), self._process:
                self._process.kill()
