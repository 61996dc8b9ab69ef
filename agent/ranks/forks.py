"""Starts the ranks of a node through its fork server, and learns how they end."""

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
"""The module is named, not imported: torch is loaded by the fork server, never by the agent."""
Cpus = tuple[int, ...]
"""Numbers of CPUs, ascending."""


class ForkServer:
    """The agent's side of the fork server of this node, which is started again when it is found dead."""

    def __init__(self, log: Path, env: dict[str, str], module: str = "") -> None:
        """`module` is imported before ranks are forked; without one they have to be programs."""
        self._log = log
        self._module = module
        self._env = {**env, **thread_variables(1)}
        self._process: subprocess.Popen[bytes] | None = None
        self._alive: set[int] = set()
        self._ready = False
        self.rank_pids: dict[int, int] = {}
        """The process of the latest fork of each rank."""

    @property
    def pid(self) -> int | None:
        """The server's process; None before the first start."""
        return self._process.pid if self._process else None

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the server unless it runs."""
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
        """Asks for one rank, bound to `cpus` if given; its exit comes through `exits`.

        Args:
            env: what the environment has more than the server's; all of it for a program.
            program: `command` and `cwd` of a program that the rank executes.
        """
        server = self.start().stdin
        assert server is not None
        self._alive.add(rank)
        request = {"rank": rank, "env": env, "log": str(log), "cpus": cpus, **program}
        with contextlib.suppress(BrokenPipeError):  # `exits` tells of a dead server
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
            # Ranks ask the kernel to kill them when their server dies. A server that never became ready
            # has forked none, and its log says why it died.
            code = -signal.SIGKILL if self._ready else self._process.returncode
            for rank in sorted(self._alive):
                yield rank, code
            self._alive.clear()

    def stop(self) -> None:
        """Ends the server and all ranks that it forked."""
        if self._process is not None:
            # Leaving the block closes the pipes, also one that holds a request which nobody has read.
            with contextlib.suppress(BrokenPipeError), self._process:
                self._process.kill()
