"""`ultrabench doctor` of this machine."""

import json

import pytest

from ultrabench.processes import command_line, own_processes

pytestmark = pytest.mark.local


def test_this_machine(bench):
    checks = {c["name"]: c for c in json.loads(bench.run("doctor", "launcher=local", "--json"))}
    assert list(checks) == ["nodes", "results folder", "torch", "GPUs", "room"]
    assert {c["status"] for c in checks.values()} == {"pass"}
    assert "torch 2." in checks["torch"]["told"]
    assert list(bench.folder.iterdir()) == [], "it leaves nothing behind"


def test_hardware_that_is_not_here(bench):
    words = ("doctor", "launcher=local", "hardware=h100x8", "hardware.gpus_per_node=16", "--json")
    checks = {c["name"]: c for c in json.loads(bench.run(*words, code=1))}
    assert (checks["nodes"]["status"], checks["GPUs"]["status"]) == ("fail", "fail")
    assert "sweep.nodes=[1]" in checks["nodes"]["remedy"]
    assert "hardware=" in checks["GPUs"]["remedy"]


def test_the_table(bench):
    lines = bench.run("doctor", "launcher=local").splitlines()
    assert lines[0].startswith("doctor: launcher=local hardware=cpu")
    assert lines[1].split() == ["check", "verdict", "found", "remedy"]
    assert len(lines) == 7
    assert not [pid for pid in own_processes() if "ultrabench.agent.checkup" in command_line(pid)]
