"""The agent's side of the fork server: ranks of the embedded kernel, forked warm."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ultrabench.processes import die_with_parent, thread_variables

KERNEL_MODULE = "ultrabench.kernel.worker"
"""Named, not imported: torch is loaded by the fork server, never by the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A rank is gone; a negative code is the signal that ended it."""

    rank: int
    code: int


class ForkServer:
    """One warm process of this node; restarted when it is found dead."""

    def __init__(self, log: Path, env: dict[str, str]) -> None:
        self._log = log
        self._env = {**env, **thread_variables(1)}
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._alive: set[int] = set()
        self.rank_pids: dict[int, int] = {}
        """Of the latest fork of each rank."""
        self.ready = False

    @property
    def pid(self) -> int | None:
        """Its process, None before the first start."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts it unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-P", "-m", "ultrabench.agent.fork_server", KERNEL_MODULE]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._pending, self._alive, self.ready = b"", set(), False

    def fork(self, rank: int, env: dict[str, str], log: Path, cpus: tuple[int, ...] | None = None) -> None:
        """Asks for one rank, bound to `cpus` if given; its exit comes through `exits`."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        request = {"rank": rank, "env": env, "log": str(log), "cpus": cpus}
        self._alive.add(rank)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def exits(self) -> Iterator[Exit]:
        """Ranks that have ended since the last call."""
        assert self._process is not None
        assert self._process.stdout is not None
        data = self._process.stdout.read() or b""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            answer: dict[str, Any] = json.loads(line)
            self.ready = self.ready or "ready" in answer
            if "forked" in answer:
                self.rank_pids[answer["forked"]] = answer["pid"]
            if "exited" in answer:
                self._alive.discard(answer["exited"])
                yield Exit(rank=answer["exited"], code=answer["code"])
        if self._process.poll() is not None:
            # Its ranks died with it (they ask the kernel for that when they start); without a word of it
            # there were none, and its log says why.
            code = -signal.SIGKILL if self.ready else self._process.returncode
            for rank in sorted(self._alive):
                yield Exit(rank=rank, code=code)
            self._alive.clear()

    def stop(self) -> None:
        """Ends it and everything it forked."""
        if self._process is not None:
            # Leaving it closes the pipes, also one that holds a request nobody has read.
            with contextlib.suppress(BrokenPipeError), self._process:
                self._process.kill()


@dataclass(slots=True)
class Programs:
    """Ranks that are the user's own program, started by exec."""

    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self,
        rank: int,
        command: list[str],
        env: dict[str, str],
        log: Path,
        cwd: str,
        cpus: tuple[int, ...] | None = None,
    ) -> Exit | None:
        """Starts one rank, bound to `cpus` if given; an Exit at once when it cannot be started."""
        with log.open("ab") as out:
            try:
                # A program of the user would not ask to die with the agent; the agent has one
                # thread, so preexec_fn is safe.
                self._running[rank] = subprocess.Popen(
                    command,
                    preexec_fn=partial(_before_exec, os.getpid(), cpus),
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    process_group=0,
                )
            except (OSError, subprocess.SubprocessError) as error:
                out.write(f"cannot start {command[0]}: {error}\n".encode())
                return Exit(rank=rank, code=127)
        return None

    @property
    def rank_pids(self) -> dict[int, int]:
        """Processes whose exit is waited for."""
        return {rank: process.pid for rank, process in self._running.items()}

    def exits(self) -> Iterator[Exit]:
        """Ranks that have ended since the last call."""
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[rank]
                yield Exit(rank=rank, code=code)


def _before_exec(agent: int, cpus: tuple[int, ...] | None) -> None:
    die_with_parent(agent)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
