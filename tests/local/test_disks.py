"""Programs that leave many files, fill a disk, or lay links where ultrabench reads:
no other run and no node suffers.
"""

import subprocess

import pytest

pytestmark = pytest.mark.local

SLOW_UNLINK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int unlinkat(int folder, const char *name, int flags) {
    usleep(6000);
    return ((int (*)(int, const char *, int))dlsym(RTLD_NEXT, "unlinkat"))(folder, name, flags);
}
"""
"""Makes a file system on which removing a file takes 6 ms."""


def test_a_run_that_leaves_many_files_harms_no_other_run_and_no_node(bench, monkeypatch):
    """Removing them takes four times as long as an agent may be silent."""
    source, library = bench.folder / "slow.c", bench.folder / "slow.so"
    source.write_text(SLOW_UNLINK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    slow = ("launcher.heartbeat_s=0.5", "measure.deadline_floor_s=20")
    sizes = {"nodes": 2, "gbs": 16, "mbs": [1, 2, 4]}
    bench.run(*bench.launch("1:litter,2:litter,4:fine", *slow, **sizes))
    rows = bench.assert_each_ran_once(3)
    assert {row["attempt"] for row in rows} == {0}
    assert len({row["allocation"] for row in rows}) == 1


def test_what_is_kept_of_a_run_follows_no_link(bench):
    bench.run(*bench.launch("1:endless_trace,2:raise", gbs=4, mbs=[1, 2]), code=1)
    names = {path.name for path in (bench.folder / "results/t/logs").glob("*/*/**/*") if path.is_file()}
    assert names == {"node0.log", "rank0.log", "rank1.log"}


def test_a_program_that_stops_its_fork_server_delays_nobody_else(bench):
    behaviours = "1:stop_server,2:fine,4:fine"
    deadline_s = 60 * bench.slowness
    bench.run(*bench.launch(behaviours, f"measure.start_deadline_s={deadline_s}", gbs=8, mbs=[1, 2, 4]))
    rows = bench.assert_each_ran_once(3)
    assert len({row["allocation"] for row in rows}) == 1
    assert max(row["duration_s"] for row in rows) < deadline_s


@pytest.mark.parametrize("behaviour", ["end_agent", "end_all"])
def test_a_sigterm_by_the_program_is_not_called_the_users(bench, behaviour):
    """Where all ranks are killed first, the run is not blamed for the end of its job either."""
    bench.run(*bench.launch(behaviour, "retry.attempts.cancelled=0", gbs=2, mbs=1), code=1)
    (row,) = bench.rows()
    assert row["status"] == "cancelled"
    assert "a SIGTERM that no launcher sent" in row["reason"]


@pytest.fixture
def small_tmp(bench, monkeypatch):
    """A TMPDIR of 16 MiB."""
    folder = bench.folder / "tmp"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_of_a_node_is_named_and_is_the_nodes_fault(bench, small_tmp):
    bench.run(*bench.launch("fill", "retry.attempts.node_fail=1", gbs=4, mbs=[1, 2]), code=1)
    rows = bench.rows()
    statuses = [row["status"] for row in rows]
    assert statuses.count("crash") == 1, "the disk is looked at before the next run"
    assert {*statuses} == {"crash", "node_fail"}
    for row in rows:
        evidence = (
            "began_on" if row["status"] == "crash" else "suspect_hosts"
        )  # the node itself reports the latter
        assert (row["cause"], row[evidence]) == ("disk_full", ["local-0"])
        assert "MiB free" in row["reason"]


def test_a_disk_that_was_full_only_for_a_moment_is_named_too(bench, small_tmp):
    bench.run(*bench.launch("1:fill_briefly,2:fine", gbs=4, mbs=[1, 2]), code=1)
    ends = {(row["mbs"], row["status"], row["cause"]) for row in bench.rows()}
    # On a slow machine the disk may still be full when the agent looks whether the node has space.
    assert {(1, "crash", "disk_full"), (2, "ok", None)} <= ends
    assert ends <= {(1, "crash", "disk_full"), (1, "node_fail", "disk_full"), (2, "ok", None)}
