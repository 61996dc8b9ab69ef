"""How each kind of fault is done."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.chaos.fault import Fault
from tests.chaos.target import jobs, nodes_at_work, processes, writers_at_rest
from tests.slurm.conftest import SETTINGS

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

T = TypeVar("T")
PATIENCE_S = 15.0
"""So long a fault waits for something that it can hit."""
AWAY_S = 5.0
"""Disks are full, read-only and controllers away for this long."""
SILENT_S = 13.0
"""More than SlurmdTimeout, after which Slurm notices."""


class MissedError(Exception):
    """There was nothing to hit."""


def strike(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Does it, and tells what was hit: {target, allocations}.

    Raises:
        MissedError: nothing could be hit.
    """
    kind = fault.kind
    if kind in ("kill_leader", "kill_follower", "kill_rank", "stop_leader", "stop_follower", "stop_rank"):
        return _signal(campaign, fault)
    if kind in ("sleep_rank", "exit_rank", "orphan"):
        return _order(campaign, fault)
    if kind in ("node_down", "node_silent"):
        return _node(campaign, fault)
    if kind in ("scancel", "requeue"):
        job = _one_of(lambda: jobs(campaign.sweep), fault)
        words = ["scancel", job.job_id] if kind == "scancel" else ["scontrol", "requeue", job.job_id]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        return {"target": f"job {job.job_id}", "said": done.stderr, "allocations": [job.allocation]}
    done_by: dict[str, Callable[[Campaign, Fault], str]] = {
        "kill_launcher": _kill_launcher, "two_launchers": _two_launchers, "slurmctld": _slurmctld,
        "disk_full": _disk_full, "read_only": _read_only, "torn_line": _torn_line, "deleted_logs": _deleted_logs,
    }  # fmt: skip
    return {"target": done_by[kind](campaign, fault), "allocations": []}


def _one_of(find: Callable[[], Sequence[T]], fault: Fault) -> T:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = find()
        if found:
            return found[fault.share * len(found) // 100]
        time.sleep(0.1)
    raise MissedError


def _signal(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    verb, role = fault.kind.split("_")
    target = _one_of(lambda: processes(campaign.bench.folder, role), fault)
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
    return {"target": str(target), "allocations": [target.allocation]}


def _order(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Leaves an order that the rank at `share` of a world takes in its next step."""
    folder, number = campaign.bench.folder, str(fault.number)
    order = folder / f"orders/{fault.kind}.{number}.{fault.share}"
    order.touch()
    told = folder / f"taken/{number}.json"
    try:
        _one_of(lambda: [told] if told.exists() and told.stat().st_size else [], fault)
    finally:
        order.unlink(missing_ok=True)
    if not told.exists():
        raise MissedError
    taken = json.loads(told.read_text())
    return {"target": f"rank {taken['rank']} of {taken['key']}", "allocations": [taken["allocation"]]}


def _node(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    node = _one_of(lambda: nodes_at_work(campaign.sweep), fault)
    hit = [job.allocation for job in jobs(campaign.sweep, f"--nodelist={node}")]
    if fault.kind == "node_down":
        campaign.cluster.tool("node-down", node)
        time.sleep(AWAY_S)
    else:
        campaign.cluster.tool("node-down", node, "--silent")
        time.sleep(SILENT_S)
    campaign.cluster.tool("node-up", node)
    return {"target": node, "allocations": hit}


def _kill_launcher(campaign: "Campaign", fault: Fault) -> str:
    launcher = _one_of(campaign.living, fault)
    launcher.kill()
    launcher.wait()
    campaign.launch()
    return f"launcher {launcher.pid}"


def _two_launchers(campaign: "Campaign", fault: Fault) -> str:
    campaign.launch()
    return f"{len(campaign.living())} launchers"


def _slurmctld(campaign: "Campaign", fault: Fault) -> str:
    # In order: a killed controller forgets its last seconds, jobs among them.
    campaign.cluster.run("scontrol", "shutdown", "slurmctld")
    time.sleep(AWAY_S)
    campaign.cluster.tool("up", *SETTINGS)
    return "slurmctld"


def _disk_full(campaign: "Campaign", fault: Fault) -> str:
    filler = campaign.results / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    time.sleep(AWAY_S)
    filler.unlink()
    return "the results folder"


def _read_only(campaign: "Campaign", fault: Fault) -> str:
    """Whatever opens a file meanwhile is refused; what is open already stays so, as the kernel has it."""
    place, aside = str(campaign.results), str(campaign.bench.folder / "aside")
    Path(aside).mkdir(exist_ok=True)
    # Aside first: where somebody writes, the kernel refuses to make a mount read-only.
    for words in (["--bind", place, aside], ["-o", "remount,bind,ro", aside], ["--bind", aside, place]):
        subprocess.run(["mount", *words], check=True, capture_output=True)
    time.sleep(AWAY_S)
    for mounted in (place, aside):
        subprocess.run(["umount", "--lazy", mounted], check=True, capture_output=True)
    return "the results folder"


def _torn_line(campaign: "Campaign", fault: Fault) -> str:
    """Leaves half a line in the file of a process that is no more, as its death in mid-write would."""
    path = _one_of(lambda: writers_at_rest(campaign.folder / "journal"), fault)
    last = path.read_bytes().splitlines()[-1]
    with path.open("ab", buffering=0) as file:
        file.write(last[: max(1, len(last) * fault.share // 100)])
    return path.name


def _deleted_logs(campaign: "Campaign", fault: Fault) -> str:
    shutil.rmtree(campaign.folder / "logs", ignore_errors=True)
    found: list[Path] = [*campaign.folder.glob("allocations/*/job.log")]
    for log in found:
        log.unlink(missing_ok=True)
    return f"logs and {len(found)} job logs"
