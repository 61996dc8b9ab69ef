"""`ultrabench doctor` of this machine."""

import json
import os
import re
import signal
import time

import pytest

from tests.local.conftest import PEAK
from ultrabench.node_health import CHECKS

pytestmark = pytest.mark.local


def test_this_machine(bench):
    first, head, *checks = bench.run("doctor", "launcher=local").splitlines()
    assert first.startswith("doctor: launcher=local hardware=cpu")
    assert head.split() == ["check", "status", "found"]
    for name, line in zip(("nodes", "results folder", "torch", "GPUs", "room"), checks, strict=False):
        assert re.match(rf"{name} +pass ", line), line
    assert "torch 2." in checks[2]
    assert any(re.match(r"not checked +unknown +\d+ values cannot be read here: ", line) for line in checks)
    assert list(bench.folder.iterdir()) == [], "it leaves nothing behind"
    assert bench.leftovers() == []


def test_hardware_that_is_not_here(bench):
    words = ("launcher=local", "hardware=h100x8", "hardware.gpus_per_node=16", "sweep.nodes=[2]")
    checks = {c["name"]: c for c in json.loads(bench.run("doctor", *words, "--json", code=1))}
    for name, remedy in (("nodes", "sweep.nodes=[1]"), ("GPUs", "hardware=")):
        assert checks[name]["status"] == "fail"
        assert remedy in checks[name]["remedy"]


def test_devices_are_verified_against_themselves_others_and_their_past(bench, monkeypatch):
    """The chain runs here; three other hosts, which have the same setup and another result, are made up."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = bench.here("doctor", "--verify")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(
        "ultrabench: --verify found no GPU that torch can use on this machine; run it on"
    )
    verify = ("doctor", "--verify", "hardware=cpu", "--json")
    (check,) = json.loads(bench.here(*verify).stdout)
    assert (check["name"], check["status"]) == ("device 0", "pass")
    assert "equal twice; compared with 0 earlier results of it and with 0 other devices" in check["finding"]
    (path,) = bench.folder.glob("results/gpu-digests/*.jsonl")
    node = json.loads(path.read_text())["nodes"][0]
    node["digests"][0]["parts"]["copies"] = "0"
    with open(path, "a") as file:
        file.writelines(
            json.dumps({"time": 1.7e9, "nodes": [node | {"host": f"other-{n}"}]}) + "\n" for n in range(3)
        )
    failed = bench.here(*verify)
    (check,) = json.loads(failed.stdout)
    assert (failed.returncode, check["finding"]) == (
        1, "device 0 computed copies differently from 3 of 4 equal devices"
    )  # fmt: skip
    assert check["remedy"].startswith("verify it again")


HERE = ("launcher=local", "--deep", PEAK, "sweep.nodes=[1]", "sweep.pp=[1,2]", "sweep.tp=[1]", "sweep.cp=[1]",
    "sweep.mbs=[2]",
        "sweep.zero_stage=[0]", "sweep.pp_schedule=[auto]", "hardware.mem_bytes=300000000",
        "measure.deadline_floor_s=2", "launcher.preflight=false")  # fmt: skip
"""An acceptance run of few layouts on this machine."""


def test_an_acceptance_run_in_small(bench):
    checks = {c["name"]: c for c in json.loads(bench.run("doctor", *HERE, "--json", seconds=290))}
    assert list(checks)[-4:] == ["same loss", "same gradient", "out of memory", "published speed"]
    assert {c["status"] for c in checks.values() if c["name"] not in CHECKS} == {"pass"}
    for name, text in {
        "same loss": "2 layouts match the loss of one GPU: ",
        "same gradient": "2 layouts match the gradient of one GPU: ",
        "out of memory": "allocate memory", "published speed": "no published speed",
    }.items():  # fmt: skip
        assert text in checks[name]["finding"]
    (path,) = bench.folder.glob("results/*/doctor.json")
    assert path.parent.name == "doctor-local-cpu"
    document = json.loads(path.read_text())
    assert document["passed"]
    assert document["checks"] == list(checks.values())[-4:]
    assert 0 < document["gpu_hours"] < 3
    assert "no sweep in" in bench.done("sweep", "status").stderr, "it is nobody's newest"


@pytest.mark.campaign  # those of tests/slurm end one, too
def test_ctrl_c_ends_an_acceptance_run(bench):
    doctor = bench.start("doctor", *HERE)
    bench.wait_for(lambda: [*bench.folder.glob("results/doctor-*/*/one/journal/agent-*.jsonl")])
    time.sleep(1)
    os.kill(doctor.pid, signal.SIGINT)
    bench.end(doctor, 130)
    assert not [*bench.folder.rglob("doctor.json")]
    assert bench.leftovers() == []
