"""Faults of the results folder: full, read-only, and files that somebody deletes, empties or leaves there."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import AWAY_S, MissedError, Target, one_of, processes, writers_at_rest

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

UNREADABLE_S = 10.0
"""Seconds for which a claim says nothing: longer than a launcher waits before it buries the dead."""
DEPTH = 100_000


def disk_full(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Fills the file system of the results for some seconds."""
    filler = campaign.results / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    time.sleep(AWAY_S)
    filler.unlink()
    return {"target": "the results folder"}


def read_only(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Whatever opens a file meanwhile is refused; what is open already stays so, as the kernel has it."""
    place, aside = str(campaign.results), str(campaign.bench.folder / "aside")
    Path(aside).mkdir(exist_ok=True)
    # Aside first: where somebody writes, the kernel refuses to make a mount read-only.
    for words in (["--bind", place, aside], ["-o", "remount,bind,ro", aside], ["--bind", aside, place]):
        subprocess.run(["mount", *words], check=True, capture_output=True)
    time.sleep(AWAY_S)
    for mounted in (place, aside):
        subprocess.run(["umount", "--lazy", mounted], check=True, capture_output=True)
    return {"target": "the results folder"}


def torn_line(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Leaves half a line in the file of a process that is no more, as its death in mid-write would."""
    path = one_of(lambda: writers_at_rest(campaign.folder / "journal"), fault)
    last = path.read_bytes().splitlines()[-1]
    with path.open("ab", buffering=0) as file:
        file.write(last[: max(1, len(last) * fault.share // 100)])
    return {"target": path.name}


def deleted_logs(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Deletes all logs of runs and jobs."""
    shutil.rmtree(campaign.folder / "logs", ignore_errors=True)
    found: list[Path] = [*campaign.folder.glob("allocations/*/job.log")]
    for log in found:
        log.unlink(missing_ok=True)
    return {"target": f"logs and {len(found)} job logs"}


def unreadable_claim(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Kills a leading agent while nobody can read what it had claimed; later the claim is there again."""
    leader, claim = one_of(lambda: _claims_at_work(campaign), fault)
    held = claim.read_bytes()
    claim.write_bytes(b"" if fault.share % 2 else b'\x00\xff{"allocation": [')
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader.pid, signal.SIGKILL)
    time.sleep(UNREADABLE_S)
    claim.write_bytes(held)
    what = "emptied" if fault.share % 2 else "garbage"
    return {"target": f"claim {claim.name} ({what}) of {leader}", "allocations": [leader.allocation]}


def _claims_at_work(campaign: "Campaign") -> list[tuple[Target, Path]]:
    """Leading agents with the claim of the attempt that runs now."""
    leaders = {leader.allocation: leader for leader in processes(campaign.bench.folder, "leader")}
    found = {}
    for path in campaign.folder.glob("claims/*.*.*"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            leader = leaders.get(json.loads(path.read_text()).get("allocation"))
            if leader and not path.name.startswith("."):
                found[path.stat().st_mtime_ns, path] = (leader, path)
    latest = {leader.allocation: (leader, path) for _, (leader, path) in sorted(found.items())}
    return [latest[name] for name in sorted(latest)]


def fifo_journal(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Leaves something in the journal's folder that is no journal, until the end of the sweep.

    Raises:
        MissedError: there is no such folder yet.
    """
    journal = campaign.folder / "journal"
    if not journal.is_dir():
        raise MissedError("there was nothing to hit")
    role = ("agent", "launcher")[fault.share % 2]
    path = journal / f"{role}-stray-{os.getpid()}-{fault.number}.jsonl"
    match fault.share // 2 % 4:
        case 0:
            os.mkfifo(path)
            what = "a FIFO"
        case 1:
            path.mkdir()
            what = "a folder"
        case 2:
            path.symlink_to(path.name)
            what = "a symbolic link to itself"
        case _:
            path.write_text('{"v": 1, "event": ' + DEPTH * "[" + DEPTH * "]" + "}\n")
            what = f"a file {DEPTH} brackets deep"
    return {"target": f"{path.name}: {what}"}
