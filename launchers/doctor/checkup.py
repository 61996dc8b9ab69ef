"""Examines a node for `ultrabench doctor`: a shared folder, a job on the node, and checks of its report."""

import contextlib
import functools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench import checkout
from ultrabench.column import BYTES
from ultrabench.errors import ClusterError, ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.doctor.check import (
    FAIL,
    WARN,
    Check,
    failure,
    first_problem,
    success,
    unknown_check,
    warning,
)
from ultrabench.launchers.launcher import NotTakenError, Say
from ultrabench.launchers.slurm.job import SlurmJob, find_job
from ultrabench.launchers.slurm.launcher import SlurmLauncher
from ultrabench.launchers.slurm.query import CommandError, NoAnswerError, ask
from ultrabench.launchers.slurm.states import pending_remedy
from ultrabench.node_health import CHECKS, MIN_FREE_GIB, Health, findings_of, places_text
from ultrabench.processes import own_name
from ultrabench.record import to_dict
from ultrabench.store.allocation import JOB_LOG, Allocation
from ultrabench.store.claim import claim, claim_content
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.jobs_seen import Job
from ultrabench.store.state import AllocationState
from ultrabench.sweep.config.sweep_config import SweepConfig

MIN_FREE_BYTES = MIN_FREE_GIB * GIB
"""Free space, in bytes, below which the results folder gets a warning."""
CLOCK_WARN_S = 1.0
"""Seconds by which the clock of a node may be off without a warning."""
CLOCK_FAIL_S = 30.0
"""Seconds by which the clock of a node may be off without a failure."""
MEMORY_TOLERANCE = 0.005
"""Relative difference of a GPU's memory from the file of its hardware without a warning; drivers differ by 0.3 %."""

Report = dict[str, Any]
"""The facts that the checkup found on its node, and those that this host added."""


def check_folder(report: Report, config: SweepConfig) -> Check:
    """Checks that the node and this host share the results folder, and that claims in it work."""
    node_name = report["host"]
    shared_remedy = f"put results_dir= on a file system that {node_name} shares"
    links_remedy = f"{shared_remedy} and that has hard links, such as NFS, Lustre or GPFS"
    is_claim_lost = not report["won_own_claim"] or not report["own_claim_seen"]
    return first_problem(
        f"{report['results_dir']}, tried from {node_name}",
        (not report["same_folder"], FAIL, f"{shared_remedy}; on NFS, mount it without nocto and with "
        "lookupcache=positive",
         "it does not see files written here"),
        (report["won_taken_claim"], FAIL, links_remedy, "it could claim a run that was already claimed here"),
        (is_claim_lost, FAIL, links_remedy, "its own claim of a run was lost"),
    )  # fmt: skip


def check_python(report: Report, config: SweepConfig) -> Check:
    """Checks that the node has the same ultrabench and the same training program as this host."""
    host_digest, node_digest = config.kernel.digest(), report["kernel_digest"]
    host_commit, node_commit = checkout.commit_sha(), report["git_commit"]
    host_version, node_version = ultrabench.__version__, report["ultrabench_version"]
    remedy = "install the same version on the nodes, or set launcher.python= to a Python that has it"
    return first_problem(
        f"{report['python']} {report['python_version']}, ultrabench {node_version} in {report['ultrabench_path']}, "
        f"kernel_digest {node_digest}",
        (report["kernel_error"], FAIL, remedy, str(report["kernel_error"])),
        (node_digest != host_digest, FAIL, remedy, f"here it is {host_digest}, ultrabench {host_version}"),
        (node_version != host_version, WARN, remedy, f"here it is ultrabench {host_version}"),
        (node_commit != host_commit, WARN, remedy,
         f"commit {_short_commit(node_commit)} there, {_short_commit(host_commit)} here"),
    )  # fmt: skip


def _short_commit(commit: str | None) -> str:
    return commit[:12] if commit else "unknown"


def check_torch(report: Report, config: SweepConfig) -> Check:
    """Checks that torch and the libraries of the training kernel can be loaded on the node."""
    torch_facts = report["torch"]
    if torch_facts is None:
        remedy = "install torch in that Python, or load its libraries with launcher.setup="
        error = f"the kernel does not start: {report['torch_error']}"
        if not config.kernel.forks and not config.launcher.preflight:
            return warning(error, f"kernel=command may not need it; otherwise {remedy}")
        return failure(error, f"{remedy}; kernel=command with launcher.preflight=false does not need it")
    key_by_label = {"CUDA": "cuda_version", "NCCL": "nccl_version", "driver": "driver_version"}
    libs = [] if torch_facts["cuda_version"] else ["without CUDA"]
    libs += [f"{label} {torch_facts[key]}" for label, key in key_by_label.items() if torch_facts[key]]
    return success(f"torch {torch_facts['torch_version']} ({', '.join(libs)}) on {torch_facts['gpu_name']}")


def check_devices(report: Report, config: SweepConfig) -> Check:
    """Checks that the GPUs are those of `hardware=`, and that no other processes use them."""
    hardware, torch_facts, num_driver_gpus = config.hardware, report["torch"] or {}, report["gpus"]
    num_visible_gpus, num_needed_gpus = int(torch_facts.get("gpus") or 0), hardware.gpus_per_node
    gpu_name, cuda_version = torch_facts.get("gpu_name"), torch_facts.get("cuda_version")
    finding = f"torch sees {num_visible_gpus}, the driver {num_driver_gpus}"
    if not hardware.has_gpus:
        return success(f"hardware={hardware.name} needs no GPU; {finding}")
    mem_bytes = int(torch_facts.get("gpu_mem_bytes") or hardware.mem_bytes)  # older reports have none
    expected_names = " or ".join(hardware.reported_as)
    build_remedy = "install the build that matches the driver"
    cuda_hint = "" if cuda_version else ", install a torch built with CUDA"
    no_gpu_remedy = f"no GPU found: set a launcher.partition= or launcher.gres= with GPUs{cuda_hint}"
    return first_problem(
        f"{finding}; hardware={hardware.name} has {num_needed_gpus} {hardware.gpu}; they are {gpu_name or 'unknown'}",
        (num_visible_gpus < num_needed_gpus <= num_driver_gpus and not cuda_version, FAIL,
            f"this torch is built without CUDA: {build_remedy}"),
        (num_visible_gpus < num_needed_gpus <= num_driver_gpus, FAIL,
            f"torch does not see the GPUs of the driver: {build_remedy}"),
        (0 < num_visible_gpus < num_needed_gpus, FAIL, f"set hardware.gpus_per_node={num_visible_gpus}, "
        "or ask for more with launcher.gres="),
        (not num_visible_gpus, FAIL, f"{no_gpu_remedy}, or the hardware= of this node (hardware=cpu needs no GPU)"),
        (gpu_name not in hardware.reported_as, FAIL, "set the hardware= of this node (this one expects "
        f"{expected_names}), "
         "otherwise results are invalid"),
        (report["foreign"], WARN, "have these processes ended, or keep launcher.exclusive=true",
            "; ".join(report["foreign"])),
        (num_visible_gpus > num_needed_gpus, WARN, "the other GPUs stay idle; to use all: "
        f"hardware.gpus_per_node={num_visible_gpus}"),
        (abs(mem_bytes / hardware.mem_bytes - 1) > MEMORY_TOLERANCE, WARN,
         f"for predictions with the real memory, set hardware.mem_bytes={mem_bytes}",
         f"torch reports {BYTES.exact_text(mem_bytes)} a GPU, hardware={hardware.name} has "
         f"{BYTES.exact_text(hardware.mem_bytes)}"),
    )  # fmt: skip


def check_cpus(report: Report, config: SweepConfig) -> Check:
    """Checks that the node has cores for the ranks."""
    num_cores, num_ranks = report["cores"], config.hardware.gpus_per_node
    has_few_cores = config.hardware.has_gpus and num_cores < num_ranks
    return first_problem(
        f"{num_cores} cores, NUMA nodes: {report['numa_nodes']}",
        (has_few_cores, WARN, "ranks share cores: ask for more with launcher.cpus=, or keep launcher.exclusive=true",
         counted(num_ranks, "rank")),
    )  # fmt: skip


def check_health(check_name: str, report: Report, config: SweepConfig) -> Check:
    """One check of the table of `node_health`, for which the node took two readings."""
    limit_text, remedy = f"limit: {CHECKS[check_name].limit_text}", CHECKS[check_name].remedy
    health_finding = findings_of(report.get("health", {}))[check_name]
    if health_finding.health is Health.UNKNOWN:
        return unknown_check(f"this node cannot report it; {limit_text}")
    places_and_limit = "; ".join(filter(None, (places_text(check_name, health_finding), limit_text)))
    if health_finding.health is Health.OK:
        return success(places_and_limit)
    return (failure if health_finding.health is Health.FAIL else warning)(places_and_limit, remedy)


def check_clock(report: Report, config: SweepConfig) -> Check:
    """Checks that the clock of the node agrees with the clock of this host.

    The report contains the times of its begin and end by the clock of the node. By the clock of this host the
    job began after `earliest_s`, and its report existed before `latest_s`. No time stamps of files are used.
    """
    node_name = report["host"]
    behind_s = report["earliest_s"] - report["began_s"]
    ahead_s = report["ended_s"] - report["latest_s"]
    clock_error_s, direction = max((ahead_s, "ahead of"), (behind_s, "behind"))
    clock_finding = f"agrees within the {report['latest_s'] - report['earliest_s']:.1f} s of the job"
    if clock_error_s > CLOCK_WARN_S:
        clock_finding = f"{node_name} is at least {clock_error_s:.1f} s {direction} this host"
    remedy = "ask the administrators to fix the time service (chrony, ntpd) of nodes and login node"
    return first_problem(
        clock_finding,
        (clock_error_s > CLOCK_FAIL_S, FAIL, remedy),
        (clock_error_s > CLOCK_WARN_S, WARN, remedy),
    )


JOB_LIMIT_S = 600.0
"""Time limit of the job, in seconds; the first import of torch on a node may take minutes."""
FIND_S = 10.0
"""Seconds to look for the job in squeue if sbatch did not name it."""
REPORT_POLL_S = 0.3
"""Seconds between two looks for the report of the job."""
POLL_S = 3.0
"""Seconds between two calls of squeue."""
END_PATIENCE_S = 10.0
"""Seconds to wait for the end of a job after its report has arrived."""

_UNREACHABLE = "slurmctld is slow or unreachable: try again"
_SBATCH_REMEDIES = {
    "timed out|contact": _UNREACHABLE,
    "account": "set launcher.account=",
    "qos": "set launcher.qos=",
    "reservation": "set +launcher.sbatch.reservation=",
    "feature": "set +launcher.sbatch.constraint=",
    "memory": "set launcher.mem=",
    "partition": "set launcher.partition=",
    "node configuration|gres|processors": "set hardware.gpus_per_node=, launcher.gres= or launcher.cpus=",
    "": "fix the launcher.* option that it names, or +launcher.sbatch.*",
}
"""Pattern in the error of sbatch -> the remedy; the first pattern that matches counts."""

_LOG_REMEDIES = {
    r"No module named .?ultrabench":
        "the nodes need the same ultrabench: set launcher.python= to a Python that has it, "
        "or load it with launcher.setup=",
    r"No such file|not found|execve|Permission denied":
        "a program is missing on the nodes: set launcher.python=, launcher.setup= or launcher.srun=",
    "": "check launcher.setup=, launcher.srun= and launcher.python=, which decide what runs there",
}  # fmt: skip
"""Pattern in the log of a job without a report -> the remedy; the first pattern that matches counts."""


class CheckupFolder:
    """The folder RESULTS_DIR/.doctor-XXXXXXXX; no sweep has such a name, which begins with a dot."""

    def __init__(self, config: SweepConfig) -> None:
        self.config, self.token = config, uuid.uuid4().hex
        self.results_dir = Path(config.results_dir).absolute()
        self.path = self.results_dir / f".doctor-{self.token[:8]}"
        self.is_kept = False
        """Whether the folder is kept because it shows what went wrong."""

    def report(self) -> Report | None:
        """The facts that the checkup found on its node; None until its report has arrived."""
        # NFS may remember for a while that a file does not exist, but a listing of the folder is fresh.
        if "report.json" not in os.listdir(self.path):
            return None
        report: Report = json.loads((self.path / "report.json").read_text())
        own_claim_seen = claim_content(self.path / "claims", "node") is not None
        folder_facts = {"results_dir": self.results_dir, "same_folder": report.get("token") == self.token}
        return report | folder_facts | {"own_claim_seen": own_claim_seen, "latest_s": time.time()}

    def check_writable(self) -> Check:
        """Makes the folder; checks that it can be written, and that a claim in it succeeds only once."""
        claims_folder = self.path / "claims"
        request = {"token": self.token, "kernel": to_dict(self.config.kernel), "work_dir": os.getcwd()}
        try:
            claims_folder.mkdir(parents=True)
            write_whole(self.path / "request.json", json.dumps(request))
            claim_successes = [claim(claims_folder, "login", {"host": "here"}) for _ in range(2)]
            free_bytes = shutil.disk_usage(self.path).free
        except OSError as error:
            remedy = "choose a folder that all nodes share with results_dir=FOLDER"
            return failure(f"cannot write {self.results_dir}: {error.strerror}", remedy)
        return first_problem(
            f"{self.results_dir}: writable, {BYTES.text(free_bytes)} free",
            (claim_successes != [True, False], FAIL,
             "put results_dir= on a file system with hard links, such as NFS, Lustre or ext4",
             f"of two claims of one run {sum(claim_successes)} succeeded, so link(2) does not work"),
            (free_bytes < MIN_FREE_BYTES, WARN, "free some space, or choose another with results_dir=FOLDER"),
        )  # fmt: skip


@contextlib.contextmanager
def checkup_folder(config: SweepConfig) -> Iterator[tuple[CheckupFolder, Check]]:
    """The folder and its check; at the end the folder, and parents that were made for it, are removed."""
    folder = CheckupFolder(config)
    absent_folders = [path for path in (folder.results_dir, *folder.results_dir.parents) if not path.exists()]
    try:
        yield folder, folder.check_writable()
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                for parent in absent_folders:
                    parent.rmdir()


class CheckupJob:
    """The job that examines one node, from its submission to its end."""

    def __init__(self, folder: CheckupFolder, say: Say) -> None:
        config, settings = folder.config, folder.config.launcher.slurm
        comment = f"ultrabench doctor of {own_name()}: examines one node, ends by itself"
        sbatch = {"comment": comment} | settings.sbatch
        settings = replace(settings, sbatch=sbatch, poll_s=min(POLL_S, settings.poll_s))
        launcher_config = replace(config.launcher, slurm=settings)
        self.launcher = SlurmLauncher(replace(config, launcher=launcher_config), SweepFolder(folder.path))
        self.launcher.module = ("ultrabench.agent.checkup", str(folder.path))
        self.allocation = Allocation(
            name="checkup.0", sweep_dir=str(folder.path), work_dir=os.getcwd(), nodes=1,
            gpus_per_node=config.hardware.gpus_per_node, simulated=config.hardware.simulated, threads=None,
            heartbeat_s=launcher_config.heartbeat_s, limit_s=JOB_LIMIT_S, kernel_digest="", tasks=(),
        )  # fmt: skip
        self._folder, self._log = folder, self.allocation.folder / JOB_LOG
        self._say, self._say_once = say, functools.cache(say)
        self._state = AllocationState(name=self.allocation.name)
        self._job = SlurmJob(job_id="", name="", state="PENDING")
        """The job as squeue last listed it."""
        self._earliest_start_s = time.time()
        """Unix time in seconds, by the clock of this host, before which the job has certainly not begun."""

    def run(self, wait_s: float) -> tuple[Check, Report | None]:
        """Submits the job and waits for its report; it is cancelled after `wait_s` seconds or on Ctrl-C."""
        self.allocation.folder.mkdir(parents=True)
        try:
            self._state.job = self._submit()
            self._job = replace(self._job, job_id=self._state.job["job_id"])
            self._say(f"submitted job {self._job.array_id} of one node; waiting for up to {wait_s:.0f} s")
            return self._watch(wait_s)
        except NotTakenError as refusal:
            is_timeout = isinstance(refusal.__cause__, NoAnswerError)
            remedy = _UNREACHABLE if is_timeout else _first_remedy(_SBATCH_REMEDIES, refusal.complaint)
            return failure(f"{refusal.complaint}; {refusal.waits_for}", remedy), None
        except (ClusterError, ConfigError) as error:
            if self._state.job is not None:
                raise
            return failure(error.fact, _first_remedy(_SBATCH_REMEDIES, error.fact)), None
        finally:
            if not self._job.is_over:
                self._cancel()

    def _submit(self) -> Job:
        """Submits the job; returns it as soon as Slurm shows it, even if sbatch did not name it.

        Raises:
            NotTakenError: Slurm takes no such job now, or none appears.
            ConfigError: Slurm refuses the job.
        """
        name = self._state.name
        try:
            return self.launcher.submit([self.allocation], (), self._say)[name]
        except NotTakenError as refusal:
            deadline_s = time.monotonic() + FIND_S
            while refusal.may_exist and time.monotonic() < deadline_s:
                if job := self.launcher.observe({name: self._state}).jobs.get(name):
                    return job
                time.sleep(REPORT_POLL_S)
            raise

    def _cancel(self) -> None:
        """Cancels the job by its name, since its number is unknown if the answer of sbatch was lost."""
        try:
            self.launcher.cancel({self._state.name: self._state})
        except ClusterError as error:
            self._say(f"job {self._job.array_id} could not be cancelled: {error}")

    def _watch(self, wait_s: float) -> tuple[Check, Report | None]:
        """Waits for the report and then for the end of the job; without a report for up to `wait_s` seconds."""
        watch_start_s, allocation_name = time.monotonic(), self._state.name
        report, report_arrival_s = None, 0.0
        while True:
            jobs_seen = self.launcher.observe({allocation_name: self._state})
            self._update_job()
            is_over, elapsed_s = self._job.is_over, time.monotonic() - watch_start_s
            if report is None:
                report, report_arrival_s = self._folder.report(), elapsed_s
            # The folder is removed afterwards, so no process of the job may be left.
            is_gone = is_over or allocation_name not in jobs_seen.alive
            if report is not None and (is_gone or elapsed_s > report_arrival_s + END_PATIENCE_S):
                finding = f"job {self._job.array_id} ran on {report['host']}"
                report["earliest_s"] = self._earliest_start_s
                return success(f"{finding}; its report arrived after {report_arrival_s:.0f} s"), report
            if report is None and (ended_job := jobs_seen.ended_jobs.get(allocation_name)):
                return self._check_without_report(ended_job.reason), None
            if report is None and not is_over and elapsed_s > wait_s:
                return self._timeout_check(wait_s), None
            time.sleep(REPORT_POLL_S)

    def _update_job(self) -> None:
        """Takes the state of the job from the answer of squeue, and tells the user about changes."""
        answer = self.launcher.query.jobs("")
        job = None if answer.error else find_job(answer.jobs, self._job.job_id)
        if job is None:
            return
        self._job = job
        if job.is_waiting:
            self._earliest_start_s = max(self._earliest_start_s, time.time() - answer.age_s)
        remedy = pending_remedy(job.reason) if job.is_waiting else None
        self._say_once(": ".join(filter(None, (job.description, remedy))))

    def _timeout_check(self, wait_s: float) -> Check:
        finding = f"{self._job.description}; not finished after {wait_s:.0f} s, cancelled"
        if self._job.is_waiting:
            wait_remedy = f"the cluster is busy: wait longer with --wait {max(3600, 3 * wait_s):.0f}"
            return failure(finding, pending_remedy(self._job.reason) or wait_remedy)
        self._folder.is_kept = True
        slow_remedy = f"if the node is only slow, use --wait {max(JOB_LIMIT_S, 3 * wait_s):.0f}"
        return failure(finding, f"see {self._log}; {slow_remedy}")

    def _check_without_report(self, reason: str) -> Check:
        """The failed check for a job that ended without a report; its folder is kept as evidence."""
        self._folder.is_kept = True
        exit_code = self._exit_code()
        finding = f"{reason}{self._job.nodes_suffix}; exit code {exit_code}, no report"
        share_remedy = (
            f"{self._folder.results_dir} is not shared by all nodes: choose a shared one with "
            "results_dir=FOLDER"
        )
        try:
            log_text = self._log.read_text(errors="replace")
        except OSError:
            return failure(f"{finding}; it wrote no {self._log}", share_remedy)
        lines = [line.strip()[:200] for line in log_text.splitlines() if line.strip()]
        # The last lines of srun only say that it has ended the remaining processes.
        log_tail = [line for line in lines if not line.startswith("srun:")][-2:] or lines[-2:]
        finding += f"; its log ends: {' | '.join(log_tail)}" if log_tail else "; its log is empty"
        if exit_code == "73:0":  # agent/checkup.py exits with 73 where it cannot write its report
            return failure(finding, share_remedy)
        return failure(finding, f"{_first_remedy(_LOG_REMEDIES, log_text)}; see {self._log}")

    def _exit_code(self) -> str:
        with contextlib.suppress(CommandError):
            job_facts = ask("scontrol", "--oneliner", "show", "job", self._job.job_id)
            if exit_code_match := re.search(r"\bExitCode=(\d+:\d+)", job_facts):
                return exit_code_match[1]
        return "unknown"


def _first_remedy(remedies: dict[str, str], text: str) -> str:
    """The remedy of the first pattern that occurs in `text`."""
    return next(remedy for pattern, remedy in remedies.items() if re.search(pattern, text, re.IGNORECASE))
