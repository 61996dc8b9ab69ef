"""Checks the answers of Slurm's programs about controller, partition, nodes, limits and accounting."""

import os
import re
import shutil
import time
from collections.abc import Sequence

from ultrabench.errors import ConfigError, counted
from ultrabench.launchers.choose import max_sweep_nodes
from ultrabench.launchers.doctor.check import FAIL, WARN, Check, failure, first_problem, success, warning
from ultrabench.launchers.slurm.query import CommandError, NoAnswerError
from ultrabench.launchers.slurm.site import (
    PROGRAMS,
    REACH_SLURMCTLD,
    Limits,
    Partition,
    Site,
    absent_programs,
)
from ultrabench.sweep.config.sweep_config import SweepConfig

OPTIONAL_PROGRAMS = {
    "sinfo": "the states and GPUs of nodes are unknown",
    "sacct": "jobs that squeue no longer lists are judged by the journal alone",
    "sacctmgr": "the limits of accounts and QOS are unknown",
}
MAX_LISTED_NAMES = 8
"""Largest number of names that a list shows."""
_MB_PER_UNIT = {"K": 2**-10, "M": 1, "": 1, "G": 2**10, "T": 2**20}


def check_programs(site: Site) -> Check:
    """Checks that the programs of Slurm are installed and start."""
    if absent_and_remedy := absent_programs():
        return failure(*absent_and_remedy)
    missing_programs = [p for p in OPTIONAL_PROGRAMS if shutil.which(p) is None]
    programs_by_version = dict[str, list[str]]()
    for program in (p for p in (*PROGRAMS, *OPTIONAL_PROGRAMS) if p not in missing_programs):
        try:
            version = (site.ask(program, "--version").split() or ["?"])[-1]
        except CommandError as error:
            return failure(str(error), "set SLURM_CONF: export SLURM_CONF=/path/of/slurm.conf")
        programs_by_version.setdefault(version, []).append(program)
    return first_problem(
        "; ".join(f"{', '.join(programs)} {version}" for version, programs in programs_by_version.items()),
        (missing_programs, WARN, f"install {', '.join(missing_programs)} here",
         "; ".join(f"without {p}, {OPTIONAL_PROGRAMS[p]}" for p in missing_programs)),
        (len(programs_by_version) > 1, WARN, "two versions of Slurm are mixed here: "
        "put the folder of one first on PATH"),
    )  # fmt: skip


def check_controller(site: Site) -> Check:
    """Checks that slurmctld answers."""
    asked_s = time.monotonic()
    try:
        answer = site.ask("scontrol", "ping")
    except NoAnswerError as error:
        return failure(str(error), REACH_SLURMCTLD)
    except CommandError as error:
        last_line = (error.complaints or ["no slurmctld is up"])[-1][:200]
        return failure(f"scontrol ping: {last_line}", REACH_SLURMCTLD)
    controllers = [" ".join(line.split()) for line in answer.splitlines() if line.startswith("Slurmctld")]
    return success(f"{'; '.join(controllers) or 'answers'}; answered in {time.monotonic() - asked_s:.1f} s")


def check_partition(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that the partition accepts and starts jobs."""
    other_partitions = [p for p in site.partitions if p.name != limits.name]
    default_suffix = " (the default)" if limits.is_default else ""
    others_text = "; ".join(f"{p.name}: {partition_text(p)}" for p in other_partitions[:MAX_LISTED_NAMES])
    up_names = ", ".join(p.name for p in other_partitions if p.state == "UP")
    remedy = f"set launcher.partition= ({up_names})" if up_names else "wait"
    others_suffix = f"; others: {others_text}" if others_text else ""
    return first_problem(
        f"{limits.name}{default_suffix}: {partition_text(limits)}{others_suffix}",
        (limits.state != "UP", FAIL,
         f"{remedy}; `scontrol update partitionname={limits.name} state=up` needs an administrator"),
        (not limits.total_nodes, FAIL, "the partition has no nodes: set launcher.partition="),
    )  # fmt: skip


def partition_text(partition: Partition) -> str:
    """State, number of nodes and limits of a partition, such as `UP, 8 nodes (2 per job), up to 30 min`."""
    max_minutes = partition.max_time_minutes
    time_limit = "no time limit" if max_minutes is None else f"up to {max_minutes} min"
    node_limit = "" if partition.max_nodes is None else f" ({partition.max_nodes} per job)"
    return f"{partition.state or 'state unknown'}, {counted(partition.total_nodes, 'node')}{node_limit}, {time_limit}"


def nodes_unknown(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """The warning that replaces each check of the nodes if sinfo does not answer."""
    return warning("sinfo does not list the nodes", "check `sinfo` by hand")


def check_nodes(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that enough nodes run jobs; it says why the others do not."""
    run_nodes, num_up, num_total = max(config.axes.nodes), limits.up_nodes or 0, limits.total_nodes
    reasons_text = _down_reasons(site, limits.name)
    reasons_suffix = f"; {reasons_text}" if reasons_text else ""
    advice = f"runs of {counted(run_nodes, 'node')} wait until more are up: leave them out with sweep.nodes="
    return first_problem(
        f"{num_up} of {num_total} up{reasons_suffix}",
        (not num_up, FAIL, "wait for the administrators (`sinfo -R`), or set launcher.partition="),
        (num_up < run_nodes <= num_total, WARN, advice),
        (num_up < num_total, WARN, "nothing to do for this sweep; `sinfo -R` shows why they are down"),
    )


def _down_reasons(site: Site, partition: str) -> str:
    """The nodes that run no jobs, with the recorded reason, such as `gpu03 drained (bad fan)`."""
    try:
        options = ("--list-reasons", "--noheader", f"--partition={partition}", "--format=%N|%T|%E")
        answer = site.ask("sinfo", *options)
    except CommandError:
        return ""
    rows = [fields for line in answer.splitlines() if len(fields := line.split("|", 2)) == 3]
    return "; ".join(f"{nodes} {state} ({reason.strip()})" for nodes, state, reason in rows)


def check_gpus(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that the GPUs that Slurm lists are those of `hardware=`."""
    hardware, gres, num_gpus = config.hardware, config.launcher.slurm.gres or "", limits.gpus_per_node or 0
    num_needed, finding = hardware.gpus_per_node, f"nodes of {limits.name} have {limits.gres or 'no GPUs'}"
    if not hardware.has_gpus:
        check_hint = "; to check them, give the hardware= of the sweep" if num_gpus else ""
        return success(f"hardware={hardware.name} needs no GPU; {finding}{check_hint}")
    gres_match = re.search(r"(?:^|,)gpu(?::[^:,(]+)??(?::(\d+))?(?:,|\(|$)", gres)
    num_requested = int(gres_match[1] or 1) if gres_match else num_needed
    gpu_models = _gpu_models(*re.findall(r"(?:^|,)gpu:([^:,(\d][^:,(]*)", gres or limits.gres or ""))
    gpus_setting = f"hardware.gpus_per_node={num_gpus}"
    first_remedy = f"{gpus_setting}, " if num_gpus else ""
    return first_problem(
        f"hardware={hardware.name} has {num_needed} {hardware.gpu} per node; {finding}",
        (num_requested != num_needed, FAIL, f"make launcher.gres= ask for hardware.gpus_per_node={num_needed}, "
        "or leave it out",
         f"launcher.gres={gres} asks for {num_requested}"),
        (num_gpus < num_needed, FAIL, f"set {first_remedy}another hardware= or "
        "launcher.partition="),
        (gpu_models and not gpu_models & _gpu_models(hardware.gpu, *hardware.reported_as), FAIL,
         "set the hardware= of these nodes, or another launcher.partition= or launcher.gres="),
        (num_gpus > num_needed, WARN, f"the other GPUs stay idle; to use all: {gpus_setting}"),
        (len(limits.node_kinds) > 1, WARN, "choose one kind with +launcher.sbatch.constraint=",
         f"nodes differ: {'; '.join(limits.node_kinds)}"),
    )  # fmt: skip


def _gpu_models(*names: str) -> set[str]:
    """The model words, such as h100, mi300x or a100, in names of GPUs."""
    return set(re.findall(r"[a-z]{1,3}\d{2,4}[a-z]?", " ".join(names).lower()))


def check_size(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that a node has the memory and the CPUs that jobs ask for."""
    settings = config.launcher.slurm
    mem_mb, num_cpus = limits.mem_mb_per_node or 0, limits.cpus_per_node or 0
    mem_match = re.match(r"(\d+)([KMGT]?)", (settings.mem or "0").upper())
    assert mem_match, "the rule of launcher.mem allows only such texts"
    return first_problem(
        f"{num_cpus} CPUs, {mem_mb} MB per node; launcher.mem={settings.mem or 'null'}, "
        f"launcher.cpus={settings.cpus or 'null'}",
        (int(mem_match[1]) * _MB_PER_UNIT[mem_match[2]] > mem_mb, FAIL,
         f"no node has that much memory: set at most launcher.mem={mem_mb}M, or 0 for all"),
        ((settings.cpus or 0) > num_cpus, FAIL, f"no node has that many CPUs: set at most launcher.cpus={num_cpus}"),
    )  # fmt: skip


def check_limits(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that the sweep stays within the limits of the site."""
    launcher_config, max_minutes, max_queued_jobs = config.launcher, limits.job_minutes, limits.max_submit
    minutes_option = "time_minutes" if launcher_config.time_minutes else "allocation_minutes"
    remedies = []
    try:
        max_sweep_nodes(config, limits)
    except ConfigError as error:
        remedies.append(str(error))
    if max_minutes is not None and max_minutes < getattr(launcher_config, minutes_option):
        remedies.append(f"jobs end after {max_minutes} min: lower launcher.{minutes_option}=")
    if max_queued_jobs is not None and max_queued_jobs < launcher_config.max_jobs:
        remedies.append(f"at most {max_queued_jobs} jobs may be queued at a time: lower launcher.max_jobs=")
    return first_problem(
        f"MaxArraySize {limits.max_array_size}; per user: jobs queued {_limit_text(max_queued_jobs)}, running "
        f"{_limit_text(limits.max_jobs)}, nodes {_limit_text(limits.max_nodes_per_user)}; per job: "
        f"nodes {_limit_text(limits.max_nodes)}, "
        f"minutes {_limit_text(max_minutes)}; the sweep: jobs {launcher_config.max_jobs}, "
        f"nodes per job up to {max(config.axes.nodes)}",
        (remedies, WARN, "; ".join(remedies)),
    )


def _limit_text(limit: int | None) -> str:
    return "any" if limit is None else str(limit)


def check_account(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that the partition accepts jobs of the account and QOS."""
    accounts, settings = site.accounts, config.launcher.slurm
    account, qos = settings.account, settings.qos
    enforced, names = site.enforced, [a.account for a in accounts.usable(limits.name)]
    rule = f"Slurm enforces {', '.join(sorted(enforced))}" if enforced else "Slurm does not enforce accounts"
    accounts_text = f"user {site.user}: {_join(names, 'no account')}; default {accounts.default or 'none'}"
    finding = f"{accounts.error or accounts_text}; {rule}"
    if not enforced:
        return success(finding)
    chosen_account = account or accounts.default
    qos_names = [q for a in accounts.usable(limits.name, chosen_account or "") for q in a.qos]
    is_qos_refused = qos and enforced & {"qos", "all"} and qos not in qos_names
    return first_problem(
        f"{finding}; QOS {_join(qos_names, 'none')}" if qos_names else finding,
        (accounts.error, WARN, "ask the site for your account, and set launcher.account= if jobs are refused"),
        (not names, FAIL, f"ask the site for an account that can use partition {limits.name}"),
        (not accounts.usable(limits.name, chosen_account or ""), FAIL,
         f"set launcher.account= to one of {_join(names)}", f"launcher.account={account or 'null'}"),
        (is_qos_refused, FAIL, f"set launcher.qos= to one of {_join(qos_names, '(none: leave it out)')}",
         f"launcher.qos={qos}"),
    )  # fmt: skip


def _join(names: Sequence[str], text_if_empty: str = "") -> str:
    """The names without repetition, at most MAX_LISTED_NAMES of them; `text_if_empty` if there is no name."""
    names = list(dict.fromkeys(names))
    more_suffix = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more_suffix or text_if_empty


def check_accounting(config: SweepConfig, site: Site, limits: Limits) -> Check:
    """Checks that sacct answers, and that the cluster records jobs."""
    note = f"ultrabench works without sacct: {OPTIONAL_PROGRAMS['sacct']}"
    try:
        site.ask("sacct", f"--user={os.getuid()}", "--starttime=now-1hours", "--allocations", "--noheader")
    except CommandError as error:
        return warning(f"{error}; {note}", "nothing to do; with slurmdbd the ends of old jobs would be known")
    not_recorded = (not limits.accounting, WARN, "nothing to do", f"but jobs are not recorded; {note}")
    return first_problem("sacct answers", not_recorded)
