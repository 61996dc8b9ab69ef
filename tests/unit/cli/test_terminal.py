"""Standard streams, text that must not reach a terminal, and tables on terminals of all widths."""

import io
import os
import subprocess
import sys
import time

import pytest
from rich.console import Group
from rich.text import Text

from tests.sweep_folder import write
from tests.unit.cli.conftest import QUICK, record
from ultrabench.cli.run_doctor import _show_checks
from ultrabench.cli.tables import PlainConsole, plain_text, table
from ultrabench.launchers.doctor.check import failure
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import Started

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x1b[0m \x1b[2J\x9b1mcut\u202etxt.exe\x00 \u00e9\u4e2d"
FULL = "ultrabench: cannot use standard output: No space left on device; free or unlock it, or use another\n"
RUN = QUICK.runs[2]
TERMINAL = "script -qec '{}' /dev/null"
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
    command = " ".join([sys.executable, "-m", "ultrabench", *words])
    process = subprocess.run(
        ["bash", "-c", how.replace("{}", command)], capture_output=True, env={**os.environ, **environment}
    )
    return process.returncode, process.stdout.decode(), process.stderr.decode()


@pytest.mark.parametrize(
    ("how", "name", "code"),
    [("{} >&-", "quick-cpu", 0), ("{} >/dev/full", "quick-cpu", 3), ("{} 2>&-", "nobody", 2),
        ("{} 2>/dev/full", "nobody", 2),
     ("{} >&- 2>&- <&-", "quick-cpu", 0), ("{} >&- 2>&- <&-", "nobody", 2)],
)  # fmt: skip
def test_streams_that_take_nothing_cost_one_line_at_most(sweep, how, name, code):
    exit_code, _, err = cli("sweep", "status", name, how=how)
    assert (exit_code, "Traceback" in err, len(err.splitlines()) <= 1) == (code, False, True)
    assert code != 3 or err == FULL


def test_an_ascii_terminal_gets_question_marks(sweep):
    code, out, err = cli("sweep", "status", "quick-cpu", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "cuttxt.exe ??" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("library", "code"),
    [
        ("typer", "PRESSED"), ("hydra", "PRESSED"),
        ("hydra", "try:\n    PRESSED\nexcept KeyboardInterrupt:\n    raise ValueError from None\n"),
    ],
)  # fmt: skip
def test_ctrl_c_gives_one_line_also_during_imports_and_where_a_library_makes_another_error_of_it(
    tmp_path, library, code
):
    pressed = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
    (tmp_path / f"{library}.py").write_text(code.replace("PRESSED", pressed))
    heard = "env --default-signal=INT {}"  # tests that run in the background ignore it, and their children would, too
    assert cli("sweep", "plan", how=heard, PYTHONPATH=str(tmp_path)) == (130, "", "ultrabench: interrupted\n")


def test_the_command_imports_nothing_before_it_has_a_handler_for_ctrl_c():
    script = (
        "import sys; old = {*sys.modules}; import ultrabench.cli.entry; print(*sorted({*sys.modules} - old))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == ["ultrabench", "ultrabench.cli", "ultrabench.cli.entry"]


def test_an_ascii_terminal_gets_bars_of_number_signs():
    words = ("predict", "dp=8", "model=llama3-8b", "hardware=h100x8")
    out = cli(*words, PYTHONIOENCODING="ascii")[1]
    assert "?" not in out
    assert f" {'#' * 40}\n" in out
    assert out.replace("#", "\u2588") == cli(*words, PYTHONIOENCODING="utf-8")[1]


def test_what_a_run_has_said_is_shown_without_escape_sequences(sweep):
    for words in (["sweep", "status", "quick-cpu"], ["sweep", "show", RUN.run_id]):
        _, out, _ = cli(*words, how=TERMINAL, TERM="xterm", COLUMNS="80")
        assert "\x1b[31m" in out, "a terminal gets colours"
        assert "cuttxt.exe" in out
        assert not {"\x9b", "\x00", "\u202e", "\x07"} & set(out)
        assert "\x1b]" not in out
        assert "\x1b[2J" not in out
    assert cli("sweep", "logs", RUN.run_id)[1] == f"{SHOWN}\n 10%\n 20%\n"


def test_a_followed_log_reads_only_what_is_new_in_the_journal(ultrabench, sweep, tmp_path, monkeypatch):
    key = AttemptKey(QUICK.runs[3].run_id, 0, 0)
    log = tmp_path / str(key) / "rank0.log"
    log.parent.mkdir()
    log.write_text("first\n")
    agent = write(sweep, Started(**key._asdict(), allocation="n1", scratch=str(tmp_path)))

    def sleep(seconds):
        agent.path.write_text(" " * agent.path.stat().st_size)  # who reads it again knows of no log
        log.write_text("first\nsecond\n")
        record(sweep, QUICK.runs[3])

    monkeypatch.setattr(time, "sleep", sleep)
    assert ultrabench("sweep", "logs", key.run_id, "-f") == (0, "first\nsecond\n", "")


@pytest.mark.parametrize("words", [("sweep", "plan"), ("sweep", "launch", "sweep.nodes=0")])
def test_commands_that_plan_say_so_at_once_on_a_terminal_only(ultrabench, words):
    shown = cli(*words, how=TERMINAL, TERM="xterm")[1]
    assert "planning\r\n" in shown.splitlines(keepends=True)[0]
    assert "planning" not in "".join(ultrabench(*words)[1:])


def test_plain_text_keeps_lines_and_tabs():
    assert plain_text(f"a\tb\nc\r\x7f{HOSTILE}") == f"a\tb\nc{SHOWN}"


RUN_ID = "5ef64a46843185df"
COLUMNS = (">rank", "layout", ">MFU", ">tokens/s/GPU", ">memory", ">step", ">predicted", "status", "run id")
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
    text = shown(table("the title", *COLUMNS, rows=[ROW]), width)
    whole = {part.removeprefix(">") for cell in (*COLUMNS, *ROW) for part in cell.split()} | {"the", "title"}
    assert set(text.split()) <= whole
    assert max(len(line) for line in text.splitlines()) <= width
    needed = {
        50: {"17", "0.1234", "1.2", "preempted", *ROW[1].split()},
        80: {"1,234,567", "29.9"},
        120: {"0.1300"},
        200: {RUN_ID},
    }
    assert set().union(*(words for least, words in needed.items() if width >= least)) <= set(text.split())
    assert ("0.1300" in text) == (width >= 120)


def test_columns_that_are_empty_in_all_rows_go_first():
    oom = ("17", "dp2 tp4 pp2 z1 mbs2 gas16", None, None, None, None, "0.1300 s", "oom", RUN_ID)
    head = shown(table("", *COLUMNS, rows=[oom]), 80).split()
    assert {"predicted", "0.1300", RUN_ID} <= set(head)
    assert "memory" not in head


RECOMMENDED = (
    ">nodes", ">precision", "layout", ">MFU", ">tokens/s", ">tokens/s/GPU", ">step s", ">peak GiB", ">P(OOM)", ">days",
    ">cost",
    "limited by", "note",
)  # fmt: skip
RECOMMENDED_ROWS = [
    ("8", precision, "dp64 tp1 pp1 z2 mbs1 gas8", "62.6 %", "684,206", "10,691", "6.13 (4.77-8.45)", "57.4", "1.5 %",
     "254 (198-350)", "974,365 (758,000-1,340,000)", "compute; memory_bound 18 %", "extrapolated, above published")
    for precision in ("bf16", "fp8")
]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "last", "first"),
    [
        (60, {"step", "(4.77-8.45)", "extrapolated,", "P(OOM)"}, {"days", "precision", "57.4", "nodes", "MFU"}),
        (80, {"step", "(4.77-8.45)", "P(OOM)", "1.5", "extrapolated,", "above"},
            {"days", "974,365", "57.4", "limited", "nodes"}),
        (120, {"MFU", "10,691", "(198-350)"}, {"974,365", "limited"}),
        (230, {"nodes", "(758,000-1,340,000)", "limited"}, set()),
    ],
)  # fmt: skip
def test_how_sure_a_number_is_is_left_out_last_and_notes_with_their_columns(width, last, first):
    fitted = table("", *RECOMMENDED, rows=RECOMMENDED_ROWS)
    fitted.note_by_column = {"MFU": "the note about MFU", "step s": "the note about intervals"}
    fitted.requested_names = ("cost",)
    text = shown(fitted, width)
    assert last <= set(text.split())
    assert not first & set(text.split())
    assert ("no room for cost: widen the terminal, or use --json" in text) == (width < 230)
    assert ("the note about MFU" in text) == ("62.6" in text)
    assert "the note about intervals" in text


@pytest.mark.parametrize("width", [50, 80])
@pytest.mark.parametrize("needed", [3, 6])
def test_the_column_that_is_ranked_by_is_never_left_out(width, needed):
    ranked = table("", *COLUMNS, rows=[ROW])
    ranked.always_shown = COLUMNS[needed].removeprefix(">")
    text = shown(ranked, width)
    assert {"rank", "layout", "status", ranked.always_shown, *ROW[needed].split()} <= set(text.split())


def test_long_reasons_share_the_room_and_only_overlong_words_are_broken():
    row = (RUN_ID, "cannot read " + "x" * 90, "mend the file that is named and launch again")
    text = shown(table("", "run", "reason", "remedy", rows=[row]), 80)
    assert {"cannot", "read", "mend", "named", RUN_ID} <= set(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


def test_the_remedy_of_a_check_is_there_on_a_narrow_terminal_too(monkeypatch, capsys):
    monkeypatch.setattr("ultrabench.cli.tables.PIPE_WIDTH", 50)
    _show_checks(
        "doctor", [failure("cannot be written: /somewhere/far/away", "mend it").named("results folder")]
    )
    assert "remedy: mend it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("as_group", [False, True])
def test_a_line_is_never_broken_so_that_its_commands_can_be_copied(as_group):
    words = f"the run {RUN_ID} of a sweep goes on with ultrabench sweep resume quick-cpu"
    console = PlainConsole(file=io.StringIO(), width=30, force_terminal=True, color_system=None)
    console.print_line(
        Group(Text(words), table("", "run", "reason", rows=[(RUN_ID, words)])) if as_group else words
    )
    first_line, *table_lines = console.file.getvalue().splitlines()
    assert first_line == words
    assert all(len(line) <= 30 for line in table_lines)
