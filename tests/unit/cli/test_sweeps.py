"""`sweep list`, `rm` and `rename`."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.sweep_folder import attempted, events_of, make_folder, write
from tests.unit.allocations import first_allocations, open_sweep
from tests.unit.cli.conftest import HEAD, QUICK, as_json, content, one_line, record
from ultrabench.processes import own_name
from ultrabench.store.events import AllocationPlanned, AllocationStarted, LeadingAgent
from ultrabench.store.folder import SweepFolder
from ultrabench.store.identity import ensure_identity
from ultrabench.store.lease import Lease


@pytest.fixture
def older(sweep):
    """A second sweep, older than the other one, of which nothing was tried."""
    folder = make_folder(sweep.path.with_name("older"), HEAD, QUICK.candidates)
    write(folder)
    os.utime(folder.sweep_json, (1e9, 1e9))
    return folder


def planned(sweep, user=None, host=None, name="n1-b.0"):
    """Journals an allocation of which no end is recorded."""
    place = {"user": user or own_name(), "cluster": "", "host": host or socket.gethostname().split(".")[0]}
    write(sweep, AllocationPlanned(allocation=name, nodes=1, limit_s=60.0, tasks=(), by=place))


def test_the_list_has_every_sweep_newest_first_with_the_best_run_of_status(ultrabench, sweep, older):
    newest, oldest = as_json(ultrabench, "sweep", "list")
    status = as_json(ultrabench, "sweep", "status", "quick-cpu")
    assert (newest["sweep"], oldest["sweep"]) == ("quick-cpu", "older")
    for name in ("runs", "settled", "by_status", "best"):
        assert newest[name] == status[name]
    assert newest["best"][0]["run_id"] == QUICK.runs[0].run_id
    assert (newest["cells"], newest["activity"], oldest["best"]) == (2, "stopped", [])
    assert oldest["age_s"] > 1e7 > newest["age_s"]


def test_several_links_to_a_sweep_are_one_sweep(ultrabench, sweep, tmp_path):
    """The list names the folder itself, or the first link to one that is elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(sweep.path, elsewhere)
    for name, path in (("a-link", sweep.path), ("far-2", elsewhere), ("far-1", elsewhere)):
        sweep.path.with_name(name).symlink_to(path)
    names = sorted(entry["path"].rpartition("/")[2] for entry in as_json(ultrabench, "sweep", "list"))
    assert names == ["far-1", "quick-cpu"]


def test_a_copy_has_no_jobs_and_no_launcher_of_its_original(ultrabench, sweep):
    """Its journal has an attempt that runs in the original, and its lease is that of the original's launcher."""
    ensure_identity(sweep)
    planned(sweep, name="n1")
    write(sweep, AllocationStarted(allocation="n1", agent=LeadingAgent(host="a", pid=1)))
    write(sweep, *attempted(QUICK.runs[-1].spec, allocation="n1"))
    lease = Lease(sweep, "launcher-a")
    copy = sweep.path.with_name("copy")
    shutil.copytree(sweep.path, copy)
    files = sorted(path for path in copy.rglob("*"))
    activity_by_name = {
        entry["path"].rpartition("/")[2]: entry["activity"] for entry in as_json(ultrabench, "sweep", "list")
    }
    original_status, copy_status = (as_json(ultrabench, "sweep", "status", n) for n in ("quick-cpu", "copy"))
    lease.release()
    assert activity_by_name == {"quick-cpu": "followed", "copy": "stopped"}
    assert [len(status["running"]) for status in (original_status, copy_status)] == [1, 0]
    assert copy_status["by_status"].get("running", 0) == 0
    assert copy_status["standing"].startswith("Nothing is running.")
    assert sorted(path for path in copy.rglob("*")) == files


def test_the_table_shows_the_faster_of_two_cells_and_goes_on_after_a_damaged_sweep(ultrabench, sweep, older):
    other = next(run for run in QUICK.runs if run.nodes != QUICK.runs[0].nodes)
    record(sweep, other, step_times_s=(0.08,) * 6)
    older.sweep_json.write_text("{")
    ultrabench("sweep", "pause", "quick-cpu")
    code, out, err = ultrabench("sweep", "list")
    assert code == 0
    assert (
        QUICK.runs[0].spec.label() in out
    )  # it has less MFU, since the ranks of one node have more cores each
    assert "paused" in out
    assert err.startswith(f"warning: older: {older.sweep_json.resolve()} is damaged")


def test_an_empty_folder_has_no_sweep_to_list(ultrabench, tmp_path):
    assert ultrabench("sweep", "list")[:2] == (0, "")
    assert as_json(ultrabench, "sweep", "list") == []


def test_a_sweep_is_deleted_whole_and_what_its_links_point_at_stays(ultrabench, sweep, older, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("mine")
    (sweep.path / "logs").mkdir(exist_ok=True)
    (sweep.path / "logs" / "link").symlink_to(outside)
    assert one_line(ultrabench, "sweep", "rm", "quick-cpu") == "no terminal can confirm this; add --yes"
    assert sweep.sweep_json.exists()
    assert ultrabench("sweep", "rm", "quick-cpu", "--yes") == (0, "", f"deleted {sweep.path}\n")
    assert [path.name for path in sweep.path.parent.iterdir()] == ["older"]
    assert (outside / "data").read_text() == "mine"


@pytest.mark.parametrize(
    ("answer", "code", "is_left"), [("n\n", 130, True), ("y\n", 0, False)], ids=["no", "yes"]
)
def test_a_terminal_is_asked(sweep, answer, code, is_left):
    """In a terminal of its own, since the question is asked only there."""
    command = [sys.executable, "-m", "ultrabench", "sweep", "rm", "quick-cpu"]
    terminal, side = os.openpty()
    os.write(terminal, answer.encode())
    process = subprocess.run(command, stdin=side, capture_output=True, text=True, cwd=sweep.path.parents[1])
    os.close(terminal)
    os.close(side)
    assert (process.returncode, sweep.path.exists()) == (code, is_left), process.stderr
    assert f"Permanently delete {sweep.path} (2 attempts, logs and results)?" in process.stderr


def test_only_a_real_folder_of_a_sweep_is_deleted_or_renamed(ultrabench, sweep, tmp_path):
    link = sweep.path.with_name("link")
    link.symlink_to(sweep.path)
    for command in (("rm", "link"), ("rename", "link", "new")):
        assert one_line(ultrabench, "sweep", *command, "--yes").startswith(
            f"{link} is a link to {sweep.path};"
        )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "sweep.json").write_text("{}")
    assert "journal is missing or a link" in one_line(ultrabench, "sweep", "rm", "notes", "--yes")
    assert "unknown sweep" in one_line(ultrabench, "sweep", "rm", "quick", "--yes")
    assert sweep.sweep_json.exists()


def test_a_sweep_that_is_half_deleted_is_no_sweep(ultrabench, sweep, older, monkeypatch):
    def stop(path):
        raise OSError(39, "Directory not empty", str(path / "logs"))

    monkeypatch.setattr(shutil, "rmtree", stop)
    assert "logs: Directory not empty; " in one_line(ultrabench, "sweep", "rm", "quick-cpu", "--yes")
    assert [entry["sweep"] for entry in as_json(ultrabench, "sweep", "list")] == ["older"]
    assert as_json(ultrabench, "sweep", "status")["sweep"] == "older"


@pytest.mark.parametrize("command", [("rm",), ("rename", "new")], ids=["rm", "rename"])
def test_a_sweep_whose_jobs_may_live_stays(ultrabench, sweep, command):
    verb, *new = command
    planned(sweep, user="ann", host="far")
    ensure_identity(sweep)
    before = content(sweep)
    line = one_line(ultrabench, "sweep", verb, "quick-cpu", *new, "--yes")
    assert line.startswith("quick-cpu is in use (allocation n1-b.0 of ann on far); only an idle sweep can")
    assert line.endswith(". To end it: ultrabench sweep cancel quick-cpu")
    assert content(sweep) == before


def test_a_sweep_that_a_launcher_follows_stays(ultrabench, sweep):
    host = socket.gethostname().split(".")[0]
    lease = Lease(sweep, "launcher-a")
    assert f"process {os.getpid()} on {host} follows it" in one_line(
        ultrabench, "sweep", "rm", "quick-cpu", "--yes"
    )
    lease.release()
    assert ultrabench("sweep", "rm", "quick-cpu", "--yes")[0] == 0


def test_checkpoints_that_killed_runs_left_elsewhere_are_named_and_deleted(ultrabench, sweep, tmp_path):
    saves = tmp_path / "saves"
    (allocation,) = first_allocations(open_sweep(sweep.path))
    own, other = saves / "checkpoint-c0ffee00-a.0.0", saves / "checkpoint-0123abcd-a.0.0"
    for path in (own, other):
        path.mkdir(parents=True)
    replace(allocation, tasks=(replace(allocation.tasks[0], checkpoint=str(own)),)).write()
    planned(sweep, name=allocation.name)
    copy = sweep.path.with_name("copy")
    shutil.copytree(sweep.path, copy)
    ensure_identity(sweep)
    code, _, err = ultrabench("sweep", "rm", "copy", "--yes")
    assert (code, copy.exists(), own.exists()) == (0, False, True)
    code, _, err = ultrabench("sweep", "rm", "quick-cpu", "--yes")
    assert (code, str(own) in err, own.exists(), other.exists()) == (0, True, False, True)


def test_a_sweep_with_a_damaged_sweep_json_can_be_deleted(ultrabench, sweep):
    sweep.sweep_json.write_text("{")
    assert ultrabench("sweep", "rm", "quick-cpu", "--yes")[0] == 0
    assert not sweep.path.exists()


def test_jobs_that_died_without_a_word_do_not_keep_a_sweep(ultrabench, sweep):
    planned(sweep)
    assert ultrabench("sweep", "rm", "quick-cpu", "--yes")[0] == 0
    assert not sweep.path.exists()


def test_a_renamed_sweep_has_its_results_and_can_be_paused(ultrabench, sweep, older):
    ultrabench("collect", "quick-cpu", "-o", "before.parquet")
    runs = as_json(ultrabench, "sweep", "top", "quick-cpu")
    assert "older exists" in one_line(ultrabench, "sweep", "rename", "quick-cpu", "older", "--yes")
    assert "NEW" in one_line(ultrabench, "sweep", "rename", "quick-cpu", "../new", "--yes")
    assert ultrabench("sweep", "rename", "quick-cpu", "new", "--yes")[0] == 0
    assert not sweep.path.exists()
    assert as_json(ultrabench, "sweep", "top", "new") == [row | {"sweep": "new"} for row in runs]
    assert {row["sweep"] for row in as_json(ultrabench, "sweep", "top", "before.parquet")} == {"quick-cpu"}
    ultrabench("sweep", "pause", "new")
    assert events_of(SweepFolder(sweep.path.with_name("new")), "pause")
