"""Standard streams, text that must not reach a terminal, and tables on terminals of all widths."""

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.unit.cli.conftest import QUICK, record
from ultrabench.cli.run_doctor import _show
from ultrabench.cli.sweep.live import attempt_line
from ultrabench.cli.tables import PlainConsole, plain, style_of, table
from ultrabench.launchers.doctor.check import failed
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import Result, Started
from ultrabench.store.journal import JournalWriter
from ultrabench.store.state import AttemptState

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


RUN_ID = "5ef64a46843185df"
COLUMNS = ("rank", "layout", "MFU", "tokens/s/GPU", "memory", "step", "predicted", "status", "run id")
NUMBERS = ("rank", "MFU", "tokens/s/GPU", "memory", "step", "predicted")
ROW = (
    "17", "dp2 tp4 pp2 cp2 z1 mbs2 gas16", "29.9 %", "1,234,567", "71.2 GiB", "0.1234 s +- 1.2 %", "0.1300 s",
    "preempted", RUN_ID,
)  # fmt: skip


def shown(renderable, width):
    file = io.StringIO()
    PlainConsole(file=file, width=width, highlight=False, markup=False).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 50, 80, 120, 200])
def test_tables_break_no_word_and_cut_no_number(width):
    made = table("the title", *(f">{name}" if name in NUMBERS else name for name in COLUMNS), rows=[ROW])
    text = shown(made, width)
    whole = {word for cell in (*COLUMNS, *ROW) for word in cell.split()} | {"the", "title"}
    assert set(text.split()) <= whole
    assert max(len(line) for line in text.splitlines()) <= width
    if width >= 50:
        assert {"17", "29.9", "preempted", *ROW[1].split()} <= set(text.split())
    if width >= 80:
        assert RUN_ID in text
        assert "1,234,567" in text
    assert ("0.1300" in text) == (width >= 120)


def test_columns_that_are_empty_in_all_rows_go_first():
    oom = ("17", "dp2 tp4 pp2 z1 mbs2 gas16", None, None, None, None, "0.1300 s", "oom", RUN_ID)
    made = table("", *(f">{name}" if name in NUMBERS else name for name in COLUMNS), rows=[oom])
    head = shown(made, 80).split()
    assert {"predicted", "0.1300", RUN_ID} <= set(head)
    assert not {"step", "memory"} & set(head)


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("needed", ["tokens/s/GPU", "predicted", "MFU"])
def test_the_column_that_is_ranked_by_is_never_left_out(width, needed):
    made = table("", *(f">{name}" if name in NUMBERS else name for name in COLUMNS), rows=[ROW])
    made.always_shown = needed
    text = shown(made, width)
    assert {"rank", "layout", "status", needed, *ROW[COLUMNS.index(needed)].split()} <= set(text.split())


def test_a_narrow_table_of_rules_keeps_the_counts_and_leaves_out_the_examples():
    row = ("tp_divides_kv_heads", "1,234", "tp=16 does not divide num_key_value_heads=8")
    text = shown(table("", "rule", ">candidates", "for example", rows=[row]), 50)
    assert {"tp_divides_kv_heads", "1,234"} <= set(text.split())
    assert "example" not in text


def test_long_reasons_share_the_room_and_only_overlong_words_are_broken():
    row = (RUN_ID, "cannot read " + "x" * 90, "mend the file that is named and launch again")
    made = table("", "run", "reason", "remedy", rows=[row])
    text = shown(made, 80)
    assert {"cannot", "read", "mend", "named", RUN_ID} <= set(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("width", [50, 80])
def test_the_remedy_of_a_check_is_there_on_a_narrow_terminal_too(width, monkeypatch, capsys):
    monkeypatch.setattr("ultrabench.cli.tables.WIDE", width)
    _show(QUICK.config, [failed("cannot be written: /somewhere/far/away", "mend it").named("results folder")])
    text = " ".join(capsys.readouterr().out.split())
    assert "remedy: mend it" in text


def line(**values):
    run = QUICK.runs[0]
    values = {"status": Status.OK, "step_times_s": (0.1,) * 6} | values
    key = AttemptKey(run.run_id, 0, 0)
    return run, AttemptState(key=key, result=RunResult(**values))


def test_the_line_of_a_finished_run_tells_mfu_memory_and_what_is_wrong_with_it():
    run, attempt = line(peak_mem_reserved_bytes=3 << 29)
    rate = run.tokens_per_s_per_gpu(attempt.result)
    flops_per_token = run.shape.flops_per_token(run.spec.workload.seq_len)
    run = replace(run, peak_flops_per_s=4 * rate * flops_per_token)
    told = attempt_line(run, attempt)
    assert ": ok, 25.0 % MFU, 1.50 GiB, " in told.plain
    assert told.style == "green"
    assert attempt_line(run, attempt, "throttled").plain.endswith(" (throttled)")
    slower = attempt_line(*line(stopped="slower_than_best"))
    assert "slower than the best of its cell" in slower.plain
    assert slower.style == "yellow"
    failed = attempt_line(*line(status=Status.OOM, reason="no memory"))
    assert failed.style == style_of("hang") == "red"
    assert "MFU" not in failed.plain


def test_a_line_wraps_between_words_on_a_terminal_and_is_whole_in_a_pipe():
    words = f"the run {RUN_ID} of a sweep goes on with ultrabench sweep resume quick-cpu"
    console = PlainConsole(file=io.StringIO(), width=30, force_terminal=True, color_system=None)
    console.print_line(words)
    lines = console.file.getvalue().splitlines()
    assert len(lines) > 1
    assert " ".join(line.strip() for line in lines) == words
    pipe = PlainConsole(file=io.StringIO(), width=30)
    pipe.print_line(words)
    assert pipe.file.getvalue() == f"{words}\n"
