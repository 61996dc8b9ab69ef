"""Whole sweeps on a real Slurm: what they leave behind, and how they are steered."""

import json
import os
import re
import signal
import subprocess

import pytest

from tests.slurm.sweeps import FEWER, MANY

pytestmark = pytest.mark.slurm


def test_the_embedded_kernel_trains_across_nodes(sweeps):
    options = [
        "launcher=slurm",
        "launcher.mem=300M",
        "launcher.poll_s=1",
        "model=tiny",
        "name=t",
        "sweep.gbs=8",
        "sweep.nodes=[2]",
        "sweep.tp=[1,2]",
        "sweep.pp=[1]",
        "sweep.zero_stage=[0]",
        "sweep.mbs=[1]",
        "measure.min_steps=6",
        "measure.max_steps=6",
        "launcher.max_nodes=4",
    ]
    sweeps.run("sweep", "launch", *options, "--max-gpu-hours", "10")
    table = sweeps.rows()
    losses = [r["loss_final"] for r in table]
    assert {(r["nodes"], r["tp"]) for r in table} == {(2, 1), (2, 2)}
    assert max(losses) - min(losses) < 1e-6 * losses[0]
    for row in table:
        assert row["status"] == "ok", row["reason"]
        assert row["gemm_flops_per_s"] > 1e8
        assert row["allreduce_busbw_bytes_per_s"] > 1e5
        assert row["allreduce_intra_node_busbw_bytes_per_s"] > 1e5


def test_launchers_that_detach_end_or_die_are_followed_by_others_and_a_pause_gives_nodes_back(
    sweeps, monkeypatch
):
    monkeypatch.setenv("STEP_S", "0.3")
    words = sweeps.launch("fine", *MANY)
    sweeps.run(*words, "--detach")
    assert len(sweeps.executions()) < 40, "it followed the sweep to its end"
    assert sweeps.count("submitted") >= 2

    interrupted = sweeps.start("sweep", "resume", "t")
    sweeps.wait_for(lambda: sweeps.executions() and followers(sweeps) == 1)
    sweeps.wait_for(lambda: sweeps.count("result"))
    sweeps.run("collect", "t")
    sweeps.run("heatmap", "t", "-o", "meanwhile.png")
    os.kill(interrupted.pid, signal.SIGINT)
    assert "submitted jobs keep running" in sweeps.end(interrupted, 130, seconds=90)
    assert sweeps.job_ids()

    killed = sweeps.start(*words)
    sweeps.wait_for(lambda: followers(sweeps) == 2)
    killed.kill()
    killed.communicate()

    launchers = [sweeps.start(*words)]
    sweeps.wait_for(lambda: followers(sweeps) == 3)
    launchers.append(sweeps.start(*words))
    sweeps.wait_for(lambda: followers(sweeps) == 4)
    sweeps.run("sweep", "pause", "t")
    outputs = [sweeps.end(launcher, 1) for launcher in launchers]
    assert f"process {launchers[0].pid} on " in outputs[1]
    assert all("stopped: paused; resume with: ultrabench sweep resume t" in output for output in outputs)
    executed = len(sweeps.executions())
    assert executed < 40
    assert not sweeps.job_ids()
    sweeps.run(*words, code=1)
    assert len(sweeps.executions()) == executed, "a launch does not lift a pause"

    monkeypatch.setenv("STEP_S", "0.05")  # with steps of 2 ms the MFU is above 1, and no run is the best
    assert "best so far" in sweeps.run("sweep", "resume", "t")
    rows = sweeps.assert_each_ran_once(runs=40)
    assert all(r["attempt"] == 0 for r in rows), "the runs under way were finished"
    assert {r["nodes"] for r in rows} == {1, 2, 4}
    for row in rows:
        assert re.fullmatch(r"\d+_\d+", row["job_id"])
        assert len({name for name in row["hostnames"] if name.startswith("gpu0")}) == row["nodes"]
        assert row["control_ratio"] == pytest.approx(1.0)
    files = [*sweeps.folder.glob("results/t/allocations/*/allocation.json")]
    assert len(files) > 3, "every size has its canary and what follows"
    for head in (json.loads(file.read_text()) for file in files):
        assert head["tasks"][0]["run_id"] == head["control"]
    assert sweeps.status()["by_status"] == {"ok": 40}


def followers(sweeps):
    """Number of launchers that follow or have followed the jobs of others."""
    events = [json.loads(line) for line in sweeps.journal().splitlines() if '"event":"adopted"' in line]
    return len({event["writer"] for event in events})


def test_no_secret_of_the_environment_reaches_a_file_and_odd_values_reach_no_shell(sweeps, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "planted-4711-secret")
    odd = 'it\'s "a" $(touch pwned); `touch pwned2` & x'
    words = sweeps.launch("fine", *FEWER)
    comment = odd.replace('"', '\\"')
    words += [f'+launcher.sbatch.comment="{comment}"', "launcher.environment=[STEP_*]"]
    launcher = sweeps.start(*words)
    queued = []
    sweeps.wait_for(lambda: queued or queued.extend(sweeps.job_ids()))
    shown = subprocess.run(["scontrol", "show", "job", queued[0]], capture_output=True, text=True).stdout
    sweeps.end(launcher, seconds=60)
    assert f"Comment={odd}" in shown
    assert not list(sweeps.folder.rglob("pwned*"))
    written = [path for path in sweeps.folder.rglob("*") if path.is_file()]
    assert [path for path in written if b"planted-4711-secret" in path.read_bytes()] == []
    sweeps.assert_each_ran_once(runs=3)
