"""The ranks of one node: they are started, watched, killed and cleaned up, one run after another."""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrabench import checkout, processes
from ultrabench.agent.diagnose.hang_evidence import dump_variables, hang_evidence
from ultrabench.agent.disk_retry import DiskRetry
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks.cleanup import (
    EVIDENCE_FOLDER,
    SharedMemoryCleanup,
    copy_logs,
    copy_profile,
    join_tails,
    read_tail,
)
from ultrabench.agent.ranks.forks import KERNEL_MODULE, ForkServer, cpu_text, rank_cpus
from ultrabench.agent.ranks.gpus import GpuGauge, foreign_processes, visible_gpus
from ultrabench.agent.ranks.rank_progress import RankEvent
from ultrabench.errors import ClusterError
from ultrabench.rank_report import NewLines, Progress, parse_line, parse_log_line, read_progress
from ultrabench.record import to_dict
from ultrabench.run import RunSpec, Task, fill_in
from ultrabench.store.allocation import Allocation
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.kernel_secrets import revealed

Cleaned = dict[str, Any]
"""State of a node after a run: {left} why it cannot be used any more or null, {sm_clocks_hz}, {slowdowns}."""

LOGS_RETRY_S = 10.0
"""Seconds to retry writing logs to a failing disk; after that the next run begins without them."""
EXTRA_PARTS = 2
"""Parts of a long report that are read at once after the first; one message holds the news of all ranks."""
LAUNCHER_VARIABLES = ("SLURM_", "SBATCH_", "SUBMITIT_", "PMI")
"""Beginnings of variables that are hidden from ranks, which would otherwise be taken for tasks of Slurm."""


class Node:
    """This node's part of an allocation."""

    def __init__(self, allocation: Allocation, identity: NodeIdentity) -> None:
        self.allocation = allocation
        self.identity = identity
        self.folder = SweepFolder(Path(allocation.sweep_dir))
        self.scratch = processes.make_scratch()
        self.tag = processes.own_tag(allocation.name, self.identity.node)
        self.disk = DiskRetry(allocation.heartbeat_s / 2)
        per_node, kernel = allocation.gpus_per_node, allocation.tasks[0].spec.kernel
        hidden = {k for k in os.environ if k != "SLURM_JOB_ID" and k.startswith(LAUNCHER_VARIABLES)}
        self._base = {k: v for k, v in os.environ.items() if k not in hidden} | {
            processes.TAG_VARIABLE: self.tag
        }
        self._on_gpus = allocation.tasks[0].device == "cuda"
        gpus = visible_gpus()[:per_node] if self._on_gpus else []
        self._gauge = GpuGauge(gpus)
        self._cpus = rank_cpus(per_node, self._on_gpus, gpu_bus_ids=[gpu.bus_id for gpu in gpus])
        self._threads = allocation.threads or max(1, len(os.sched_getaffinity(0)) // per_node)
        self._shared_memory = SharedMemoryCleanup()
        self._warm = allocation.kernel_kind != "command" or allocation.preflight
        module = KERNEL_MODULE if self._warm else ""
        self._server = ForkServer(self.scratch / "fork_server.log", self._base, module)
        self._program_env = revealed(kernel.env, self.folder.secrets)
        self._task: Task | None = None
        self._run = self.scratch
        """Folder of the current run."""
        self._reports: dict[int, NewLines] = {}
        self._progress: dict[int, Progress] = {}
        self._evidence: Iterator[list[RankEvent]] = iter(())
        self._log: NewLines | None = None
        """The log of the rank that prints the steps, if the program does not report them."""
        self._exits: list[tuple[int, int]] = []
        """Exits that the leader has not been told yet."""
        self._oom_kills = 0

    def facts(self) -> dict[str, Any]:
        """What the leader needs to know about this node before the first run."""
        return {
            "node": self.identity.node,
            "host": self.identity.host,
            "threads": self._threads,
            "bindings": [cpu_text(cpus) for cpus in self._cpus or ()],
            "foreign": foreign_processes(self._is_ours) if self._on_gpus else [],
            "kernel_digest": self.digest(),
            "git_commit": checkout.commit(),
        }

    def _is_ours(self, pid: int) -> bool:
        """Whether a process has the tag of this agent, which started it or one of its ancestors."""
        return processes.tag_of(pid) == self.tag

    def digest(self) -> str:
        """The hash of the training program's sources as this node reads them now."""
        with contextlib.chdir(self.allocation.work_dir):
            return self.allocation.tasks[0].spec.kernel.digest()

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        per_node = self.allocation.gpus_per_node
        return range(self.identity.node * per_node, (self.identity.node + 1) * per_node)

    def warm_up(self) -> None:
        """Starts the fork server, unless all ranks are programs of the user."""
        if self._warm:
            self._server.start()

    def obey(self, message: dict[str, Any]) -> Any:
        """Calls the method that the leader orders; returns the answer of `kill` or `finish`, else None."""
        orders = {f.__name__: f for f in (self.start, self.store, self.examine, self.kill, self.finish)}
        order = orders.get(message.get("do", ""))
        return order and order(**{name: value for name, value in message.items() if name != "do"})

    def start(self, index: int, address: str, port: int) -> None:
        """Starts this node's ranks of a task; with port 0, rank 0 will report the port that it got."""
        task = self._task = self.allocation.task(index)
        run = self._run = self.scratch / task.key
        (run / EVIDENCE_FOLDER).mkdir(parents=True)
        write_whole(run / "spec.json", json.dumps(to_dict(task), indent=1))
        self._progress, self._exits, self._evidence = {}, [], iter(())
        self._reports = {rank: NewLines(run / f"rank{rank}.report") for rank in self.ranks}
        self._gauge.clear()
        self._oom_kills = oom_kills()
        kernel = task.spec.kernel
        step_rank = kernel.step_rank % task.spec.layout.world_size
        only_logs = kernel.step_line and step_rank in self.ranks and not task.forked
        self._log = NewLines(run / f"rank{step_rank}.log") if only_logs else None
        for local, rank in enumerate(self.ranks):
            env = self._rank_env(task, rank, local, address, port)
            log = run / f"rank{rank}.log"
            log.touch()
            cpus = self._cpus[local] if self._cpus else None
            if task.forked:
                self._server.fork(rank, env, log, cpus)
                continue
            env = {**self._base, **env, **dump_variables(run), **self._program_env}
            env.pop("PYTHONSAFEPATH", None)  # a script may import from its own folder
            command = fill_in(task.spec, task.repeat, task.attempt, task.measure)
            self._server.fork(rank, env, log, cpus, command=command, cwd=self.allocation.work_dir)

    def _rank_env(self, task: Task, rank: int, local: int, address: str, port: int) -> dict[str, str]:
        """The variables that torchrun sets, and ours."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(task.spec.layout.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.allocation.gpus_per_node),
            "NODE_RANK": str(self.identity.node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            **processes.thread_variables(self._threads),
            "ULTRABENCH_SPEC": str(self._run / "spec.json"),
            "ULTRABENCH_REPORT": str(self._run / f"rank{rank}.report"),
            "ULTRABENCH_STORE": str(self._run / "store"),
        }

    def rank_events(self) -> list[RankEvent]:
        """Reported lines, progress, evidence and exits of this node's ranks since the last call."""
        task = self._task
        if task is None:
            return []
        self._exits += self._server.exits()
        found: list[RankEvent] = []
        for rank, report in self._reports.items():
            found += self._reported(rank, report, task.forked)
        behind = {rank for rank, report in self._reports.items() if report.behind}
        if self._log is not None:
            found += _logged(task.spec, self._log)
            step_rank = task.spec.kernel.step_rank % task.spec.layout.world_size
            behind |= {0, step_rank} if self._log.behind else set()
        if any("microbatches" in event or event["line"].get("event") == "step" for event in found):
            self._gauge.sample()
        found += next(self._evidence, [])
        # Exits come last, so that the leader learns what a rank reported before it learns that it ended.
        ended = [end for end in self._exits if end[0] not in behind]
        self._exits = [end for end in self._exits if end[0] in behind]
        oom = bool(ended) and oom_kills() > self._oom_kills
        for rank, code in ended:
            tail = read_tail(self._run / f"rank{rank}.log", 8192)
            tail = tail or read_tail(self.scratch / "fork_server.log", 8192)
            oom_killed = oom and code == -signal.SIGKILL
            found.append({"rank": rank, "code": code, "tail": tail, "oom_killed": oom_killed})
        return found

    def _reported(self, rank: int, report: NewLines, forked: bool) -> list[RankEvent]:
        """The lines that a rank has reported since the last call, and its progress where that has changed."""
        texts = report.read()
        for _ in range(EXTRA_PARTS if report.behind else 0):
            texts += report.read()
        lines = [parse_line(text) for text in texts]
        # Only our own kernel may report measurements of devices and links.
        known = [line for line in lines if line and (forked or line["event"] != "probe")]
        found: list[RankEvent] = [{"rank": rank, "line": line} for line in known]
        done, before = read_progress(report.path), self._progress.get(rank, Progress())
        # Smaller counts than before can only be an error of the rank.
        if done != before and done.step >= before.step and done.microbatches >= before.microbatches:
            self._progress[rank] = done
            found.append({"rank": rank, **to_dict(done)})
        return found

    def store(self, port: int) -> None:
        """Tells the ranks, which wait for this file, the port that rank 0 got."""
        write_whole(self._run / "store", str(port))

    def examine(self) -> None:
        """Begins to collect the evidence of a hang; it is among the events when it is complete."""
        if self._task is not None:
            pids = {rank: pid for rank, pid in self._server.rank_pids.items() if self._is_ours(pid)}
            self._evidence = hang_evidence(self._run, pids, self.tag)

    def kill(self) -> Cleaned:
        """Kills every process of the current run on this node, and removes what they left behind."""
        left = self._end_processes() or self._gauge.occupied(self.disk.beat)
        slowdowns = sorted(self._gauge.slowdowns)
        return {"left": left, "sm_clocks_hz": self._gauge.clocks_hz, "slowdowns": slowdowns}

    def _end_processes(self) -> str | None:
        """Kills all processes but the fork server; returns a message about those that did not die."""
        stay = processes.kill_until_gone(self._of_the_run, meanwhile=self.disk.beat)
        self._shared_memory.remove()
        return f"processes that cannot be killed: {processes.described(stay)}" if stay else None

    def _of_the_run(self) -> list[int]:
        """All descendants of this agent and all processes with its tag, except the fork server.

        The agent's own children are already killed by this call.
        """
        hit = processes.kill_children({self._server.pid or 0})
        found = processes.descendants(os.getpid()) | {*processes.tagged(lambda tag: tag == self.tag)}
        return sorted(found - {self._server.pid} or hit)

    def finish(self, keep_all: bool) -> str | None:
        """Saves the logs of the run and removes its folder; returns why the logs could not be saved, or None.

        Args:
            keep_all: keep the logs of all ranks, as of a failed run.
        """
        if self._task is None:
            return None
        task, problem = self._task, None
        self._task = None
        try:
            self.disk.retry_for(LOGS_RETRY_S, self._keep_logs, task, keep_all)
        except (ClusterError, OSError) as error:
            problem = f"the logs of {self.identity.host} could not be kept: {error}"
        shutil.rmtree(self._run, ignore_errors=True)
        return problem

    def _keep_logs(self, task: Task, failed: bool) -> None:
        to = self.folder.log_folder(task.run_id, task.repeat, task.attempt)
        if failed:
            copy_logs(self._run, to, int(task.measure.log_mib_per_rank * 2**20))
        elif self.identity.node == 0 and not task.probe:
            join_tails(self._run, to, self.ranks)
        copy_profile(self._run, to)

    def close(self) -> None:
        """Kills every process, the fork server too, and removes the node-local folder."""
        self._server.stop()
        self._end_processes()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _logged(spec: RunSpec, log: NewLines) -> list[RankEvent]:
    """The steps that a program prints to its log; they count as steps of rank 0, whoever prints them."""
    pattern = re.compile(spec.kernel.step_line or "")
    tokens_per_gpu = spec.tokens_per_step / spec.layout.world_size
    steps = (parse_log_line(text, pattern, tokens_per_gpu) for text in log.read())
    return [{"rank": 0, "line": step} for step in steps if step]


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes Linux has killed for lack of memory in the memory cgroup of this process.

    The ranks of a run share the cgroup of their agent, so that kills in other jobs of the host do not count.
    Where the cgroup has no such counter, that of the whole host is read; without any the answer is 0.
    Sources: docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html
    (memory.oom_control).
    """
    counters = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            counters.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            counters.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    for file in (*counters, proc / "vmstat"):
        if match := re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE):
            return int(match[1])
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
