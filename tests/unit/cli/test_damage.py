"""A folder or a row that is damaged, foreign or unreadable is a warning, and commands show all others."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sweep_folder import attempted, ended, write
from tests.unit.cli.conftest import HEAD, QUICK, as_json, content, make_folder, one_line
from ultrabench.analysis.study import studies
from ultrabench.store.events import encode, with_checksum
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal


def _foreign_plan(folder):
    pq.write_table(pa.table({"a": [1]}), folder.plan)


def _plan_of_other_types(folder):
    plan = pq.read_table(folder.plan)
    numbers = pa.array(range(len(plan)))
    pq.write_table(plan.set_column(plan.column_names.index("model"), "model", numbers), folder.plan)


def _no_parquet(folder):
    folder.plan.write_bytes(b"PAR1 and nothing else")


def _folder_as_plan(folder):
    folder.plan.unlink()
    folder.plan.mkdir()


def _empty_sweep_json(folder):
    folder.sweep_json.write_text("")


def _folder_as_sweep_json(folder):
    folder.sweep_json.unlink()
    folder.sweep_json.mkdir()


def _other_sweep_json(folder):
    folder.sweep_json.write_text('{"schema_version": 2, "sweep": 7}')


def _file_as_journal(folder):
    shutil.rmtree(folder.journal)
    folder.journal.write_text("")


def _folder_in_journal(folder):
    (folder.journal / "agent-x.jsonl").mkdir()


def _binary_journal(folder):
    (folder.journal / "agent-x.jsonl").write_bytes(bytes(range(256)) + b"\n[]\n{}\nnull\n")


FOLDER_FAULTS = (
    _foreign_plan, _plan_of_other_types, _no_parquet, _folder_as_plan, _empty_sweep_json, _folder_as_sweep_json,
    _other_sweep_json, _file_as_journal, _folder_in_journal, _binary_journal,
)  # fmt: skip


def edit_plan(folder, column, value):
    """Writes another value into the first row of a plan."""
    plan = pq.read_table(folder.plan)
    index = plan.column_names.index(column)
    column_values = [value, *plan[column].to_pylist()[1:]]
    column_type = pa.string() if isinstance(value, str) else plan.schema.field(column).type
    new_column = pa.array(column_values, column_type)
    pq.write_table(plan.set_column(index, column, new_column), folder.plan)


def edit_result(folder, run, **values):
    """Writes other values into the result of a run, with the checksums of the changed lines."""
    for path in folder.journal.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        for line in lines:
            line.pop("crc", None)
            if "result" in line and line["run_id"] == run.run_id:
                line["result"].update(values)
        path.write_bytes(b"".join(with_checksum(json.dumps(line).encode()) for line in lines))


@pytest.fixture
def bad(sweep):
    """A second sweep like the first one, which tests damage."""
    folder = make_folder(sweep.path.with_name("bad"), HEAD, QUICK.candidates)
    for run in QUICK.runs[:2]:
        write(folder, *attempted(run.spec, ended(started_at=1e9), allocation="n1"))
    return folder


WORDS_OF_STUDIES = {"history": ("history",), "nodes": ("nodes",), "export": ("export", "csv", "quick-cpu")}
COMMANDS = {
    "list": ("sweep", "list"), "top": ("sweep", "top", "quick-cpu"),
    "collect": ("collect", "quick-cpu", "bad", "-o", "out.parquet"), "report": ("report", "quick-cpu"),
    **{study.name: WORDS_OF_STUDIES[study.name] for study in studies() if study.name in WORDS_OF_STUDIES},
}  # fmt: skip


def runs_in(table):
    return {row["run_id"] for row in table.to_pylist() if row["status"] == "ok"}


def test_damaged_folders_are_warnings_and_the_others_are_shown(ultrabench, sweep, bad):
    for damage in FOLDER_FAULTS:
        folder = SweepFolder(bad.path.with_name(f"bad{damage.__name__}"))
        shutil.copytree(bad.path, folder.path)
        damage(folder)
    bad_names = [f"bad{damage.__name__}" for damage in FOLDER_FAULTS]
    for name, words in COMMANDS.items():
        code, out, err = ultrabench(*words, *(bad_names if name == "collect" else []))
        assert code == 0, (name, err)
        assert "Traceback" not in err
        if name in ("list", "collect"):
            assert "quick-cpu" in (out or err.splitlines()[-1])
            unnamed = [bad_name for bad_name in bad_names if bad_name not in err]
            assert unnamed == [], f"{name} says nothing of the damage"
    assert {QUICK.runs[0].run_id} <= runs_in(pq.read_table("out.parquet"))


@pytest.mark.parametrize("damage", FOLDER_FAULTS, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_sweep_alone_is_shown_as_far_as_it_can_be_or_refused_in_one_line(
    ultrabench, sweep, bad, damage
):
    damage(bad)
    for words in (
        ("sweep", "top", "bad"), ("nodes", "bad"), ("sweep", "status", "bad"),
        ("sweep", "rename", "bad", "new", "--yes"),
    ):  # fmt: skip
        code, _, err = ultrabench(*words)
        assert code in (0, 2), (words, err)
        assert code == 0 or len([line for line in err.splitlines() if not line.startswith("warning: ")]) == 1


def test_the_newest_sweep_that_can_be_read_is_shown_by_default(ultrabench, sweep, bad):
    os.utime(sweep.sweep_json, (1e9, 1e9))
    _empty_sweep_json(bad)
    code, out, err = ultrabench("sweep", "top")
    assert (code, "quick-cpu" in out) == (0, True)
    assert err.startswith("warning: bad: ")
    code, _, err = ultrabench("collect")
    damage_line, result_line = err.splitlines()[:2]
    assert (code, damage_line.startswith("warning: bad: ")) == (0, True)
    assert f"of quick-cpu to {sweep.path}/runs.parquet" in result_line


@pytest.mark.parametrize("mode", [0o000, 0o600], ids=oct)
def test_a_folder_that_may_not_be_read_is_a_warning(sweep, bad, mode):
    """In a process of another user, since root may read everything."""
    command = [sys.executable, "-m", "ultrabench"]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
        if not shutil.which("setpriv") or subprocess.run([*command, "--version"], cwd="/").returncode:
            pytest.skip("no other user can start the program")
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is closed for others
        os.chmod(folder, 0o755)
        shutil.copytree(sweep.path.parent, Path(folder) / "results")
        (Path(folder) / "results" / "bad").chmod(mode)
        for words in [COMMANDS[name] for name in ("list", "history", "nodes") if name in COMMANDS]:
            process = subprocess.run([*command, *words], capture_output=True, text=True, cwd=folder)
            assert process.returncode == 0, process.stderr
            assert "warning: bad: cannot read" in process.stderr
        (Path(folder) / "results" / "bad").chmod(0o755)


@pytest.mark.parametrize(
    ("column", "value"),
    [("variant", "{"), ("variant", "[1]"), ("variant", '{"env.A": [1]}'), ("variant", "a\nb"), ("nodes", 0),
        ("nodes", None), ("dp", 0), ("dp", None),
     ("gbs", -1), ("run_id", None), ("pp_schedule", "?"), ("zero_stage", 9)],
)  # fmt: skip
def test_a_damaged_row_of_the_plan_is_a_warning(ultrabench, sweep, column, value):
    edit_plan(sweep, column, value)
    num_runs = len(QUICK.runs)
    code, out, err = ultrabench("sweep", "list")
    assert (code, "quick-cpu" in out) == (0, True), err
    assert err.startswith("warning: ")
    assert "skipped 1 damaged row, such as run" in err
    assert as_json(ultrabench, "sweep", "list")[0]["runs"] == num_runs - 1
    assert ultrabench("collect")[0] == 0


IMPOSSIBLE_VALUES = (
    {"started_at": -1e11}, {"started_at": 1e300}, {"started_at": 2e11}, {"peak_mem_reserved_bytes": 2**70},
    {"step_times_s": [0.0] * 6}, {"step_times_s": [-1.0] * 6}, {"step_times_s": [1e308] * 6}, {"duration_s": 1e308},
    {"allocator_retries": -(2**63)}, {"loss_final": 1e308}, {"checkpoint_save_s": 1e-300, "checkpoint_bytes": 2**60},
    {"hostnames": [""]}, {"power_w_mean": -1.0}, {"probe": {"a": 1}}, {"evidence": {"hang_evidence": 3}},
    {"variables": {"A": "\n"}},
)  # fmt: skip


def test_impossible_values_of_results_end_no_command(ultrabench, sweep, bad):
    runs = QUICK.runs[2 : 2 + len(IMPOSSIBLE_VALUES)]
    for run, values in zip(runs, IMPOSSIBLE_VALUES, strict=True):
        write(bad, *attempted(run.spec, ended(started_at=1e9), allocation="n1"))
        edit_result(bad, run, **values)
    for name, words in COMMANDS.items():
        code, _, err = ultrabench(*(word.replace("quick-cpu", "bad") for word in words))
        assert code == 0, (name, err)
        assert "Traceback" not in err
    rows = [row for row in pq.read_table("out.parquet").to_pylist() if row["attempt"] is not None]
    assert {run.run_id for run in runs} <= {row["run_id"] for row in rows}


def test_a_date_that_is_none_is_named_and_its_result_is_kept(ultrabench, sweep):
    edit_result(sweep, QUICK.runs[0], started_at=-1e11)
    _, _, err = ultrabench("collect", "quick-cpu")
    assert "started_at=-1e+11, which is no date of the years 1970 to 2262; its start counts as unknown" in err
    table = pq.read_table(sweep.path / "runs.parquet")
    assert QUICK.runs[0].run_id in runs_in(table)
    assert table["started_at"].null_count == len(table)


def test_the_time_of_a_line_that_is_no_date_counts_as_unknown(sweep):
    path = next(sweep.journal.glob("*.jsonl"))
    line = next(read_journal(sweep.journal))
    path.write_bytes(encode(type(line)(line.event, line.writer, line.seq, -1e11)))
    assert [line.time for line in read_journal(sweep.journal)] == [0.0]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_sweep_whose_json_is_damaged_keeps_its_name(ultrabench, sweep, text):
    sweep.sweep_json.write_text(text)
    before = content(sweep)
    assert str(sweep.sweep_json) in one_line(ultrabench, "sweep", "rename", "quick-cpu", "new", "--yes")
    assert content(sweep) == before
    assert not SweepFolder(sweep.path.with_name("new")).path.exists()
