"""Ranks as an agent starts them: forked from a warm server, a store's port passed on, a report each."""

import dataclasses
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.configs import measure as measure_of
from tests.parity.test_layouts import spec_of
from tests.patience import Deadline
from tests.unit.agent import one_node
from ultrabench.kernel.requests import TINY
from ultrabench.kernel_config import KernelConfig
from ultrabench.rank_report import read_progress
from ultrabench.record import to_dict
from ultrabench.run import RunSpec, Workload

pytestmark = pytest.mark.parity
GIB = 2**30


def task_of(case, precision="fp32", rank_mem_bytes=GIB):
    """A short run of the layout that `case` describes."""
    layout = spec_of(case).layout
    spec = RunSpec(
        shape=TINY, workload=Workload(seq_len=64, gbs=layout.gbs), layout=layout, nodes=1,
        kernel=KernelConfig(name="embedded", precision=precision), gpus_per_node=layout.world_size,
    )  # fmt: skip
    measure = measure_of(warmup_steps=2, min_steps=6, max_steps=8, target_ci95_rel=1e-9, loss_step=5)
    made = one_node.task("", "cpu")
    return replace(made, run_id=spec.run_id, spec=spec, measure=measure, rank_mem_bytes=rank_mem_bytes)


Lines = list[dict[str, Any]]


def run_ranks(forks, task, folder, **more):
    """Exit codes and report lines of all ranks; the test is the agent that passes on the port."""
    (folder / "task.json").write_text(json.dumps(to_dict(task)))
    ranks = range(task.spec.layout.world_size)
    reports = [folder / f"report{rank}" for rank in ranks]
    environment = {
        "WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "ULTRABENCH_SPEC": str(folder / "task.json"),
        "ULTRABENCH_STORE": str(folder / "port"), **more,
    }  # fmt: skip
    for rank in ranks:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ULTRABENCH_REPORT": str(reports[rank])}
        forks.fork(rank, {**environment, **own}, folder / f"log{rank}", None)
    deadline, codes = Deadline(60), dict[int, int]()
    while len(codes) < len(ranks):
        assert not deadline.over(), [lines_of(report) for report in reports]
        codes |= dict(forks.exits())
        for line in lines_of(reports[0]):
            if line["event"] == "store" and not (folder / "port").exists():
                (folder / "port.new").write_text(str(line["port"]))
                (folder / "port.new").rename(folder / "port")
        time.sleep(0.02)
    return [codes[rank] for rank in ranks], [lines_of(report) for report in reports]


def lines_of(report):
    """The whole lines of a report so far."""
    text = report.read_text() if report.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


@pytest.mark.parametrize(
    ("case", "precision", "seconds"), [("dp=2 zero_stage=1 gas=2", "fp32", 0.0), ("pp=2 gas=2", "bf16", 0.4)]
)
def test_a_run_from_start_to_end(forks, tmp_path, case, precision, seconds):
    """Every event of a healthy run, in order, on both ranks; warm-up and measuring last at least `seconds`."""
    task = task_of(case, precision)
    task = replace(task, measure=replace(task.measure, warmup_s=seconds, min_s=seconds))
    codes, lines = run_ranks(forks, task, tmp_path)
    assert codes == [0, 0]
    for rank, seen in enumerate(lines):
        phases = [line["name"] for line in seen if line["event"] == "phase"]
        assert phases == ["process_group", "build", "first_step", "warmup", "measure", "teardown"]
        steps = [line for line in seen if line["event"] == "step"]
        measured = [line["seconds"] for line in steps if line["measured"]]
        warmup = len(steps) - len(measured)
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        assert [line["measured"] for line in steps] == [False] * warmup + [True] * len(measured)
        if seconds:
            assert sum(measured) >= seconds * (rank == 0)
            assert steps[warmup]["time"] - steps[0]["time"] >= seconds
            assert min(len(measured) - 8, warmup - 2) >= 0
        else:
            assert (warmup, len(measured)) == (2, 8)
        (ran,) = [line["options"] for line in seen if line["event"] == "ran"]
        options = {**dataclasses.asdict(task.spec.layout), "precision": precision, "recompute": "none"}
        unknown = {"pp", "pp_schedule", "virtual_stages"} if task.spec.layout.pp == 1 else set()
        assert ran == {k: v for k, v in options.items() if k not in unknown} | {
            "compile": False,
            "attention": "flash",
        }
        assert all(line["tokens"] == task.spec.tokens_per_step for line in steps)
        assert steps[-1]["loss"] < steps[0]["loss"]
        (done,) = [line for line in seen if line["event"] == "done"]
        assert done["stopped"] == "max_steps"
        assert done["ci_reached"] is False
        assert done["loss_final"] == steps[4]["loss"]
        assert done["omp_num_threads"] == 1
        assert done["graphs"] == 0
        # Of the products of the matrices, and attention with its scores computed anew.
        per_token = 6 * TINY.num_matmul_params + 14 * TINY.num_hidden_layers * TINY.hidden_size * 64
        assert done["hardware_flops_per_step"] == task.spec.tokens_per_step * per_token
        *_, memory = [line for line in seen if line["event"] == "memory"]
        assert memory["allocated_bytes"] is None
        assert 2**26 < memory["reserved_bytes"] < GIB
        progress = read_progress(tmp_path / f"report{rank}")
        assert progress.microbatches >= len(steps) * task.spec.layout.gas
        assert (progress.step, progress.part) == (len(steps), "optimizer")
        assert sum(line["event"] == "environment" for line in seen) == (rank == 0)
        timeouts = json.loads((tmp_path / f"report{rank}.timeouts").read_text())
        assert timeouts.keys() >= {"default_pg", "mesh_tp", "mesh_dp_replicate"}
        assert {*timeouts.values()} == {12 * 3600}
    assert 0.1 < lines[0][[line["event"] for line in lines[0]].index("step")]["gradient_norm"] < 100
    losses = [[line["loss"] for line in seen if line["event"] == "step"] for seen in lines]
    assert losses[0] == losses[1]


def test_too_little_memory_is_oom(forks, tmp_path):
    """The limit is enforced, and the report names it; peers may only see a lost connection."""
    codes, lines = run_ranks(forks, task_of("dp=2 mbs=64", rank_mem_bytes=40 * 2**20), tmp_path)
    assert codes == [1, 1]
    errors = [line for seen in lines for line in seen if line["event"] == "error"]
    assert "oom" in {error["kind"] for error in errors}
    assert {error["kind"] for error in errors} <= {"oom", "comm"}


def test_replicas_that_differ_are_told(forks, tmp_path):
    """One bit of one copy of a parameter is flipped on rank 1 before the last step."""
    name = "layers.1.ffn.up.weight"
    codes, lines = run_ranks(forks, task_of("dp=2"), tmp_path, FLIP=name)
    assert codes == [1, 1]
    errors = [line for seen in lines for line in seen if line["event"] == "error"]
    assert [error["kind"] for error in errors] == ["replicas", "replicas"]
    assert all(name in error["message"] for error in errors)
    assert not [line for seen in lines for line in seen if line["event"] == "done"]
