"""Small real sweeps of the embedded kernel: two nodes, experts, memory that runs out, links, a trace."""

import gzip
import json
import os

import pytest

from tests.local.conftest import AT_ONCE, EMBEDDED, PEAK, axes
from ultrabench.device_rates import LONG_SIZES_BYTES, OPERATIONS

pytestmark = pytest.mark.local

QUICK = [*EMBEDDED, "sweep.gbs=8", "measure.max_steps=6", "measure.confirm=1", "measure.deadline_floor_s=20"]


def test_layouts_on_one_and_two_nodes_train_alike_and_are_measured(bench):
    sizes = axes(nodes=[1, 2], tp=[1, 2], pp=1, zero_stage=0, mbs=2, gas=None)
    env = "kernel.env={NCCL_ALGO: Ring, A_TOKEN: hunter2}"
    bench.run("sweep", "launch", *QUICK, *sizes, "measure.race=null", env)
    rows = bench.rows()
    assert {r["status"] for r in rows} == {"ok"}
    variables = {**os.environ, "NCCL_ALGO": "Ring"}
    assert all(json.loads(r["variables"]).items() <= variables.items() for r in rows)
    assert {json.loads(r["variables"])["NCCL_ALGO"] for r in rows} == {"Ring"}, "what a rank has seen"
    assert {r["env"] for r in rows} == {'{"A_TOKEN": "<redacted>", "NCCL_ALGO": "Ring"}'}
    assert {(r["nodes"], r["tp"]) for r in rows} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    losses = [r["loss_final"] for r in rows]
    assert max(losses) - min(losses) < 1e-6 * min(losses), "layouts that train differently"
    for row in rows:
        assert row["num_steps_measured"] >= 6
        assert row["mfu_problem"] or 0 < row["mfu"] <= 1
        assert row["peak_source"] == "measured"
        assert row["hostnames"] == [f"local-{n}" for n in range(row["nodes"])]
        for name in (
            "tokens_per_s_per_gpu", "peak_mem_reserved_bytes", "init_time_s", "gpu_hours", "env_id",
            "torch_version", "gpu_name", "kernel_digest", "allocation", "predicted_step_time_s",
        ):  # fmt: skip
            assert row[name] is not None, name
    gpus = json.loads(bench.run("nodes", "t", "--json"))["gpus"]
    assert [(gpu["host"], gpu["number"]) for gpu in gpus] == [
        (f"local-{n}", i) for n in range(2) for i in range(2)
    ]
    results = [result for gpu in gpus for result in gpu["history"]]
    assert {result["against"] for result in results} == {None}, "one CPU computes the same in all processes"
    assert len({result["setup"] for result in results}) == 1
    bench.run("heatmap", "t", "-o", "map.svg")
    assert "nodes" in (bench.folder / "map.svg").read_text()
    run_id = rows[0]["run_id"]
    assert run_id in bench.run("sweep", "show", run_id)
    assert "--- rank 0" in bench.run("sweep", "logs", run_id)


@pytest.mark.campaign  # parity tests share experts, too
def test_experts_train_alike_however_they_are_shared(bench):
    """Of sweep=moe two layouts with ZeRO-3; a run in which ep was ignored would be invalid."""
    sizes = axes(nodes=[1], tp=[1], zero_stage=[3], mbs=[4], ep=[1, 2])
    quick = ("measure.warmup_steps=1", "measure.loss_step=3", "measure.max_steps=6")
    bench.run("sweep", "launch", "sweep=moe", "name=t", *sizes, *quick, "measure.race=null", *AT_ONCE)
    rows = bench.rows()
    assert {(r["status"], r["reason"]) for r in rows} == {("ok", None)}
    assert sorted(r["ep"] for r in rows) == [1, 2]
    assert {(r["num_experts"], r["routing"]) for r in rows} == {(8, "balanced")}
    losses = [r["loss_final"] for r in rows]
    assert max(losses) - min(losses) < 1e-6 * min(losses)
    bench.run("heatmap", "t", "-o", "map.svg")
    best = max(rows, key=lambda row: row["tokens_per_s_per_gpu"])
    assert f"ep{best['ep']}" in (bench.folder / "map.svg").read_text()


def test_memory_that_runs_out_is_an_answer_and_the_next_run_goes_on(bench):
    sizes = axes(nodes=1, tp=1, pp=1, zero_stage=1, seq_len=64, gbs=[4, 512], mbs=[2, 256], gas=1)
    bench.run("sweep", "launch", *QUICK, *sizes, *AT_ONCE, "hardware.mem_bytes=270000000", "max_p_oom=1")
    rows = bench.rows()
    status = {r["mbs"]: (r["status"], r["reason"]) for r in rows}
    assert status[2] == ("ok", None)
    assert status[256][0] == "oom", status
    assert "allocate memory" in status[256][1]
    assert {(r["cause"], r["confirmed"]) for r in rows if r["mbs"] == 256} == {("cpu_oom", True)}


@pytest.mark.campaign  # parity tests probe links, too
def test_a_sweep_measures_the_links_and_plot_draws_them(bench):
    """Those of two simulated nodes, and of the ranks of one."""
    steps = ("measure.max_steps=6", "measure.min_steps=6", "measure.warmup_steps=2", "measure.loss_step=3")
    bench.run("sweep", "launch", "sweep=comm", "name=t", "sweep.nodes=[2]", *steps, PEAK)
    assert bench.status()["by_status"] == {"ok": 1}
    (row,) = bench.rows()
    assert (row["nodes"], row["status"], row["kernel"], row["model"]) == (2, "ok", "probe", None)
    sizes = LONG_SIZES_BYTES["cpu"]
    across = [b for b in row["bandwidths"] if b["scope"] == "all"]
    assert [(b["operation"], b["bytes"]) for b in across] == [(o, s) for o in OPERATIONS for s in sizes]
    assert len(row["bandwidths"]) == 2 * len(across)
    assert row["memory_copy_bytes_per_s"] > 1e8
    largest = {b["operation"]: b["busbw_bytes_per_s"] for b in across if b["bytes"] == sizes[-1]}
    assert {o: row[f"{o}_busbw_bytes_per_s"] for o in OPERATIONS} == largest
    assert "drew " in bench.done("plot", "comm", "t").stderr
    assert (bench.folder / "results/t/comm.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(bench.run("heatmap", "t", "--json")) == []


@pytest.mark.campaign
def test_both_stages_leave_a_trace_and_a_summary_after_the_measured_steps(bench):
    sizes = axes(nodes=1, tp=1, pp=2, mbs=1, gas=4, gbs=4, zero_stage=0)
    words = ["sweep", "launch", *QUICK, *sizes, "measure.min_steps=6", *AT_ONCE, "trace=true"]
    bench.run(*words)
    row = bench.rows()[0]
    assert (row["status"], len(row["step_times_s"])) == ("ok", 6)
    shown = json.loads(bench.run("sweep", "show", row["run_id"], "--json"))
    ranks = shown["attempts"][0]["profile"]
    assert [(profile["rank"], profile["steps"]) for profile in ranks] == [(0, 2), (1, 2)]
    for profile in ranks:
        assert profile["step_time_s"] > 0
        assert 0 <= profile["exposed_communication_s"] <= profile["communication_s"]
        used = profile["compute_s"] + profile["exposed_communication_s"] + profile["idle_s"]
        assert used == pytest.approx(profile["step_time_s"], rel=1e-6)
        names = [kernel["name"] for kernel in profile["top"]]
        assert any(name.startswith("aten::") for name in names), "which ones depends on the load"
        assert any(name.startswith("gloo:") for name in names), "activations are sent"
        *kinds, peak = profile["memory_bytes"].values()
        assert min(kinds) > 0
        assert sum(kinds) == peak
        static = profile["memory_bytes"]
        beside = static["optimizer"] - 2 * static["parameter"]
        assert beside in range(4096), "AdamW keeps two of each, and steps"
        with gzip.open(bench.folder / profile["folder"] / "trace.json.gz") as file:
            assert len(json.load(file)["traceEvents"]) > 100
    assert "exposed communication" in bench.run("sweep", "show", row["run_id"])
    repeated = bench.done(*words)
    assert repeated.returncode == 0
    assert "trace=true applies to new runs only" in repeated.stderr


def test_a_program_of_the_users_has_its_own_profiler(bench):
    process = bench.here("sweep", "launch", *bench.overrides("ok", "trace=true"))
    assert process.returncode == 2
    assert "kernel=command" in process.stderr
