"""Injects faults: those of processes, jobs, nodes and launchers are here, the others in modules beside it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.bystander import other_cluster, other_user
from tests.chaos.clumsy_files import (
    deleted_logs,
    disk_full,
    fifo_journal,
    read_only,
    torn_line,
    unreadable_claim,
)
from tests.chaos.fault import OF_A_PROGRAM, Fault
from tests.chaos.intruder import port_scan, reforking_children
from tests.chaos.lying_slurm import clock_offset, double_submission, empty_squeue
from tests.chaos.target import AWAY_S, MissedError, Target, jobs, nodes_at_work, one_of, processes
from tests.slurm.conftest import SETTINGS
from ultrabench.processes import command_line

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

SILENT_S = 13.0
"""Seconds for which a node is silent; they are more than SlurmdTimeout, after which Slurm notices it."""
Hit = dict[str, Any]
"""What a fault hit: `target` in words, `allocations` whose attempt it may have ended, and `costs`, the number
of jobs it may cost, if that is not one for each of them."""


def strike(campaign: "Campaign", fault: Fault) -> Hit:
    """Injects a fault; returns what it hit.

    Raises:
        MissedError: nothing could be hit.
    """
    done_by: dict[str, Callable[[Campaign, Fault], Hit]] = {
        "kill_launcher": _kill_launcher, "two_launchers": _two_launchers, "slurmctld": _slurmctld,
        **dict.fromkeys(("kill_leader", "kill_follower", "kill_rank"), _signal),
        **dict.fromkeys(("stop_leader", "stop_follower", "stop_rank"), _signal),
        **dict.fromkeys(OF_A_PROGRAM, order), "reforking_children": _reforking_children,
        "node_down": _node, "node_silent": _node, "scancel": _job, "requeue": _job,
        "disk_full": disk_full, "read_only": read_only, "torn_line": torn_line, "deleted_logs": deleted_logs,
        "unreadable_claim": unreadable_claim, "fifo_journal": fifo_journal, "port_scan": port_scan,
        "other_user": other_user, "other_cluster": other_cluster, "clock_offset": clock_offset,
        "double_submission": double_submission, "empty_squeue": empty_squeue,
    }  # fmt: skip
    if fault.kind in ("disk_full", "read_only") and not campaign.mounted:
        raise MissedError("no file system can be mounted here")
    return {"allocations": [], **done_by[fault.kind](campaign, fault)}


def _signal(campaign: "Campaign", fault: Fault) -> Hit:
    verb, role = fault.kind.split("_")
    target = one_of(lambda: _at_work(campaign, role), fault)
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
    return {"target": str(target), "allocations": [target.allocation]}


def _at_work(campaign: "Campaign", role: str) -> list[Target]:
    """Processes of a role; ranks count only after rank 0 has recorded its start, which the judge needs."""
    found = processes(campaign.bench.folder, role)
    if role != "rank" or campaign.embedded:
        return found
    begun = {tuple(line.split()[:4]) for line in campaign.bench.executions()}
    return [target for target in found if tuple(command_line(target.pid)[-4:]) in begun]


def order(campaign: "Campaign", fault: Fault) -> Hit:
    """Writes an order, which the rank at `share` of a world takes in its next step."""
    folder, number = campaign.bench.folder, str(fault.number)
    order = folder / f"orders/{fault.kind}.{number}.{fault.share}"
    order.touch()

    def answer() -> list[Path]:
        return [told for told in (folder / "taken").glob(f"{number}.json") if told.stat().st_size]

    try:
        told = one_of(answer, fault)
    except MissedError:
        if order.exists():
            order.unlink()
            raise
        told = one_of(answer, fault)  # a rank took it at the last moment
    taken = json.loads(told.read_text())
    target = f"rank {taken['rank']} of {taken['key']}"
    return {"target": target, "allocations": [taken["allocation"]]}


def _reforking_children(campaign: "Campaign", fault: Fault) -> Hit:
    return reforking_children(campaign, fault, order(campaign, fault))


def _job(campaign: "Campaign", fault: Fault) -> Hit:
    job = one_of(lambda: jobs(campaign.sweep), fault)
    words = ["scancel", job.job_id] if fault.kind == "scancel" else ["scontrol", "requeue", job.job_id]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return {"target": f"job {job.job_id}", "said": done.stderr, "allocations": [job.allocation]}


def _node(campaign: "Campaign", fault: Fault) -> Hit:
    node = one_of(lambda: nodes_at_work(campaign.sweep), fault)
    words, away_s = ([], AWAY_S) if fault.kind == "node_down" else (["--silent"], SILENT_S)
    hit = jobs(campaign.sweep, f"--nodelist={node}")
    campaign.cluster.tool("node-down", node, *words)
    until = time.monotonic() + away_s
    while time.monotonic() < until:  # Slurm starts other jobs on a silent node until it notices
        hit += jobs(campaign.sweep, f"--nodelist={node}")
        time.sleep(1)
    campaign.cluster.tool("node-up", node)
    return {"target": node, "allocations": sorted({job.allocation for job in hit})}


def _kill_launcher(campaign: "Campaign", fault: Fault) -> Hit:
    launcher = one_of(campaign.living, fault)
    launcher.kill()
    launcher.wait()
    campaign.launch()
    return {"target": f"launcher {launcher.pid}"}


def _two_launchers(campaign: "Campaign", fault: Fault) -> Hit:
    campaign.launch()
    return {"target": f"{len(campaign.living())} launchers"}


def _slurmctld(campaign: "Campaign", fault: Fault) -> Hit:
    # It is shut down properly, since a killed controller forgets the jobs of its last seconds.
    campaign.cluster.run("scontrol", "shutdown", "slurmctld")
    time.sleep(AWAY_S)
    campaign.cluster.tool("up", *SETTINGS)
    return {"target": "slurmctld"}
