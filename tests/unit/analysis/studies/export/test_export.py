"""`ultrabench export`, and the process behind `launcher.track`, against the readers of the trackers themselves."""

import contextlib
import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from tests import patience
from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis.tables import table_of
from tests.unit.cli.conftest import QUICK, as_json, content, one_line, record
from ultrabench.analysis.studies.export.library import PACKAGES, require_library
from ultrabench.cli.sweep import tracking
from ultrabench.store.events import Launched
from ultrabench.sweep.config.load import load_config

OK, CRASHED = QUICK.runs[:2]


@pytest.fixture
def measured(sweep):
    """The sweep of `sweep`, of which one run was measured twice, and a second layout as well."""
    record(sweep, OK, repeat=1, step_times_s=(0.09,) * 6, peak_mem_reserved_bytes=2**28)
    record(sweep, QUICK.runs[2], step_times_s=(0.2,) * 6)
    return sweep


def read_back(kind, folder):
    """What the tracker's own reader finds after two exports under two names, by run:
    the part of its id that is the run_id.
    """
    for package in PACKAGES[kind]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'ultrabench[{kind}]'")
    command = [sys.executable, "-m", "tests.unit.analysis.studies.export.read_back", kind]
    env = os.environ | {"PYTHONPATH": str(__file__).partition("/tests/")[0]}
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("exported 3 runs to ") == 2
    return json.loads(process.stdout)


SETTINGS = ("model", "nodes", "tp", "pp", "mbs", "zero_stage", "gbs", "seq_len", "precision", "hardware")
NUMBERS = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "ranked_value",
    "mfu",
    "num_repeats",
    "peak_mem_reserved_bytes",
)


def require_same(run, row, config=str, number=float):
    """That a run of a tracker has the settings and numbers of the row of `sweep top`."""
    assert {name: run["config"][name] for name in SETTINGS} == {name: config(row[name]) for name in SETTINGS}
    numbers = {name: number(run["metrics"][name]) if name in run["metrics"] else None for name in NUMBERS}
    assert numbers == {name: row[name] for name in NUMBERS}


def test_csv_has_a_line_for_each_run_that_ended_with_the_numbers_of_top(ultrabench, measured):
    rows = [row for row in as_json(ultrabench, "sweep", "top") if row["status"]]
    path = measured.path / "export.csv"
    assert as_json(ultrabench, "export", "csv") == {"kind": "csv", "runs": 3, "where": str(path)}
    lines = [*csv.DictReader(path.read_text().splitlines())]
    assert [line["run_id"] for line in lines] == [row["run_id"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        require_same({"config": line, "metrics": {name: n for name, n in line.items() if n}}, row)
        assert (line["status"], line["reason"]) == (row["status"], row["reason"] or "")
    before = path.read_bytes()
    ultrabench("export", "csv", "-o", "again.csv")
    assert (path.parents[2] / "again.csv").read_bytes() == before


def test_the_median_of_two_repeats_ranks_their_run_and_is_its_speed_everywhere(ultrabench, sweep):
    beside = next(run for run in QUICK.runs[1:] if run.spec.nodes == OK.spec.nodes and run != CRASHED)
    record(sweep, OK, repeat=1, step_times_s=(0.06,) * 6)
    record(sweep, beside, step_times_s=(0.09,) * 6)
    ultrabench("export", "csv", "-o", "runs.csv")
    best, second = [*csv.DictReader(Path("runs.csv").read_text().splitlines())][:2]
    assert (best["run_id"], best["rank"], best["ranked_by"]) == (OK.run_id, "1.0", "tokens_per_s_per_gpu")
    assert float(best["ranked_value"]) > float(second["ranked_value"]) > 0
    assert best["tokens_per_s_per_gpu"] == best["ranked_value"]
    top, cell = as_json(ultrabench, "sweep", "top")[0], as_json(ultrabench, "heatmap")[0]
    (listed,) = as_json(ultrabench, "sweep", "list")
    assert float(best["tokens_per_s_per_gpu"]) == listed["best"][0]["tokens_per_s_per_gpu"]
    for name in ("run_id", "tokens_per_s_per_gpu", "mfu", "ranked_value", "ranked_by"):
        assert best[name] == str(top[name]) == str(cell[name]), name


def test_wandb_offline_holds_one_run_a_layout_also_after_the_second_export(ultrabench, measured, tmp_path):
    best, *_ = as_json(ultrabench, "sweep", "top")
    *runs, of_sweep = sorted(read_back("wandb", tmp_path), key=lambda run: run["files"])
    by_id = {run["id"].partition("-")[2]: run for run in runs}
    assert by_id.keys() == {OK.run_id, CRASHED.run_id, QUICK.runs[2].run_id}
    require_same(by_id[best["run_id"]], best, config=lambda value: value)
    assert (by_id[OK.run_id]["ended"], by_id[CRASHED.run_id]["ended"]) == (0, 1)
    assert by_id[CRASHED.run_id]["metrics"]["reason"] == "rank 1: ValueError: [bold]no[/bold]"
    assert (of_sweep["name"], of_sweep["files"]) == ("new", ["report.html", "runs.parquet"])


def test_mlflow_on_sqlite_holds_one_run_a_layout_and_one_point_a_number(ultrabench, measured, tmp_path):
    best, *_ = as_json(ultrabench, "sweep", "top")
    runs = {run["tags"]["ultrabench.key"].partition("-")[2]: run for run in read_back("mlflow", tmp_path)}
    of_sweep = runs.pop("")
    assert runs.keys() == {OK.run_id, CRASHED.run_id, QUICK.runs[2].run_id}
    require_same(runs[best["run_id"]], best)
    assert all(run["points"] == [1] for run in runs.values())
    assert {run["tags"]["mlflow.parentRunId"] for run in runs.values()} == {of_sweep["id"]}
    assert (runs[OK.run_id]["ended"], runs[CRASHED.run_id]["ended"]) == ("FINISHED", "FAILED")
    assert (of_sweep["name"], of_sweep["files"]) == ("new", ["report.html", "runs.parquet"])
    assert {run["tags"]["sweep"] for run in (*runs.values(), of_sweep)} == {"new"}


def test_tensorboard_reads_one_event_file_a_layout_with_its_step_times(ultrabench, measured, tmp_path):
    best, *_ = as_json(ultrabench, "sweep", "top")
    runs = {run["id"].rpartition("-")[2]: run for run in read_back("tensorboard", tmp_path)}
    assert runs.keys() == {OK.run_id, CRASHED.run_id, QUICK.runs[2].run_id}
    run = runs[best["run_id"]]
    assert run["metrics"].pop("step_times_s") == pytest.approx([0.1] * 6), (
        "of the repeat nearest to the median"
    )
    single = {name: point for name, (point,) in run["metrics"].items()}
    require_same({**run, "metrics": single}, best, lambda value: value, lambda n: pytest.approx(n, rel=1e-6))
    (folder,) = (tmp_path / "results/tensorboard").iterdir()
    assert folder.name == "new"
    assert {path.name for path in folder.glob("[!.]*") if path.is_file()} == {"report.html", "runs.parquet"}


@pytest.mark.parametrize("command", ["export {}", "sweep launch model=tiny launcher.track={}"])
def test_a_missing_library_gives_the_command_that_installs_it(ultrabench, sweep, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    line = one_line(ultrabench, *command.format("mlflow").split())
    assert line == "mlflow is not installed; run: pip install 'ultrabench[mlflow]'"


def test_a_folder_with_offline_runs_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with refused("wandb is not installed; run: pip install 'ultrabench[wandb]'"):
        require_library("wandb")


def test_a_sweep_whose_tracker_is_gone_is_not_resumed(ultrabench, sweep, monkeypatch):
    tracked = load_config(["model=tiny", "launcher.track=mlflow"]).resolved
    write(sweep, Launched(generation=2, config=tracked))
    ultrabench("sweep", "pause")
    before = content(sweep)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for command in ("resume", "retry"):
        assert one_line(ultrabench, "sweep", command).startswith("mlflow is not installed; run: pip install ")
    assert content(sweep) == before


def test_mistakes_of_an_export_are_one_line(ultrabench, sweep):
    assert "did you mean wandb?" in one_line(ultrabench, "export", "wandbb")
    line = one_line(ultrabench, "export", "csv", "--project", "p")
    assert line.startswith("--project p; only wandb and mlflow ")
    for path in sweep.journal.iterdir():
        path.unlink()
    assert one_line(ultrabench, "export", "csv").startswith("no run of quick-cpu has ended")
    parquet.write_table(table_of(), "empty.parquet")
    assert one_line(ultrabench, "export", "csv", "empty.parquet").startswith("no run of empty has ended")
    assert ultrabench("sweep", "top", "empty.parquet") == (0, "", "empty has no rows\n")


@pytest.fixture
def tracker(tmp_path, monkeypatch):
    """Puts a W&B in the way of processes that are started, whose `init` has this body."""

    def make(body):
        folder = tmp_path / "fake"
        folder.mkdir()
        (folder / "wandb.py").write_text(f"Settings = dict\ndef init(**options):\n    {body}\n")
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return make


def test_a_tracker_that_hangs_delays_neither_runs_nor_the_end(sweep, tracker, monkeypatch, capsys):
    tracker("import os, time; open('called', 'w').write(str(os.getpid())); time.sleep(10_000)")
    monkeypatch.setattr(tracking, "EXIT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(tracking, "USUAL_EXIT_S", 0.5)
    pid_file = sweep.path.parents[1] / "called"
    with tracking.tracked("wandb", sweep):
        patience.wait_until(lambda: pid_file.exists() and pid_file.read_text(), 60)
        ended = time.monotonic()
    assert time.monotonic() - ended < patience.slowness() * 5.0
    stderr = capsys.readouterr().err
    assert "wandb may miss some runs; to add them: ultrabench export wandb quick-cpu\n" in stderr
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_tracker_that_fails_becomes_one_line_of_its_log(sweep, tracker, capsys):
    tracker("raise ConnectionError('no route to host\\nat line 1')")
    with tracking.tracked("wandb", sweep):
        log = sweep.path / "tracking.log"
        patience.wait_until(log.exists, 60)
    (line,) = log.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d wandb: no route to host", line)
    assert f"wandb may miss some runs ({line}); to add them: " in capsys.readouterr().err


def test_a_launch_that_is_interrupted_waits_for_no_tracker(sweep, tracker, capsys):
    tracker("import time; time.sleep(10_000)")
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), tracking.tracked("wandb", sweep):
        raise KeyboardInterrupt
    assert time.monotonic() - began < patience.slowness() * 5.0
    assert "for the tracker" not in capsys.readouterr().err
