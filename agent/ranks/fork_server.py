"""A process that has imported the kernel and forks the ranks of a node on request, so that they start fast.

`ForkServer` is the agent's side of it: it requests ranks, binds them to CPUs and receives their exit codes. The
process itself runs `python -P -m ultrabench.agent.ranks.fork_server MODULE FD`. It imports MODULE once, unless
that is empty. Then it receives requests ({rank, env, log, cpus}) from the socket FD. For each it forks a process
that calls MODULE.main(), or executes a program of the user ({..., command, cwd}). Its answers are {ready},
{forked: rank, pid} and {exited: rank, code}. It never runs a tensor operation nor uses CUDA, since a forked child
would inherit broken threads or contexts.
"""

import contextlib
import gc
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from ultrabench.agent.disk_retry import log_line
from ultrabench.processes import (
    RunningClock,
    become_subreaper,
    command_line,
    descendants,
    die_with_parent,
    kill_until_gone,
    state_of,
    thread_variables,
)

KERNEL_MODULE = "ultrabench.kernel.worker"
"""The module that the fork server imports; the agent itself never imports torch."""
Cpus = tuple[int, ...]
"""Numbers of CPUs in ascending order."""
Main = Callable[[], int] | None
"""The function that a forked rank calls; None where no module was imported."""
FORK_LIMIT_S = 30.0
"""Seconds to wait until a server that is ready has forked a rank; one that needs more is replaced."""
STOPPED_STATES = ("T", "t")
"""States of /proc of a process that a signal or a debugger has stopped."""
RANK_OOM_SCORE = 500
"""By how much the OOM score of ranks is above that of the agent; 1000 stands for all memory."""
EXIT_POLL_S = 0.02
"""Seconds between two checks for ranks that have ended."""


class ForkServer:
    """The fork server of this node; it is started again if it has died."""

    def __init__(self, log_path: Path, env: dict[str, str], module_name: str = "") -> None:
        """`module_name` is imported before ranks are forked; without it all ranks have to be programs."""
        self._log_path, self._module_name = log_path, module_name
        self._env = {**env, **thread_variables(1)}
        self.rank_pids: dict[int, int] = {}
        """Rank -> pid of the process that was forked last for it."""
        self._start()

    def _start(self) -> None:
        self._requests: dict[int, dict[str, Any]] = {}
        """Rank -> its request, which the server has not answered."""
        self._clock, self._waiting_since_s = RunningClock(), 0.0
        self._killed_ranks = set[int]()
        """Ranks that died with a server that was replaced, and whose ends were not reported yet."""
        self._connection, server_connection = Pipe()
        fd = server_connection.fileno()
        argv = [sys.executable, "-P", "-m", "ultrabench.agent.ranks.fork_server", self._module_name, str(fd)]
        with self._log_path.open("ab") as log, server_connection:
            self._process = Popen(argv, env=self._env, stdin=DEVNULL, stdout=log, stderr=log, pass_fds=[fd])
        self._running_ranks, self._is_ready = set[int](), False
        """Ranks that were requested and have not ended, and whether the server can fork already."""
        self._executing_ranks = set[int]()
        """Ranks that are no copy of the server any more, but the program of the user."""

    @property
    def pid(self) -> int:
        """Pid of the server."""
        return self._process.pid

    def fork(self, rank: int, env: dict[str, str], log_path: Path, cpus: Cpus | None, **program: Any) -> None:
        """Requests one rank, bound to `cpus` if given; `new_exits` reports its end.

        Args:
            env: variables besides those of the server; for a program, all variables.
            program: `command` and `cwd` of the program that the rank executes, if it is one; and `guarded`, whether
                its children must not outlive the agent, as those of a command that starts the ranks of a node.
        """
        if self._process.poll() is not None:
            self._start()
        self._send_request({"rank": rank, "env": env, "log": str(log_path), "cpus": cpus, **program})

    def _send_request(self, request: dict[str, Any]) -> None:
        self._running_ranks.add(request["rank"])
        self._executing_ranks.discard(request["rank"])
        self._requests[request["rank"]], self._waiting_since_s = request, self._clock()
        with contextlib.suppress(OSError):  # `new_exits` reports a dead server
            self._connection.send(request)

    @property
    def program_pids(self) -> dict[int, int]:
        """Rank -> its pid, for the ranks that run and have begun to execute a program of the user."""
        for rank in self._running_ranks - self._requests.keys() - self._executing_ranks:
            if (words := command_line(self.rank_pids[rank])) and __name__ not in words:
                self._executing_ranks.add(rank)
        return {rank: self.rank_pids[rank] for rank in self._running_ranks & self._executing_ranks}

    def replace_if_stuck(self) -> None:
        """Replaces a server that is stopped, or does not fork in time; the ranks it has not forked are requested again.

        A program may have stopped its parent, the server. A server that is not ready yet imports its module; the
        start deadline of the run limits that time.
        """
        waited_s = self._clock() - self._waiting_since_s if self._requests else 0.0
        if not self._requests or not self._is_ready:
            return
        if state_of(self.pid) not in STOPPED_STATES and waited_s <= FORK_LIMIT_S:
            return
        # Where the server has forked some ranks, one of them may have stopped it; the deadlines of their run decide.
        if not descendants(self.pid):
            log_line(f"the fork server {self.pid} does not answer (state {state_of(self.pid)}); replacing it")
            self.replace()

    def replace(self) -> None:
        """Starts a new server in place of this one, and requests the ranks again that it has not forked."""
        requests = [*self._requests.values()]
        killed_ranks = self._running_ranks - self._requests.keys()
        self.stop()
        self._start()
        self._killed_ranks = killed_ranks
        for request in requests:
            self._send_request(request)

    def new_exits(self) -> Iterator[tuple[int, int]]:
        """Each rank that has ended since the last call, and its exit code: negative for a signal."""
        yield from ((rank, -signal.SIGKILL) for rank in sorted(self._killed_ranks))
        self._killed_ranks = set()
        server_has_ended = self._process.poll() is not None
        with contextlib.suppress(EOFError, OSError):  # the server has closed its end of the link
            while self._connection.poll():
                answer: dict[str, Any] = self._connection.recv()
                if "ready" in answer:  # the time to fork counts from here
                    self._is_ready, self._waiting_since_s = True, self._clock()
                if "forked" in answer:
                    self._requests.pop(answer["forked"], None)
                    self.rank_pids[answer["forked"]] = answer["pid"]
                if "exited" in answer:
                    self._running_ranks.discard(answer["exited"])
                    yield answer["exited"], answer["code"]
        if server_has_ended:
            # Linux kills the ranks when their server dies. A server that never became ready has forked
            # no rank, and its log shows why it died.
            exit_code = -signal.SIGKILL if self._is_ready else self._process.returncode
            yield from ((rank, exit_code) for rank in sorted(self._running_ranks))
            self._running_ranks.clear()

    def stop(self) -> None:
        """Kills the server; Linux then kills the ranks that it forked."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def rank_cpus(num_ranks: int, bus_ids: Sequence[str] | None, sysfs: Path = Path("/sys")) -> list[Cpus] | None:
    """The CPUs of each local rank; None if all usable CPUs are on one NUMA node.

    With GPUs a rank gets the CPUs of its GPU's NUMA node; without GPUs the ranks are spread over
    the NUMA nodes in order. Only CPUs that this process may use count, since Slurm may have limited them.
    A rank gets all of these if the NUMA node of its GPU is unknown or has none of them.

    Args:
        bus_ids: the PCI bus of the GPU of each local rank, as sysfs or NVML writes it; None without GPUs.
        sysfs: the folder in which Linux describes its devices.
    """
    all_cpus = tuple(sorted(os.sched_getaffinity(0)))
    cpus_by_node = cpus_by_numa_node(sysfs, all_cpus)
    if len(cpus_by_node) < 2:
        return None
    if bus_ids is None:
        numa_nodes = sorted(cpus_by_node)
        return [cpus_by_node[numa_nodes[rank * len(numa_nodes) // num_ranks]] for rank in range(num_ranks)]
    cpus_by_rank = [cpus_by_node.get(numa_node_of(sysfs, bus_id), all_cpus) for bus_id in bus_ids[:num_ranks]]
    return cpus_by_rank + [all_cpus] * (num_ranks - len(cpus_by_rank))


def cpu_text(cpus: Sequence[int]) -> str:
    """CPUs as a list in the form of Linux: `0-3,8` for (0, 1, 2, 3, 8)."""
    cpu_groups = groupby(enumerate(sorted(set(cpus))), lambda pair: pair[1] - pair[0])
    cpu_spans = [[cpu for _, cpu in pairs] for _, pairs in cpu_groups]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in cpu_spans)


def cpus_by_numa_node(sysfs: Path, allowed_cpus: Cpus) -> dict[int, Cpus]:
    """NUMA node -> its allowed CPUs; nodes without any, such as those that have only memory, are left out."""
    cpus_by_node: dict[int, Cpus] = {}
    for cpu in allowed_cpus:
        for node_link in sysfs.glob(f"devices/system/cpu/cpu{cpu}/node[0-9]*"):
            numa_node = int(node_link.name.removeprefix("node"))
            cpus_by_node[numa_node] = (*cpus_by_node.get(numa_node, ()), cpu)
    return cpus_by_node


def numa_node_of(sysfs: Path, bus_id: str) -> int:
    """The NUMA node of a PCI device; -1 if Linux does not know it."""
    domain, _, bus_in_domain = bus_id.strip().lower().partition(":")
    with contextlib.suppress(OSError, ValueError):
        # sysfs writes 0000:1b:00.0, NVML writes 00000000:1B:00.0 for the same device.
        return int((sysfs / f"bus/pci/devices/{int(domain, 16):04x}:{bus_in_domain}/numa_node").read_text())
    return -1


def serve(module_name: str, connection: Connection) -> None:
    """Forks a rank for each request.

    Raises:
        EOFError: the agent has closed the link.
    """
    die_with_parent(os.getppid())
    rank_main: Main = importlib.import_module(module_name).main if module_name else None
    # Imported objects are never freed; frozen, they are skipped by the garbage collectors of the children.
    gc.collect()
    gc.freeze()
    rank_by_pid: dict[int, int] = {}
    connection.send({"ready": True})
    while True:
        has_request = connection.poll(EXIT_POLL_S if rank_by_pid else None)
        _report_exits(rank_by_pid, connection)
        if has_request:
            request = connection.recv()
            _assert_forkable()
            server_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_rank(request, rank_main, server_pid, connection)
            rank_by_pid[pid] = request["rank"]
            connection.send({"forked": request["rank"], "pid": pid})


def _report_exits(rank_by_pid: dict[int, int], connection: Connection) -> None:
    """Reports which of the ranks (pid -> rank) have ended."""
    while rank_by_pid:
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection.send({"exited": rank_by_pid.pop(pid), "code": os.waitstatus_to_exitcode(wait_status)})


def _assert_forkable() -> None:
    """Fails unless this process has one thread and no CUDA context: no other process may be forked."""
    thread_ids = os.listdir("/proc/self/task")
    assert len(thread_ids) == 1, f"the fork server has {len(thread_ids)} threads"
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "the fork server initialised CUDA"


def _become_rank(request: dict[str, Any], rank_main: Main, server_pid: int, connection: Connection) -> None:
    """Turns the forked child into a rank; it never returns."""
    command = request.get("command")
    exit_code = 127 if command else 70
    try:
        if not request.get("guarded"):
            die_with_parent(server_pid)
        os.setpgid(0, 0)
        _prefer_for_oom_kill()
        connection.close()
        if request.get("guarded"):
            _guard_children(server_pid)
        log_fd = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        if request["cpus"]:
            os.sched_setaffinity(0, request["cpus"])
        if command:
            # Python ignores these signals; a program may rely on their default actions.
            for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signal_number, signal.SIG_DFL)
            os.chdir(request["cwd"])
            os.execvpe(command[0], command, request["env"])
        assert rank_main is not None
        os.environ.update(request["env"])
        exit_code = rank_main()
    except BaseException as error:
        print(f"cannot start {command[0]}: {error}" if command else traceback.format_exc(), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _guard_children(server_pid: int) -> None:
    """Forks: returns in a child, while this process waits for it, and kills all its descendants if the server dies.

    Linux kills only the children of a dead server. Those of torchrun are in sessions of their own, and would train on
    without an agent. This process ends like its child, and the agent then gets what is left of its descendants.
    """
    become_subreaper()
    guard_pid, child_pid = os.getpid(), os.fork()
    if child_pid == 0:
        die_with_parent(guard_pid)
        os.setpgid(0, 0)
        return

    def kill_descendants(*_: object) -> None:
        kill_until_gone(lambda: sorted(descendants(os.getpid())))
        os._exit(1)

    signal.signal(signal.SIGTERM, kill_descendants)
    die_with_parent(server_pid, signal.SIGTERM)
    ended_pid, wait_status = 0, 0
    while ended_pid != child_pid:  # others are orphans of its descendants
        ended_pid, wait_status = os.wait()
    exit_code = os.waitstatus_to_exitcode(wait_status)
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(guard_pid, -exit_code)
    os._exit(exit_code)


def _prefer_for_oom_kill() -> None:
    """Lets Linux kill this process before the agent when memory runs out, so that the agent can report it."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        adjustment = min(1000, int(file.read()) + RANK_OOM_SCORE)
        file.seek(0)
        file.write(str(adjustment))


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        serve(sys.argv[1], Connection(int(sys.argv[2])))
