"""The preflight of an allocation on real ranks, started as an agent starts them."""

from dataclasses import replace

import pytest

from tests.parity.test_worker import run_ranks, task_of
from ultrabench.device_rates import LONG_SIZES_BYTES, OPERATIONS, SHORT, summary
from ultrabench.rank_report import read_progress

pytestmark = pytest.mark.parity


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
def test_all_ranks_measure_and_rank_0_tells(forks, tmp_path, nodes, gpus_per_node, short):
    """The dict has what its docstring says, its numbers fit each other, and every rank is done.

    The short probe is a preflight of any kernel's allocation, the long one a run of kernel=probe.
    """
    ranks = nodes * gpus_per_node
    task = task_of(f"dp={ranks}")
    kernel = task.spec.kernel if short else replace(task.spec.kernel, kind="probe")
    spec = replace(task.spec, nodes=nodes, gpus_per_node=gpus_per_node, kernel=kernel)
    codes, lines = run_ranks(forks, replace(task, spec=spec, probe=short), tmp_path)
    assert codes == [0] * ranks
    operations = OPERATIONS[:3] if short else OPERATIONS
    sizes = SHORT["cpu"].sizes_bytes if short else LONG_SIZES_BYTES["cpu"]
    scopes = (ranks > 1) + (1 < gpus_per_node < ranks)
    measurements = 2 + len(operations) * len(sizes) * scopes
    for rank, seen in enumerate(lines):
        phases = [line["name"] for line in seen if line["event"] == "phase"]
        assert phases == ["process_group", "probe", "teardown"]
        assert [line["stopped"] for line in seen if line["event"] == "done"] == ["probe"]
        assert read_progress(tmp_path / f"report{rank}").microbatches == measurements
        assert sum(line["event"] == "probe" for line in seen) == (rank == 0)
    (found,) = [line for line in lines[0] if line["event"] == "probe"]
    rates = found["gemm_flops_per_s"]
    assert len(rates) == len(found["memory_copy_bytes_per_s"]) == ranks
    assert all(1e8 < rate < 1e13 for rate in [*rates, *found["memory_copy_bytes_per_s"]])
    assert list(found["collectives"]) == list(operations)
    for name, rows in found["collectives"].items():
        if ranks == 1:
            assert rows["all"] == []
        else:
            check_rows(rows["all"], sizes, shares(ranks)[name], ranks)
        if gpus_per_node == 1:
            assert rows["intra_node"] is None
        elif nodes == 1:
            assert rows["intra_node"] == rows["all"]
        else:
            check_rows(rows["intra_node"], sizes, shares(gpus_per_node)[name], gpus_per_node)
    columns = summary(found)
    assert columns["gemm_flops_per_s"] == min(rates)
    assert (columns["allreduce_busbw_bytes_per_s"] is None) == (ranks == 1)
    assert (columns["allreduce_intra_node_busbw_bytes_per_s"] is None) == (gpus_per_node == 1)
