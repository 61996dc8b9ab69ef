"""Whole sweeps on a real Slurm: what they leave behind, and how they are steered."""

import json
import os
import signal
import subprocess

import pyarrow.parquet as pq
import pytest

from tests.slurm.sweeps import FEW, MANY, SlurmBench, in_files

pytestmark = pytest.mark.slurm


def test_forty_runs_on_1_2_and_4_nodes_with_collect_and_heatmap_meanwhile(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.02")
    launcher = sweeps.start(
        *sweeps.launch("fine", *MANY, "launcher.preflight=true", "launcher.allocation_minutes=0.4")
    )
    sweeps.wait_for(lambda: len(sweeps.executions()) >= 5)
    sweeps.run("collect", "t")
    sweeps.run("heatmap", "t", "-o", "meanwhile.png")
    assert launcher.poll() is None, "it was over before anybody looked"
    output, _ = launcher.communicate(timeout=250)
    assert launcher.returncode == 0, output
    rows = sweeps.judge(runs=40)
    assert {r["nodes"] for r in rows} == {1, 2, 4}
    for row in rows:
        assert row["job_id"].partition("_")[0].isdigit()
        assert len(set(row["hostnames"])) == row["nodes"]
        assert all(name.startswith("gpu0") for name in row["hostnames"])
        assert row["gemm_flops_per_s"] > 1e8
        assert row["allreduce_busbw_bytes_per_s"] > 1e5
        assert row["allreduce_intra_node_busbw_bytes_per_s"] > 1e5
        assert row["control_ratio"] == pytest.approx(1.0)
    allocations = {r["allocation"] for r in rows}
    assert len(allocations) > 3, "every size has its canary and what follows"
    for allocation in allocations:
        planned = json.loads(
            (sweeps.folder / f"results/t/allocations/{allocation}/allocation.json").read_text()
        )
        assert planned["tasks"][0]["run_id"] == planned["control"]
    states = sweeps.run("sweep", "status", "t", "--json")
    assert json.loads(states)["by_status"] == {"ok": 40}


def test_the_rest_of_a_size_waits_for_its_canary(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    launcher = sweeps.start(*sweeps.launch("fine", *MANY, "launcher.preflight=false"))
    sweeps.wait_for(lambda: sweeps.executions())
    assert sweeps.journal().count('"event":"allocation_planned"') == 3, "one of each size"
    sweeps.wait_for(lambda: sweeps.journal().count('"event":"allocation_planned"') > 3)
    assert '"event":"result"' in sweeps.journal()
    sweeps.run("sweep", "cancel", "t")
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1, output


def test_the_embedded_kernel_trains_across_nodes_as_it_does_on_one(sweeps):
    more = ["launcher=slurm", "launcher.mem=300M", "launcher.poll_s=1", "model=tiny", "name=t", "sweep.gbs=4",
            "sweep.nodes=[1,2]", "sweep.zero_stage=[0]", "sweep.mbs=[1]", "measure.min_steps=6",
            "measure.max_steps=6", "launcher.max_nodes=4"]  # fmt: skip
    sweeps.run("sweep", "launch", *more, "--max-gpu-hours", "10")
    table = [r for r in pq.read_table(_collected(sweeps)).to_pylist() if r["attempt"] is not None]
    losses = [r["loss_final"] for r in table]
    assert {r["nodes"] for r in table} == {1, 2}
    assert {(r["tp"], r["pp"]) for r in table} >= {(1, 1), (2, 1), (1, 2)}
    assert max(losses) - min(losses) < 1e-6 * losses[0]
    for row in table:
        assert row["status"] == "ok", row["reason"]


def _collected(sweeps: SlurmBench) -> str:
    sweeps.run("collect", "t")
    return str(sweeps.folder / "results/t/runs.parquet")


def test_detach_leaves_and_resume_goes_on(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.05")
    sweeps.run(*sweeps.launch("fine", *FEW), "--detach")
    assert len(sweeps.executions()) < 10, "it followed the sweep to its end"
    assert sweeps.journal().count('"event":"submitted"') >= 2
    output = sweeps.run("sweep", "resume", "t")
    assert "best so far" in output
    sweeps.judge(runs=10)


def test_a_killed_launcher_is_followed_by_another_and_two_at_once_know_of_each_other(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.2")
    words = sweeps.launch("fine", *FEW)
    first = sweeps.start(*words)
    sweeps.wait_for(lambda: sweeps.executions())
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    launchers = [sweeps.start(*words)]
    sweeps.wait_for(lambda: sweeps.journal().count('"event":"config"') == 2)
    launchers.append(sweeps.start(*words))
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert f"process {launchers[0].pid} on " in outputs[1]
    assert '"event":"adopted"' in sweeps.journal()
    sweeps.judge(runs=10)


def test_ctrl_c_leaves_the_jobs_and_says_so(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.2")
    words = sweeps.launch("fine", *FEW)
    launcher = sweeps.start(*words)
    sweeps.wait_for(lambda: sweeps.executions())
    os.kill(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 130
    assert "its jobs go on" in output
    assert sweeps.job_ids()
    sweeps.run("sweep", "cancel", "t")
    sweeps.wait_for(lambda: not sweeps.job_ids())
    monkeypatch.setenv("STEP_S", "0.002")
    sweeps.run(*words)
    sweeps.judge(runs=10, allowed=frozenset({"cancelled"}))


def test_pause_gives_the_nodes_back_and_resume_goes_on(sweeps, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.15")
    launcher = sweeps.start(*sweeps.launch("fine", *FEW))
    sweeps.wait_for(lambda: len(sweeps.executions()) >= 2)
    sweeps.run("sweep", "pause", "t")
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "stopped: paused; go on with: ultrabench sweep resume t" in output
    done = len(sweeps.executions())
    assert done < 10
    assert not sweeps.job_ids()
    sweeps.run(*sweeps.launch("fine", *FEW), code=1)
    assert len(sweeps.executions()) == done, "a launch does not lift a pause"
    monkeypatch.setenv("STEP_S", "0.002")
    sweeps.run("sweep", "resume", "t")
    rows = sweeps.judge(runs=10)
    assert all(r["attempt"] == 0 for r in rows), "the runs under way were finished"


def test_no_secret_of_the_environment_reaches_a_file_and_odd_values_reach_no_shell(sweeps, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "planted-4711-secret")
    odd = 'it\'s "a" $(touch pwned); `touch pwned2` & x'
    words = sweeps.launch("fine", *FEW[1:], "sweep.nodes=1")
    quoted = odd.replace('"', '\\"')
    words += [f'+launcher.sbatch.comment="{quoted}"', "launcher.environment=[STEP_*]"]
    launcher = sweeps.start(*words)
    sweeps.wait_for(lambda: sweeps.job_ids())
    shown = subprocess.run(
        ["scontrol", "show", "job", sweeps.job_ids()[0]], capture_output=True, text=True
    ).stdout
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    assert f"Comment={odd}" in shown
    assert not list(sweeps.folder.rglob("pwned*"))
    assert in_files(sweeps.folder, "planted-4711-secret") == []
    sweeps.judge(runs=6)


def test_a_cluster_without_accounting_is_enough(bare, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.02")
    assert subprocess.run(["sacct"], capture_output=True).returncode != 0
    bare.run(*bare.launch("fine", *FEW))
    bare.judge(runs=10)
