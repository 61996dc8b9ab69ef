"""What ranks report on the leading and on a following node cannot hurt an agent, nor blame a node."""

import pytest

pytestmark = pytest.mark.local

BEHAVIOURS = {1: "huge", 2: "zero", 4: "digits", 8: "deep", 16: "fields", 32: "fine"}
REASONS = {
    "huge": "step seconds=1e+308: not a number of seconds",
    "zero": "step seconds=0.0: not a number of seconds",
    "digits": f"step seconds={'7' * 60}: not a number of seconds",
    "deep": "a line that cannot be read: ",
}


def test_nonsense_costs_its_own_run_only(bench):
    behaviour = ",".join(f"{mbs}:{name}" for mbs, name in BEHAVIOURS.items())
    overrides = bench.overrides(
        behaviour, "sweep.nodes=[1,2]", "sweep.gbs=128", "sweep.seq_len=8", "sweep.zero_stage=0",
        f"sweep.mbs={list(BEHAVIOURS)}", "sweep.gas=null", "measure.race=null", "retry.attempts.invalid=0",
        "measure.confirm=1",
    )  # fmt: skip
    bench.run("sweep", "launch", *overrides, code=1)
    rows = bench.rows()
    for row in rows:
        behaviour, last = BEHAVIOURS[row["mbs"]], 2 * row["nodes"] - 1
        if behaviour in REASONS:
            assert (row["status"], row["cause"]) == ("invalid", "bad_report")
            assert row["reason"].startswith(f"rank {last} reported {REASONS[behaviour]}")
            assert not row["suspect_hosts"]
        else:
            assert row["status"] == "ok", row["reason"]
    assert len({row["allocation"] for row in rows}) == 2
    assert len(bench.executions()) == len(rows) == 2 * len(BEHAVIOURS)
