"""The columns of results that come from an allocation: its job, its preflight, its control, its sources."""

import pytest
from msgspec import Raw

from tests.sweep_folder import write
from tests.unit.analysis.sweeps import SPECS, attempted, rows_of, swept, values
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
UNKNOWN = dict.fromkeys(("gemm_flops_per_s", "allreduce_busbw_bytes_per_s", "control_ratio", "job_id")) | {
    "git_commit": "abc"
}
KNOWN = {
    "gemm_flops_per_s": 6e14, "allreduce_busbw_bytes_per_s": 4e10, "allgather_busbw_bytes_per_s": None,
    "git_commit": "def", "control_ratio": 2.0,
}  # fmt: skip
CLAIMED = {"run_id": OTHER.run_id, "repeat": 0, "attempt": 0, "allocation": "a0", "spec": Raw(b"{}")}


def planned(n=0, control=CONTROL.run_id, facts=None):
    """What the journal says of an allocation and, if it was looked at, its preflight."""
    plan = AllocationPlanned(allocation=f"a{n}", nodes=1, limit_s=60.0, tasks=(), control=control)
    return [plan] if facts is None else [plan, Preflight(allocation=f"a{n}", found=facts)]


def ended(spec, *times, n=0, status=Status.OK):
    return attempted(spec, RunResult(status=status, step_times_s=times), n, allocation=f"a{n}")


def submitted(**job):
    return Submitted(allocation="a0", job=job)


def rows_after(path, *events):
    folder = swept(path, specs=(CONTROL, OTHER))
    write(folder, *events)
    return rows_of(folder)


PREFLIGHTS = (
    None, {}, {"nodes": [None]}, {"nodes": {"a": 1}}, {"nodes": [{"git_commit": 7}]}, {"probe": [1]},
    {"probe": {"collectives": 7}}, {"probe": {"gemm_flops_per_s": {}}},
)  # fmt: skip
"""What tells nothing of an allocation."""


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        *(([*planned(control=None, facts=facts), *ended(OTHER, 0.1)],
            UNKNOWN | {"status": "ok"}) for facts in PREFLIGHTS),
        ([submitted(job_id="57_0"), Claimed(**CLAIMED, job=Start(job_id="61_0", restart=1))], {"job_id": "61_0"}),
        ([submitted(job_id="57_0"), Claimed(**CLAIMED)], {"job_id": "57_0"}),
        ([submitted(job_id=57), Claimed(**CLAIMED)], {"job_id": "57"}),
        ([submitted(host="h", pid=7), Claimed(**CLAIMED)], {"job_id": None}),
        ([submitted(job_id=None), Claimed(**CLAIMED)], {"job_id": None}),
        ([*planned(facts=FOUND), *ended(CONTROL, 0.3, 0.2, 0.4), *ended(OTHER, 0.1, 0.2, 0.15)], KNOWN),
        ([*planned(facts=FOUND), *ended(CONTROL, 0.3, 0.2, 0.4)], UNKNOWN | {"status": None}),
        ([*planned(), *ended(CONTROL, 0.2, status=Status.CRASH), *ended(OTHER, 0.4)], UNKNOWN),
        ([*planned(), *ended(CONTROL, 0.2, status=Status.OOM), *ended(OTHER, 0.4)], UNKNOWN),
        ([*planned(), *ended(CONTROL, 0.2), *ended(OTHER, 0.4, status=Status.HANG)], UNKNOWN),
    ],
)  # fmt: skip
def test_a_row_knows_its_job_and_what_its_allocation_was_worth(tmp_path, events, expected):
    assert values(rows_after(tmp_path, *events)[1], expected) == pytest.approx(expected)


def test_a_control_counts_for_its_own_allocation_only(tmp_path):
    first = [*planned(0), *ended(CONTROL, 0.2), *ended(OTHER, 0.4)]
    second = [*planned(1), *ended(CONTROL, 0.8, n=1), *ended(OTHER, 0.4, n=1)]
    ratios = [row["control_ratio"] for row in rows_after(tmp_path, *first, *second)]
    assert ratios == pytest.approx([1.0, 1.0, 0.5, 2.0])
