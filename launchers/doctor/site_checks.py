"""Checks on what Slurm's own programs say: programs, controller, partition, nodes, limits, accounting."""

import os
import re
import shutil
import time
from collections.abc import Sequence

from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import Hardware
from ultrabench.launchers.doctor.check import Check, failed, passed, warned
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.limits import Limits
from ultrabench.launchers.slurm.partition import Partition
from ultrabench.launchers.slurm.share import node_share
from ultrabench.launchers.slurm.site import Ask, Site
from ultrabench.sweep.config import SweepConfig
from ultrabench.sweep.launcher_config import LauncherConfig

NEEDED = ("sbatch", "squeue", "scontrol", "scancel")
WANTED = {
    "sinfo": "states and GPUs of nodes stay unknown",
    "sacct": "jobs that squeue has forgotten are judged by the journal alone",
    "sacctmgr": "limits of accounts and QOS stay unknown",
}
MOST = 8
"""Largest number of other partitions that are named."""
_MB = {"K": 2**-10, "M": 1, "": 1, "G": 2**10, "T": 2**20}


def check_programs(ask: Ask) -> Check:
    """Whether Slurm's programs are there and start."""
    absent = [p for p in NEEDED if shutil.which(p) is None]
    if absent:
        remedy = "log in to a node of the cluster or `module load slurm`; or set launcher=local"
        return failed("programs", f"not on PATH: {', '.join(absent)}", remedy)
    versions = dict[str, list[str]]()
    missing = [p for p in WANTED if shutil.which(p) is None]
    for program in (*NEEDED, *(p for p in WANTED if p not in missing)):
        try:
            version = (ask(program, "--version").split() or ["?"])[-1]
        except CommandError as error:
            remedy = "give the cluster's configuration: export SLURM_CONF=/path/of/slurm.conf"
            return failed("programs", str(error), remedy)
        versions.setdefault(version, []).append(program)
    told = "; ".join(f"{', '.join(programs)} {version}" for version, programs in versions.items())
    if missing:
        why = "; ".join(f"without {p} {WANTED[p]}" for p in missing)
        return warned("programs", f"{told}; {why}", f"have {', '.join(missing)} installed here")
    if len(versions) > 1:
        return warned("programs", told, "put one Slurm's folder first on PATH: two are mixed here")
    return passed("programs", told)


def check_controller(ask: Ask) -> Check:
    """Whether slurmctld answers."""
    begin = time.monotonic()
    try:
        text = ask("scontrol", "ping")
    except CommandError as error:
        last = (error.complaints.strip().splitlines() or ["no slurmctld is up"])[-1]
        told = str(error) if "no answer" in str(error) else f"scontrol ping: {last.strip()[:200]}"
        return controller_failed(told)
    took_s = time.monotonic() - begin
    found = [" ".join(line.split()) for line in text.splitlines() if line.startswith("Slurmctld")]
    return passed("slurmctld", f"{'; '.join(found) or 'answers'}; answered in {took_s:.1f} s")


def controller_failed(told: str) -> Check:
    """The check of a controller that cannot be reached."""
    remedy = "run this on a login node, or wait until `scontrol ping` says UP; launcher=local needs no Slurm"
    return failed("slurmctld", told, remedy)


def check_partition(partition: Partition, others: Sequence[Partition]) -> Check:
    """Whether the partition takes and starts jobs."""
    rest = "; ".join([f"{p.name}: {_facts(p)}" for p in others if p.name != partition.name][:MOST])
    default = " (the default)" if partition.is_default else ""
    told = f"{partition.name}{default}: {_facts(partition)}" + (f"; others: {rest}" if rest else "")
    up = [p.name for p in others if p.state == "UP" and p.name != partition.name]
    if partition.state != "UP":
        other = f"set launcher.partition= ({', '.join(up)})" if up else "wait"
        admins = f"`scontrol update partitionname={partition.name} state=up` is the administrators'"
        return failed("partition", told, f"{other}; {admins}")
    if not partition.total_nodes:
        return failed("partition", told, "it has no nodes: set launcher.partition=")
    return passed("partition", told)


def _facts(partition: Partition) -> str:
    limit = (
        "no time limit" if partition.max_time_minutes is None else f"up to {partition.max_time_minutes} min"
    )
    most = "" if partition.max_nodes is None else f" ({partition.max_nodes} a job)"
    return f"{partition.state or 'state unknown'}, {counted(partition.total_nodes, 'node')}{most}, {limit}"


def check_nodes(ask: Ask, partition: Partition, largest: int) -> Check:
    """Whether enough nodes run jobs, and why the others do not; `largest` is what one run needs."""
    if partition.up_nodes is None:
        return warned("nodes", "sinfo does not tell which nodes are up", "look at `sinfo` by hand")
    told = f"{partition.up_nodes} of {partition.total_nodes} up"
    reasons = _reasons(ask, partition.name)
    if reasons:
        told += f"; {reasons}"
    if not partition.up_nodes:
        return failed("nodes", told, "wait for the administrators (`sinfo -R`), or set launcher.partition=")
    if partition.up_nodes < largest <= partition.total_nodes:
        remedy = (
            f"runs of {counted(largest, 'node')} wait until they are back: leave them out with sweep.nodes="
        )
        return warned("nodes", told, remedy)
    if partition.up_nodes < partition.total_nodes:
        return warned("nodes", told, "nothing to do for this sweep; `sinfo -R` shows who looks after them")
    return passed("nodes", told)


def _reasons(ask: Ask, name: str) -> str:
    """Nodes that run no jobs, with the reason that somebody gave, such as `gpu03 drained (bad fan)`."""
    try:
        text = ask("sinfo", "--list-reasons", "--noheader", f"--partition={name}", "--format=%N|%T|%E")
    except CommandError:
        return ""
    rows = [fields for line in text.splitlines() if len(fields := line.split("|", 2)) == 3]
    return "; ".join(f"{nodes} {state} ({reason.strip()})" for nodes, state, reason in rows)


def check_gpus(hardware: Hardware, choice: LauncherConfig, partition: Partition) -> Check:
    """Whether the GPUs that Slurm knows are those of the hardware."""
    own, seen = hardware.gpus_per_node, f"nodes of {partition.name} have {partition.gres or 'no GPUs'}"
    if hardware.device != "cuda":
        other = "; to have them checked, name the hardware= of the sweep" if partition.gpus_per_node else ""
        return passed("GPUs", f"hardware={hardware.name} needs none; {seen}{other}")
    if partition.gpus_per_node is None:
        return warned("GPUs", "sinfo does not tell what nodes have", "look at `sinfo -o '%N %G'` by hand")
    told = f"hardware={hardware.name} has {own} {hardware.gpu} a node; {seen}"
    asked = re.search(r"(?:^|,)gpu(?::[^:,(]+)??(?::(\d+))?(?:,|\(|$)", choice.gres or "")
    if asked and int(asked[1] or 1) != own:
        told = f"{told}; launcher.gres={choice.gres} asks for {asked[1] or 1}"
        remedy = f"make launcher.gres= ask for hardware.gpus_per_node={own}, or leave it out"
        return failed("GPUs", told, remedy)
    if partition.gpus_per_node < own:
        remedy = (
            f"set hardware.gpus_per_node={partition.gpus_per_node}, " if partition.gpus_per_node else "set "
        )
        return failed("GPUs", told, f"{remedy}another hardware= or launcher.partition=")
    types = re.findall(r"(?:^|,)gpu:([^:,(\d][^:,(]*)", choice.gres or partition.gres or "")
    others = {model for kind in types for model in _models(kind)}
    if others and not others & _models(" ".join([hardware.gpu, *hardware.reported_as])):
        remedy = "set the hardware= that is there, or launcher.partition= or launcher.gres="
        return failed("GPUs", told, remedy)
    if partition.gpus_per_node > own:
        remedy = f"the others stay idle; use all: hardware.gpus_per_node={partition.gpus_per_node}"
        return warned("GPUs", told, remedy)
    if len(partition.kinds) > 1:
        told, remedy = (
            f"nodes differ: {'; '.join(partition.kinds)}",
            "keep to one kind with launcher.constraint=",
        )
        return warned("GPUs", told, remedy)
    return passed("GPUs", told)


def _models(text: str) -> set[str]:
    """Words such as h100, mi300x or a100 in the name of a GPU."""
    return set(re.findall(r"[a-z]{1,3}\d{2,4}[a-z]?", text.lower()))


def check_size(choice: LauncherConfig, partition: Partition) -> Check:
    """Whether a node has the memory and the CPUs that jobs ask for."""
    mem, cpus = partition.mem_mb_per_node, partition.cpus_per_node
    if mem is None or cpus is None:
        remedy = "look at `sinfo -o '%N %c %m'` by hand"
        return warned("node size", "sinfo does not tell what nodes have", remedy)
    told = f"{cpus} CPUs, {mem} MB a node; launcher.mem={choice.mem or 'null'}, launcher.cpus={choice.cpus or 'null'}"
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", (choice.mem or "0").upper())
    if found is None:
        return failed("node size", told, "write launcher.mem= as a number with K, M, G or T, such as 500G")
    if int(found[1]) * _MB[found[2]] > mem:
        remedy = f"no node has so much memory: set at most launcher.mem={mem}M, or 0 for all"
        return failed("node size", told, remedy)
    if (choice.cpus or 0) > cpus:
        return failed("node size", told, f"no node has so many CPUs: set at most launcher.cpus={cpus}")
    return passed("node size", told)


def check_limits(config: SweepConfig, limits: Limits) -> Check:
    """Whether the sweep stays within what the site allows."""
    choice, largest = config.launcher, max(config.axes.nodes)
    times = [m for m in (limits.max_time_minutes, limits.max_wall_minutes) if m is not None]
    most, remedies = min(times, default=None), list[str]()
    told = (
        f"MaxArraySize {limits.max_array_size}; a user: jobs queued {_any(limits.max_submit)}, running "
        f"{_any(limits.max_jobs)}, nodes {_any(limits.max_nodes_per_user)}; a job: nodes {_any(limits.max_nodes)}, "
        f"minutes {_any(most)}; the sweep: jobs {choice.max_jobs}, nodes of a job up to {largest}"
    )
    try:
        node_share(config, limits)
    except ConfigError as error:
        remedies.append(str(error))
    if limits.max_nodes_per_user is not None and largest > limits.max_nodes_per_user:
        remedies.append(
            f"a user may have {counted(limits.max_nodes_per_user, 'node')}: leave larger sweep.nodes out"
        )
    if most is not None and most < (choice.time_minutes or choice.allocation_minutes):
        name = "time_minutes" if choice.time_minutes else "allocation_minutes"
        remedies.append(f"jobs end after {most} min: lower launcher.{name}=")
    if limits.max_submit is not None and limits.max_submit < choice.max_jobs:
        remedies.append(
            f"no more than {limits.max_submit} may be queued at a time; launcher.max_jobs= says so"
        )
    return warned("limits", told, "; ".join(remedies)) if remedies else passed("limits", told)


def _any(number: int | None) -> str:
    return "any" if number is None else str(number)


def check_accounts(site: Site, partition: str, account: str | None, qos: str | None) -> Check:
    """Whether jobs of this account and QOS are taken in a partition; None stands for the default."""
    accounts, usable = site.accounts, site.accounts.usable(partition)
    rule = f"Slurm enforces {', '.join(sorted(site.enforced))}" if site.enforced else "not enforced here"
    names = list(dict.fromkeys(a.account for a in usable))
    told = f"user {site.user}: {_list(names) or 'no account'}; default {accounts.default or 'none'}; {rule}"
    if accounts.error:
        told = f"{accounts.error}; {rule}"
    if not site.enforced:
        return passed("account", told)
    if accounts.error:
        remedy = "ask the site for your account, and set launcher.account= if jobs are refused"
        return warned("account", told, remedy)
    wanted = account or accounts.default
    if not names:
        return failed("account", told, f"ask the site for an account that may use partition {partition}")
    chosen = [a for a in usable if a.account.lower() == (wanted or "").lower()]
    if not chosen:
        given = f"launcher.account={account}" if account else f"default {wanted or 'none'}"
        return failed("account", f"{given}; {told}", f"set launcher.account= to one of {_list(names)}")
    known = list(dict.fromkeys(q for a in chosen for q in a.qos))
    if qos and site.enforced & {"qos", "all"} and qos not in known:
        told = f"launcher.qos={qos}; account {wanted} has QOS {_list(known) or 'none'}; {rule}"
        remedy = f"set launcher.qos= to one of {_list(known) or '(none: leave it out)'}"
        return failed("account", told, remedy)
    return passed("account", f"{told}; QOS {_list(known) or 'none'}")


def _list(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_accounting(ask: Ask, limits: Limits) -> Check:
    """Whether sacct answers."""
    try:
        ask("sacct", f"--user={os.getuid()}", "--starttime=now-1hours", "--allocations", "--noheader")
    except CommandError as error:
        told = f"{error}; ultrabench works without: {WANTED['sacct']}"
        return warned("accounting", told, "nothing to do; slurmdbd would make the end of old jobs known")
    if not limits.accounting:
        told = f"sacct answers, but jobs are not recorded; ultrabench works without: {WANTED['sacct']}"
        return warned("accounting", told, "nothing to do")
    return passed("accounting", "sacct answers")
