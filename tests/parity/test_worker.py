"""Ranks as an agent starts them: forked from a warm server, a store's port passed on, a report each.

They train, or they are the preflight of an allocation.
"""

import dataclasses
import json
import time
from dataclasses import replace

import pytest

from tests.configs import measure as measure_of
from tests.parity.server import in_precision
from tests.parity.test_layouts import spec_of
from tests.patience import Deadline
from tests.unit.agent import one_node
from ultrabench.device_digest import dated_digests, differences
from ultrabench.device_rates import LONG_SIZES_BYTES, OPERATIONS, PROBES, summary
from ultrabench.kernel.requests import TINY
from ultrabench.rank_report import parse_line, read_progress
from ultrabench.record import to_dict

pytestmark = pytest.mark.parity
GIB = 2**30


def task_of(case, precision="fp32"):
    """A short run of the layout that `case` describes."""
    spec = in_precision(spec_of(case, TINY), precision)
    measure = measure_of(warmup_steps=2, min_steps=6, max_steps=8, target_ci95_rel=1e-9, loss_step=5)
    template = one_node.task("", "cpu")
    return replace(template, run_id=spec.run_id, spec=spec, measure=measure, rank_mem_bytes=GIB)


def run_ranks(forks, task, folder, **variables):
    """Exit codes and report lines of all ranks; the test is the agent that passes on the port."""
    (folder / "task.json").write_text(json.dumps(to_dict(task)))
    ranks = range(task.spec.layout.world_size)
    reports = [folder / f"report{rank}" for rank in ranks]
    environment = {
        "WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "ULTRABENCH_SPEC": str(folder / "task.json"),
        "ULTRABENCH_STORE": str(folder / "port"), **variables,
    }  # fmt: skip
    for rank in ranks:
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ULTRABENCH_REPORT": str(reports[rank])}
        forks.fork(rank, {**environment, **of_rank}, folder / f"log{rank}", None)
    deadline, codes = Deadline(60), dict[int, int]()
    while len(codes) < len(ranks):
        assert not deadline.over(), [lines_of(report) for report in reports]
        codes |= dict(forks.new_exits())
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


def events(lines, name):
    return [line for line in lines if line["event"] == name]


def phases(lines):
    return [line["name"] for line in events(lines, "phase")]


@pytest.mark.parametrize(
    ("case", "precision", "seconds"), [("dp=2 zero_stage=1 gas=2", "fp32", 0.0), ("pp=2 gas=2", "bf16", 0.4)]
)
def test_a_run_from_start_to_end(forks, tmp_path, case, precision, seconds):
    """Every event of a healthy run, in order, on both ranks; warm-up and measuring last at least `seconds`."""
    task = task_of(case, precision)
    task = replace(task, measure=replace(task.measure, warmup_s=seconds, min_s=seconds))
    spec, pp = task.spec, task.spec.layout.pp
    codes, lines = run_ranks(forks, task, tmp_path)
    assert codes == [0, 0]
    for rank, rank_lines in enumerate(lines):
        assert phases(rank_lines) == ["process_group", "build", "first_step", "warmup", "measure", "teardown"]
        steps = events(rank_lines, "step")
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
        (ran,) = [line["options"] for line in events(rank_lines, "ran")]
        options = {**dataclasses.asdict(spec.layout), "precision": precision, "recompute": "none"}
        unknown = {"pp", "pp_schedule", "virtual_stages", "pp_layout"} if pp == 1 else {"dp_overlap"}
        expected = {k: v for k, v in options.items() if k not in unknown}
        computed_in = dict.fromkeys(("gradients", "masters", "moments", "angles", "norms"), "fp32")
        switches = {"compile": False, "fused_optimizer": True, "tf32": False}
        added_by_tp = {"kv_copies": 1, "padded_vocab_size": TINY.vocab_size}
        others = added_by_tp | {"attention": "flash", "routing": "balanced"}
        assert ran == expected | computed_in | switches | others
        assert all(line["tokens"] == spec.tokens_per_step for line in steps)
        assert steps[-1]["loss"] < steps[0]["loss"]
        # Of the products of the matrices, and attention with its scores computed anew.
        per_token = 6 * TINY.num_matmul_params + 14 * TINY.num_hidden_layers * TINY.hidden_size * 64
        (end,) = events(rank_lines, "done")
        assert end.items() >= {
            "stopped": "max_steps", "ci_reached": False, "loss_final": steps[4]["loss"], "omp_num_threads": 1,
            "graphs": 0, "hardware_flops_per_step": spec.tokens_per_step * per_token,
        }.items()  # fmt: skip
        *_, memory = events(rank_lines, "memory")
        assert memory["allocated_bytes"] is None
        assert 2**26 < memory["reserved_bytes"] < GIB
        progress = read_progress(tmp_path / f"report{rank}")
        assert progress.microbatches >= len(steps) * spec.layout.gas
        assert (progress.step, progress.part) == (len(steps), "optimizer")
        assert len(events(rank_lines, "environment")) == (rank == 0)
        timeouts = json.loads((tmp_path / f"report{rank}.timeouts").read_text())
        assert timeouts.keys() >= {"default_pg", "mesh_tp", "mesh_dp_replicate"}
        assert {*timeouts.values()} == {12 * 3600}
    first, other = ([line["loss"] for line in events(rank_lines, "step")] for rank_lines in lines)
    assert first == other
    assert 0.1 < events(lines[0], "step")[0]["gradient_norm"] < 100


def test_replicas_that_differ_are_told(forks, tmp_path):
    """One bit of one copy of a parameter is flipped on rank 1 before the last step."""
    codes, lines = run_ranks(forks, task_of("dp=2"), tmp_path, FAULT="flipped_bit")
    assert codes == [1, 1]
    for rank_lines in lines:
        (error,) = events(rank_lines, "error")
        assert error["kind"] == "replicas"
        assert "layers.1.ffn.up.weight" in error["message"]
        assert not events(rank_lines, "done")


def shares(ranks):
    """The share of a tensor's bytes that crosses each link, from the definition of nccl-tests."""
    part = (ranks - 1) / ranks
    return {"allreduce": 2 * part, "allgather": part, "reducescatter": part, "alltoall": part, "sendrecv": 1}


def check_rows(rows, sizes, share, ranks):
    """A row for each size, whose bandwidth follows from its bytes and seconds."""
    assert [row["bytes"] for row in rows] == [size // 4 // ranks * 4 * ranks for size in sizes]
    for row in rows:
        assert 0 < row["seconds"] < 10
        assert row["busbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"] * share)
        assert 0 < row["busbw_p5_bytes_per_s"] <= row["busbw_bytes_per_s"] <= row["busbw_p95_bytes_per_s"]


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "short"),
    [(1, 1, True), (1, 2, True), (3, 1, True), (2, 2, True), (2, 2, False)],
)
def test_all_ranks_probe_and_rank_0_tells(forks, tmp_path, nodes, gpus_per_node, short):
    """The dict has what its docstring says, its numbers fit each other, and every rank is done.

    The short probe is a preflight of any kernel's allocation, the long one a run of kernel=probe. In the preflight of
    three nodes rank 1 flips a bit of what all devices compute.
    """
    ranks = nodes * gpus_per_node
    task = task_of(f"dp={ranks}")
    kernel = task.spec.kernel if short else replace(task.spec.kernel, kind="probe")
    spec = replace(task.spec, nodes=nodes, gpus_per_node=gpus_per_node, kernel=kernel)
    fault = {"FAULT": "flipped_result_bit"} if nodes == 3 else {}
    codes, lines = run_ranks(forks, replace(task, spec=spec, probe=short), tmp_path, **fault)
    assert codes == [0] * ranks
    digests = [parse_line(json.dumps(line)) for rank_lines in lines for line in events(rank_lines, "digest")]
    assert len(digests) == ranks * short
    facts = [{"host": f"n{rank}", "digests": [digest]} for rank, digest in enumerate(digests)]
    blamed = [(d.dated.host, d.against, d.parts) for d in differences(dated_digests(facts, "job", 1.7e9))]
    assert blamed == [("n1", "others", ("reductions",))] * bool(fault)
    operations = OPERATIONS[:3] if short else OPERATIONS
    sizes = PROBES["cpu"].sizes_bytes if short else LONG_SIZES_BYTES["cpu"]
    scopes = (ranks > 1) + (1 < gpus_per_node < ranks)
    measurements = 2 + short + len(operations) * len(sizes) * scopes
    for rank, rank_lines in enumerate(lines):
        assert phases(rank_lines) == ["process_group", "probe", "teardown"]
        assert [line["stopped"] for line in events(rank_lines, "done")] == ["probe"]
        assert read_progress(tmp_path / f"report{rank}").microbatches == measurements
        assert len(events(rank_lines, "probe")) == (rank == 0)
    (results,) = events(lines[0], "probe")
    rates, copies = results["gemm_flops_per_s"], results["memory_copy_bytes_per_s"]
    assert len(rates) == len(copies) == ranks
    assert all(1e8 < rate < 1e13 for rate in [*rates, *copies])
    assert list(results["collectives"]) == list(operations)
    for name, rows in results["collectives"].items():
        check_rows(rows["all"], sizes if ranks > 1 else (), shares(ranks)[name], ranks)
        if gpus_per_node in (1, ranks):
            assert rows["intra_node"] == (rows["all"] if ranks == gpus_per_node > 1 else None)
        else:
            check_rows(rows["intra_node"], sizes, shares(gpus_per_node)[name], gpus_per_node)
    columns = summary(results)
    assert columns["gemm_flops_per_s"] == min(rates)
    assert (columns["allreduce_busbw_bytes_per_s"] is None) == (ranks == 1)
    assert (columns["allreduce_intra_node_busbw_bytes_per_s"] is None) == (gpus_per_node == 1)
