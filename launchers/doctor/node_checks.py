"""Checks on what ultrabench.agent.checkup reported of a node, or of this machine."""

import time
from typing import Any

import ultrabench
from ultrabench import checkout
from ultrabench.errors import counted
from ultrabench.launchers.doctor.check import FAIL, WARN, Check, CheckStatus, failed, first_problem, passed
from ultrabench.sweep.config.sweep_config import SweepConfig

GIB = 2**30
LITTLE_BYTES = GIB
"""Free space below which a folder gets a warning."""
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0

Report = dict[str, Any]
"""What the checkup found on its node, and what `CheckupFolder` and `CheckupJob` of this host added."""


def check_folder(report: Report, config: SweepConfig) -> Check:
    """Whether the node and this host share the results folder, and the claims in it."""
    host = report["host"]
    shared = f"put results_dir= on a file system that {host} shares"
    links = f"{shared} and that has hard links, such as NFS, Lustre or GPFS"
    lost = not report["won_own_claim"] or not report["own_claim_seen"]
    return first_problem(
        f"{report['results_dir']}, tried from {host}",
        (not report["same_folder"], FAIL, f"{shared}; on NFS, mount it without nocto and with lookupcache=positive",
         "it does not see what was written here"),
        (report["won_taken_claim"], FAIL, links, "a run claimed here was claimed there again"),
        (lost, FAIL, links, "its own claim of a run was lost"),
    )  # fmt: skip


def check_python(report: Report, config: SweepConfig) -> Check:
    """Whether the node has the ultrabench and the training program of this host."""
    digest, commit, version = config.kernel.digest(), checkout.commit(), ultrabench.__version__
    same = "install the same version for the nodes, or set launcher.python= to a Python that has it"
    theirs = report["ultrabench_version"], report["kernel_digest"], report["git_commit"]
    return first_problem(
        f"{report['python']} {report['python_version']}, ultrabench {theirs[0]} in {report['ultrabench_path']}, "
        f"kernel_digest {theirs[1]}",
        (report["kernel_error"], FAIL, same, str(report["kernel_error"])),
        (theirs[1] != digest, FAIL, same, f"here it is {digest}, ultrabench {version}"),
        (theirs[0] != version, WARN, same, f"here it is ultrabench {version}"),
        (theirs[2] != commit, WARN, same, f"commit {_short(theirs[2])} there, {_short(commit)} here"),
    )


def _short(commit: str | None) -> str:
    return commit[:12] if commit else "unknown"


def check_torch(report: Report, config: SweepConfig) -> Check:
    """Whether the training kernel's libraries start."""
    torch = report["torch"]
    if torch is None:
        told = f"the kernel does not start: {report['torch_error']}"
        remedy = "install torch in that Python, or load what it needs with launcher.setup="
        if config.kernel.kind == "command" and not config.launcher.preflight:
            return Check(status=WARN, told=told, remedy=f"kernel=command may do without; else {remedy}")
        return failed(told, f"{remedy}; kernel=command with launcher.preflight=false does without")
    parts = [f"CUDA {torch['cuda_version']}" if torch["cuda_version"] else "without CUDA"]
    parts += [
        f"{key} {v}" for key, v in (("NCCL", torch["nccl_version"]), ("driver", torch["driver_version"])) if v
    ]
    return passed(f"torch {torch['torch_version']} ({', '.join(parts)}) on {torch['gpu_name']}")


def check_devices(report: Report, config: SweepConfig) -> Check:
    """Whether the GPUs are those of `hardware=`, and nobody else is on them."""
    hardware, torch, driver = config.hardware, report["torch"] or {}, report["gpus"]
    seen, own, name = int(torch.get("gpus") or 0), hardware.gpus_per_node, torch.get("gpu_name")
    told = f"torch sees {seen}, the driver {driver}"
    if hardware.device != "cuda":
        return passed(f"hardware={hardware.name} needs none; {told}")
    cuda, known = torch.get("cuda_version"), " or ".join(hardware.reported_as)
    fits = "install the build that fits the driver"
    build = "" if cuda else ", a torch that is built with CUDA"
    none = f"there is no GPU: set a launcher.partition= or launcher.gres= that gives some{build}, or the hardware= "
    return first_problem(
        f"{told}; hardware={hardware.name} has {own} {hardware.gpu}; they are {name or 'unknown'}",
        (seen < own <= driver and not cuda, FAIL, f"this torch is built without CUDA: {fits}"),
        (seen < own <= driver, FAIL, f"torch does not see what the driver has: {fits}"),
        (0 < seen < own, FAIL, f"set hardware.gpus_per_node={seen}, or ask for more with launcher.gres="),
        (not seen, FAIL, f"{none}that is there (hardware=cpu needs none)"),
        (name not in hardware.reported_as, FAIL, f"name the hardware= that is there (this one says {known}), "
         "else results are invalid"),
        (report["foreign"], WARN, "have it ended, or keep launcher.exclusive=true", "; ".join(report["foreign"])),
        (seen > own, WARN, f"the others stay idle; use all: hardware.gpus_per_node={seen}"),
    )  # fmt: skip


def check_room(report: Report, config: SweepConfig) -> Check:
    """Whether there are cores for the ranks, and room for their logs in the temporary folder."""
    free, cores, ranks = report["temp_free_bytes"], report["cores"], config.hardware.gpus_per_node
    few = config.hardware.device == "cuda" and cores < ranks
    return first_problem(
        f"{cores} cores, NUMA nodes: {report['numa_nodes']}, {free / GIB:.1f} GiB free in {report['temp_folder']}",
        (free < LITTLE_BYTES, WARN,
         "ranks keep their logs there: name another folder with launcher.setup=['export TMPDIR=FOLDER']"),
        (few, WARN, "ranks share cores: ask for more with launcher.cpus=, or keep launcher.exclusive=true",
         counted(ranks, "rank")),
    )  # fmt: skip


def check_clock(report: Report, config: SweepConfig) -> Check:
    """Whether the node's clock agrees with this host's.

    The report names the time at its begin and end. By our clock the job began after `earliest_s` and its
    report was there before `latest_s`. No file's time stamp is looked at.
    """
    host, window, zone = report["host"], config.launcher.window, time.strftime("%z")
    behind_s = report["earliest_s"] - report["began_s"]
    ahead_s = report["ended_s"] - report["latest_s"]
    off_s, side = max((ahead_s, "ahead of"), (behind_s, "behind"))
    if off_s > CLOCK_WARN_S:
        status: CheckStatus = FAIL if off_s > CLOCK_FAIL_S else WARN
        remedy = "have the administrators mend the time service (chrony, ntpd) of nodes and login node"
        return Check(status=status, told=f"{host} is at least {off_s:.1f} s {side} this host", remedy=remedy)
    return first_problem(
        f"within the {report['latest_s'] - report['earliest_s']:.1f} s in which the job ran here",
        (window and report["utc_offset"] != zone, WARN,
         f"launcher.window={window} is read as local time: set TZ in launcher.setup=",
         f"{host} has the time zone {report['utc_offset']}, this host {zone}"),
    )  # fmt: skip
