"""Nodes that a job has not given back count, although its agents and its processes have ended."""

import json

import pytest

from tests.slurm.sweeps import FEW

pytestmark = pytest.mark.slurm


@pytest.fixture
def witness(slurm, tmp_path):
    """A file with a line for each node that a job takes, and one when its epilog, of 8 seconds, is over."""
    file, conf = tmp_path / "nodes.log", slurm.folder / "slurm.conf"
    scripts = {"Prolog": f"echo +1 >> {file}", "Epilog": f"/bin/sleep 8; echo -1 >> {file}"}
    before = conf.read_text()
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    conf.write_text(before + "".join(f"{name}={tmp_path / name}\n" for name in scripts))
    slurm.run("scontrol", "reconfigure")
    yield file
    slurm.wait_for(slurm.clean)
    conf.write_text(before)
    slurm.run("scontrol", "reconfigure")


def test_nodes_that_an_epilog_holds_count_for_max_jobs_and_hours(sweeps, witness):
    options = ("sweep.nodes=1", "launcher.max_jobs=1", "launcher.pack=2", "launcher.window=null")
    sweeps.run(*sweeps.launch("fine", *FEW[1:], *options), seconds=280)
    steps = [int(line) for line in witness.read_text().split()]
    in_use = [sum(steps[: n + 1]) for n in range(len(steps))]
    assert (max(in_use), steps.count(1) >= 2) == (1, True), steps
    ends = [json.loads(line) for line in sweeps.journal().splitlines() if '"allocation_ended"' in line]
    ran_s = {end["allocation"]: end["elapsed_s"] for end in ends if end["source"] == "agent"}
    beyond_s = [end["held_s"] - ran_s[end["allocation"]] for end in ends if "held_s" in end]
    assert len(beyond_s) >= steps.count(1) - 1
    assert max(beyond_s) > 4, "without the epilog it is about a second"
