"""Nodes that cannot be cleaned are given up, and a results folder that is full for a while costs nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.disks import on_a_small_disk
from tests.unit.agent import one_node, test_gpus
from ultrabench.layout import Layout
from ultrabench.run import Workload
from ultrabench.store.allocation import Allocation
from ultrabench.store.events import AllocationEnded, Claimed
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal

pytestmark = pytest.mark.local
driver, library = test_gpus.driver, test_gpus.library

KEEPS_MEMORY = """
import json, os
if os.environ["RANK"] == "1":
    open(os.environ["FAKE_GPUS"], "w").write(f"GPU-a 00000000:1B:00.0 {41 * 2**30} {80 * 2**30} 1980 0 0\\n")
report = open(os.environ["ULTRABENCH_REPORT"], "a")
print(json.dumps({"event": "step", "step": 1, "seconds": 0.1, "loss": 1.0}), file=report)
print(json.dumps({"event": "done"}), file=report)
"""


def allocation_of(folder, program):
    """Two nodes of one GPU, and two tasks."""
    first = one_node.task(str(program), "cuda")
    layout = Layout(dp=2, tp=1, pp=1, mbs=1, gas=1, zero_stage=0)
    spec = replace(first.spec, layout=layout, nodes=2, workload=Workload(seq_len=64, gbs=2))
    tasks = tuple(replace(first, spec=spec, run_id=spec.run_id, repeat=repeat) for repeat in (0, 1))
    return Allocation(
        name="n2-given.0", sweep_dir=str(folder), work_dir=str(folder), nodes=2, gpus_per_node=1, simulated=True,
        threads=1, heartbeat_s=5.0, limit_s=600.0, kernel_digest=spec.kernel.digest(), tasks=tasks,
    )  # fmt: skip


def test_nothing_more_is_claimed_where_a_follower_cannot_clean(tmp_path, driver):
    sweep = SweepFolder(tmp_path / "sweep")
    sweep.create()
    program = tmp_path / "program.py"
    program.write_text(KEEPS_MEMORY)
    allocation = allocation_of(sweep.path, program)
    allocation.write()
    agents = []
    for node in range(2):
        gpus = tmp_path / f"gpus{node}"
        gpus.write_text(f"GPU-a {test_gpus.A} {2**30} {80 * 2**30} 1980 0 0\n")
        place = {"SUBMITIT_LOCAL_GLOBALID": str(node), "FAKE_GPUS": str(gpus)}
        agents.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "ultrabench.agent", str(allocation.folder)],
                env={**os.environ, **place}, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = [agent.communicate(timeout=120)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 0], said
    events = [line.event for line in read_journal(sweep.journal)]
    (end,) = (e for e in events if isinstance(e, AllocationEnded))
    assert end.reason == ("local-1 is given up: GPU 0 still holds 40.0 GiB after the run: no known process")
    assert end.avoid == ("local-1",)
    assert [e.repeat for e in events if isinstance(e, Claimed)] == [0]


FULL_FOR_A_WHILE = """
import json, os
os.environ["STEP_S"] = "0.1"
from tests.local.conftest import Bench
bench = Bench(disk.parent)
(bench.folder / "results").symlink_to(disk)
size = ["sweep.nodes=[1]", "sweep.gbs=8", "sweep.zero_stage=[0]", "sweep.mbs=[1,2,4]", "sweep.gas=[1,2,4]"]
words = bench.overrides("fine", *size)
launcher = bench.start("sweep", "launch", *words)
bench.wait_for(lambda: len(bench.executions()) >= 1)
fill()
time.sleep(5)
free()
output, _ = launcher.communicate(timeout=200)
print(output, file=sys.stderr)
assert launcher.returncode == 0, output
mount("-o", "remount,size=4m", str(disk))
rows = bench.rows()
print(json.dumps({
    "statuses": sorted(r["status"] for r in rows),
    "twice": len(set(bench.executions())) != len(bench.executions()),
    "left": bench.leftovers(), "beside": [p.name for p in disk.rglob(".*") if p.is_file()],
}))
"""


def test_a_results_folder_that_is_full_for_some_seconds_costs_nothing(tmp_path):
    found = json.loads(on_a_small_disk(tmp_path, FULL_FOR_A_WHILE).splitlines()[-1])
    assert found == {"statuses": ["ok"] * 3, "twice": False, "left": [], "beside": []}
