"""Faults of the results folder: it is full or read-only, or somebody deletes, empties or adds files."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import AWAY_S, MissedError, Target, one_of, processes, writers_at_rest

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

UNREADABLE_S = 10.0
"""Seconds for which a claim is unreadable; a launcher records dead allocations as lost in less time."""
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


def torn_line(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Adds half a line to the journal of a process that has ended, as if it had died while writing."""
    path = one_of(lambda: writers_at_rest(campaign.folder / "journal"), fault)
    last = path.read_bytes().splitlines()[-1]
    with path.open("ab", buffering=0) as file:
        file.write(last[: max(1, len(last) * fault.share // 100)])
    return {"target": path.name}


def deleted_logs(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Deletes the logs of all runs and jobs."""
    shutil.rmtree(campaign.folder / "logs", ignore_errors=True)
    found = [*campaign.folder.glob("allocations/*/job.log")]
    for log in found:
        log.unlink(missing_ok=True)
    return {"target": f"logs and {len(found)} job logs"}


def unreadable_claim(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Kills a leading agent while its claim cannot be read; later the claim is restored."""
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
    """The leading agents, each with its claim of the attempt that runs now."""
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
    """Puts a file that is no journal into the journal's folder, where it stays until the end of the sweep.

    Raises:
        MissedError: there is no such folder yet.
    """
    journal = campaign.folder / "journal"
    if not journal.is_dir():
        raise MissedError("there was nothing to hit")
    role = ("agent", "launcher")[fault.share % 2]
    path = journal / f"{role}-stray-{os.getpid()}-{fault.number}.jsonl"
    nested = '{"v": 1, "event": ' + DEPTH * "[" + DEPTH * "]" + "}\n"
    strays: list[tuple[str, Callable[[], object]]] = [
        ("a FIFO", lambda: os.mkfifo(path)),
        ("a folder", path.mkdir),
        ("a symbolic link to itself", lambda: path.symlink_to(path.name)),
        (f"a file {DEPTH} brackets deep", lambda: path.write_text(nested)),
    ]
    what, put = strays[fault.share // 2 % 4]
    put()
    return {"target": f"{path.name}: {what}"}
