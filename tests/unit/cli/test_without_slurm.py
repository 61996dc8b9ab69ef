"""`sweep rm` of a sweep on Slurm where Slurm's commands are missing."""

import os

import pytest

from tests.sweep_folder import make_folder, write
from tests.unit.cli.conftest import one_line
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.store.events import AllocationPlanned, Launched
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan


@pytest.fixture
def sweep_of_lost_cluster(sweep, tmp_path, monkeypatch):
    """A launched sweep on Slurm with a job of which no end is recorded."""
    plan = make_plan(load_config(["launcher=slurm", "model=tiny", "name=lost"]))
    folder = make_folder(sweep.path.with_name("lost"), sweep_json_of(plan.config, {}), plan.candidates)
    by = {"user": "ann", "cluster": "big", "host": "login"}
    write(folder, Launched(generation=1, config=plan.config.resolved))
    write(folder, AllocationPlanned(allocation="n1-b.0", nodes=1, limit_s=60.0, tasks=(), by=by))
    monkeypatch.setenv("PATH", str(tmp_path))
    for path in folder.journal.iterdir():
        os.utime(path, (1e9, 1e9))
    return folder


def test_the_message_names_a_way_out_that_rm_takes(ultrabench, sweep_of_lost_cluster):
    folder = sweep_of_lost_cluster
    message = one_line(ultrabench, "sweep", "rm", "lost", "--yes", code=3)
    assert "1 job of lost may still run or wait" in message
    assert "launcher=local" not in message
    assert message.endswith("If that cluster no longer exists: ultrabench sweep rm --cluster-gone lost")
    assert ultrabench("sweep", "rm", "--cluster-gone", "lost", "--yes") == (0, "", f"deleted {folder.path}\n")
    assert not folder.path.exists()


def test_a_journal_that_is_still_written_speaks_against_a_cluster_that_is_gone(
    ultrabench, sweep_of_lost_cluster
):
    for path in sweep_of_lost_cluster.journal.iterdir():
        os.utime(path)
    message = one_line(ultrabench, "sweep", "rm", "--cluster-gone", "lost", "--yes")
    assert "needs 15 minutes of silence" in message
