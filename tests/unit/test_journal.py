import json
import os

import pytest

from ultrabench.errors import SweepFolderError
from ultrabench.result import RunResult, Status
from ultrabench.store.events import Cancel, Failed, Phase
from ultrabench.store.journal import JournalWriter, read_journal


def test_a_writer_numbers_its_events(tmp_path):
    writer = JournalWriter(tmp_path, "launcher")
    for n in range(3):
        writer.write(Cancel(generation=n))
    assert [(e.writer, e.seq, e.event.generation) for e in read_journal(tmp_path)] == [
        (writer.name, n, n) for n in range(3)
    ]
    assert JournalWriter(tmp_path, "launcher").path != writer.path


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
    found = list(read_journal(tmp_path, warnings.append))
    assert [(e.seq, e.event.generation) for e in found] == [(0, 1), (1, 3)]
    assert len(warnings) == 1


def test_a_write_that_fails_is_told_in_one_line(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    writer = JournalWriter(tmp_path, "agent")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SweepFolderError, match="No space left on device") as raised:
        writer.write(Cancel(generation=1))
    monkeypatch.undo()
    assert "\n" not in str(raised.value)
    writer.write(Cancel(generation=2))
    assert [e.event.generation for e in read_journal(tmp_path)] == [2]


def test_a_journal_that_cannot_be_opened_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepFolderError) as raised:
        JournalWriter(tmp_path / "file", "agent").write(Cancel(generation=1))
    assert "\n" not in str(raised.value)


def test_lines_hold_no_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        JournalWriter(tmp_path, "agent").write(Cancel(generation=float("nan")))
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_one_json_object(tmp_path):
    writer = JournalWriter(tmp_path, "agent")
    writer.write(Phase(run_id="aaaa", repeat=0, attempt=0, name="two\nlines \u2028 and more"))
    raw = writer.path.read_bytes()
    assert raw.count(b"\n") == 1
    assert json.loads(raw)["name"] == "two\nlines \u2028 and more"


def test_a_result_with_bytes_that_are_no_utf8_is_read_again(tmp_path):
    told = {
        "reason": os.fsdecode(b"no such file: caf\xe9"),
        "evidence": {"tail": [os.fsdecode(b"\xff\xfe ok \xc3\xa9")]},
    }
    writer = JournalWriter(tmp_path, "agent")
    writer.write(Failed(run_id="aaaa", repeat=0, attempt=0, result=RunResult(status=Status.CRASH, **told)))
    (line,) = read_journal(tmp_path, pytest.fail)
    assert line.event.result.reason == "no such file: caf?"
    assert line.event.result.evidence == {"tail": ["?? ok \u00e9"]}
