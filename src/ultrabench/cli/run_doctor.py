"""Runs the checks of `ultrabench doctor`, prints them, and writes the configuration of a cluster."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from ultrabench.cli.tables import output_console, print_json, say, table
from ultrabench.errors import ClusterError, ConfigError
from ultrabench.hardware import USUAL_DEVICE
from ultrabench.launchers.doctor.check import Check, CheckStatus, skip
from ultrabench.launchers.doctor.cluster_file import write_cluster_file
from ultrabench.launchers.doctor.examine import ACCESS_CHECKS, examine, failed_names, why_not_slurm
from ultrabench.launchers.doctor.verify import verify_devices
from ultrabench.launchers.slurm.site import Site
from ultrabench.record import to_dict
from ultrabench.sweep.config.compose import parts_of
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig

STYLES = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim", "unknown": "dim"}
"""Status of a check -> style in which it is printed."""


def run_doctor(
    overrides: list[str], cluster: str | None, partition: str | None, force: bool, wait_s: float, deep: bool
) -> tuple[SweepConfig, list[Check]]:
    """Runs the checks of the configuration that `overrides` describe; returns it and the checks in order.

    Args:
        cluster: name of the cluster configuration to write and then check; None writes nothing.
        partition: the partition of that configuration; None means launcher.partition, else the default one.
        force: whether an existing configuration of this name is overwritten.
        wait_s: seconds that the job on a node may take; with 0 no job is submitted.
        deep: whether an acceptance run follows.

    Raises:
        ConfigError: --deep is given with a sweep, or --partition without --write. `examine` and
            `run_acceptance` raise it, too.
    """
    if deep and (sweep_name := parts_of(overrides).get("sweep")):
        raise ConfigError(f"--deep runs its own sweep (acceptance); leave out sweep={sweep_name}")
    if partition and cluster is None:
        remedy = f"add it, or set launcher.partition={partition}"
        raise ConfigError(f"--partition {partition} needs --write", remedy)
    site = Site()
    # The configuration that --write makes does not exist yet, so it cannot be named in an override.
    usable_overrides = [override for override in overrides if override != f"cluster={cluster}"]
    chosen_overrides, slurm_problem = _with_launcher(site, usable_overrides)
    chosen_overrides += [f"launcher.partition={partition}"] if partition else []
    if deep:
        shares_host = load_config([*chosen_overrides, "sweep=acceptance"]).hardware.shares_host
        chosen_overrides.append("sweep=acceptance-small" if shares_host else "sweep=acceptance")
    config = load_config(chosen_overrides)
    if cluster is not None:
        _write_cluster(config, site, cluster, force, slurm_problem)
        if "cluster" not in parts_of(chosen_overrides):
            config = load_config([*chosen_overrides, f"cluster={cluster}"])
    checks = examine(config, site, wait_s=wait_s, say=say)
    if deep:
        # It needs pandas, which takes time to import.
        from ultrabench.cli.run_acceptance import run_acceptance

        skip_reason = f"not started, because {' and '.join(failed_names(checks))} failed"
        checks += [skip("acceptance run", skip_reason)] if failed_names(checks) else run_acceptance(config)
    if slurm_problem and slurm_problem.status is CheckStatus.WARN:
        checks.insert(0, slurm_problem)
    return config, checks


def run_verify(overrides: list[str]) -> tuple[SweepConfig, list[Check]]:
    """Compares the GPUs of this machine bit by bit, or its CPU with hardware=cpu; returns what `run_doctor` does."""
    launcher = [] if "launcher" in parts_of(overrides) else ["launcher=local"]
    config = load_config([*overrides, *launcher])
    device_type = config.hardware.device if "hardware" in parts_of(overrides) else USUAL_DEVICE
    return config, verify_devices(device_type, Path(config.results_dir).absolute())


def print_checks(
    config: SweepConfig, checks: Sequence[Check], as_json: bool, title: str | None = None
) -> int:
    """Prints the checks of a configuration, which is their title if there is no other; returns the exit code."""
    if as_json:
        print_json([to_dict(check) for check in checks])
    else:
        config_text = (
            f"launcher={config.launcher.name} hardware={config.hardware.name} cluster={config.cluster}"
        )
        _show_checks(title or f"doctor: {config_text}", checks)
    num_by_status = Counter(check.status for check in checks)
    say(", ".join(f"{num_by_status[status]} {status}" for status in CheckStatus if num_by_status[status]))
    if config.launcher.holds_nodes and ACCESS_CHECKS.keys() & failed_names(checks):
        return ClusterError.exit_code
    return int(num_by_status[CheckStatus.FAIL] > 0)


def _with_launcher(site: Site, overrides: Sequence[str]) -> tuple[list[str], Check | None]:
    """The overrides with a launcher, and the failed check that says why it is not Slurm;
    Slurm is chosen if it answers.
    """
    if "launcher" in parts_of(overrides):
        return [*overrides], None
    problem = why_not_slurm(site)
    launcher_name = "local" if problem else "slurm"
    say(f"checking launcher={launcher_name}: {problem.finding if problem else 'Slurm responds here'}")
    return [*overrides, f"launcher={launcher_name}"], problem


def _write_cluster(config: SweepConfig, site: Site, cluster: str, force: bool, problem: Check | None) -> None:
    """Writes the configuration `cluster` for the partition that `config` names; `problem` says why Slurm is not here.

    Raises:
        ConfigError: the file exists or cannot be written, or there is no such partition.
        ClusterError: Slurm is not here.
    """
    launcher = config.launcher
    if not launcher.submits_scripts and problem:
        raise ClusterError(f"--write needs Slurm, but {problem.finding}; run it on a login node")
    if not launcher.submits_scripts:
        raise ConfigError(f"--write needs Slurm; leave launcher={launcher.name} out")
    settings = launcher.slurm
    limits = site.limits(settings.partition, settings.account, settings.qos)
    path = write_cluster_file(Path.cwd() / "ultrabench" / "cluster", cluster, site, limits, settings, force)
    say(f"wrote {path}", f"to use it: ultrabench sweep plan cluster={cluster} launcher=slurm")


REPORT_WIDTH = 120
"""Width in characters of the checks when the output is no terminal: people read them in a log or a mail."""


def _show_checks(title: str, checks: Sequence[Check]) -> None:
    """Prints a table of the checks, then the remedies as lines; checks that could not be made share the last row."""
    unknown_names = [check.name for check in checks if check.status is CheckStatus.UNKNOWN]
    rows = [
        (check.name, Text(check.status, STYLES[check.status]), check.finding)
        for check in checks
        if check.name not in unknown_names
    ]
    if unknown_names:
        unknown_text = f"{len(unknown_names)} values cannot be read here: {', '.join(unknown_names)}"
        rows.append(("not checked", Text(CheckStatus.UNKNOWN, STYLES[CheckStatus.UNKNOWN]), unknown_text))
    checks_table = table(title, "check", "status", "found", rows=rows)
    remedies = [f"{check.name}: remedy: {check.remedy}" for check in checks if check.remedy]
    console = output_console(pipe_width=REPORT_WIDTH)
    console.print_line(checks_table)
    for remedy in remedies:
        console.print_line(remedy)
