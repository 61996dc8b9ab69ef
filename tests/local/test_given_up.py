"""Nodes that cannot be cleaned, or that are faulty, are given up."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import patience
from tests.unit.agent import one_node, test_gpus
from ultrabench.node_health import findings_of
from ultrabench.result import NODE_FAILURE
from ultrabench.store.events import AllocationEnded, Claimed, Failed, Preflight
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
    events, _ = run_agents(allocation_of(sweep.path, program))
    (end,) = (e for e in events if isinstance(e, AllocationEnded))
    finding = "GPU 0 still has 40.0 GiB in use after the run: no known process"
    assert (end.reason, end.avoid) == (f"local-1 is unusable: {finding}", ("local-1",))
    assert [e.repeat for e in events if isinstance(e, Claimed)] == [0]


def test_a_faulty_node_is_refused_and_the_journal_keeps_the_health_of_all(tmp_path, driver):
    sweep, program = SweepFolder(tmp_path / "sweep"), tmp_path / "program.py"
    sweep.create()
    program.touch()
    (tmp_path / "health0").write_text("GPU-a ecc 0\nGPU-a power 500000\nGPU-a default_power 700000\n")
    (tmp_path / "health1").write_text("GPU-a ecc 3\n")
    events, errors = run_agents(replace(allocation_of(sweep.path, program), preflight=True))
    (end,) = (e for e in events if isinstance(e, AllocationEnded))
    fault = "local-1: the node is faulty: ECC errors (GPU 0: 3 errors)"
    assert (end.reason, end.avoid) == (fault, ("local-1",))
    (result,) = (e.result for e in events if isinstance(e, Failed))
    assert (result.status, result.cause, result.suspect_hosts) == ("node_fail", NODE_FAILURE, ("local-1",))
    (preflight,) = (e for e in events if isinstance(e, Preflight))
    sound, faulty = (findings_of(facts["health"])["ECC errors"] for facts in preflight.found["nodes"])
    assert (sound.health, faulty.health, faulty.numbers) == ("ok", "fail", {"GPU 0": 3})
    warning = "local-0: power limit (GPU 0: 200 W below); limit: not below the GPU's default; remedy: "
    assert warning in errors


def run_agents(allocation):
    """Runs both agents of an allocation, each with its own GPU; returns the events, and what the leader said."""
    sweep = SweepFolder(Path(allocation.sweep_dir))
    allocation.write()
    agents = []
    for node in range(2):
        gpus = sweep.path.parent / f"gpus{node}"
        gpus.write_text(f"GPU-a {test_gpus.A} {2**30} {80 * 2**30} 1980 0 0 0 0\n")
        place = {"SUBMITIT_LOCAL_GLOBALID": str(node), "FAKE_GPUS": str(gpus)}
        place["FAKE_HEALTH"] = str(sweep.path.parent / f"health{node}")
        agents.append(
            patience.Process(
                [sys.executable, "-P", "-m", "ultrabench.agent", str(allocation.folder)],
                env={**os.environ, **place}, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    errors = [agent.communicate(timeout=120)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 0], errors
    return [line.event for line in read_journal(sweep.journal)], errors[0]
