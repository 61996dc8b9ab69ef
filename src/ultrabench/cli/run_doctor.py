"""Runs the checks of `ultrabench doctor`, prints them, and writes the configuration of a cluster."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.doctor.check import Check, CheckStatus, skip
from ultrabench.launchers.doctor.cluster_file import write_cluster_file
from ultrabench.launchers.doctor.examine import ACCESS_CHECKS, examine, failed_names, why_not_slurm
from ultrabench.launchers.slurm.site import Site
from ultrabench.record import to_dict
from ultrabench.sweep.config.compose import parts_of
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig

STYLES = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim", "unknown": "dim"}


def run_doctor(
    overrides: list[str], write: str | None, partition: str | None, force: bool, wait_s: float, deep: bool
) -> tuple[SweepConfig, list[Check]]:
    """The configuration that `overrides` describe, and its checks in order.

    Args:
        write: name of the cluster configuration that is written first and then checked; None writes nothing.
        partition: the partition of that configuration; None means launcher.partition, else the default one.
        deep: whether an acceptance run follows.

    Raises:
        ConfigError: --deep is given with a sweep, or --partition without --write. `examine` and
            `run_acceptance` raise it, too.
    """
    if deep and (name := parts_of(overrides).get("sweep")):
        raise ConfigError(f"--deep runs its own sweep (acceptance); leave out sweep={name}")
    if partition and write is None:
        raise ConfigError(
            f"--partition {partition} needs --write; add it, or set launcher.partition={partition}"
        )
    site = Site()
    # The configuration that --write makes does not exist yet, so it cannot be named in an override.
    chosen_overrides, slurm_problem = _with_launcher(site, [o for o in overrides if o != f"cluster={write}"])
    chosen_overrides += [f"launcher.partition={partition}"] if partition else []
    if deep:
        is_small = load_config([*chosen_overrides, "sweep=acceptance"]).hardware.device == "cpu"
        chosen_overrides.append("sweep=acceptance-small" if is_small else "sweep=acceptance")
    config = load_config(chosen_overrides)
    if write is not None:
        _write(config, site, write, force, slurm_problem)
        if "cluster" not in parts_of(chosen_overrides):
            config = load_config([*chosen_overrides, f"cluster={write}"])
    checks = examine(config, site, wait_s=wait_s, say=say)
    if deep:
        # It needs pandas, which takes time to import.
        from ultrabench.cli.run_acceptance import run_acceptance

        reason = f"not started, because {' and '.join(failed_names(checks))} failed"
        checks += [skip("acceptance run", reason)] if failed_names(checks) else run_acceptance(config)
    if slurm_problem and slurm_problem.status is CheckStatus.WARN:
        checks.insert(0, slurm_problem)
    return config, checks


def report(config: SweepConfig, checks: Sequence[Check], as_json: bool) -> int:
    """Prints the checks of a configuration; returns the exit code."""
    if as_json:
        print_json([to_dict(check) for check in checks])
    else:
        _show(config, checks)
    counts = Counter(check.status for check in checks)
    say(", ".join(f"{counts[status]} {status}" for status in CheckStatus if counts[status]))
    if config.launcher.name == "slurm" and ACCESS_CHECKS.keys() & failed_names(checks):
        return ClusterError.exit_code
    return int(counts[CheckStatus.FAIL] > 0)


def _with_launcher(site: Site, overrides: Sequence[str]) -> tuple[list[str], Check | None]:
    """The overrides with a launcher, and why it is not Slurm; Slurm is chosen if it answers."""
    if "launcher" in parts_of(overrides):
        return [*overrides], None
    slurm_problem = why_not_slurm(site)
    launcher = "slurm" if slurm_problem is None else "local"
    say(f"checking launcher={launcher}: {slurm_problem.finding if slurm_problem else 'Slurm responds here'}")
    return [*overrides, f"launcher={launcher}"], slurm_problem


def _write(config: SweepConfig, site: Site, name: str, force: bool, slurm_problem: Check | None) -> None:
    """Writes the configuration of the partition that `config` names.

    Raises:
        ConfigError: the file exists or cannot be written, or there is no such partition.
        ClusterError: Slurm is not here.
    """
    launcher = config.launcher
    if launcher.name == "local" and slurm_problem:
        raise ClusterError(f"--write needs Slurm, but {slurm_problem.finding}; run it on a login node")
    if launcher.name == "local":
        raise ConfigError("--write needs Slurm; leave launcher=local out")
    limits = site.limits(launcher.partition, launcher.account, launcher.qos)
    path = write_cluster_file(Path.cwd() / "ultrabench" / "cluster", name, site, limits, launcher, force)
    say(f"wrote {path}", f"to use it: ultrabench sweep plan cluster={name} launcher=slurm")


def _show(config: SweepConfig, checks: Sequence[Check]) -> None:
    names_text = f"launcher={config.launcher.name} hardware={config.hardware.name} cluster={config.cluster}"
    rows, unknown_names = [], [check.name for check in checks if check.status is CheckStatus.UNKNOWN]
    for check in (check for check in checks if check.name not in unknown_names):
        remedy = f"; remedy: {check.remedy}" if check.remedy else ""
        rows.append((check.name, Text(check.status, STYLES[check.status]), check.finding + remedy))
    if unknown_names:
        unknown_text = f"{len(unknown_names)} values cannot be read here: {', '.join(unknown_names)}"
        rows.append(("not checked", Text(CheckStatus.UNKNOWN, STYLES[CheckStatus.UNKNOWN]), unknown_text))
    show(table(f"doctor: {names_text}", "check", "status", "found", rows=rows))
