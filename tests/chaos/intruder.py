"""Faults of programs that misbehave, at the port where agents meet and on the nodes."""

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.fault import Fault
from tests.chaos.target import AWAY_S, MissedError, one_of
from ultrabench.processes import command_line, own_processes, start_time
from ultrabench.store.events import Failed, Result
from ultrabench.store.journal import read_journal

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

SAYINGS = {
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: gpu01\r\n\r\n",
    "null": b"null\n",
    "nothing": b"",
    "half a hello": b'{"secret": "',
}
"""Texts that a port scanner sends to each open port."""
HELD_S = 15.0
"""Seconds for which an unfinished caller stays connected; a launcher ends frozen agents in less time."""
CLEAN_S = 5.0
"""Seconds after the end of a run within which all its processes have to end."""
RUN_S = 60.0


def port_scan(campaign: "Campaign", fault: Fault) -> dict[str, Any]:
    """Connects to the leading agent of an allocation, if possible before its peers do."""
    known = {path for path, _ in _rendezvous_files(campaign.folder)}

    def new() -> list[tuple[Path, dict[str, Any]]]:
        return [m for m in _rendezvous_files(campaign.folder) if m[0] not in known and _of_many(m[0])]

    try:
        (rendezvous, address), when = one_of(new, fault, 0.002), "while its agents met"
    except MissedError:
        (rendezvous, address), when = (
            one_of(lambda: _rendezvous_files(campaign.folder), fault),
            "while it ran",
        )
    words, said = [*SAYINGS.items()][fault.share % len(SAYINGS)]
    with contextlib.ExitStack() as calls:
        for _ in range(3):
            with contextlib.suppress(OSError):
                call = socket.create_connection((address["host"], address["port"]), timeout=2.0)
                calls.enter_context(call).sendall(said)
        time.sleep(AWAY_S if said.endswith(b"\n") else HELD_S)
    return {"target": f"the leader of {rendezvous.parent.name}, {when}: {words}"}


def _of_many(rendezvous: Path) -> bool:
    """Whether the allocation has several nodes, so that the leading agent waits for peers."""
    return bool(json.loads((rendezvous.parent / "allocation.json").read_text())["nodes"] > 1)


def _rendezvous_files(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files in which leading agents have written their address, with their contents."""
    found = []
    for path in sorted(folder.glob("allocations/*/leader*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append((path, json.loads(path.read_text())))
    return found


def reforking_children(campaign: "Campaign", fault: Fault, hit: dict[str, Any]) -> dict[str, Any]:
    """Checks that children which fork all the time are gone soon after their run has ended."""
    mark = f"{campaign.bench.folder}/reforking.{fault.number}"
    key = hit["target"].rpartition(" ")[2]
    end = time.monotonic() + RUN_S
    while not _has_ended(campaign.folder / "journal", key) and time.monotonic() < end:
        time.sleep(0.1)
    end = time.monotonic() + CLEAN_S
    while _left(mark) and time.monotonic() < end:
        time.sleep(0.2)
    if pids := _left(mark):
        campaign.complain(f"children of {key} run on {CLEAN_S:g} s after its end: {pids}")
    return {**hit, "allocations": []}


def _left(mark: str) -> list[int]:
    """The living processes with this word; it looks several times, since each lives only milliseconds."""
    found: set[int] = set()
    for _ in range(5):
        found |= {pid for pid in own_processes() if mark in command_line(pid) and start_time(pid) is not None}
    return sorted(found)


def _has_ended(journal: Path, key: str) -> bool:
    """Whether the journal records how an attempt ended."""
    events = (line.event for line in read_journal(journal, lambda warning: None))
    ends = (event for event in events if isinstance(event, Result | Failed))
    return any(f"{end.run_id}.{end.repeat}.{end.attempt}" == key for end in ends)
