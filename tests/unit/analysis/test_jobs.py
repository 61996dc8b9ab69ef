"""Columns of the results that come from an allocation: its job, its preflight, its control, its sources."""

import pytest

from tests.unit.analysis.sweeps import LAYOUTS, candidate, claim, make_sweep, rows_of, spec_of
from ultrabench.result import RunResult, Status
from ultrabench.store.events import AllocationPlanned, Claimed, Preflight, Start, Submitted
from ultrabench.store.journal import JournalWriter

CONTROL, OTHER = (spec_of(layout) for layout in LAYOUTS[:2])
FOUND = {
    "nodes": [{"host": "gpu01", "git_commit": "def"}, {"host": "gpu02", "git_commit": "def"}],
    "probe": {
        "gemm_flops_per_s": [7e14, 6e14],
        "collectives": {"allreduce": {"all": [{"bytes": 1024, "busbw_bytes_per_s": 4e10}], "intra_node": []}},
    },
}
CIRCUMSTANCES = ("gemm_flops_per_s", "allreduce_busbw_bytes_per_s", "git_commit", "control_ratio", "job_id")


class Sweep:
    """A sweep of a control run and another run; what its journal says."""

    def __init__(self, folder):
        self.folder = make_sweep(folder, [candidate(CONTROL), candidate(OTHER)])
        self.writer = JournalWriter(self.folder.journal, "agent")
        self.say = self.writer.write

    def attempt(self, spec, *times, n=0, status=Status.OK):
        claim(self.writer, spec, n, result=RunResult(status=status, step_times_s=times), allocation=f"a{n}")

    def planned(self, n=0, control=CONTROL.run_id, found=None):
        plan = AllocationPlanned(allocation=f"a{n}", nodes=1, limit_s=60.0, tasks=(), control=control)
        self.say(plan)
        if found is not None:
            self.say(Preflight(allocation=f"a{n}", found=found))

    def row(self, spec=OTHER, n=0):
        told = [r for r in rows_of(self.folder) if r["run_id"] == spec.run_id and r["repeat"] in (n, None)]
        (row,) = told
        return row


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path / "s")


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
    sweep.say(Submitted(allocation="a0", job=submitted))
    sweep.say(Claimed(run_id=OTHER.run_id, repeat=0, attempt=0, allocation="a0", job=claimed))
    assert sweep.row()["job_id"] == expected


def test_every_row_of_an_allocation_knows_what_it_was_worth(sweep):
    sweep.planned(found=FOUND)
    sweep.attempt(CONTROL, 0.3, 0.2, 0.4)
    not_attempted = [None, None, "abc", None, None]
    assert [sweep.row()[name] for name in CIRCUMSTANCES] == not_attempted
    sweep.attempt(OTHER, 0.1, 0.2, 0.15)
    *worth, ratio, job = (sweep.row()[name] for name in CIRCUMSTANCES)
    assert (worth, ratio, job) == ([6e14, 4e10, "def"], pytest.approx(0.3 / 0.15), None)
    assert sweep.row()["allgather_busbw_bytes_per_s"] is None
    assert sweep.row(CONTROL)["control_ratio"] == 1.0


def test_a_control_counts_for_its_own_allocation_only(sweep):
    for n, time in enumerate((0.2, 0.8)):
        sweep.planned(n)
        sweep.attempt(CONTROL, time, n=n)
        sweep.attempt(OTHER, 0.4, n=n)
    assert [sweep.row(n=n)["control_ratio"] for n in range(2)] == [pytest.approx(0.5), pytest.approx(2.0)]


@pytest.mark.parametrize(
    ("control", "other"), [(Status.CRASH, Status.OK), (Status.OOM, Status.OK), (Status.OK, Status.HANG)]
)
def test_without_two_ok_ends_there_is_no_ratio(sweep, control, other):
    sweep.planned()
    sweep.attempt(CONTROL, 0.2, status=control)
    sweep.attempt(OTHER, 0.4, status=other)
    assert sweep.row()["control_ratio"] is None


@pytest.mark.parametrize(
    "found",
    [
        None, {}, {"nodes": [None]}, {"nodes": {"a": 1}}, {"nodes": [{"git_commit": 7}]}, {"probe": [1]},
        {"probe": {"collectives": 7}}, {"probe": {"gemm_flops_per_s": {}}},
    ],
)  # fmt: skip
def test_without_preflight_and_control_a_row_knows_less(sweep, found):
    sweep.planned(control=None, found=found)
    sweep.attempt(OTHER, 0.1)
    assert sweep.row()["status"] == "ok"
    assert [sweep.row()[name] for name in CIRCUMSTANCES] == [None, None, "abc", None, None]
