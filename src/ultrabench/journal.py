"""The journal of a sweep: append-only JSON lines, one file a writer, no locks."""

import contextlib
import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrabench.errors import DiskError, SweepFolderError, may_pass
from ultrabench.record import canonical_json

SCHEMA_VERSION = 1
"""Of journal lines and sweep.json; additions keep it, a newer one is refused."""

EVENTS = (
    "config", "allocation_planned", "submitting", "submitted", "adopted", "allocation_started",
    "preflight", "claimed", "started", "phase", "result", "failed", "allocation_ended", "pause",
    "cancel",
)  # fmt: skip

Event = dict[str, Any]
"""One journal line: v, writer, seq, time, event and what belongs to that event."""


class JournalWriter:
    """Appends events to a file that only this process writes."""

    def __init__(self, folder: Path, role: str) -> None:
        host = socket.gethostname().split(".")[0]
        self.name = f"{role}-{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.path = folder / f"{self.name}.jsonl"
        self._seq = 0
        self._torn = False
        self._fd: int | None = None

    def write(self, event: str, **values: Any) -> Event:
        """Appends one event with a single write and fsync; returns it.

        Raises:
            DiskError: the line could not be written whole, but may be later: the next call opens the
                file anew and starts a new line, so readers drop the torn one.
            SweepFolderError: it cannot be written at all.
        """
        assert event in EVENTS, event
        line: Event = {
            "v": SCHEMA_VERSION,
            "writer": self.name,
            "seq": self._seq,
            "time": time.time(),
            "event": event,
            **values,
        }
        data = (("\n" if self._torn else "") + canonical_json(line) + "\n").encode()
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o666)
            if os.write(self._fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError as error:
            self._torn = True
            self._close()
            kind = DiskError if may_pass(error) else SweepFolderError
            raise kind(f"cannot write {self.path}: {error.strerror}; free or unlock it") from error
        self._torn = False
        self._seq += 1
        return line

    def _close(self) -> None:
        """A handle that went stale never heals; the next write gets another."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = None


@dataclass(slots=True)
class JournalReader:
    """Follows all journal files of a sweep; each call of `poll` reads only what is new."""

    folder: Path
    warn: Callable[[str], None] = lambda message: None
    events: list[Event] = field(default_factory=list)
    """Every event read so far."""
    _offsets: dict[Path, int] = field(default_factory=dict)
    _closed: set[Path] = field(default_factory=set)
    """Files of agents that have written their last word."""

    def poll(self) -> list[Event]:
        """All events so far, the new whole lines included.

        A last line without its newline is left for the next call; a line that is no event is
        skipped with a warning.

        Raises:
            SweepFolderError: a line of a newer schema.
        """
        for path in sorted(set(self.folder.glob("*.jsonl")) - self._closed):
            offset = self._offsets.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except FileNotFoundError:  # somebody deleted it; what it said is known
                continue
            whole, newline, _ = data.rpartition(b"\n")
            self._offsets[path] = offset + len(whole) + len(newline)
            events = list(self._parse(path, whole.split(b"\n")))
            self.events.extend(events)
            over = events and events[-1]["event"] == "allocation_ended"
            if over and path.name.startswith("agent-"):
                self._closed.add(path)
        return self.events

    def _parse(self, path: Path, lines: Iterable[bytes]) -> Iterable[Event]:
        for line in lines:
            if not line.strip():
                continue
            try:
                event = json.loads(line)
                version, _ = int(event["v"]), (event["writer"], int(event["seq"]), event["event"])
            except (ArithmeticError, ValueError, TypeError, KeyError):
                self.warn(f"{path.name}: skipped a corrupt line ({line[:40]!r}...)")
                continue
            if version > SCHEMA_VERSION:
                raise SweepFolderError(
                    f"{path} has schema {version}; this ultrabench reads up to {SCHEMA_VERSION}: upgrade it"
                )
            yield event


def read_journal(folder: Path, warn: Callable[[str], None] = lambda message: None) -> list[Event]:
    """All events of a sweep's journal folder, in no particular order of time."""
    return JournalReader(folder, warn).poll()
