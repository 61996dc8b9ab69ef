"""Whether this cluster, or this machine, is usable: every check, each failure with its remedy."""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ultrabench import checkout
from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.doctor import node_checks, site_checks
from ultrabench.launchers.doctor.check import Check, CheckStatus, failed, passed, skipped
from ultrabench.launchers.doctor.checkup_folder import CheckupFolder, checkup_folder
from ultrabench.launchers.doctor.checkup_job import CheckupJob, Say, Seen
from ultrabench.launchers.open_sweep import require_local
from ultrabench.launchers.slurm.limits import read_limits
from ultrabench.launchers.slurm.script import require_plain
from ultrabench.launchers.slurm.site import Site
from ultrabench.sweep.config import SweepConfig

LOCAL_TIMEOUT_S = 240.0
NEEDED_BY_A_JOB = ("partition", "nodes", "results folder")


def examine(config: SweepConfig, site: Site, *, wait_s: float, say: Say) -> list[Check]:
    """All checks of the launcher that `config` names, in the order in which they depend on each other.

    Args:
        wait_s: seconds that the job on a node may take; with 0 none is submitted.

    Raises:
        ConfigError: a folder that no job script can name.
    """
    if config.launcher.name == "local":
        return _examine_here(config, say)
    for path in (Path(config.results_dir).absolute(), Path.cwd()):
        require_plain(path)
    say("asking Slurm's programs")
    checks = [site_checks.check_programs(site.ask)]
    if checks[-1].status is not CheckStatus.FAIL:
        checks.append(site_checks.check_controller(site.ask))
    if checks[-1].status is CheckStatus.FAIL:
        return [*checks, skipped("everything else", f"not looked at, because {checks[-1].name} failed")]
    try:
        checks += _examine_site(config, site, say)
    except ClusterError as error:
        return [*checks, site_checks.controller_failed(str(error))]
    with checkup_folder(config) as (folder, check):
        checks.append(check)
        bad = [c.name for c in checks if c.status is CheckStatus.FAIL and c.name in NEEDED_BY_A_JOB]
        if bad or not wait_s:
            why = f"{' and '.join(bad)} failed" if bad else "of --wait 0"
            return [*checks, skipped("job", f"none submitted, because {why}; nodes were not looked at")]
        job, seen = CheckupJob(folder, config, say).run(wait_s)
        return [*checks, job, *(_examine_node(config, folder, seen) if seen else [])]


def reachable(checks: Sequence[Check]) -> bool:
    """Whether Slurm could be asked at all."""
    return not any(c.status is CheckStatus.FAIL and c.name in ("programs", "slurmctld") for c in checks)


def why_not_slurm(site: Site) -> str | None:
    """Why there is no Slurm to be checked here; None when there is one."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch on PATH"
    check = site_checks.check_controller(site.ask)
    return None if check.status is CheckStatus.PASS else f"sbatch is here, but {check.told}"


def _examine_site(config: SweepConfig, site: Site, say: Say) -> list[Check]:
    """What Slurm says; only the partition's check when there is no such partition.

    Raises:
        ClusterError: slurmctld stopped answering.
    """
    choice = config.launcher
    try:
        limits = read_limits(site, choice.partition, choice.account, choice.qos)
    except ConfigError as error:
        told, _, remedy = str(error).partition("; ")
        return [failed("partition", told, remedy or "set launcher.partition=")]
    say(f"looking at partition {limits.name}")
    return [
        site_checks.check_partition(limits, site.partitions),
        site_checks.check_nodes(site.ask, limits, max(config.axes.nodes)),
        site_checks.check_gpus(config.hardware, choice, limits),
        site_checks.check_size(choice, limits),
        site_checks.check_limits(config, limits),
        site_checks.check_accounts(site, limits.name, choice.account, choice.qos),
        site_checks.check_accounting(site.ask, limits),
    ]


def _examine_node(config: SweepConfig, folder: CheckupFolder, seen: Seen) -> list[Check]:
    """What the job found on its node."""
    report, window = seen.report, config.launcher.window
    claim_seen, results = folder.node_claim_seen(), str(folder.results_dir)
    return [
        node_checks.check_folder(report, folder.token, claim_seen, results),
        node_checks.check_python(report, config.kernel.digest(), checkout.commit()),
        node_checks.check_torch(report, config, "torch on the node"),
        node_checks.check_devices(report, config.hardware, "GPUs on the node"),
        node_checks.check_room(report, config.hardware, "room on the node"),
        node_checks.check_clock(seen, window, time.strftime("%z")),
    ]


def _examine_here(config: SweepConfig, say: Say) -> list[Check]:
    """What this machine is for launcher=local."""
    checks = [_check_nodes_here(config)]
    with checkup_folder(config) as (folder, check):
        checks.append(check)
        if check.status is CheckStatus.FAIL:
            return [*checks, skipped("this machine", "not looked at, because the results folder failed")]
        say("looking at this machine")
        command = [sys.executable, "-P", "-m", "ultrabench.agent.checkup", str(folder.path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=LOCAL_TIMEOUT_S)
            report = folder.report()
        except (OSError, subprocess.SubprocessError) as error:
            last = (str(getattr(error, "stderr", None) or error).strip().splitlines() or ["no message"])[-1]
            return [
                *checks,
                failed("this machine", f"the agent does not start: {last}", "install ultrabench again"),
            ]
    assert report is not None
    return [
        *checks,
        node_checks.check_torch(report, config, "torch"),
        node_checks.check_devices(report, config.hardware, "GPUs"),
        node_checks.check_room(report, config.hardware, "room"),
    ]


def _check_nodes_here(config: SweepConfig) -> Check:
    most = max(config.axes.nodes)
    try:
        require_local(config)
    except ConfigError as error:
        told, _, remedy = str(error).partition("; ")
        return failed("nodes", told, remedy)
    kind = "simulated " if config.hardware.simulated else ""
    return passed("nodes", f"up to {most} {kind}nodes of hardware={config.hardware.name} on this machine")
