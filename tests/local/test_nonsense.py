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


@pytest.mark.parametrize("nodes", [1, 2])
def test_nonsense_costs_its_own_run_only(bench, nodes):
    gbs = 64 * nodes
    gas = [gbs // (2 * nodes * mbs) for mbs in BEHAVIOURS]
    behaviour = ",".join(f"{mbs}:{name}" for mbs, name in BEHAVIOURS.items())
    overrides = bench.overrides(
        behaviour, f"sweep.nodes={nodes}", f"sweep.gbs={gbs}", "sweep.seq_len=8", "sweep.zero_stage=0",
        f"sweep.mbs={list(BEHAVIOURS)}", f"sweep.gas={gas}", "measure.race=null", "retry.attempts.invalid=0",
        "measure.confirm=1",
    )  # fmt: skip
    bench.run("sweep", "launch", *overrides, code=1)
    rows = {BEHAVIOURS[row["mbs"]]: row for row in bench.rows()}
    last = 2 * nodes - 1
    for behaviour, row in rows.items():
        if behaviour in REASONS:
            assert (row["status"], row["cause"]) == ("invalid", "bad_report")
            assert row["reason"].startswith(f"rank {last} reported {REASONS[behaviour]}")
            assert not row["suspect_hosts"]
        else:
            assert row["status"] == "ok", row["reason"]
    assert len({row["allocation"] for row in rows.values()}) == 1
    assert len(bench.executions()) == len(BEHAVIOURS)
