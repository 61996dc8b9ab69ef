"""Commands that start the ranks of a node themselves: torchrun, and a small program that does as torchrun does."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.local.conftest import AT_ONCE, axes
from ultrabench.processes import command_line, own_processes

pytestmark = pytest.mark.local

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun"
STARTER = """
import os, signal, subprocess, sys, time

def train(rank, behaviour):
    for step in range(1, 1000 if behaviour == "endless" else 13):
        time.sleep(0.1)
        if rank == 3 and step == 5 and behaviour == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 6 and behaviour == "stop":
            time.sleep(1000)
        if rank == 3 and step == 5 and behaviour == "raise":
            raise RuntimeError("the flux capacitor is empty")
        if rank == 0:
            print(f"step {step} took 0.1 s", flush=True)

nodes, node_rank, num_local, behaviours = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
behaviour = dict(pair.split(":") for pair in behaviours.split(",")).get(sys.argv[5], "fine")
if "RANK" in os.environ and len(sys.argv) > 6:
    train(int(os.environ["RANK"]), behaviour)
    sys.exit()
workers = []
for local_rank in range(num_local):
    sizes = {"RANK": node_rank * num_local + local_rank, "WORLD_SIZE": nodes * num_local, "LOCAL_RANK": local_rank}
    env = {**os.environ, **{name: str(size) for name, size in sizes.items()}}
    workers.append(subprocess.Popen([sys.executable, *sys.argv, "worker"], env=env, start_new_session=True))
while any(worker.poll() is None for worker in workers):
    time.sleep(0.05)
    for local_rank, worker in enumerate(workers):
        if worker.poll():
            for other in workers:
                other.terminate()
            print("Root Cause (first observed failure):\\n[0]:")
            print(f"  rank      : {node_rank * num_local + local_rank} (local_rank: {local_rank})")
            print(f"  exitcode  : {worker.poll()} (pid: {worker.pid})", flush=True)
            sys.exit(1)
"""
ALONE = "'1','0'"
"""The words by which a node trains alone, whatever the layout."""
LAUNCH = (
    "kernel=command", "model=tiny", "name=t", "kernel.step_line='step [0-9]+ took (?P<seconds>[0-9.]+) s'",
    "measure.warmup_steps=2", "measure.min_steps=6", "measure.deadline_floor_s=2", *AT_ONCE,
)  # fmt: skip


def launch(bench, behaviours, *, nodes=2, places="'{nodes}','{node_rank}'", **sizes):
    """The words of a launch of STARTER, whose behaviour follows from mbs."""
    (bench.folder / "starter.py").write_text(STARTER)
    command = f"[python,starter.py,{places},'{{gpus_per_node}}','{behaviours}','{{mbs}}']"
    sizes = {"nodes": nodes, "tp": 1, "pp": 1, "zero_stage": 0, "gas": None, "gbs": 16, **sizes}
    return ["sweep", "launch", *LAUNCH, f"kernel.command={command}", *axes(**sizes)]


def workers(bench):
    """The processes of STARTER in the folder of a sweep."""
    pids = own_processes()
    return [pid for pid in pids if "starter.py" in command_line(pid) and _folder_of(pid) == str(bench.folder)]


def _folder_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None


def test_the_ranks_that_a_command_starts_are_measured_examined_and_killed(bench):
    """On two nodes: one run is fine, in one a rank is stopped, and in one a rank raises an exception."""
    words = launch(bench, "2:stop,4:raise", mbs=[1, 2, 4])
    bench.run(*words, "kernel.launch_per=node", "retry.attempts.hang=0", code=1)
    rows = {row["mbs"]: row for row in bench.rows()}
    assert {mbs: row["status"] for mbs, row in rows.items()} == {1: "ok", 2: "hang", 4: "crash"}
    assert (rows[1]["measured_by"], set(rows[1]["step_times_s"])) == ("log", {0.1})
    assert 2**22 < rows[1]["peak_mem_reserved_bytes"] < 2**27, "that of a rank, not of torchrun"
    assert rows[2]["reason"].startswith("rank 3 on local-1 is stopped (state T)")
    attempts = json.loads(bench.run("sweep", "show", rows[2]["run_id"], "--json"))["attempts"]
    evidence = attempts[0]["result"]["evidence"]
    assert [row["at"].split()[0] for row in evidence["hang_evidence"]] == ["train"] * 4, evidence
    assert re.search(r"Rank 3 is in train \(.*starter.py:8\)", evidence["hang_cause"])
    assert rows[4]["reason"] == "exception, rank 3 on local-1: RuntimeError: the flux capacitor is empty"
    assert workers(bench) == []


def test_no_rank_outlives_killed_launchers_and_agents(bench):
    """The ranks are in sessions of their own, and no later agent has to find them."""
    words = launch(bench, "8:endless", mbs=8, nodes=1)
    launcher = bench.start(*words, "kernel.launch_per=node")
    bench.wait_for(lambda: len(workers(bench)) == 3)
    for pid in (launcher.pid, *bench.agents()):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate()
    bench.wait_for(lambda: workers(bench) == [], 20)


@pytest.mark.parametrize(
    ("launch_per", "places", "nodes", "reason"),
    [
        ("rank", ALONE, 1, "the commands of ranks 0 and 1 both started RANK=0, so that several trainings compete: "
         "set kernel.launch_per=node"),
        ("node", ALONE, 2, "the command started ranks with WORLD_SIZE=2; the layout has 4 ranks: "
        "pass it nodes and ranks"),
    ],
)  # fmt: skip
def test_a_command_that_trains_other_ranks_than_the_layout_is_not_measured(
    bench, launch_per, places, nodes, reason
):
    words = launch(bench, "1:endless", nodes=nodes, places=places, mbs=1)
    bench.run(*words, f"kernel.launch_per={launch_per}", code=1)
    (row,) = (row for row in bench.rows() if row["status"] != "cancelled")
    assert (row["status"], row["cause"]) == ("invalid", "unmeasured")
    assert reason in row["reason"]


def test_the_example_of_torchrun_is_measured(bench):
    shutil.copytree(EXAMPLE, bench.folder, dirs_exist_ok=True)
    sizes = axes(nodes=1, tp=1, pp=1, zero_stage=0, mbs=1, gas=2, gbs=4)
    bench.run(
        "sweep", "launch", "kernel=torchrun", "model=tiny", "name=t", *sizes, "measure.max_steps=8", *AT_ONCE
    )
    (row,) = bench.rows()
    assert (row["status"], row["measured_by"], row["num_steps_measured"]) == ("ok", "log", 8)
    assert row["loss_final"] == pytest.approx(6.24, abs=0.2)  # log(512)
