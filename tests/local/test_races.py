"""What is clearly slower is not measured to the end; what may be the best is measured again elsewhere."""

import json

import pytest

pytestmark = pytest.mark.local


def test_a_slow_run_is_stopped_and_the_contender_is_confirmed(bench):
    axes = ("sweep.nodes=1", "sweep.gbs=8", "sweep.zero_stage=0", "sweep.gas=[1,2,4]", "launcher.pack=1")
    words = ["sweep", "launch", *bench.overrides("1:fine,2:endless", *axes)]
    bench.run(*words, "sweep.mbs=1")
    bench.run(*words, "sweep.mbs=[1,2]", "measure.confirm=2")
    rows = bench.rows()
    slow = [r for r in rows if r["mbs"] == 2]
    assert [(r["status"], r["stopped"]) for r in slow] == [("ok", "slower_than_best")]
    assert slow[0]["num_steps_measured"] >= 2
    assert "the best of its cell needs 0.002 s" in slow[0]["reason"]
    best = [r for r in rows if r["mbs"] == 1]
    assert sorted((r["repeat"], r["stopped"]) for r in best) == [(0, "program"), (1, "program")]
    assert len({r["allocation"] for r in best}) == 2
    cell = json.loads(bench.run("heatmap", "t", "--json", "--include-suspects"))[0]
    assert cell["mbs"] == 1
    assert len(bench.executions()) == 3


def test_what_was_measured_before_the_limit_counts(bench):
    axes = ("sweep.nodes=1", "sweep.gbs=4", "sweep.zero_stage=0", "sweep.mbs=1", "measure.run_limit_s=6")
    bench.run("sweep", "launch", *bench.overrides("endless", *axes))
    (row,) = bench.rows()
    assert (row["status"], row["stopped"]) == ("ok", "time_limit")
    assert row["num_steps_measured"] >= 6
    assert "after its limit of" in row["reason"]
