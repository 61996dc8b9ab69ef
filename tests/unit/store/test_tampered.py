"""Files of a sweep that somebody damages, plants or writes at the same time: nothing is believed, followed or mixed."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import Raw

from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.claim import claim, unrecorded_attempts
from ultrabench.store.events import (
    _SAFE_NAMES_OF,
    EVENTS,
    AllocationEnded,
    AllocationPlanned,
    AllocationStarted,
    Claimed,
    Failed,
    LeadingAgent,
    Result,
    Start,
    Submitted,
)
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.state import fold
from ultrabench.store.sweep_json import read_sweep_json

ROOT = Path(__file__).parents[3]
OK = RunResult(status=Status.OK, step_times_s=(0.125, 0.25))


def journal_of(folder, *events):
    writer = JournalWriter(folder, "agent")
    for event in events:
        writer.write(event)
    return writer.path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"0.125", b"0.121"), (b'"ok"', b'"oK"'), (b'"attempt":0', b'"attempt":1'), (b'"crc":"', b'"crc":"0'),
        (rb',"crc":"\w+"', b""),
    ],
)  # fmt: skip
def test_a_line_that_was_changed_is_named_and_not_believed(tmp_path, old, new):
    path = journal_of(tmp_path, Result(run_id="aaaa", repeat=0, attempt=0, result=OK))
    path.write_bytes(re.sub(old, new, path.read_bytes()))
    warnings = []
    assert list(read_journal(tmp_path, warnings.append)) == []
    assert f"{path}:1: skipped a corrupt line about run aaaa" in warnings[0]


OUT = "../../x"


@pytest.mark.parametrize(
    "event",
    [
        AllocationPlanned(allocation=OUT, nodes=1, limit_s=1.0, tasks=()), Submitted(allocation=OUT),
        AllocationStarted(allocation="n1-a.0", agent=LeadingAgent(journal=OUT)),
        AllocationStarted(allocation="n1-a.0", agent=LeadingAgent(job=Start(job_id="--signal=9"))),
        AllocationEnded(allocation="n1-a.0", reason="", avoid=("gpu01\n#SBATCH --wrap=x",)),
        Submitted(allocation="n1-a.0", job={"job_id": "-1"}),
        Claimed(run_id=OUT, repeat=0, attempt=0, allocation="n1-a.0", spec=Raw(b"{}")),
        Failed(run_id="a", repeat=0, attempt=0, result=replace(OK, status=Status.HANG, suspect_hosts=("a b",))),
    ],
)  # fmt: skip
def test_names_that_leave_their_folder_or_their_option_are_damage(tmp_path, event):
    journal_of(tmp_path, event)
    warnings = []
    assert list(read_journal(tmp_path, warnings.append)) == []
    assert "skipped a corrupt line" in warnings[0]


def test_each_event_says_what_its_names_are_and_an_empty_one_is_none(tmp_path):
    assert _SAFE_NAMES_OF.keys() == EVENTS.keys()
    journal_of(tmp_path, Claimed(run_id="aaaa", repeat=0, attempt=0, allocation="", spec=Raw(b"{}")))
    assert [line.event.run_id for line in read_journal(tmp_path, pytest.fail)] == ["aaaa"]


def test_no_planted_file_or_link_is_written_through(tmp_path, monkeypatch):
    """A colleague may write into the folder and guess names of temporary files, but not random ones."""
    secrets, mine = tmp_path / "secrets.json", tmp_path / "mine"
    monkeypatch.setattr("ultrabench.store.folder.secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".secrets.json.guessed").symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_whole(secrets, "token", mode=0o600)
    assert (secrets.exists(), mine.exists()) == (False, False)
    monkeypatch.undo()
    write_whole(secrets, "token", mode=0o600)
    assert (secrets.read_text(), secrets.stat().st_mode & 0o777) == ("token", 0o600)


CREATE = """
import sys, time
from dataclasses import replace
from pathlib import Path
from tests.unit.cli.conftest import HEAD
from ultrabench.store.folder import SweepFolder
from ultrabench.store.sweep_json import create_sweep_json
print("ready", flush=True)
begin = float(sys.stdin.readline())
for number in range(20):
    while time.time() < begin + number * 0.02:
        pass
    print(create_sweep_json(SweepFolder(Path(sys.argv[1], str(number))), replace(HEAD, sweep=sys.argv[2])).sweep)
"""


def test_of_two_launches_of_one_new_name_one_creates_the_sweep(tmp_path):
    for number in range(20):
        SweepFolder(tmp_path / str(number)).create()
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, tmp_path, name], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        )
        for name in "ab"
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    begin = f"{time.time() + 0.1}\n"
    for process in processes:
        process.stdin.write(begin)
        process.stdin.flush()
    outputs = [process.communicate()[0].split() for process in processes]
    created = [read_sweep_json(SweepFolder(tmp_path / str(number))).sweep for number in range(20)]
    assert outputs == [created, created]
    assert not list(tmp_path.glob("*/.new-*"))


def test_claims_of_which_the_journal_says_nothing_are_counted(tmp_path):
    folder = SweepFolder(tmp_path)
    folder.create()
    events = [
        AllocationPlanned(allocation="n1-a.0", nodes=1, limit_s=1.0, tasks=()),
        Claimed(run_id="aaaa", repeat=0, attempt=0, allocation="n1-a.0", spec=Raw(b"{}")),
    ]
    journal_of(folder.journal, *events)
    for run in ("aaaa", "bbbb"):
        claim(folder.claims, str(AttemptKey(run, 0, 0)), {"allocation": "n1-a.0"})
    unrecorded = unrecorded_attempts(folder.claims, fold(read_journal(folder.journal)))
    assert unrecorded == [], "its job may just begin it"
    journal_of(folder.journal, AllocationEnded(allocation="n1-a.0", reason="all tasks done"))
    assert unrecorded_attempts(folder.claims, fold(read_journal(folder.journal))) == ["bbbb.0.0"]
