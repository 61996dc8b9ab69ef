"""One node on which runs or agents fail in a way that nobody has listed, and failures that come everywhere."""

import os
import sys

import pytest

pytestmark = pytest.mark.slurm

ONE_NODE = ("sweep.nodes=[1]", "sweep.gbs=32", "sweep.zero_stage=[0,1]", "sweep.mbs=[1,2,4,8]", "sweep.gas=null",
            "launcher.pack=2", "launcher.max_jobs=2", "launcher.control=false", "measure.confirm=1")  # fmt: skip
"""Options of a sweep of 8 runs in jobs of two, of which at most two run at a time."""


def test_runs_that_fail_on_one_node_end_ok_on_others_and_the_node_is_excluded(sweeps):
    process = sweeps.done(*sweeps.launch("bad_gpu01", *ONE_NODE))
    assert process.returncode == 0, process.stderr
    rows = sweeps.assert_each_ran_once(runs=8, allowed=frozenset({"crash"}))
    failed = [row for row in rows if row["status"] == "crash"]
    assert {row["hostnames"][0] for row in failed} == {"gpu01"}
    assert all(row["began_on"] == ["gpu01"] and row["suspect_hosts"] is None for row in failed)
    assert "node gpu01 is excluded: 2 runs failed there" in process.stderr
    # Jobs that were queued before it was found may still go there.
    assert 2 <= len(failed) <= 4
    evidence = "runs failed there"
    failed_id = failed[0]["run_id"]
    for command in (
        ["sweep", "status", "t"],
        ["sweep", "retry", "t", "--dry-run"],
        ["sweep", "show", failed_id, "t"],
        ["nodes"],
    ):
        process = sweeps.done(*command)
        assert f"node gpu01 is excluded: {len(failed)} {evidence}" in process.stdout + process.stderr, command


def test_after_a_job_that_starts_no_agent_the_next_ones_use_other_nodes(sweeps):
    """As where a container or a Python environment is broken on one node."""
    python = sweeps.folder / "python"
    python.write_text(
        '#!/bin/bash\n[ "$SLURMD_NODENAME" = gpu01 ] && { echo "error: cannot start" >&2; exit 1; }\n'
        'exec "$REAL_PYTHON" "$@"\n'
    )
    python.chmod(0o755)
    options = (f"launcher.python={python}", "launcher.environment=[STEP_S,REAL_PYTHON]")
    os.environ["REAL_PYTHON"] = sys.executable
    try:
        process = sweeps.done(*sweeps.launch("fine", *ONE_NODE, *options))
    finally:
        del os.environ["REAL_PYTHON"]
    assert process.returncode == 0, process.stderr
    rows = sweeps.assert_each_ran_once(runs=8, allowed=frozenset({"lost"}))
    assert {row["cause"] for row in rows if row["status"] == "lost"} == {"not_started"}
    assert "gpu01" not in {host for row in rows for host in row["hostnames"] or ()}
    line = "node gpu01 is used last: nothing started there: "
    assert line in process.stderr
    assert line in sweeps.run("sweep", "status", "t")


def test_a_failure_that_comes_on_every_node_excludes_none(sweeps):
    process = sweeps.done(*sweeps.launch("bad", *ONE_NODE, "retry.breaker=null"))
    assert process.returncode == 1, process.stderr
    rows = sweeps.rows()
    assert {row["status"] for row in rows} == {"crash"}
    assert "is excluded" not in process.stdout + process.stderr
    assert "is excluded" not in sweeps.run("sweep", "status", "t")
    assert len(rows) <= 8 + 2 * 4, "only the runs that were under way tried two other nodes"
