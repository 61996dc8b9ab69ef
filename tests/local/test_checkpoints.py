"""A sweep with checkpoints: a file system that hangs harms no run and no node, and nothing of a checkpoint is left."""

import subprocess

import pytest

from tests.local.conftest import AT_ONCE, EMBEDDED, axes
from ultrabench.analysis.results.schema import CHECKPOINT
from ultrabench.store.folder import SweepFolder
from ultrabench.store.sweep_json import read_sweep_json

pytestmark = pytest.mark.local

SLOW_FSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int fsync(int file) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    readlink(link, path, sizeof path - 1);
    if (strstr(path, "/checkpoint-"))
        sleep(1000);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
"""
"""Makes a file system on which a checkpoint is never written to its end."""


@pytest.mark.campaign
def test_a_save_that_hangs_is_given_up_and_the_next_start_removes_what_killed_runs_left(bench, monkeypatch):
    source, library = bench.folder / "slow.c", bench.folder / "slow.so"
    source.write_text(SLOW_FSYNC)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    steps = ("measure.max_steps=6", "measure.confirm=1", "measure.race=null")
    words = ["sweep", "launch", *EMBEDDED, *AT_ONCE, *steps, "measure.checkpoint=true"]
    sizes = {"nodes": 1, "tp": 1, "pp": 1, "zero_stage": 1, "gbs": 4, "gas": None}
    with monkeypatch.context() as slow:
        slow.setenv("LD_PRELOAD", str(library))
        bench.run(
            *words, *axes(**sizes, mbs=1), "measure.checkpoint_limit_s=1", "measure.deadline_floor_s=0.5"
        )
    (row,) = bench.rows()
    assert (row["status"], row["num_steps_measured"]) == ("ok", 6)
    assert (row["cause"], row["suspect_hosts"]) == (None, None)
    assert (row["checkpoint_cause"], {row[name] for name in CHECKPOINT}) == ("disk_slow", {None})
    assert "did not finish within 1 s" in row["checkpoint_reason"]
    folder = SweepFolder(bench.folder / "results/t")
    saves = folder.path.glob("checkpoint-*")
    assert [*saves] == []
    sweep_id, keys = read_sweep_json(folder).id, (f"{row['run_id']}.0.0", "runs.0.0")
    ended, other = (folder.checkpoint(folder.path, sweep_id, key) for key in keys)
    for path in (ended, other):
        (path / "sync").mkdir(parents=True)
    bench.run(*words, *axes(**sizes, mbs=[1, 2]))
    assert not ended.exists()
    assert other.exists(), "its attempt may still run"
    first, second = sorted(bench.rows(), key=lambda row: row["mbs"])
    assert (first["started_at"], first["attempt"]) == (row["started_at"], 0)
    assert second["checkpoint_cause"] is None
    assert all(second[name] is not None for name in CHECKPOINT)
    assert second["checkpoint_bytes"] > 12 * second["num_params"]
    assert [*folder.path.glob("checkpoint-*")] == [other]
