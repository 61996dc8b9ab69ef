"""Faults by which a process, a job, a node, a launcher or the results folder dies, stops or is full."""

import contextlib
import json
import shutil
import signal
import subprocess
import time
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.fault import OF_A_PROGRAM, Fault
from tests.chaos.target import (
    AWAY_S,
    Hit,
    MissedError,
    Target,
    jobs,
    nodes_at_work,
    one_of,
    processes,
    send,
    writers_at_rest,
)  # fmt: skip
from tests.slurm.conftest import SETTINGS
from ultrabench.processes import command_line

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

SILENT_S = 13.0
"""Seconds for which a node is silent; they are more than SlurmdTimeout, after which Slurm notices it."""


def _signal(campaign: "Campaign", fault: Fault) -> Hit:
    verb, role = fault.kind.split("_")
    target = one_of(lambda: _at_work(campaign, role), fault)
    send(signal.SIGKILL if verb == "kill" else signal.SIGSTOP, target.pid)
    return {"target": str(target), "allocations": [target.allocation]}


def _at_work(campaign: "Campaign", role: str) -> list[Target]:
    """Processes of a role; ranks count only after rank 0 has recorded its start, which the judge needs."""
    targets = processes(campaign.bench.folder, role)
    if role != "rank" or campaign.embedded:
        return targets
    begun = {tuple(line.split()[:4]) for line in campaign.bench.executions()}
    return [target for target in targets if tuple(command_line(target.pid)[-4:]) in begun]


def order(campaign: "Campaign", fault: Fault) -> Hit:
    """Writes an order, which the rank at `share` of a world takes in its next step."""
    folder, number = campaign.bench.folder, str(fault.number)
    order = folder / f"orders/{fault.kind}.{number}.{fault.share}"
    order.touch()

    def answer() -> list[Path]:
        return [
            answer_path
            for answer_path in (folder / "taken").glob(f"{number}.json")
            if answer_path.stat().st_size
        ]

    try:
        answer_path = one_of(answer, fault)
    except MissedError:
        if order.exists():
            order.unlink()
            raise
        answer_path = one_of(answer, fault)  # a rank took it at the last moment
    answer_fields = json.loads(answer_path.read_text())
    target = f"rank {answer_fields['rank']} of {answer_fields['key']}"
    return {"target": target, "allocations": [answer_fields["allocation"]]}


def _job(campaign: "Campaign", fault: Fault) -> Hit:
    job = one_of(lambda: jobs(campaign.sweep), fault)
    words = ["scancel", job.job_id] if fault.kind == "scancel" else ["scontrol", "requeue", job.job_id]
    process = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return {"target": f"job {job.job_id}", "said": process.stderr, "allocations": [job.allocation]}


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


def _disk_full(campaign: "Campaign", fault: Fault) -> Hit:
    """Fills the file system of the results for some seconds."""
    filler = campaign.results / "filler"
    with filler.open("wb", buffering=0) as file:
        fill(file)
    time.sleep(AWAY_S)
    filler.unlink()
    return {"target": "the results folder"}


def fill(file: FileIO) -> None:
    """Writes to an unbuffered file until its file system is full."""
    for size in (2**20, 2**12, 1):
        with contextlib.suppress(OSError):
            while file.write(b"x" * size):
                pass


def _read_only(campaign: "Campaign", fault: Fault) -> Hit:
    """Makes the file system read-only for some seconds; files that are already open can still be written."""
    place, aside = str(campaign.results), str(campaign.bench.folder / "aside")
    Path(aside).mkdir(exist_ok=True)
    # A second mount is made read-only, since Linux refuses that for a mount with files open for writing.
    for words in (["--bind", place, aside], ["-o", "remount,bind,ro", aside], ["--bind", aside, place]):
        subprocess.run(["mount", *words], check=True, capture_output=True)
    time.sleep(AWAY_S)
    for mounted in (place, aside):
        subprocess.run(["umount", "--lazy", mounted], check=True, capture_output=True)
    return {"target": "the results folder"}


def _torn_line(campaign: "Campaign", fault: Fault) -> Hit:
    """Adds half a line to the journal of a process that has ended, as if it had died while writing."""
    path = one_of(lambda: writers_at_rest(campaign.folder / "journal"), fault)
    last = path.read_bytes().splitlines()[-1]
    with path.open("ab", buffering=0) as file:
        file.write(last[: max(1, len(last) * fault.share // 100)])
    return {"target": path.name}


def _deleted_logs(campaign: "Campaign", fault: Fault) -> Hit:
    """Deletes the logs of all runs and jobs."""
    shutil.rmtree(campaign.folder / "logs", ignore_errors=True)
    logs = [*campaign.folder.glob("allocations/*/job.log")]
    for log in logs:
        log.unlink(missing_ok=True)
    return {"target": f"logs and {len(logs)} job logs"}


STRIKES = {
    "kill_launcher": _kill_launcher, "two_launchers": _two_launchers, "slurmctld": _slurmctld,
    **dict.fromkeys(("kill_leader", "kill_follower", "kill_rank"), _signal),
    **dict.fromkeys(("stop_leader", "stop_follower", "stop_rank"), _signal),
    **dict.fromkeys(OF_A_PROGRAM, order), "node_down": _node, "node_silent": _node, "scancel": _job, "requeue": _job,
    "disk_full": _disk_full, "read_only": _read_only, "torn_line": _torn_line, "deleted_logs": _deleted_logs,
}  # fmt: skip
"""Kind of fault -> the function that injects it and returns what it hit; it raises MissedError if nothing was hit."""
