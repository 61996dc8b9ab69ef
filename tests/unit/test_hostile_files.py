"""Sweep folders with files that are no journals, and file systems that lack what a sweep needs."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ultrabench.errors import SweepFolderError
from ultrabench.store.journal import MAX_LINE_BYTES, JournalReader, read_journal

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"v": 1, "writer": "w", "seq": 0, "time": 0.0, "event": "cancel", "generation": 1}


def line(**values):
    return json.dumps({**GOOD, **values}).encode() + b"\n"


def fifo(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def loop(path):
    path.symlink_to(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, folder, loop, unix_socket, device], ids=lambda make: make.__name__)
def test_what_is_no_regular_file_is_skipped_with_one_warning(tmp_path, make):
    (tmp_path / "a.jsonl").write_bytes(line(seq=0))
    make(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(line(seq=1))
    told = []
    reader = JournalReader(tmp_path, told.append)
    assert [e.seq for e in reader.poll()] == [0, 1]
    assert list(reader.poll()) == []
    assert len(told) == 1
    assert str(tmp_path / "b.jsonl") in told[0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_a_file_of_another_user_is_skipped_and_an_unreadable_folder_is_named(tmp_path):
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    (tmp_path / "a.jsonl").write_bytes(line())
    (tmp_path / "b.jsonl").write_bytes(line())
    (tmp_path / "b.jsonl").chmod(0o000)
    told = []
    os.seteuid(65534)
    try:
        assert len(list(read_journal(tmp_path, told.append))) == 1
        os.seteuid(0)
        tmp_path.chmod(0o000)
        os.seteuid(65534)
        with pytest.raises(SweepFolderError, match=str(tmp_path)):
            list(read_journal(tmp_path))
    finally:
        os.seteuid(0)
        tmp_path.chmod(0o755)
    assert len(told) == 1


def test_a_journal_folder_that_is_gone_is_named(tmp_path):
    for path in (tmp_path / "journal", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(SweepFolderError, match=f"cannot read the journal folder {path}: .*; results"):
            list(read_journal(path))


def test_absurd_nesting_is_a_corrupt_line(tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    nested = line(seq=2)[:-2] + b', "more": ' + deep + b"}\n"
    (tmp_path / "w.jsonl").write_bytes(deep + b"\n" + nested + line(seq=1))
    told = []
    assert [e.seq for e in read_journal(tmp_path, told.append)] == [1]
    assert len(told) == 2


def test_an_overlong_line_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(line(seq=0))
    with path.open("ab") as file:
        file.truncate(8 * MAX_LINE_BYTES)  # 512 MiB of NULs that take no room on the disk
    told = []
    reader = JournalReader(tmp_path, told.append)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [e.seq for e in reader.poll()] == [0]
    assert len(told) == 1
    with path.open("ab") as file:
        file.write(b"\n" + line(seq=1))
    assert [e.seq for e in reader.poll()] == [1]
    assert len(told) == 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 4 * MAX_LINE_BYTES


@pytest.mark.parametrize("number", ["EPERM", "EOPNOTSUPP", "EMLINK", "ENOSYS"])
def test_a_file_system_without_hard_links_is_refused_when_the_sweep_is_opened(tmp_path, number):
    code = (
        "import sys; from pathlib import Path; from ultrabench.store.folder import SweepFolder\n"
        "SweepFolder(Path(sys.argv[1])).create()"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.without_links", number, sys.executable, "-c", code, str(tmp_path / "s")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ultrabench.errors.SweepFolderError: the file system of {tmp_path / 's'} makes no"
    )
    assert "results_dir=FOLDER" in last
    assert list((tmp_path / "s" / "claims").iterdir()) == []
