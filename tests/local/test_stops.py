"""What ends a sweep or a run before all is measured: the budget, the breaker, a faster run, a time limit."""

import json
import shlex

import pytest

pytestmark = pytest.mark.local


def test_the_command_that_a_budget_prints_goes_on_to_the_end(bench):
    words = bench.launch("fine", "launcher.pack=1", gbs=16, mbs=[1, 2, 4])
    output = bench.end(bench.start(*words, "--max-gpu-hours", "0.001"), 1)
    assert "over the budget of 0.001" in output
    assert bench.executions() == [], "a job is submitted only where its predicted price is left"
    command = shlex.split(output.split("To continue: ")[1].splitlines()[0])
    assert command[:4] == ["ultrabench", "sweep", "resume", "t"]
    bench.run(*command[1:])
    assert [r["status"] for r in bench.rows()] == ["ok"] * 3
    assert len(bench.executions()) == 3


def test_the_breaker_stops_a_sweep_and_a_new_launch_goes_on(bench):
    words = bench.launch(
        "raise", "launcher.pack=1", "retry.breaker=3", gbs=32, zero_stage=[0, 1], mbs=[1, 2, 4]
    )
    for executed in (3, 6):
        process = bench.done(*words)
        assert process.returncode == 1
        assert "the last 3 runs all failed in the same way: crash" in process.stderr
        assert "planted error" in process.stderr
        assert len(bench.executions()) == executed
    # The first was tried twice, since it might have been the node's fault; then the failure is known.
    assert bench.status()["by_status"] == {"crash": 5, "pending": 1}


def test_a_slow_run_is_stopped_and_the_contender_is_confirmed(bench):
    words = bench.launch("1:fine,2:endless", "launcher.pack=1", gbs=8)
    bench.run(*words, "sweep.mbs=1")
    bench.run(*words, "sweep.mbs=[1,2]", "measure.confirm=2")
    *best, slow = sorted(bench.rows(), key=lambda r: (r["mbs"], r["repeat"]))
    assert (slow["mbs"], slow["status"], slow["stopped"]) == (2, "ok", "slower_than_best")
    assert slow["num_steps_measured"] >= 2
    assert "the best of its cell takes 0.002 s" in slow["reason"]
    assert [(r["mbs"], r["repeat"], r["stopped"]) for r in best] == [(1, 0, "program"), (1, 1, "program")]
    assert len({r["allocation"] for r in best}) == 2
    assert json.loads(bench.run("heatmap", "t", "--json", "--include-suspects"))[0]["mbs"] == 1
    assert len(bench.executions()) == 3


def test_what_was_measured_before_the_limit_counts(bench):
    bench.run(*bench.launch("endless", "measure.run_limit_s=6", gbs=4, mbs=1))
    (row,) = bench.rows()
    assert (row["status"], row["stopped"]) == ("ok", "time_limit")
    assert row["num_steps_measured"] >= 6
    assert "after its limit of" in row["reason"]
