"""Journals: lines that are written whole, files that are no journals, and file systems that lack what a sweep needs."""

import errno
import os
import resource
import shutil
import socket
from pathlib import Path

import pytest

from tests.configs import refused
from tests.strategies import written
from ultrabench.errors import SweepFolderError
from ultrabench.result import RunResult, Status
from ultrabench.store.events import Cancel, Failed, encode
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import MAX_LINE_BYTES, JournalReader, JournalWriter, read_journal


def test_a_torn_write_is_told_and_the_next_event_starts_a_new_line(tmp_path, monkeypatch):
    writer = JournalWriter(tmp_path, "agent")
    writer.write(Cancel(generation=1))
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
    with pytest.raises(SweepFolderError, match="No space left on device"):
        writer.write(Cancel(generation=2))
    monkeypatch.undo()
    writer.write(Cancel(generation=3))
    warnings = []
    entries = list(read_journal(tmp_path, warnings.append))
    assert [(e.writer, e.seq, e.event.generation) for e in entries] == [
        (writer.name, 0, 1),
        (writer.name, 1, 3),
    ]
    assert len(warnings) == 1
    assert JournalWriter(tmp_path, "agent").path != writer.path


def test_a_journal_that_cannot_be_opened_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(str(tmp_path / "file"), SweepFolderError):
        JournalWriter(tmp_path / "file", "agent").write(Cancel(generation=1))


def test_lines_hold_no_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        JournalWriter(tmp_path, "agent").write(Cancel(generation=float("nan")))
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_one_json_object_whatever_it_tells(tmp_path):
    """Names of files, for example, may have bytes that are no UTF-8."""
    writer = JournalWriter(tmp_path, "agent")
    fields = {
        "reason": os.fsdecode(b"no such\nfile: caf\xe9") + "\u2028",
        "evidence": {"tail": [os.fsdecode(b"\xff\xfe ok \xc3\xa9")]},
    }
    writer.write(Failed(run_id="aaaa", repeat=0, attempt=0, result=RunResult(status=Status.CRASH, **fields)))
    assert writer.path.read_bytes().count(b"\n") == 1
    (entry,) = read_journal(tmp_path, pytest.fail)
    assert entry.event.result.reason == "no such\nfile: caf?\u2028"
    assert entry.event.result.evidence == {"tail": ["?? ok \u00e9"]}


def line(seq=0):
    return encode(written(Cancel(generation=1), seq=seq))


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


ODD = {
    "fifo": os.mkfifo, "folder": Path.mkdir, "loop": lambda path: path.symlink_to(path), "socket": unix_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}  # fmt: skip


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_regular_file_is_skipped_with_one_warning(tmp_path, make):
    (tmp_path / "a.jsonl").write_bytes(line())
    make(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(line(1))
    warnings = []
    reader = JournalReader(tmp_path, warnings.append)
    assert [e.seq for e in reader.poll()] == [0, 1]
    assert list(reader.poll()) == []
    assert len(warnings) == 1
    assert str(tmp_path / "b.jsonl") in warnings[0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_a_file_of_another_user_is_skipped_and_an_unreadable_folder_is_named(tmp_path):
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    (tmp_path / "a.jsonl").write_bytes(line())
    (tmp_path / "b.jsonl").write_bytes(line())
    (tmp_path / "b.jsonl").chmod(0o000)
    warnings = []
    os.seteuid(65534)
    try:
        assert len(list(read_journal(tmp_path, warnings.append))) == 1
        os.seteuid(0)
        tmp_path.chmod(0o000)
        os.seteuid(65534)
        with pytest.raises(SweepFolderError, match=str(tmp_path)):
            list(read_journal(tmp_path))
    finally:
        os.seteuid(0)
        tmp_path.chmod(0o755)
    assert len(warnings) == 1


def test_a_journal_folder_that_is_gone_is_named(tmp_path):
    for path in (tmp_path / "journal", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            SweepFolderError, match=f"cannot read the journal folder {path}: .*; it has the results"
        ):
            list(read_journal(path))


def test_an_overlong_line_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(line())
    with path.open("ab") as file:
        file.truncate(8 * MAX_LINE_BYTES)  # 512 MiB of NULs that take no room on the disk
    warnings = []
    reader = JournalReader(tmp_path, warnings.append)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [e.seq for e in reader.poll()] == [0]
    assert len(warnings) == 1
    with path.open("ab") as file:
        file.write(b"\n" + line(1))
    assert [e.seq for e in reader.poll()] == [1]
    assert len(warnings) == 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 4 * MAX_LINE_BYTES


def refuse(number):
    def link(source, target):
        raise OSError(getattr(errno, number), number)

    return link


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        *((refuse(number), number) for number in ("EPERM", "EOPNOTSUPP", "EMLINK", "ENOSYS")),
        (shutil.copy, "the link count stays 1"),
    ],
)
def test_a_file_system_without_hard_links_is_refused_when_the_sweep_is_opened(
    tmp_path, monkeypatch, link, reason
):
    monkeypatch.setattr(os, "link", link)
    with refused(f"the file system of {tmp_path / 's'} has no hard links ({reason})", SweepFolderError):
        SweepFolder(tmp_path / "s").create()
    assert list((tmp_path / "s" / "claims").iterdir()) == []
