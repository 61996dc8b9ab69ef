"""The ranks of one node: started, followed, killed and cleaned up, run after run."""

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

from ultrabench import checkout
from ultrabench.agent.autopsy import FOLDER as AUTOPSY
from ultrabench.agent.autopsy import Autopsy, dump_variables
from ultrabench.agent.binding import cpu_text, gpu_bus_ids, rank_cpus
from ultrabench.agent.forks import Exit, ForkServer, Programs
from ultrabench.agent.gpus import foreign_processes, visible_gpus
from ultrabench.agent.host_memory import oom_kills
from ultrabench.agent.leftovers import Leftovers
from ultrabench.agent.log_copies import copy_ends, read_tail
from ultrabench.agent.nvml import GpuGauge
from ultrabench.agent.patience import Patience
from ultrabench.agent.place import Place
from ultrabench.allocation import Allocation
from ultrabench.errors import ClusterError
from ultrabench.folder import SweepFolder, write_whole
from ultrabench.kernel_env import revealed
from ultrabench.processes import (
    TAG_VARIABLE,
    descendants,
    described,
    kill_children,
    kill_until_gone,
    make_scratch,
    own_tag,
    tag_of,
    tagged,
    thread_variables,
)
from ultrabench.record import to_dict
from ultrabench.report import PROFILE, NewLines, Progress, parse_line, parse_log_line, read_progress
from ultrabench.run import Task, fill_in

News = dict[str, Any]
"""About one rank: {rank, line} a report line, {rank, microbatches, step, part} its progress,
{rank, code, tail, oom_killed} its exit with the end of its log, {rank, found} by its autopsy."""

Cleaned = dict[str, Any]
"""After a run: {left} why this node cannot be used any more or null, {sm_clocks_hz}, {slowdowns}."""

LOGS_PATIENCE_S = 10.0
"""So long a disk that takes no logs holds up the next run."""
TAIL_BYTES = 64 * 1024
KEPT = ("rank*.log", f"{AUTOPSY}/*")
"""What is kept of a failed run."""
MOST_FILES = 1000
"""Files kept per pattern of KEPT."""
PARTS_A_LOOK = 2
"""Further parts of a report that are read at once where a rank has written a lot; all ranks fit a message."""
LAUNCHERS_OWN = ("SLURM_", "SBATCH_", "SUBMITIT_", "PMI", "PMIX_")


class Node:
    """This node's part of an allocation."""

    def __init__(self, allocation: Allocation, place: Place) -> None:
        self.allocation = allocation
        self.index = place.node
        self.host = place.host
        self.scratch = make_scratch()
        self.tag = own_tag(allocation.name, self.index)
        base = {**os.environ, TAG_VARIABLE: self.tag}
        # A rank is no task of Slurm's: programs that find its variables would take it for one.
        self._base = {k: v for k, v in base.items() if k == "SLURM_JOB_ID" or not k.startswith(LAUNCHERS_OWN)}
        self._on_gpus = allocation.tasks[0].device == "cuda"
        self._gauge = GpuGauge(visible_gpus()[: allocation.gpus_per_node] if self._on_gpus else ())
        self._leftovers = Leftovers()
        self.patience = Patience(allocation.heartbeat_s / 2)
        buses = gpu_bus_ids() if self._on_gpus else []
        self._cpus = rank_cpus(allocation.gpus_per_node, self._on_gpus, gpu_bus_ids=buses)
        cores = len(os.sched_getaffinity(0)) // allocation.gpus_per_node
        self._threads = allocation.threads or max(1, cores)
        self._server = ForkServer(self.scratch / "fork_server.log", self._base)
        self._programs = Programs()
        secrets = SweepFolder(Path(allocation.sweep_dir)).secrets
        self._program_env = revealed(allocation.tasks[0].spec.kernel.env, secrets)
        self._reports: dict[int, NewLines] = {}
        self._progress: dict[int, Progress] = {}
        self._autopsy: Autopsy | None = None
        self._log: NewLines | None = None
        self._early: list[Exit] = []
        """Exits that have not been told yet."""
        self._oom_kills = 0
        self._task: Task | None = None

    def facts(self) -> dict[str, Any]:
        """What the leader has to know of this node before the first run."""
        return {
            "node": self.index,
            "host": self.host,
            "threads": self._threads,
            "bindings": [cpu_text(cpus) for cpus in self._cpus or ()],
            "foreign": foreign_processes(lambda pid: tag_of(pid) == self.tag) if self._on_gpus else [],
            "kernel_digest": self.digest(),
            "git_commit": checkout.commit(),
        }

    def digest(self) -> str:
        """Hash of the training program's sources as this node sees them now."""
        with contextlib.chdir(self.allocation.work_dir):
            return self.allocation.tasks[0].spec.kernel.digest()

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        per_node = self.allocation.gpus_per_node
        return range(self.index * per_node, (self.index + 1) * per_node)

    def warm_up(self) -> None:
        """Starts the fork server while there is nothing else to do."""
        if self.allocation.kernel_kind != "command" or self.allocation.preflight:
            self._server.start()

    def start(self, task: Task, address: str, port: int) -> None:
        """Starts this node's ranks of `task`; port 0: rank 0 will say which one it got."""
        self._task = task
        run = self.scratch / task.key
        (run / AUTOPSY).mkdir(parents=True)
        write_whole(run / "spec.json", json.dumps(to_dict(task), indent=1))
        self._reports, self._progress, self._early, self._autopsy = {}, {}, [], None
        self._gauge.clear()
        self._oom_kills = oom_kills()
        kernel = task.spec.kernel
        telling = kernel.step_rank % task.spec.layout.world_size
        only_logs = kernel.step_line and telling in self.ranks and not task.forked
        self._log = NewLines(run / f"rank{telling}.log") if only_logs else None
        for rank in self.ranks:
            env = self._rank_env(task, run, rank, address, port)
            self._reports[rank] = NewLines(run / f"rank{rank}.report")
            log = run / f"rank{rank}.log"
            log.touch()
            cpus = self._cpus[rank % self.allocation.gpus_per_node] if self._cpus else None
            if task.forked:
                self._server.fork(rank, env, log, cpus)
            else:
                command = fill_in(task.spec, task.repeat, task.attempt, task.measure)
                program_env = {**self._base, **env, **dump_variables(run), **self._program_env}
                program_env.pop("PYTHONSAFEPATH", None)  # a script may import from its own folder
                gone = self._programs.start(rank, command, program_env, log, self.allocation.work_dir, cpus)
                self._early += [gone] if gone else []

    def _rank_env(self, task: Task, run: Path, rank: int, address: str, port: int) -> dict[str, str]:
        """torchrun's variables and ours."""
        per_node = self.allocation.gpus_per_node
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(task.spec.layout.world_size),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "NODE_RANK": str(self.index),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            **thread_variables(self._threads),
            "ULTRABENCH_SPEC": str(run / "spec.json"),
            "ULTRABENCH_REPORT": str(run / f"rank{rank}.report"),
            "ULTRABENCH_STORE": str(run / "store"),
        }

    def tell_port(self, port: int) -> None:
        """Passes rank 0's port on to the ranks that wait for it."""
        assert self._task is not None
        write_whole(self.scratch / self._task.key / "store", str(port))

    def news(self) -> list[News]:
        """What happened since the last call."""
        if self._task is None:
            return []
        self._early += self._programs.exits()
        if self._task.forked:
            self._early += self._server.exits()
        found = [item for rank, report in self._reports.items() for item in self._told(rank, report)]
        behind = {rank for rank, report in self._reports.items() if report.behind}
        if self._log is not None:
            pattern = re.compile(self._task.spec.kernel.step_line or "")
            spec = self._task.spec
            tokens_per_gpu = spec.tokens_per_step / spec.layout.world_size
            steps = [parse_log_line(text, pattern, tokens_per_gpu) for text in self._log.read()]
            found += [{"rank": 0, "line": step} for step in steps if step]
            behind |= {0, spec.kernel.step_rank % spec.layout.world_size} if self._log.behind else set()
        if any("microbatches" in item or item["line"].get("event") == "step" for item in found):
            self._gauge.sample()
        if self._autopsy is not None and (seen := self._autopsy.finished()) is not None:
            self._autopsy = None
            found += seen
        # Exits come last: what a rank said before it ended is heard before its end.
        exits = [end for end in self._early if end.rank not in behind]
        self._early = [end for end in self._early if end.rank in behind]
        struck = bool(exits) and oom_kills() > self._oom_kills
        for end in exits:
            killed = struck and end.code == -signal.SIGKILL
            tail = self._tail(end.rank)
            found.append({"rank": end.rank, "code": end.code, "tail": tail, "oom_killed": killed})
        return found

    def _told(self, rank: int, report: NewLines) -> list[News]:
        """What a rank has reported since the last call, and how far it has come."""
        assert self._task is not None
        texts = report.read()
        for _ in range(PARTS_A_LOOK if report.behind else 0):
            texts += report.read()
        lines = [parse_line(text) for text in texts]
        # Only our own kernel may answer for devices and links.
        told = [line for line in lines if line and (self._task.forked or line["event"] != "probe")]
        found: list[News] = [{"rank": rank, "line": line} for line in told]
        done, before = read_progress(report.path), self._progress.get(rank, Progress())
        # A count that goes back is none.
        if done != before and done.step >= before.step and done.microbatches >= before.microbatches:
            self._progress[rank] = done
            found.append({"rank": rank, **to_dict(done)})
        return found

    def _tail(self, rank: int, size: int = 8192) -> str:
        assert self._task is not None
        own = read_tail(self.scratch / self._task.key / f"rank{rank}.log", size)
        return own or read_tail(self.scratch / "fork_server.log", size)

    def examine(self) -> None:
        """Looks at the ranks that still run; what is found comes with the news when it is complete."""
        if self._task is not None:
            pids = {rank: pid for rank, pid in self._pids().items() if tag_of(pid) == self.tag}
            self._autopsy = Autopsy(self.scratch / self._task.key, pids, self.tag)

    def _pids(self) -> dict[int, int]:
        assert self._task is not None
        return self._server.rank_pids if self._task.forked else self._programs.rank_pids

    def kill(self) -> Cleaned:
        """Ends every process of the current run on this node and removes what it left."""
        left = self._end_processes() or self._gauge.occupied(self.patience.beat)
        slowed = sorted(self._gauge.slowdowns)
        return {"left": left, "sm_clocks_hz": self._gauge.clocks_hz, "slowdowns": slowed}

    def _end_processes(self) -> str | None:
        """Ends all but the fork server, and says what would not die."""
        stay = kill_until_gone(self._of_the_run, meanwhile=self.patience.beat)
        self._leftovers.remove()
        return f"processes that cannot be killed: {described(stay)}" if stay else None

    def _of_the_run(self) -> list[int]:
        """All that descends from this agent, with or without its tag, but for the fork server.

        Its own children are killed at once.
        """
        hit = kill_children({self._server.pid or 0, *self._programs.rank_pids.values()})
        found = descendants(os.getpid()) | {*tagged(lambda tag: tag == self.tag)}
        return sorted(found - {self._server.pid} or hit)

    def finish(self, keep_all: bool) -> str | None:
        """Saves logs of the run (all ranks of a failed one), then forgets it; says why that failed."""
        if self._task is None:
            return None
        task, run = self._task, self.scratch / self._task.key
        self._task = None
        problem = None
        try:
            self.patience.within(LOGS_PATIENCE_S, self._keep_logs, task, run, keep_all)
        except (ClusterError, OSError) as error:
            problem = f"the logs of {self.host} could not be kept: {error}"
        shutil.rmtree(run, ignore_errors=True)
        return problem

    def _keep_logs(self, task: Task, run: Path, keep_all: bool) -> None:
        to = SweepFolder(Path(self.allocation.sweep_dir)).log_folder(task.run_id, task.repeat, task.attempt)
        if keep_all:
            to.mkdir(parents=True, exist_ok=True)
            most = int(task.measure.log_mib_per_rank * 2**20)
            copies = [log for pattern in KEPT for log in sorted(run.glob(pattern))[:MOST_FILES]]
            for log in copies:
                copy_ends(log, to / log.relative_to(run), most)
        elif self.index == 0 and not task.probe:
            to.mkdir(parents=True, exist_ok=True)
            joined = "".join(
                f"--- rank {rank}\n{read_tail(run / f'rank{rank}.log', TAIL_BYTES)}" for rank in self.ranks
            )
            write_whole(to / "node0.log", joined)
        if (run / PROFILE).is_dir():
            shutil.copytree(run / PROFILE, to / PROFILE, dirs_exist_ok=True)

    def close(self) -> None:
        """Ends every process and removes the node-local folder."""
        self._server.stop()
        self._end_processes()
        shutil.rmtree(self.scratch, ignore_errors=True)
