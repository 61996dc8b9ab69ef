"""The ranks of one node: they are started, watched, killed and cleaned up, one run after another."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from ultrabench import checkout, processes
from ultrabench.agent.diagnose.addresses import addresses_of_host
from ultrabench.agent.diagnose.hang_evidence import dump_variables, fatal_stacks, hang_evidence
from ultrabench.agent.disk_retry import DiskRetry
from ultrabench.agent.health_reader import HealthReader
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks import cleanup
from ultrabench.agent.ranks.compiler_locks import compiler_locks
from ultrabench.agent.ranks.fork_server import KERNEL_MODULE, STOPPED_STATES, ForkServer, cpu_text, rank_cpus
from ultrabench.agent.ranks.gpus import GpuGauge, foreign_processes, visible_gpus
from ultrabench.agent.ranks.host_load import HostLoad
from ultrabench.agent.ranks.rank_log import END_BYTES, MAX_LOG_BYTES, read_log
from ultrabench.agent.ranks.rank_progress import NO_EVIDENCE, MeasuredPhase, RankEvent
from ultrabench.agent.ranks.resident_memory import ResidentMemory
from ultrabench.agent.ranks.sources import Source, report_sources
from ultrabench.agent.ranks.workers import (
    Worker,
    pid_by_rank,
    repeated_rank_text,
    workers_among,
    wrong_size_text,
)
from ultrabench.batch_system import BATCH_SYSTEMS
from ultrabench.errors import ClusterError
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.log_patterns import OBSERVED_EVENT
from ultrabench.node_health import Reading, examine, to_facts
from ultrabench.oom_kills import num_oom_kills
from ultrabench.partial_step import PART_FOLDER, Departure, PartStart
from ultrabench.rank_report import CHECKPOINT_PHASE, Progress, read_progress
from ultrabench.record import from_dict, to_dict
from ultrabench.run import FILES_WORD, ProcessWords, Task, fill_in, fill_in_files
from ultrabench.store.allocation import Allocation
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.kernel_secrets import reveal_env
from ultrabench.variant import variables_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAfterRun:
    """The state of a node after a run."""

    complaint: str | None
    """Why the node cannot be used any more; None if it can."""
    sm_clocks_hz: tuple[float, ...]
    """SM clock of each GPU in each sample."""
    slowdowns: tuple[str, ...]
    """Reasons for which the driver lowered the clocks."""
    powers_w: tuple[float, ...] = ()
    """Mean power of each GPU in the measured steps, where it is known."""
    core_shares: tuple[float, float] | None = None
    """The shares of the host's cores that all processes, and this agent, used during the steps; None if unknown."""
    foreign_processes: tuple[str, ...] = ()
    """Processes of somebody else that used the GPUs during the steps."""
    compiler_locks: tuple[str, ...] = ()
    """Locks in the caches of compilers that exist although the processes of the run are gone."""
    health: dict[str, dict[str, dict[str, float]]] | None = None
    """Health of the node after a preflight, with the growth of its counters meanwhile, as `to_facts` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCleanup:
    """How keeping the logs and removing the files of a run went on a node."""

    problem: str | None = None
    """Which files could not be kept or removed, and why; None if all were."""
    is_stuck: bool = False
    """Whether a file system did not answer in time, so that files of the run may still be removed."""
    space_shortage: str | None = None
    """Which folder of the node has too little space for another run; None if none has."""


LOGS_RETRY_S = 10.0
"""Seconds to retry writing logs to a failing disk; after that the next run begins without them."""
CLEANING_S = 120.0
"""Seconds for removing the files of a run; at 1 ms each, 20,000 files take 20 s."""
PREPARING_LIMIT_S = 60.0
"""Seconds for making the node-local files of a run."""
PROGRAM_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""Variables of a program of the user, unless it has others: without a buffer, its lines arrive when it writes them; and
Python writes its stacks when a signal such as SIGSEGV or SIGABRT ends it."""
HIDDEN_PREFIXES = (
    *(prefix for system in BATCH_SYSTEMS for prefix in system.task_prefixes),
    "SUBMITIT_",
    "PMI",
)
"""Prefixes of variables that are hidden from ranks; with them, programs would take a rank for a task of a job."""
SHOWN_NAMES = frozenset().union(*(system.rank_variables for system in BATCH_SYSTEMS))
"""Variables with these prefixes that ranks see."""
LOG_READING_S = 0.2
"""Seconds after which an agent that reads logs of failed ranks looks after its other work again."""
WORKER_LOOK_S = 1.0
"""Seconds between two searches for the ranks that a command has started; each reads all processes of the host."""
TAIL_BYTES = 8192
"""Bytes of the end of the log of a rank that ended well."""


def with_variant_env(env: Mapping[str, str], variant_env: Mapping[str, str | None]) -> dict[str, str]:
    """The variables `env` with the values of a variant; those whose value is None are unset."""
    return {name: value for name, value in {**env, **variant_env}.items() if value is not None}


class Node:
    """This node's part of an allocation."""

    def __init__(self, allocation: Allocation, identity: NodeIdentity) -> None:
        self.allocation = allocation
        self.identity = identity
        self.folder = SweepFolder(Path(allocation.sweep_dir))
        self.scratch = processes.make_scratch()
        self.tag = processes.own_tag(allocation.name, self.identity.node_index)
        self.disk = DiskRetry(allocation.heartbeat_s / 2)
        gpus_per_node, kernel = allocation.gpus_per_node, allocation.tasks[0].spec.kernel
        kept_names = {k for k in os.environ if k in SHOWN_NAMES or not k.startswith(HIDDEN_PREFIXES)}
        self._base_env = {**{k: os.environ[k] for k in kept_names}, processes.TAG_VARIABLE: self.tag}
        self._uses_gpus = DEVICE_KINDS[allocation.tasks[0].device].has_gpus
        gpus = visible_gpus()[:gpus_per_node] if self._uses_gpus else []
        self._health_reader = HealthReader(gpus)  # it reads in the background
        self._gpu_gauge, self._host_load = GpuGauge(gpus), HostLoad()
        self._resident_memory = ResidentMemory()
        self._rank_cpus = rank_cpus(gpus_per_node, [gpu.bus_id for gpu in gpus] if self._uses_gpus else None)
        self._threads_per_rank = allocation.threads or max(1, len(os.sched_getaffinity(0)) // gpus_per_node)
        self._shared_memory_cleanup = cleanup.SharedMemoryCleanup()
        self._program_env = reveal_env(kernel.env, self.folder.secrets)
        self._task = allocation.tasks[0]
        """The task of the current run."""
        self._run_folder = self.scratch
        """Folder of the current run."""
        self._report_sources: list[Source] = []
        self._sent_progress: dict[int, Progress] = {}
        """Rank -> the progress that was last sent to the leader."""
        self._hang_evidence: Iterator[list[RankEvent]] = iter(())
        self._exits: dict[int, int] = {}
        """Rank -> exit code that was not sent to the leader yet."""
        self._unread_logs: dict[int, int] = {}
        """Rank that failed and whose log was not read yet -> how many bytes of it are read at most."""
        self._has_killed = False
        """Whether the ranks of the current run were killed, so that their logs only show what they had done before."""
        self._has_launched = False
        """Whether the command has been seen to train the ranks of the layout, or other ones."""
        self._last_look_s = 0.0
        """When the processes of the command were last searched for ranks, by the monotonic clock."""
        self._worker_pids: dict[int, int] = {}
        """Rank -> pid of the processes that a starter has made the ranks of this node, when they were last searched."""
        self._measured_phase = MeasuredPhase(allocation.tasks[0].measure.warmup_steps)
        self._is_training = True
        """Whether the run trains; False once it saves its state, which its measurements must not include."""
        self._oom_kills_before = 0
        """Number of processes that Linux had killed for lack of memory before the current run."""
        self._full_folder: str | None = None
        """Which node-local folder was full during the current run, as a text; None if none was."""
        self._server_module = KERNEL_MODULE if allocation.tasks[0].forked or allocation.preflight else ""
        # Torch reads some variables when it is imported, so those of forked ranks are set in the server.
        self._server_env = self._base_env | (self._program_env if allocation.tasks[0].forked else {})
        self._server_variant_env: dict[str, str | None] = {}
        """The variables of a variant with which the fork server runs."""
        self._fork_server = self._start_server(self._server_variant_env)

    def _start_server(self, variant_env: Mapping[str, str | None]) -> ForkServer:
        env = with_variant_env(self._server_env, variant_env)
        return ForkServer(self.scratch / "fork_server.log", env, self._server_module)

    def _use_server(self, variant_env: dict[str, str | None]) -> None:
        """Replaces the fork server if the next run has other variables; libraries read them when they are imported."""
        if variant_env != self._server_variant_env:
            self._fork_server.stop()
            self._fork_server, self._server_variant_env = self._start_server(variant_env), variant_env

    def own_facts(self) -> dict[str, Any]:
        """What the leader needs to know about this node before the first run."""
        return {
            "node": self.identity.node_index,
            "host": self.identity.host,
            "addresses": addresses_of_host(),
            "threads": self._threads_per_rank,
            "bindings": [cpu_text(cpus) for cpus in self._rank_cpus or ()],
            "foreign": foreign_processes(self._is_ours) if self._uses_gpus else [],
            "short_of_space": self._space_shortage(),
            "kernel_digest": self.kernel_digest(),
            "git_commit": checkout.commit_sha(),
            "health": to_facts(examine(self._first_reading, self._first_reading)),
        }

    @cached_property
    def _first_reading(self) -> Reading:
        """The health of this node before the first run; without a preflight nothing is read later."""
        reading = self._health_reader.read()
        if not self.allocation.preflight:
            self._health_reader.close()
        return reading

    def _is_ours(self, pid: int) -> bool:
        """Whether a process has the tag of this agent, which started it or one of its ancestors."""
        return processes.tag_of(pid) == self.tag

    def kernel_digest(self) -> str:
        """The hash of the training program's sources as this node reads them now."""
        with contextlib.chdir(self.allocation.work_dir):
            return self.allocation.tasks[0].spec.kernel.digest()

    @cached_property
    def address(self) -> str:
        """The address at which the other nodes of the allocation reach this node."""
        return self.identity.address(self.allocation.simulated or self.allocation.nodes == 1)

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        gpus_per_node = self.allocation.gpus_per_node
        return range(self.identity.node_index * gpus_per_node, (self.identity.node_index + 1) * gpus_per_node)

    @property
    def _processes(self) -> Sequence[int]:
        """The ranks for which a process is started: all, or the first one if a command starts the ranks of the node."""
        return self.ranks[:1] if self._task.starts_ranks else self.ranks

    def obey(self, message: dict[str, Any]) -> Any:
        """Calls the method that the leader orders; returns what `kill` and `finish` return, else None."""
        methods = (
            self.start,
            self.write_store_port,
            self.collect_hang_evidence,
            self.abort_for_stacks,
            self.kill,
            self.finish,
        )
        method = {method.__name__: method for method in methods}.get(message.get("do", ""))
        return method and method(**{name: value for name, value in message.items() if name != "do"})

    def start(
        self,
        task_index: int,
        address: str,
        port: int,
        departure: Mapping[str, Any] | None = None,
        gas: int | None = None,
    ) -> None:
        """Starts this node's ranks of a task; with port 0, rank 0 will report the port that it got.

        Args:
            departure: the fields of that of parts of steps of this kind from a straight line, if runs before have
                measured it.
            gas: micro-batches of all steps of this start, if it is one of two; None: those of the run.
        """
        line_departure = from_dict(Departure, departure) if departure else None
        part_start = None if gas is None else PartStart(gas=gas)
        task = self.allocation.task(task_index).with_departure(line_departure).in_start(part_start)
        self._task = task
        run_folder = self._run_folder = self.scratch / str(task.key)
        self.disk.retry(self._prepare, PREPARING_LIMIT_S)
        self._report_sources = report_sources(task, self.ranks, self._run_folder)
        self._gpu_gauge.clear()
        self._host_load.clear()
        self._resident_memory.clear()
        self._oom_kills_before, self._full_folder, self._is_training = num_oom_kills(), None, True
        self._has_killed, self._has_launched, self._last_look_s = False, False, time.monotonic()
        self._worker_pids = {}
        self._measured_phase = MeasuredPhase(task.measure.warmup_steps)
        variant_env = variables_of(task.spec.variant)
        if task.forked:
            self._use_server(variant_env)
        for rank in self._processes:
            local_rank = None if task.starts_ranks else rank - self.ranks.start
            process = ProcessWords(
                self.identity.node_index, local_rank, address, port, str(self._files_folder)
            )
            env, log_path = self._rank_env(task, rank, process), self._log_path(rank)
            # A starter does not bind ranks, nor may it be bound to the CPUs of its first one.
            cpus = self._rank_cpus[local_rank] if self._rank_cpus and local_rank is not None else None
            if task.forked:
                self._fork_server.fork(rank, env, log_path, cpus)
                continue
            env = {**PROGRAM_ENV, **self._base_env, **env, **dump_variables(run_folder), **self._program_env}
            env = with_variant_env(env, variant_env)
            env.pop("PYTHONSAFEPATH", None)  # a script may import from its own folder
            program = {
                "command": fill_in(task.started_spec, task.key, task.measure, process),
                "cwd": self._program_folder,
                "guarded": task.starts_ranks,
            }
            self._fork_server.fork(rank, env, log_path, cpus, **program)

    @property
    def _files_folder(self) -> Path:
        """Folder of the files of the current run on this node."""
        return self._run_folder / FILES_WORD

    @property
    def _program_folder(self) -> str:
        """Working folder of a program of the user."""
        return str(Path(self.allocation.work_dir) / (self._task.spec.kernel.folder or ""))

    def _prepare(self) -> None:
        """Makes the node-local files of the current run."""
        (self._run_folder / cleanup.EVIDENCE_FOLDER).mkdir(parents=True, exist_ok=True)
        started_task = replace(self._task, spec=self._task.started_spec)
        write_whole(self._run_folder / "spec.json", json.dumps(to_dict(started_task), indent=1))
        for rank in self._processes:
            self._log_path(rank).touch()
        task, folder = self._task, self._files_folder
        for name, text in fill_in_files(task.started_spec, task.key, task.measure, str(folder)).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)

    def _space_shortage(self, min_bytes: int = cleanup.MIN_FREE_BYTES) -> str | None:
        return cleanup.space_shortage(self.scratch.parent, min_bytes)

    def _rank_env(self, task: Task, rank: int, process: ProcessWords) -> dict[str, str]:
        """The variables that torchrun sets, or those that its own command needs; and ours."""
        if task.starts_ranks:
            sizes: dict[str, object] = {
                "NNODES": task.spec.nodes,
                "GPUS_PER_NODE": self.allocation.gpus_per_node,
            }
        else:
            sizes = {
                "RANK": rank,
                "WORLD_SIZE": task.spec.layout.world_size,
                "LOCAL_RANK": process.local_rank,
                "LOCAL_WORLD_SIZE": self.allocation.gpus_per_node,
            }
        return {
            **{name: str(size) for name, size in sizes.items()},
            "NODE_RANK": str(process.node_rank),
            "MASTER_ADDR": process.master_addr,
            "MASTER_PORT": str(process.master_port),
            **processes.thread_variables(self._threads_per_rank),
            "ULTRABENCH_SPEC": str(self._run_folder / "spec.json"),
            "ULTRABENCH_REPORT": str(self._run_folder / f"rank{rank}.report"),
            "ULTRABENCH_STORE": str(self._run_folder / "store"),
        }

    def rank_events(self) -> list[RankEvent]:
        """Reported lines, progress, evidence and exits of this node's ranks since the last call."""
        self._exits |= dict(self._fork_server.new_exits())
        self._fork_server.replace_if_stuck()
        # A disk that makes a rank fail may have space again when the rank ends.
        self._full_folder = self._full_folder or self._space_shortage(cleanup.FULL_BELOW_BYTES)
        # A large log takes up to a second, so logs are read after the call that has sent the exits of their ranks.
        events: list[RankEvent] = [*self._read_logs()]
        for source in self._report_sources:
            report_lines = source.read(is_last=source.writer_rank in self._exits)
            # Only our own kernel may report measurements of devices and links.
            trusted_lines = (
                line for line in report_lines if self._task.forked or line["event"] not in ("probe", "digest")
            )
            events += [{"rank": source.described_rank, "line": line} for line in trusted_lines]
        events += [*self._new_progress(), *self._launch_problems()]
        if not self._task.forked and not self._uses_gpus:
            events += self._resident_peaks()
        step_events = [e for e in events if e.get("line", {}).get("event") == "step"]
        self._measured_phase.observe(step_events)
        if self._is_training and (step_events or any("microbatches" in e for e in events)):
            self._gpu_gauge.sample(self._own_pids, self._measured_phase.is_measuring)
        if self._is_training and step_events:
            self._host_load.sample()
        if self._is_training and any(e.get("line", {}).get("name") == CHECKPOINT_PHASE for e in events):
            self._host_load.sample(is_last=True)
            self._is_training = False
        events += next(self._hang_evidence, [])
        # Exits come last, so that the leader reads the last report of a rank before its exit.
        ranks_behind = {source.writer_rank for source in self._report_sources if source.has_more}
        for rank in sorted(self._exits.keys() - ranks_behind):
            exit_code = self._exits.pop(rank)
            has_kills = exit_code != 0 and num_oom_kills() > self._oom_kills_before
            exit_event: RankEvent = {"rank": rank, "code": exit_code, "oom_killed": has_kills}
            if exit_code:
                self._unread_logs[rank] = END_BYTES if self._has_killed else MAX_LOG_BYTES
            else:
                exit_event["tail"] = cleanup.read_tail(self._log_path(rank), TAIL_BYTES)
            events.append({**exit_event, "disk_full": self._full_folder if exit_code else None})
        return events

    def _log_path(self, rank: int) -> Path:
        return self._run_folder / f"rank{rank}.log"

    def _read_logs(self) -> Iterator[RankEvent]:
        """What logs of ranks that failed show, as many as can be read in LOG_READING_S;
        the others wait for the next call.
        """
        start_s = time.monotonic()
        while self._unread_logs and time.monotonic() - start_s < LOG_READING_S:
            rank, max_bytes = self._unread_logs.popitem()
            paths = (self._log_path(rank), self.scratch / "fork_server.log")
            path = next(filter(cleanup.file_size_bytes, paths), paths[0])
            yield {"rank": rank, "log": to_dict(read_log(path, max_bytes))}

    def _new_progress(self) -> Iterator[RankEvent]:
        """The progress of each rank where it has changed since the last call."""
        for rank in self.ranks:
            previous = self._sent_progress.get(rank, Progress())
            progress = read_progress(self._run_folder / f"rank{rank}.report")
            # Counts that decrease can only be an error of the rank.
            has_decreased = progress.step < previous.step or progress.microbatches < previous.microbatches
            if progress != previous and not has_decreased:
                self._sent_progress[rank] = progress
                yield {"rank": rank, **to_dict(progress)}

    def _launch_problems(self) -> Iterator[RankEvent]:
        """Why the command trains other ranks than those of the layout, by its processes until the first step."""
        has_steps = self._measured_phase.has_steps
        is_due = has_steps or (self._task.starts_ranks and self._is_look_due)
        if self._task.forked or self._has_launched or not is_due:
            return
        workers = self._find_workers()
        if self._task.starts_ranks:
            problem = wrong_size_text(workers, self._task.spec.layout.world_size)
        else:
            problem = repeated_rank_text(workers, {pid: rank for rank, pid in self._rank_pids().items()})
        has_all = len(self._worker_pids) == len(self.ranks)
        self._has_launched = has_steps or has_all or bool(problem)
        if problem:
            line = {"event": OBSERVED_EVENT, "launch_problem": problem}
            yield {"rank": self.ranks.start, "line": line}

    def _rank_pids(self) -> dict[int, int]:
        """Rank -> pid of the process that was started for it in the current run."""
        return {rank: pid for rank, pid in self._fork_server.rank_pids.items() if self._is_ours(pid)}

    @property
    def _is_look_due(self) -> bool:
        """Whether it is WORKER_LOOK_S since the ranks of the command were last searched."""
        return time.monotonic() - self._last_look_s >= WORKER_LOOK_S

    def _find_workers(self) -> list[Worker]:
        """The ranks that the command of this node has started, whose pids it keeps;
        it reads all processes of the host.
        """
        self._last_look_s = time.monotonic()
        workers = workers_among(self._pids_below(os.getpid()))
        self._worker_pids = pid_by_rank(workers, self.ranks)
        return workers

    def _pids_below(self, ancestor_pid: int) -> set[int]:
        """Pids of the descendants of a process, and of those that have left them but bear this agent's tag."""
        return processes.descendants(ancestor_pid) | {*processes.tagged(lambda tag: tag == self.tag)}

    def _program_pids(self) -> dict[int, int]:
        """Rank -> pid of its process, for the ranks that have begun to execute a program of the user.

        The ranks of a starter are searched until all of them run; the command itself is none of them.
        """
        if not self._task.starts_ranks:
            return self._fork_server.program_pids
        if self._is_look_due and len(self._worker_pids) < len(self.ranks):
            self._find_workers()
        return self._worker_pids

    def _resident_peaks(self) -> Iterator[RankEvent]:
        """The peak memory of each rank where it has grown since the last call."""
        for rank, peak_bytes in self._resident_memory.grown(self._program_pids()):
            yield {"rank": rank, "line": {"event": OBSERVED_EVENT, "resident_bytes": peak_bytes}}

    def write_store_port(self, port: int) -> None:
        """Writes the port of rank 0's store to the file for which the other ranks wait."""
        write_whole(self._run_folder / "store", str(port))

    def collect_hang_evidence(self) -> None:
        """Begins to collect the evidence of a hang; `rank_events` returns it when it is complete."""
        pids = self._training_pids()
        gone_ranks: list[RankEvent] = [
            {"rank": r, "evidence": {**NO_EVIDENCE}} for r in self.ranks if r not in pids
        ]
        self._hang_evidence = chain(hang_evidence(self._run_folder, pids, self.tag), [gone_ranks])

    def abort_for_stacks(self, ranks: list[int]) -> None:
        """Begins to end those of these ranks that are on this node by a signal on which Python writes its stacks."""
        ranks_here = [rank for rank in ranks if rank in self.ranks]
        pids = {rank: pid for rank, pid in self._training_pids().items() if rank in ranks_here}
        logs = {
            rank: self._log_path(self.ranks.start if self._task.starts_ranks else rank) for rank in ranks_here
        }
        server_pid = self._fork_server.pid
        other_pids = self._pids_below(server_pid) - {server_pid}
        self._hang_evidence = fatal_stacks(self._run_folder, pids, logs, other_pids)

    def _training_pids(self) -> dict[int, int]:
        """Rank -> pid of its process; of a command that has started no ranks yet, that of the command."""
        if self._task.starts_ranks:
            self._find_workers()
            if self._worker_pids:
                return self._worker_pids
        return self._rank_pids()

    def kill(self) -> NodeAfterRun:
        """Kills every process of the current run on this node, and removes what they left behind."""
        if self._is_training:
            self._host_load.sample(is_last=True)
        health_facts = None
        if self._task.probe and self._health_reader.is_open:
            health_facts = to_facts(examine(self._first_reading, self._health_reader.read_again()))
            self._health_reader.close()
        complaint, self._has_killed = self._end_processes(), True
        if processes.state_of(self._fork_server.pid) in STOPPED_STATES:
            self._fork_server.replace()
        gauge = self._gpu_gauge
        return NodeAfterRun(
            complaint=complaint or gauge.unfreed_memory_text(self.disk.beat), sm_clocks_hz=tuple(gauge.clocks_hz),
            slowdowns=tuple(sorted(gauge.slowdowns)), foreign_processes=tuple(sorted(gauge.foreign_processes)),
            powers_w=gauge.powers_w, core_shares=self._host_load.core_shares, health=health_facts,
            compiler_locks=() if self._task.probe else tuple(self._compiler_locks()),
        )  # fmt: skip

    def _compiler_locks(self) -> list[str]:
        env = {**self._base_env, **self._program_env}
        return compiler_locks(with_variant_env(env, variables_of(self._task.spec.variant)))

    def _own_pids(self) -> set[int]:
        """The pids of this agent and its descendants; empty in a PID namespace, whose pids the driver does not know."""
        in_own_namespace = processes.pid_namespace() != processes.FIRST_PID_NAMESPACE
        return set() if in_own_namespace else {os.getpid(), *processes.descendants(os.getpid())}

    def _end_processes(self) -> str | None:
        """Kills all processes but the fork server; returns a message about processes that did not die."""
        survivors = processes.kill_until_gone(self._processes_of_run, on_round=self.disk.beat)
        return f"processes that cannot be killed: {processes.pids_text(survivors)}" if survivors else None

    def _processes_of_run(self) -> list[int]:
        """All descendants of this agent and all processes with its tag, except the fork server.

        The agent's own children are already killed by this call.
        """
        killed_pids = processes.kill_children({self._fork_server.pid})
        return sorted(self._pids_below(os.getpid()) - {self._fork_server.pid} or killed_pids)

    def finish(self, keep_all: bool) -> FileCleanup:
        """Keeps the logs of the run and removes its files; meanwhile the agent shows that it is alive.

        Args:
            keep_all: keep the logs of all ranks, as of a failed run.
        """
        self._report_sources, self._sent_progress, self._exits, self._hang_evidence = [], {}, {}, iter(())
        self._unread_logs = {}
        host, problem = self.identity.host, None
        self.remove_state()  # before the logs wait for space
        try:
            if too_large_names := self.disk.retry(partial(self._keep_logs, keep_all), LOGS_RETRY_S):
                limit_text = f"over the limit of {cleanup.MAX_TRACE_BYTES >> 20:,} MiB"
                problem = f"trace files on {host} were not kept: {', '.join(too_large_names)}, {limit_text}"
        except (ClusterError, OSError) as error:
            problem = f"cannot keep the logs of {host}: {error}"
        try:
            self.disk.retry(self._remove_files, CLEANING_S, subject=f"removing {self._run_folder} on {host}")
        except ClusterError as error:
            return FileCleanup(problem=str(error), is_stuck=True)
        return FileCleanup(problem=problem, space_shortage=self._space_shortage())

    def remove_state(self) -> None:
        """Removes the checkpoint and the shared memory of the current run, whose processes are gone.

        A disk that does not answer is not waited for here, but when `finish` removes all files.
        """
        if self._has_killed:
            with contextlib.suppress(ClusterError):
                self.disk.retry(self._remove_state, LOGS_RETRY_S)

    def _remove_state(self) -> None:
        if self._task.checkpoint and self.identity.node_index == 0:
            shutil.rmtree(self._task.checkpoint, ignore_errors=True)
        self._shared_memory_cleanup.remove()

    def _remove_files(self) -> None:
        shutil.rmtree(self._run_folder, ignore_errors=True)
        self._remove_state()

    def _keep_logs(self, keep_all: bool) -> list[str]:
        """Copies what is kept of a run; returns the names of files that are too large."""
        log_folder = self.folder.log_folder(self._task.key)
        if self._task.part_start:
            log_folder /= f"{PART_FOLDER}{self._task.part_start.gas}"
        if keep_all:
            cleanup.copy_logs(self._run_folder, log_folder, int(self._task.measure.log_mib_per_rank * 2**20))
        elif self.identity.node_index == 0 and not self._task.probe:
            cleanup.join_tails(self._run_folder, log_folder, self._processes)
        return cleanup.copy_trace(self._run_folder, log_folder) if self._task.traced else []

    def close(self) -> None:
        """Kills every process, the fork server too."""
        self._fork_server.stop()
        self._health_reader.close()
        self._end_processes()

    def remove_scratch(self) -> None:
        """Removes the node-local folder, after the end of the allocation was recorded."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._shared_memory_cleanup.remove()
