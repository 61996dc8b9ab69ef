"""Columns of the results that come from an allocation: its job, its preflight, its control, its sources."""

import pytest

from tests.unit.analysis_sweeps import LAYOUTS, OK, candidate, make_sweep, rows_of, spec_of
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.journal import JournalWriter

SPECS = [spec_of(layout) for layout in LAYOUTS]
CONTROL, OTHER = SPECS[:2]
FOUND = {
    "nodes": [{"host": "gpu01", "git_commit": "def"}, {"host": "gpu02", "git_commit": "def"}],
    "probe": {
        "gemm_flops_per_s": [7e14, 6e14],
        "collectives": {"allreduce": {"all": [{"bytes": 1024, "busbw_bytes_per_s": 4e10}], "intra_node": []}},
    },
}
CIRCUMSTANCES = ("gemm_flops_per_s", "allreduce_busbw_bytes_per_s", "git_commit", "control_ratio", "job_id")


class Sweep:
    """A sweep of two runs; what is said of it."""

    def __init__(self, folder):
        self.folder = make_sweep(folder, [candidate(CONTROL), candidate(OTHER)])
        self.writer = JournalWriter(self.folder.journal, "agent")
        self.say = self.writer.write

    def attempt(self, spec, times=None, allocation="a0", repeat=0, attempt=0, **claimed):
        key = {"run_id": spec.run_id, "repeat": repeat, "attempt": attempt}
        self.say("claimed", **key, allocation=allocation, spec=to_dict(spec), predicted={}, **claimed)
        if times:
            result = to_dict(RunResult(status=Status.OK, step_times_s=times))
            self.say("result", **key, source="agent", result=result)

    def planned(self, name="a0", control=CONTROL):
        run_id = control.run_id if control else None
        self.say("allocation_planned", allocation=name, nodes=1, limit_s=60.0, tasks=[], control=run_id)

    def row(self, spec=OTHER, **key):
        found = [r for r in rows_of(self.folder) if r["run_id"] == spec.run_id]
        (row,) = [r for r in found if all(r[k] == v for k, v in key.items())]
        return row


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path / "s")


def test_the_job_of_a_row_is_that_of_its_claim(sweep):
    sweep.say("submitted", allocation="a0", job={"job_id": "57_0", "name": "ub"})
    sweep.attempt(OTHER, job={"job_id": "61_0", "restart": 1})
    sweep.attempt(CONTROL, job=None)
    assert sweep.row()["job_id"] == "61_0"
    assert sweep.row(CONTROL)["job_id"] == "57_0"


@pytest.mark.parametrize("job", [None, {}, {"host": "h", "pid": 7}, {"job_id": None}, "57_0", ["57_0"], 7])
def test_a_row_without_a_job_has_no_number(sweep, job):
    sweep.say("submitted", allocation="a0", job=job)
    sweep.attempt(OTHER, (0.1,), job=job)
    assert sweep.row()["job_id"] is None


def test_every_row_of_an_allocation_knows_what_it_was_worth(sweep):
    sweep.planned()
    sweep.say("preflight", allocation="a0", found=FOUND)
    sweep.attempt(CONTROL, (0.3, 0.2, 0.4))
    sweep.attempt(OTHER, (0.1, 0.2, 0.15))
    row = sweep.row()
    assert (row["gemm_flops_per_s"], row["allreduce_busbw_bytes_per_s"]) == (6e14, 4e10)
    assert row["allreduce_intra_node_busbw_bytes_per_s"] is row["allgather_busbw_bytes_per_s"] is None
    assert row["git_commit"] == "def"
    assert row["control_ratio"] == pytest.approx(0.3 / 0.15)
    assert sweep.row(CONTROL)["control_ratio"] == 1.0


def test_an_allocation_without_preflight_and_control_leaves_them_unknown(sweep):
    sweep.planned(control=None)
    sweep.attempt(OTHER, (0.1,))
    row = sweep.row()
    assert [row[name] for name in CIRCUMSTANCES] == [None, None, "abc", None, None]


def test_a_control_counts_for_its_own_allocation_only(sweep):
    for n, times in enumerate([(0.2,), (0.8,), None]):
        sweep.planned(f"a{n}")
        sweep.attempt(CONTROL, times, f"a{n}", repeat=n)
        sweep.attempt(OTHER, (0.4,), f"a{n}", repeat=n)
    assert [sweep.row(repeat=n)["control_ratio"] for n in range(3)] == [
        pytest.approx(0.5),
        pytest.approx(2.0),
        None,
    ]


@pytest.mark.parametrize("status", [Status.CRASH, Status.OOM, Status.LOST])
def test_a_control_that_failed_tells_nothing(sweep, status):
    sweep.planned()
    key = {"run_id": CONTROL.run_id, "repeat": 0, "attempt": 0}
    sweep.attempt(CONTROL)
    sweep.say(
        "failed", **key, source="agent", result={"status": status.value, "reason": "x", "step_times_s": [0.1]}
    )
    sweep.attempt(OTHER, (0.4,))
    assert sweep.row()["control_ratio"] is None
    assert sweep.row(CONTROL)["control_ratio"] is None


def test_a_run_that_failed_has_no_ratio(sweep):
    sweep.planned()
    sweep.attempt(CONTROL, (0.2,))
    sweep.attempt(OTHER)
    sweep.say("failed", run_id=OTHER.run_id, repeat=0, attempt=0, source="agent", result={"status": "hang"})
    assert sweep.row()["control_ratio"] is None


def test_candidates_that_were_not_attempted_have_none_of_it(sweep):
    sweep.planned()
    sweep.say("preflight", allocation="a0", found=FOUND)
    sweep.attempt(CONTROL, (0.2,))
    row = sweep.row()
    assert [row[name] for name in CIRCUMSTANCES] == [None, None, "abc", None, None]


@pytest.mark.parametrize(
    "found",
    [
        {}, {"nodes": []}, {"nodes": [None]}, {"nodes": "x"}, {"nodes": {"a": 1}}, {"nodes": [{"git_commit": None}]},
        {"nodes": [{"git_commit": 7}]}, {"probe": None}, {"probe": []}, {"probe": [1]}, {"probe": "x"}, {"probe": 7},
        {"probe": {"collectives": 7}}, {"probe": {"gemm_flops_per_s": {}}},
    ],
)  # fmt: skip
def test_a_damaged_preflight_costs_no_row(sweep, found):
    sweep.planned()
    sweep.say("preflight", allocation="a0", found=found)
    sweep.attempt(OTHER, (0.1,))
    row = sweep.row()
    assert row["status"] == "ok"
    assert row["git_commit"] in ("abc", None)
    assert row["gemm_flops_per_s"] is None


def test_a_damaged_claim_costs_no_row(sweep):
    key = {"run_id": OTHER.run_id, "repeat": 0, "attempt": 0}
    sweep.say("claimed", **key, allocation="a0", spec="x", predicted=7, job=[])
    sweep.say("result", **key, source="agent", result=to_dict(OK))
    row = sweep.row()
    assert (row["status"], row["job_id"], row["allocation"]) == ("ok", None, "a0")


@pytest.mark.parametrize("allocation", [7, None, ["a"], ""])
def test_an_odd_allocation_costs_no_row(sweep, allocation):
    key = {"run_id": OTHER.run_id, "repeat": 0, "attempt": 0}
    sweep.say("claimed", **key, allocation=allocation, spec=to_dict(OTHER), predicted={})
    sweep.say("result", **key, source="agent", result=to_dict(OK))
    assert sweep.row()["status"] == "ok"
