"""Checks on what a checkup reported of a node, or of this machine."""

from typing import Any

import ultrabench
from ultrabench.errors import counted
from ultrabench.hardware import Hardware
from ultrabench.launchers.doctor.check import Check, failed, passed, warned
from ultrabench.launchers.doctor.checkup_job import Seen
from ultrabench.sweep.config import SweepConfig

GIB = 2**30
LITTLE_TEMP_BYTES = 2**30
"""Logs and scratch files of ranks are in the temporary folder."""
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0

Report = dict[str, Any]
"""What `ultrabench.agent.checkup` writes."""


def check_folder(report: Report, token: str, claim_seen: bool, results_dir: str) -> Check:
    """Whether the node and this host have the results folder, and its claims, in common."""
    name, shared = "folder on the node", f"put results_dir= on a file system that {report['host']} shares"
    if report["token"] != token:
        told = f"{report['host']} does not see what was written here to {results_dir}"
        return failed(name, told, f"{shared}; on NFS, mount it without nocto and with lookupcache=positive")
    if report["won_taken_claim"] or not report["won_own_claim"] or not claim_seen:
        how = (
            "a run claimed here was claimed there again"
            if report["won_taken_claim"]
            else "its own claim was lost"
        )
        told = f"claims do not work between {report['host']} and here: {how}"
        return failed(name, told, f"{shared} and that has hard links, such as NFS, Lustre or GPFS")
    return passed(name, f"{report['host']} sees {results_dir} and what was written here; claims work there")


def check_python(report: Report, kernel_digest: str, git_commit: str | None) -> Check:
    """Whether the node runs the same ultrabench, and would run the same training program.

    Args:
        kernel_digest: of the training program here.
        git_commit: of the sources here.
    """
    version = ultrabench.__version__
    name = "Python on the node"
    told = (
        f"{report['python']} {report['python_version']}, ultrabench {report['ultrabench_version']} in "
        f"{report['ultrabench_path']}, kernel_digest {report['kernel_digest']}"
    )
    same = "install the same version for the nodes, or set launcher.python= to a Python that has it"
    if report["kernel_error"]:
        return failed(name, f"{told} ({report['kernel_error']})", same)
    if report["kernel_digest"] != kernel_digest:
        return failed(name, f"{told}; here it is {kernel_digest}, ultrabench {version}", same)
    if report["ultrabench_version"] != version:
        return warned(name, f"{told}; here it is ultrabench {version}", same)
    if report["git_commit"] != git_commit:
        commits = f"commit {_short(report['git_commit'])} there, {_short(git_commit)} here"
        return warned(name, f"{told}; {commits}", same)
    return passed(name, f"{told}, as here")


def _short(commit: str | None) -> str:
    return commit[:12] if commit else "unknown"


def check_torch(report: Report, config: SweepConfig, name: str) -> Check:
    """Whether the training kernel's libraries start."""
    torch = report["torch"]
    if torch is None:
        told = f"the kernel does not start: {report['torch_error']}"
        remedy = "install torch in that Python, or load what it needs with launcher.setup="
        if config.kernel.kind == "command" and not config.launcher.preflight:
            return warned(name, told, f"kernel=command may do without; else {remedy}")
        return failed(name, told, f"{remedy}; kernel=command with launcher.preflight=false does without")
    cuda = f"CUDA {torch['cuda_version']}" if torch["cuda_version"] else "without CUDA"
    nccl = f", NCCL {torch['nccl_version']}" if torch["nccl_version"] else ""
    driver = f", driver {torch['driver_version']}" if torch["driver_version"] else ""
    return passed(name, f"torch {torch['torch_version']} ({cuda}{nccl}{driver}) on {torch['gpu_name']}")


def check_devices(report: Report, hardware: Hardware, name: str) -> Check:
    """Whether the GPUs are as the hardware says, and nobody else is on them."""
    torch = report["torch"] or {}
    seen, driver = int(torch.get("gpus") or 0), report["gpus"]
    told = f"torch sees {seen}, the driver {driver}"
    if hardware.device != "cuda":
        return passed(name, f"hardware={hardware.name} needs none; {told}")
    told += f"; hardware={hardware.name} has {hardware.gpus_per_node} {hardware.gpu}"
    if seen < hardware.gpus_per_node:
        return failed(name, told, _fewer(seen, driver, hardware, torch))
    if torch.get("gpu_name") not in hardware.reported_as:
        known = " or ".join(hardware.reported_as)
        remedy = f"results would be invalid: name the hardware= that is there (this one says {known})"
        return failed(name, f"{told}; they are {torch.get('gpu_name')}", remedy)
    if report["foreign"]:
        remedy = "have it ended, or keep launcher.exclusive=true"
        return warned(name, f"{told}; {'; '.join(report['foreign'])}", remedy)
    if seen > hardware.gpus_per_node:
        return warned(name, told, f"the others stay idle; use all: hardware.gpus_per_node={seen}")
    return passed(name, f"{told}; they are {torch['gpu_name']}, nobody else is on them")


def _fewer(seen: int, driver: int, hardware: Hardware, torch: dict[str, Any]) -> str:
    """What to do where torch sees too few GPUs."""
    if driver >= hardware.gpus_per_node and not torch.get("cuda_version"):
        return "this torch is built without CUDA: install the build that fits the driver"
    if driver >= hardware.gpus_per_node:
        return "torch does not see what the driver has: install the build of torch that fits the driver"
    if seen:
        return f"set hardware.gpus_per_node={seen}, or ask for more with launcher.gres="
    build = "" if torch.get("cuda_version") else ", a torch that is built with CUDA"
    return (
        f"there is no GPU: set a launcher.partition= or launcher.gres= that gives some{build}, or the hardware= "
        "that is there (hardware=cpu needs none)"
    )


def check_room(report: Report, hardware: Hardware, name: str) -> Check:
    """Whether there are cores for the ranks, and room for their files."""
    free = report["temp_free_bytes"]
    told = (
        f"{report['cores']} cores, NUMA nodes: {report['numa_nodes']}, {free / GIB:.1f} GiB free in "
        f"{report['temp_folder']}"
    )
    if free < LITTLE_TEMP_BYTES:
        remedy = (
            "ranks keep their logs there: name another folder with launcher.setup=['export TMPDIR=FOLDER']"
        )
        return warned(name, told, remedy)
    if hardware.device == "cuda" and report["cores"] < hardware.gpus_per_node:
        remedy = "ranks share cores: ask for more with launcher.cpus=, or keep launcher.exclusive=true"
        return warned(name, f"{told}, {counted(hardware.gpus_per_node, 'rank')}", remedy)
    return passed(name, told)


def check_clock(seen: Seen, window: str | None, utc_offset: str) -> Check:
    """Whether the node's clock agrees with this host's.

    The report names the time at its begin and end; the job surely began after `earliest_s` and the
    report was surely there before `latest_s`, both by our clock. No file's time stamp is looked at.
    """
    report, name = seen.report, "clock of the node"
    behind_s = seen.earliest_s - report["began_s"]
    ahead_s = report["ended_s"] - seen.latest_s
    off_s, side = max((ahead_s, "ahead of"), (behind_s, "behind"))
    told = f"within the {seen.latest_s - seen.earliest_s:.1f} s in which the job ran here"
    remedy = "have the administrators mend the time service (chrony, ntpd) of nodes and login node"
    if off_s > CLOCK_WARN_S:
        told = f"{report['host']} is at least {off_s:.1f} s {side} this host"
        return (failed if off_s > CLOCK_FAIL_S else warned)(name, told, remedy)
    if window and report["utc_offset"] != utc_offset:
        told += f"; {report['host']} has the time zone {report['utc_offset']}, this host {utc_offset}"
        remedy = f"launcher.window={window} is read as local time: set TZ in launcher.setup="
        return warned(name, told, remedy)
    return passed(name, told)
