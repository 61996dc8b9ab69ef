"""Disks that are full, read-only or silent for a while, or for good: real file systems of 256 KiB."""

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.disks import on_a_small_disk
from ultrabench.agent.disk_retry import DiskRetry
from ultrabench.errors import ClusterError

JOURNAL = """
from ultrabench.errors import DiskError
from ultrabench.store.events import Submitting
from ultrabench.store.journal import JournalWriter, read_journal
writer = JournalWriter(disk, "agent")
write = lambda n: writer.write(Submitting(allocation=f"{n}", token="x" * 3000))
"""


def test_a_journal_survives_a_full_and_a_read_only_disk(tmp_path):
    told = on_a_small_disk(
        tmp_path,
        JOURNAL
        + """
        warnings = []
        for n, (spoil, mend) in enumerate([(fill, free), (lambda: read_only(True), lambda: read_only(False))]):
            write(2 * n)
            writer._close()  # a disk with a file open for writing cannot be made read-only
            spoil()
            for _ in range(3):
                try:
                    write(2 * n + 1)
                except DiskError as error:
                    print(error)
            mend()
            write(2 * n + 1)
        print([(e.seq, int(e.event.allocation)) for e in read_journal(disk, warnings.append)])
        """.replace("\n        ", "\n"),
    )
    *errors, events = told.splitlines()
    assert [e.split(": ")[1].split(";")[0] for e in errors] == ["No space left on device"] * 3 + [
        "Read-only file system"
    ] * 3
    assert events == "[(0, 0), (1, 1), (2, 2), (3, 3)]"


def test_nothing_but_whole_files_is_found_on_a_full_disk(tmp_path):
    told = on_a_small_disk(
        tmp_path,
        """
        from ultrabench.store.claim import claim, owner_of
        from ultrabench.store.folder import write_whole
        write_whole(disk / "whole", "first")
        fill()
        for act in (lambda: write_whole(disk / "whole", "second" * 9000),
                    lambda: claim(disk, "run.0.0", {"allocation": "mine", "more": "x" * 9000})):
            try:
                print(act())
            except OSError as error:
                print(error.strerror)
        print((disk / "whole").read_text(), sorted(p.name for p in disk.iterdir()))
        free()
        print(claim(disk, "run.0.0", {"allocation": "mine"}), owner_of(disk, "run.0.0"))
        read_only(True)
        try:
            claim(disk, "run.0.1", {"allocation": "mine"})
        except OSError as error:
            print(error.strerror)
        """,
    )
    assert told.splitlines() == [
        "No space left on device", "No space left on device", "first ['ballast', 'whole']", "True mine",
        "Read-only file system",
    ]  # fmt: skip


def test_an_agent_waits_for_a_disk_and_goes_on_beating(tmp_path):
    told = on_a_small_disk(
        tmp_path,
        JOURNAL
        + """
from ultrabench.agent.disk_retry import DiskRetry
beats = []
disk_retry = DiskRetry(1.0)
disk_retry.beat = lambda: beats.append(time.monotonic())
fill()
later(1.0, free)
disk_retry.retry(lambda: write(1))
writer._close()  # a disk with a file open for writing cannot be made read-only
read_only(True)
later(1.0, read_only, False)
disk_retry.retry(lambda: write(2))
print([int(e.event.allocation) for e in read_journal(disk)])
from tests.patience import slowness
print(max(b - a for a, b in zip(beats, beats[1:])) < slowness())
        """,
    )
    assert told.splitlines() == ["[1, 2]", "True"]


def test_an_agent_gives_up_a_disk_that_nobody_mends(capfd):
    disk_retry = DiskRetry(1.0)
    with pytest.raises(ClusterError, match=r"No space left on device.*; waited 0.5 s"):
        disk_retry.retry(full, 0.5)
    assert "No space left on device" in capfd.readouterr().err


def test_a_log_on_the_full_disk_does_no_harm():
    code = (
        "from ultrabench.agent.disk_retry import DiskRetry; from ultrabench.errors import ClusterError\n"
        "try: DiskRetry(1.0).retry(lambda: open('/dev/full', 'wb', buffering=0).write(b'x'), 0.5)\n"
        "except ClusterError: print('given up')"
    )
    with open("/dev/full", "wb") as log:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, check=False)
    assert (done.returncode, done.stdout) == (0, b"given up\n")


def full():
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def test_a_silent_file_server_is_not_waited_for_in_the_kernel(tmp_path):
    os.mkfifo(tmp_path / "server")  # opening it blocks, as a server that is away does
    disk_retry, beats = DiskRetry(1.0), []
    disk_retry.beat = lambda: beats.append(1)
    with pytest.raises(ClusterError, match=r"did not answer for 0.3 s"):
        disk_retry.retry((tmp_path / "server").read_bytes, 0.3)
    assert len(beats) > 1
    (tmp_path / "server").write_bytes(b"")


def test_what_cannot_pass_is_told_at_once():
    disk_retry = DiskRetry(1.0)
    with pytest.raises(ZeroDivisionError):
        disk_retry.retry(lambda: 1 // 0)
    with pytest.raises(FileNotFoundError):
        disk_retry.retry(lambda: os.stat("/no/such/file"))


def test_presence_is_shown_at_most_so_often_and_leaves_no_thread(tmp_path):
    journal = tmp_path / "journal"
    journal.write_text("")
    os.utime(journal, (0, 0))
    disk_retry, threads = DiskRetry(3600.0), threading.active_count()
    disk_retry._touched, disk_retry.journal = time.monotonic() - 4000.0, journal
    disk_retry.beat()
    first = journal.stat().st_mtime_ns
    assert first > 0
    disk_retry.beat()
    assert journal.stat().st_mtime_ns == first
    assert threading.active_count() == threads
    disk_retry._touched -= 4000.0
    disk_retry.journal = tmp_path / "gone"
    disk_retry.beat()
