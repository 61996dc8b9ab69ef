"""The journal of a sweep: append-only files of JSON lines, one for each writer, without locks."""

import contextlib
import errno
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ultrabench.errors import DiskError, SweepFolderError, may_pass
from ultrabench.rank_report import NewLines
from ultrabench.store.events import DAMAGED, AllocationEnded, Decoders, Event, Line, decode, encode

MAX_LINE_BYTES = 64 << 20
"""Longest line in bytes that is read; longer ones are skipped, since an event has only a few KiB."""

_PERMANENT_ERRNOS = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)
"""Errors of opening a file that is not regular or must not be read; trying again does not help."""


class JournalWriter:
    """Appends events to a file that only this process writes."""

    def __init__(self, folder: Path, role: str) -> None:
        host = socket.gethostname().split(".")[0]
        self.name = f"{role}-{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.path = folder / f"{self.name}.jsonl"
        self._seq = 0
        self._fd: int | None = None

    def write(self, event: Event) -> None:
        """Appends one event with a single write and fsync.

        Raises:
            DiskError: the line could not be written whole, but may be written later. The next call opens the
                file again and begins a new line, so that readers skip the incomplete one.
            SweepFolderError: the file cannot be written at all.
        """
        line_bytes = encode(Line(event=event, writer=self.name, seq=self._seq, time=time.time()))
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o666)
                line_bytes = b"\n" + line_bytes if os.fstat(self._fd).st_size else line_bytes
            if os.write(self._fd, line_bytes) != len(line_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError as error:
            self._close()
            failure = f"cannot write {self.path}: {error.strerror}; free space or unlock it"
            raise (DiskError if may_pass(error) else SweepFolderError)(failure) from error
        self._seq += 1

    def _close(self) -> None:
        """Closes the file; a stale handle never recovers, so the next write opens the file again."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = None


@dataclass(slots=True)
class JournalReader:
    """Reads all journal files of a sweep; each call of `poll` reads only what is new."""

    folder: Path
    warn: Callable[[str], None] = lambda message: None
    decoders: Decoders | None = None
    """The events that are read, as `decode` takes them; None means all."""
    _reader_by_path: dict[Path, NewLines] = field(default_factory=dict)
    _finished_paths: set[Path] = field(default_factory=set)
    """Files of agents whose last event, the end of the allocation, was read."""
    _warned_paths: set[Path] = field(default_factory=set)
    """Files that cannot be read and for which a warning was given."""

    def poll(self) -> Iterator[Line]:
        """The whole lines that were written since the last call.

        A last line without its newline is left for the next call. Lines that are no event, and files that are
        not regular or not readable, are skipped with a warning. MAX_LINE_BYTES bounds the memory that is
        needed, however large the files are.

        Raises:
            SweepFolderError: a line has a newer schema, or the folder cannot be read.
        """
        try:
            paths = {self.folder / name for name in os.listdir(self.folder) if name.endswith(".jsonl")}
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            failure = f"cannot read the journal folder {self.folder}: {error.strerror}; it has the results"
            raise SweepFolderError(f"{failure}: restore it, or start a new sweep with name=NAME") from error
        for path in sorted(paths - self._finished_paths):
            last_line = None
            try:
                for last_line in self._new_lines(path):
                    yield last_line
            except FileNotFoundError:  # somebody deleted the file, but its earlier lines were read
                continue
            except OSError as error:
                if error.errno not in _PERMANENT_ERRNOS:
                    raise
                if path not in self._warned_paths:
                    self.warn(f"skipped {path}: {error.strerror}; a journal must be a regular, readable file")
                self._warned_paths.add(path)
            if last_line and isinstance(last_line.event, AllocationEnded) and path.name.startswith("agent-"):
                self._finished_paths.add(path)

    def _new_lines(self, path: Path) -> Iterator[Line]:
        """The lines that were added to a file since the last call; warns of each line that is damaged or too long."""
        tail_reader = self._reader_by_path.setdefault(path, NewLines(path, MAX_LINE_BYTES))
        has_more = True
        while has_more:
            num_skipped_before = tail_reader.num_skipped
            raw_lines = tail_reader.read_bytes().split(b"\n")
            for line_no, raw_line in enumerate(raw_lines, start=tail_reader.num_lines - len(raw_lines) + 1):
                if not raw_line.strip():
                    continue
                try:
                    line = decode(raw_line, path, self.decoders)
                except DAMAGED:
                    run_match = re.search(rb'"run_id":"(\w+)"', raw_line)
                    run_text = f" about run {run_match[1].decode()}" if run_match else ""
                    self.warn(f"{path}:{line_no}: skipped a corrupt line{run_text} ({raw_line[:40]!r}...)")
                    continue
                if line:
                    yield line
            if tail_reader.num_skipped > num_skipped_before:
                self.warn(f"{path}: skipped a line of more than {MAX_LINE_BYTES >> 20} MiB")
            has_more = tail_reader.has_more


def read_journal(
    folder: Path, warn: Callable[[str], None] = lambda message: None, decoders: Decoders | None = None
) -> Iterator[Line]:
    """All lines of a sweep's journal folder; their order is not that of their times.

    Args:
        decoders: the events that are read, as `decode` takes them; None means all.
    """
    return JournalReader(folder, warn, decoders).poll()
