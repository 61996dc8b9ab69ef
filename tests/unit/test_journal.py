import json
import os

import pytest

from tests.configs import refused
from ultrabench.errors import SweepFolderError
from ultrabench.store.events import Cancel, Phase
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


def test_a_journal_that_cannot_be_opened_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(str(tmp_path / "file"), SweepFolderError):
        JournalWriter(tmp_path / "file", "agent").write(Cancel(generation=1))


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
