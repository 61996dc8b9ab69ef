"""trace=true on two real ranks: files, summary, and a measurement that does not notice."""

import gzip
import json

import pytest

from tests.local.conftest import PEAK

pytestmark = pytest.mark.local

PIPELINE = [
    "model=tiny", "name=t", "sweep.nodes=1", "sweep.tp=1", "sweep.pp=2", "sweep.mbs=1", "sweep.gas=4",
    "sweep.gbs=4", "sweep.seq_len=32", "sweep.zero_stage=0", "measure.warmup_steps=1", "measure.min_steps=6",
    "measure.max_steps=6", "measure.loss_step=3", "launcher.preflight=false", "trace=true", PEAK,
]  # fmt: skip


def test_both_stages_leave_a_trace_and_a_summary_after_the_measured_steps(bench):
    bench.run("sweep", "launch", *PIPELINE)
    row = bench.rows()[0]
    assert row["status"] == "ok"
    assert len(row["step_times_s"]) == 6
    shown = json.loads(bench.run("sweep", "show", row["run_id"], "--json"))
    ranks = shown["attempts"][0]["profile"]
    assert [seen["rank"] for seen in ranks] == [0, 1]
    for seen in ranks:
        assert seen["steps"] == 2
        assert seen["step_time_s"] > 0
        assert 0 <= seen["exposed_communication_s"] <= seen["communication_s"]
        used = seen["compute_s"] + seen["exposed_communication_s"] + seen["idle_s"]
        assert used == pytest.approx(seen["step_time_s"], rel=1e-6)
        names = [kernel["name"] for kernel in seen["top"]]
        assert any(name.startswith("aten::") for name in names), "which ones depends on the load"
        assert any(name.startswith("gloo:") for name in names), "activations are sent"
        *kinds, peak = seen["memory_bytes"].values()
        assert min(kinds) > 0
        assert sum(kinds) == peak
        static = seen["memory_bytes"]
        assert static["optimizer"] - 2 * static["parameter"] in range(0, 4096), (
            "AdamW keeps two of each, and steps"
        )
        with gzip.open(bench.folder / seen["folder"] / "trace.json.gz") as file:
            assert len(json.load(file)["traceEvents"]) > 100
    assert "exposed communication" in bench.run("sweep", "show", row["run_id"])
    again = bench.done("sweep", "launch", *PIPELINE)
    assert again.returncode == 0
    assert "trace=true, but all is measured" in again.stderr


def test_a_program_of_the_users_has_its_own_profiler(bench):
    done = bench.here("sweep", "launch", *bench.overrides("ok", "trace=true"))
    assert done.returncode == 2
    assert "kernel=command" in done.stderr
