"""Disks that are full, read-only or silent for a while, or for good: real file systems of 256 KiB."""

import os

import pytest

from tests.disks import on_a_small_disk
from tests.patience import slowness, wait_until
from ultrabench.agent.disk_retry import DiskRetry, log_line
from ultrabench.errors import ClusterError


def test_nothing_but_whole_files_is_found_on_a_full_disk(tmp_path):
    output = on_a_small_disk(
        tmp_path,
        """
        from ultrabench.store.claim import claim, owner_of
        from ultrabench.store.folder import write_whole
        def tried(act, *words):
            try:
                return act(*words)
            except OSError as error:
                return error.strerror
        write_whole(disk / "whole", "first")
        fill()
        print(tried(write_whole, disk / "whole", "second" * 9000))
        print(tried(claim, disk, "run.0.0", {"allocation": "mine", "more": "x" * 9000}))
        print((disk / "whole").read_text(), sorted(p.name for p in disk.iterdir()))
        free()
        print(claim(disk, "run.0.0", {"allocation": "mine"}), owner_of(disk, "run.0.0"))
        read_only(True)
        print(tried(claim, disk, "run.0.1", {"allocation": "mine"}))
        """,
    )
    no_space = "No space left on device"
    expected = [no_space, no_space, "first ['ballast', 'whole']", "True mine", "Read-only file system"]
    assert output.splitlines() == expected


def test_an_agent_waits_for_a_disk_and_goes_on_beating_and_its_journal_stays_readable(tmp_path):
    output = on_a_small_disk(
        tmp_path,
        """
        from tests.patience import slowness
        from ultrabench.agent.disk_retry import DiskRetry
        from ultrabench.store.events import Submitting
        from ultrabench.store.journal import JournalWriter, read_journal
        writer, disk_retry, beats = JournalWriter(disk, "agent"), DiskRetry(1.0), []
        disk_retry.beat = lambda: beats.append(time.monotonic())
        write = lambda n: disk_retry.retry(lambda: writer.write(Submitting(allocation=f"{n}", token="x" * 3000)))
        write(0)
        fill()
        later(1.0, free)
        write(1)
        writer._close()  # a disk with a file open for writing cannot be made read-only
        read_only(True)
        later(1.0, read_only, False)
        write(2)
        print([(e.seq, e.event.allocation) for e in read_journal(disk)])
        print(max(b - a for a, b in zip(beats, beats[1:])) < slowness())
        """,
    )
    assert output.splitlines() == ["[(0, '0'), (1, '1'), (2, '2')]", "True"]


def full(*_):
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def test_an_agent_gives_up_a_disk_that_nobody_mends(capfd):
    disk_retry = DiskRetry(1.0)
    with pytest.raises(ClusterError, match=r"No space left on device.*; retried for 0.5 s"):
        disk_retry.retry(full, 0.5)
    assert "No space left on device" in capfd.readouterr().err


def test_space_is_freed_once_and_before_anybody_waits(tmp_path, capfd):
    """The disk is full until its space is freed, and the clock starts again then."""
    has_space, calls = [], []

    def write():
        calls.append("write")
        if not has_space:
            full()
        return "written"

    def free_space():
        calls.append("free")
        has_space.append(True)

    assert DiskRetry(1.0).retry(write, 0.0, free_space=free_space) == "written"
    assert calls == ["write", "free", "write"]
    assert "retrying" not in capfd.readouterr().err
    calls.clear()
    with pytest.raises(ClusterError):
        DiskRetry(1.0).retry(full, 0.0, free_space=lambda: calls.append("free"))
    assert calls == ["free"]


def test_a_log_on_the_full_disk_does_no_harm(monkeypatch):
    monkeypatch.setattr(os, "write", full)
    log_line("a line that nobody will read")


def test_a_silent_file_server_is_not_waited_for_in_the_kernel(tmp_path):
    os.mkfifo(tmp_path / "server")  # opening it blocks, as a server that is away does
    disk_retry, beats = DiskRetry(1.0), []
    disk_retry.beat = lambda: beats.append(1)
    with pytest.raises(ClusterError, match="did not answer for "):
        disk_retry.retry((tmp_path / "server").read_bytes, 0.3 * slowness())
    assert len(beats) > 1
    (tmp_path / "server").write_bytes(b"")


@pytest.mark.parametrize(
    ("act", "error"),
    [(lambda: 1 // 0, ZeroDivisionError), (lambda: os.stat("/no/such/file"), FileNotFoundError)],
)
def test_what_cannot_pass_is_told_at_once(act, error):
    with pytest.raises(error):
        DiskRetry(1.0).retry(act)


def test_an_agent_shows_that_it_is_there_by_its_journal(tmp_path):
    journal, disk_retry = tmp_path / "journal", DiskRetry(0.0)
    journal.touch()
    os.utime(journal, (0, 0))
    disk_retry.journal_path = journal
    disk_retry.beat()
    wait_until(lambda: journal.stat().st_mtime > 0, 5)
