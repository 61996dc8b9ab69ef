"""Nodes that cannot be cleaned are given up."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests import patience
from tests.unit.agent import one_node, test_gpus
from ultrabench.store.events import AllocationEnded, Claimed
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal

pytestmark = pytest.mark.local
driver, library = test_gpus.driver, test_gpus.library

KEEPS_MEMORY = """
import json, os
if os.environ["RANK"] == "1":
    open(os.environ["FAKE_GPUS"], "w").write(f"GPU-a 00000000:1B:00.0 {41 * 2**30} {80 * 2**30} 1980 0 0 0 0\\n")
report = open(os.environ["ULTRABENCH_REPORT"], "a")
print(json.dumps({"event": "step", "step": 1, "seconds": 0.1, "loss": 1.0}), file=report)
print(json.dumps({"event": "done"}), file=report)
"""


def allocation_of(folder, program):
    """Two nodes of one GPU, and two tasks."""
    first = one_node.task(str(program), "cuda")
    layout = replace(first.spec.layout, dp=2)
    spec = replace(first.spec, layout=layout, nodes=2, workload=replace(first.spec.workload, gbs=2))
    tasks = (replace(first, spec=spec, run_id=spec.run_id, repeat=repeat) for repeat in (0, 1))
    return replace(one_node.allocation(folder, *tasks), kernel_digest=spec.kernel.digest())


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
        gpus.write_text(f"GPU-a {test_gpus.A} {2**30} {80 * 2**30} 1980 0 0 0 0\n")
        place = {"SUBMITIT_LOCAL_GLOBALID": str(node), "FAKE_GPUS": str(gpus)}
        agents.append(
            patience.Process(
                [sys.executable, "-P", "-m", "ultrabench.agent", str(allocation.folder)],
                env={**os.environ, **place}, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = [agent.communicate(timeout=120)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 0], said
    events = [line.event for line in read_journal(sweep.journal)]
    (end,) = (e for e in events if isinstance(e, AllocationEnded))
    assert end.reason == "local-1 is given up: GPU 0 still holds 40.0 GiB after the run: no known process"
    assert end.avoid == ("local-1",)
    assert [e.repeat for e in events if isinstance(e, Claimed)] == [0]
