"""The agent's side of the fork server: requests ranks, binds them to cores and receives their exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
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


def rank_cpus(ranks: int, bus_ids: Sequence[str] | None, sysfs: Path = Path("/sys")) -> list[Cpus] | None:
    """The CPUs of each local rank; None if all usable CPUs are on one NUMA node.

    With GPUs a rank gets the CPUs of its GPU's NUMA node; without GPUs the ranks are spread over
    the NUMA nodes in order. Only CPUs that this process may use count, since Slurm may have limited them.
    A rank gets all of them if the NUMA node of its GPU is unknown or has none of them.

    Args:
        bus_ids: the PCI bus of the GPU of each local rank, as sysfs or NVML writes it; None without GPUs.
        sysfs: the folder in which Linux describes its devices.
    """
    everything = tuple(sorted(os.sched_getaffinity(0)))
    nodes = _numa_nodes(sysfs, everything)
    if len(nodes) < 2:
        return None
    if bus_ids is None:
        order = sorted(nodes)
        return [nodes[order[rank * len(order) // ranks]] for rank in range(ranks)]
    near = [nodes.get(_numa_node_of(sysfs, bus_id), everything) for bus_id in bus_ids[:ranks]]
    return near + [everything] * (ranks - len(near))


def cpu_text(cpus: Sequence[int]) -> str:
    """CPUs as a list in the form of Linux: `0-3,8` for (0, 1, 2, 3, 8)."""
    numbered = groupby(enumerate(sorted(set(cpus))), lambda pair: pair[1] - pair[0])
    runs = [[cpu for _, cpu in run] for _, run in numbered]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _numa_nodes(sysfs: Path, allowed: Cpus) -> dict[int, Cpus]:
    """NUMA node -> its allowed CPUs; nodes without any, such as those of memory alone, are left out."""
    nodes: dict[int, Cpus] = {}
    for cpu in allowed:
        for path in sysfs.glob(f"devices/system/cpu/cpu{cpu}/node[0-9]*"):
            node = int(path.name.removeprefix("node"))
            nodes[node] = (*nodes.get(node, ()), cpu)
    return nodes


def _numa_node_of(sysfs: Path, bus_id: str) -> int:
    """The NUMA node of a PCI device; -1 if Linux does not know it."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    try:  # sysfs writes 0000:1b:00.0 where NVML writes 00000000:1B:00.0
        return int((sysfs / f"bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return -1
