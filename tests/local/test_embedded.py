"""Small real sweeps of the embedded kernel: two nodes, a killed rank, memory that runs out."""

import os
import signal

import pytest

from tests.chaos.target import processes
from tests.local.conftest import PEAK

pytestmark = pytest.mark.local

QUICK = [
    "model=tiny", "sweep.gbs=8", "sweep.seq_len=32", "measure.warmup_steps=1", "measure.loss_step=3",
    "measure.max_steps=6", "measure.confirm=1", "measure.deadline_floor_s=20",
]  # fmt: skip


def test_layouts_on_one_and_two_nodes_train_alike_and_every_column_is_filled(bench):
    bench.run(
        "sweep", "launch", *QUICK, "name=t", "sweep.nodes=[1,2]", "sweep.zero_stage=0",
        "sweep.mbs=2", "sweep.gas=null", "measure.race=null",
    )  # fmt: skip
    rows = bench.rows()
    assert {r["status"] for r in rows} == {"ok"}
    assert {(r["nodes"], r["tp"], r["pp"]) for r in rows} == {
        (1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)
    }  # fmt: skip
    losses = [r["loss_final"] for r in rows]
    assert max(losses) - min(losses) < 1e-6 * min(losses), "layouts that train differently"
    for row in rows:
        assert row["num_steps_measured"] >= 6
        assert 0 < row["mfu"] < 1.5
        assert row["peak_source"] == "measured"
        assert row["hostnames"] == [f"local-{n}" for n in range(row["nodes"])]
        for name in (
            "tokens_per_s_per_gpu", "peak_mem_reserved_bytes", "init_time_s", "gpu_hours", "env_id",
            "torch_version", "gpu_name", "kernel_digest", "allocation", "predicted_step_time_s",
        ):  # fmt: skip
            assert row[name] is not None, name
    bench.run("heatmap", "t", "-o", "map.svg")
    assert "nodes" in (bench.folder / "map.svg").read_text()
    run_id = rows[0]["run_id"]
    assert run_id in bench.run("sweep", "show", run_id)
    assert "--- rank 0" in bench.run("sweep", "logs", run_id)


def test_memory_that_runs_out_is_an_answer_and_the_next_run_goes_on(bench):
    bench.run(
        "sweep", "launch", *QUICK, "name=t", "hardware.mem_bytes=270000000",
        "sweep.nodes=1", "sweep.tp=1", "sweep.pp=1", "sweep.zero_stage=1", "sweep.seq_len=64",
        "sweep.gbs=512", "sweep.mbs=[32,256]", "sweep.gas=[1,8]", "launcher.preflight=false", "max_p_oom=1", PEAK,
    )  # fmt: skip
    rows = bench.rows()
    status = {r["mbs"]: (r["status"], r["reason"]) for r in rows}
    assert status[32] == ("ok", None)
    assert status[256][0] == "oom", status
    assert "allocate memory" in status[256][1]
    assert {(r["cause"], r["confirmed"]) for r in rows if r["mbs"] == 256} == {("cpu_oom", True)}


def test_killed_ranks_and_agents_are_told_and_their_runs_made_again(bench):
    words = [
        *QUICK, "name=t", "sweep.nodes=2", "sweep.tp=1", "sweep.pp=1", "sweep.mbs=1", "sweep.gas=2",
        "sweep.zero_stage=[0,1]", "measure.max_steps=60", "measure.min_steps=60", "launcher.preflight=false", PEAK,
        "retry.backoff_s=0",
    ]  # fmt: skip
    launcher = bench.start("sweep", "launch", *words)
    bench.wait_for(bench.measuring)
    os.kill(processes(bench.folder, "rank")[-1].pid, signal.SIGKILL)
    bench.wait_for(lambda: '"status":"crash"' in bench.journal())
    before = bench.journal().count('"name":"measure"')
    bench.wait_for(lambda: bench.journal().count('"name":"measure"') > before)
    agents = bench.agents()
    assert len(agents) == 2
    os.kill(max(agents), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    rows = bench.rows()
    assert sorted(r["status"] for r in rows if r["is_final"]) == ["ok", "ok"]
    crash, lost = sorted((r for r in rows if not r["is_final"]), key=lambda r: r["status"])
    assert crash["status"] == "crash"
    assert "killed by SIGKILL, which ultrabench did not send" in crash["reason"]
    assert lost["status"] in ("node_fail", "lost")
