"""Columns of the results that come from an allocation: its job, its preflight, its control, its sources."""

import pytest

from tests.unit.analysis.sweeps import SPECS, claim, rows_of, swept
from ultrabench.result import RunResult, Status
from ultrabench.store.events import AllocationPlanned, Claimed, Preflight, Start, Submitted

CONTROL, OTHER = SPECS[:2]
FOUND = {
    "nodes": [{"host": "gpu01", "git_commit": "def"}, {"host": "gpu02", "git_commit": "def"}],
    "probe": {
        "gemm_flops_per_s": [7e14, 6e14],
        "collectives": {"allreduce": {"all": [{"bytes": 1024, "busbw_bytes_per_s": 4e10}], "intra_node": []}},
    },
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path):
    """The folder of a sweep of the control and another run, and the writer of its journal."""
    return swept(tmp_path, specs=(CONTROL, OTHER))


def plan(writer, n=0, control=CONTROL.run_id, found=None):
    writer.write(AllocationPlanned(allocation=f"a{n}", nodes=1, limit_s=60.0, tasks=(), control=control))
    if found is not None:
        writer.write(Preflight(allocation=f"a{n}", found=found))


def attempt(writer, spec, *times, n=0, status=Status.OK):
    claim(writer, spec, n, result=RunResult(status=status, step_times_s=times), allocation=f"a{n}")


def circumstances(row):
    names = ("gemm_flops_per_s", "allreduce_busbw_bytes_per_s", "git_commit", "control_ratio", "job_id")
    return [row[name] for name in names]


UNKNOWN = [None, None, "abc", None, None]


@pytest.mark.parametrize(
    ("submitted", "claimed", "expected"),
    [
        ({"job_id": "57_0", "name": "ub"}, Start(job_id="61_0", restart=1), "61_0"),
        ({"job_id": "57_0", "name": "ub"}, None, "57_0"),
        ({"job_id": 57}, None, "57"),
        ({"host": "h", "pid": 7}, None, None),
        ({"job_id": None}, None, None),
    ],
)
def test_the_job_of_a_row_is_that_of_its_claim_else_of_its_allocation(sweep, submitted, claimed, expected):
    folder, writer = sweep
    writer.write(Submitted(allocation="a0", job=submitted))
    writer.write(Claimed(run_id=OTHER.run_id, repeat=0, attempt=0, allocation="a0", job=claimed))
    assert rows_of(folder)[1]["job_id"] == expected


def test_every_row_of_an_allocation_knows_what_it_was_worth(sweep):
    folder, writer = sweep
    plan(writer, found=FOUND)
    attempt(writer, CONTROL, 0.3, 0.2, 0.4)
    control, other = rows_of(folder)
    assert (circumstances(other), control["control_ratio"]) == (UNKNOWN, 1.0)
    attempt(writer, OTHER, 0.1, 0.2, 0.15)
    other = rows_of(folder)[1]
    assert circumstances(other) == [6e14, 4e10, "def", pytest.approx(0.3 / 0.15), None]
    assert other["allgather_busbw_bytes_per_s"] is None


def test_a_control_counts_for_its_own_allocation_only(sweep):
    folder, writer = sweep
    for n, time in enumerate((0.2, 0.8)):
        plan(writer, n)
        attempt(writer, CONTROL, time, n=n)
        attempt(writer, OTHER, 0.4, n=n)
    assert [row["control_ratio"] for row in rows_of(folder)] == pytest.approx([1.0, 1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("control", "other"), [(Status.CRASH, Status.OK), (Status.OOM, Status.OK), (Status.OK, Status.HANG)]
)
def test_without_two_ok_ends_there_is_no_ratio(sweep, control, other):
    folder, writer = sweep
    plan(writer)
    attempt(writer, CONTROL, 0.2, status=control)
    attempt(writer, OTHER, 0.4, status=other)
    assert rows_of(folder)[1]["control_ratio"] is None


@pytest.mark.parametrize(
    "found",
    [
        None, {}, {"nodes": [None]}, {"nodes": {"a": 1}}, {"nodes": [{"git_commit": 7}]}, {"probe": [1]},
        {"probe": {"collectives": 7}}, {"probe": {"gemm_flops_per_s": {}}},
    ],
)  # fmt: skip
def test_without_preflight_and_control_a_row_knows_less(sweep, found):
    folder, writer = sweep
    plan(writer, control=None, found=found)
    attempt(writer, OTHER, 0.1)
    row = rows_of(folder)[1]
    assert (row["status"], circumstances(row)) == ("ok", UNKNOWN)
