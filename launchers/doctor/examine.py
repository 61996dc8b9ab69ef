"""Checks whether this cluster or this machine can run sweeps; every failed check names a remedy."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.doctor import checkup, site_checks
from ultrabench.launchers.doctor.check import Check, CheckStatus, failure, skip, success, warning
from ultrabench.launchers.doctor.checkup import CheckupJob, checkup_folder
from ultrabench.launchers.launcher import Say
from ultrabench.launchers.required_programs import require_local
from ultrabench.launchers.slurm.script import require_plain
from ultrabench.launchers.slurm.site import REACH_SLURMCTLD, Site
from ultrabench.node_health import CHECKS
from ultrabench.processes import run_python
from ultrabench.sweep.config.sweep_config import SweepConfig

LOCAL_TIMEOUT_S = 240.0
"""Seconds for the look at this machine, which imports torch."""
Table = dict[str, Callable[..., Check]]
"""Name of a check in the output -> the function of the check."""
ACCESS_CHECKS: Table = {"programs": site_checks.check_programs, "slurmctld": site_checks.check_controller}
"""Checks whether Slurm answers; all other checks of Slurm need them."""
SITE_CHECKS: Table = {
    "partition": site_checks.check_partition,
    "nodes": site_checks.check_nodes,
    "GPUs": site_checks.check_gpus,
    "node size": site_checks.check_size,
    "limits": site_checks.check_limits,
    "account": site_checks.check_account,
    "accounting": site_checks.check_accounting,
}
"""Checks of the answers of Slurm, in order."""
NODE_CHECK_NAMES = ("nodes", "GPUs", "node size")
"""The checks of SITE_CHECKS that need the answers of sinfo."""
HOST_CHECKS: Table = {"torch": checkup.check_torch, "GPUs": checkup.check_devices, "room": checkup.check_cpus}
HOST_CHECKS |= {name: partial(checkup.check_health, name) for name in CHECKS}
"""Checks of this machine for launcher=local."""
REPORT_CHECKS: Table = {
    "folder on the node": checkup.check_folder,
    "Python on the node": checkup.check_python,
    **{f"{name} on the node": check for name, check in HOST_CHECKS.items()},
    "clock of the node": checkup.check_clock,
}
"""Checks of the report that the job wrote on its node."""


def examine(config: SweepConfig, site: Site, *, wait_s: float, say: Say) -> list[Check]:
    """All checks of the launcher that `config` names, in the order in which they depend on each other.

    Args:
        wait_s: seconds that the job on a node may take; with 0 no job is submitted.

    Raises:
        ConfigError: a job script cannot name the folder.
    """
    if not config.launcher.holds_nodes:
        return _examine_here(config, say)
    require_plain(Path(config.results_dir).absolute(), Path.cwd())
    say("querying Slurm")
    checks = list[Check]()
    for name, check in ACCESS_CHECKS.items():
        checks.append(check(site).named(name))
        if checks[-1].status is CheckStatus.FAIL:
            return [*checks, skip("everything else", f"not checked because {name} failed")]
    try:
        checks += _examine_site(config, site, say)
    except ClusterError as error:
        return [*checks, failure(str(error), REACH_SLURMCTLD).named("slurmctld")]
    with checkup_folder(config) as (folder, folder_check):
        checks.append(folder_check.named("results folder"))
        blockers = [name for name in failed_names(checks) if name in ("partition", "nodes", "results folder")]
        if blockers or not wait_s:
            reason = f"{' and '.join(blockers)} failed" if blockers else "of --wait 0"
            return [*checks, skip("job", f"none submitted because {reason}; nodes were not examined")]
        job_check, report = CheckupJob(folder, say).run(wait_s)
        return [*checks, job_check.named("job"), *(_run_all(REPORT_CHECKS, report, config) if report else [])]


def failed_names(checks: Sequence[Check]) -> list[str]:
    """The names of the checks that failed."""
    return [check.name for check in checks if check.status is CheckStatus.FAIL]


def why_not_slurm(site: Site) -> Check | None:
    """Why no Slurm can be checked on this host: a warning if it has sbatch, else a skipped check; None if one can."""
    if shutil.which("sbatch") is None:
        return skip("slurmctld", "there is no sbatch on PATH")
    check = site_checks.check_controller(site)
    if check.status is CheckStatus.PASS:
        return None
    remedy = "to check a cluster, add launcher=slurm"
    return warning(f"sbatch is here, but {check.finding}", remedy).named("slurmctld")


def _examine_site(config: SweepConfig, site: Site, say: Say) -> list[Check]:
    """The checks of the answers of Slurm; only the check of the partition if there is no such partition.

    Raises:
        ClusterError: slurmctld no longer answers.
    """
    settings = config.launcher.slurm
    try:
        limits = site.limits(settings.partition, settings.account, settings.qos)
    except ConfigError as error:
        return [failure(error.fact, error.remedy or "set launcher.partition=").named("partition")]
    say(f"checking partition {limits.name}")
    unlisted = NODE_CHECK_NAMES if limits.up_nodes is None else ()
    return _run_all(SITE_CHECKS | dict.fromkeys(unlisted, site_checks.nodes_unknown), config, site, limits)


def _run_all(table: Table, *arguments: object) -> list[Check]:
    """The results of the checks of a table, which are all called with the same arguments."""
    return [check(*arguments).named(name) for name, check in table.items()]


def _examine_here(config: SweepConfig, say: Say) -> list[Check]:
    """The checks of this machine, for launcher=local."""
    checks = [_check_nodes_here(config).named("nodes")]
    with checkup_folder(config) as (folder, folder_check):
        checks.append(folder_check.named("results folder"))
        if folder_check.status is CheckStatus.FAIL:
            return [*checks, skip("this machine", "not checked because the results folder failed")]
        say("checking this machine")
        try:
            run_python("-m", "ultrabench.agent.checkup", str(folder.path), timeout_s=LOCAL_TIMEOUT_S)
        except ClusterError as error:
            agent_check = failure(f"the agent does not start: {error}", "reinstall ultrabench")
            return [*checks, agent_check.named("this machine")]
        report = folder.report()
    assert report is not None
    return [*checks, *_run_all(HOST_CHECKS, report, config)]


def _check_nodes_here(config: SweepConfig) -> Check:
    try:
        require_local(config)
    except ConfigError as error:
        return failure(error.fact, error.remedy)
    kind_text = "simulated " if config.hardware.simulated else ""
    return success(f"up to {max(config.axes.nodes)} {kind_text}nodes of hardware={config.hardware.name} here")
