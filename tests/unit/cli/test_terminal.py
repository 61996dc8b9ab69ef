"""Standard streams that are closed, full or plain ASCII, and text that must not reach a terminal."""

import os
import subprocess
import sys

import pytest
from rich.table import Table

from tests.unit.cli.conftest import QUICK, record
from ultrabench.cli.tables import PlainConsole, plain
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import Result, Started
from ultrabench.store.journal import JournalWriter

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x1b[0m \x1b[2J\x9b1mcut\u202etxt.exe\x00 \u00e9\u4e2d"
FULL = "ultrabench: cannot use standard output: No space left on device; free or unlock it, or use another\n"
RUN = QUICK.runs[2]
SHOWN = "red cuttxt.exe \u00e9\u4e2d"


@pytest.fixture
def sweep(sweep):
    """A sweep with a failure whose reason and log hold escape sequences."""
    rank = {"rank": 0, "phase": "steady", "code": 1, "error": None, "last_line": HOSTILE}
    evidence = {"ranks": [rank], "hang_cause": HOSTILE}
    record(sweep, RUN, status=Status.CRASH, reason=HOSTILE, evidence=evidence)
    logs = sweep.log_folder(AttemptKey(RUN.run_id, 0, 0))
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_bytes(HOSTILE.encode() + b"\r\n 10%\r 20%\n")
    return sweep


def cli(*words, how="{}", **environment):
    """Runs the command line in a shell, `how` with {} for the command; exit code, stdout, stderr."""
    command = " ".join([sys.executable, "-m", "ultrabench.cli.main", *words])
    done = subprocess.run(
        ["bash", "-c", how.replace("{}", command)], capture_output=True, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("how", "name", "code"),
    [("{} >&-", "quick-cpu", 0), ("{} >/dev/full", "quick-cpu", 3), ("{} 2>&-", "nobody", 2), ("{} 2>/dev/full", "nobody", 2),
     ("{} >&- 2>&- <&-", "quick-cpu", 0), ("{} >&- 2>&- <&-", "nobody", 2)],
)  # fmt: skip
def test_streams_that_take_nothing_cost_one_line_at_most(sweep, how, name, code):
    found, _, err = cli("sweep", "status", name, how=how)
    assert (found, "Traceback" in err, len(err.splitlines()) <= 1) == (code, False, True)
    assert code != 3 or err == FULL


def test_an_ascii_terminal_gets_question_marks(sweep):
    code, out, err = cli("sweep", "status", "quick-cpu", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "cuttxt.exe ??" in out
    assert "\x1b" not in out


def test_what_a_run_has_said_is_shown_without_escape_sequences(sweep):
    for words in (["sweep", "status", "quick-cpu"], ["sweep", "show", RUN.run_id]):
        _, out, _ = cli(*words, how="script -qec '{}' /dev/null", TERM="xterm", COLUMNS="80")
        assert "\x1b[31m" in out, "a terminal gets colours"
        assert "cuttxt.exe" in out
        assert not {"\x9b", "\x00", "\u202e", "\x07"} & set(out)
        assert "\x1b]" not in out
        assert "\x1b[2J" not in out
    assert cli("sweep", "logs", RUN.run_id)[1] == f"{SHOWN}\n 10%\n 20%\n"


def test_a_followed_log_reads_only_what_is_new_in_the_journal(sweep, tmp_path):
    key = {"run_id": QUICK.runs[3].run_id, "repeat": 0, "attempt": 0}
    log = tmp_path / f"{'.'.join(map(str, key.values()))}" / "rank0.log"
    log.parent.mkdir()
    log.write_text("first\n")
    agent, other = JournalWriter(sweep.journal, "agent"), JournalWriter(sweep.journal, "agent")
    agent.write(Started(**key, allocation="n1", scratch=str(tmp_path)))
    command = [sys.executable, "-m", "ultrabench.cli.main", "sweep", "logs", key["run_id"], "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout.readline() == "first\n"
        agent.path.write_text(" " * agent.path.stat().st_size)  # who reads it again knows of no log
        with log.open("a") as file:
            file.write("second\n")
        other.write(Result(**key, source="agent", result=RunResult(status=Status.OK)))
        assert follower.stdout.read() == "second\n"


@pytest.mark.parametrize("words", [("sweep", "plan"), ("sweep", "launch", "sweep.nodes=0")])
def test_commands_that_plan_say_so_at_once_on_a_terminal_only(ultrabench, words):
    shown = cli(*words, how="script -qec '{}' /dev/null", TERM="xterm")[1]
    assert "planning\r\n" in shown.splitlines(keepends=True)[0]
    assert "planning" not in "".join(ultrabench(*words)[1:])


def test_a_terminal_with_no_color_gets_no_colours(sweep):
    how = "script -qec '{}' /dev/null"
    assert "\x1b[3" not in cli("sweep", "status", "quick-cpu", how=how, TERM="xterm", NO_COLOR="1")[1]


def test_plain_text_keeps_lines_and_tabs():
    assert plain("a\tb\nc\r\x7f") == "a\tb\nc"
    assert plain(HOSTILE) == SHOWN


def test_tables_and_styles_are_plain_too(capsys):
    made = Table("a")
    made.add_row(HOSTILE)
    PlainConsole(force_terminal=True, color_system="standard", width=80).print(made, style="red")
    shown = capsys.readouterr().out
    assert "\x1b[31m" in shown  # our own colour
    assert "cuttxt.exe" in shown
    assert "\x1b]" not in shown
