"""A sweep that is measured by parts of steps, whose launcher and agents are killed in between."""

import json
import os
import signal
from collections import Counter

import pytest

from tests.local.conftest import AT_ONCE, EMBEDDED, axes

pytestmark = pytest.mark.local

OPTIONS = [
    *EMBEDDED, *AT_ONCE, *axes(nodes=1, gbs=48, tp=1, pp=[1, 2], zero_stage=[0, 1], mbs=2, gas=None),
    "measure.partial_steps=auto", "measure.max_steps=6", "measure.target_ci95_rel=0.5", "measure.confirm=1",
    "measure.race=null", "measure.deadline_floor_s=20",
]  # fmt: skip
"""Options of three runs with enough micro-batches for parts."""


def is_underway(bench, repeats, num_ok=0):
    """Whether so many attempts are ok, and another one with one of these numbers of repeats measures steps."""
    attempts = bench.state().attempts if bench.measuring() else {}
    is_measuring = any(
        attempt.result is None and attempt.phase == "measure" and key.repeat in repeats
        for key, attempt in attempts.items()
    )
    return is_measuring and sum(attempt.ok is not None for attempt in attempts.values()) >= num_ok


def test_parts_survive_the_ends_of_launchers_and_agents_and_a_start_in_full_confirms_the_best(bench):
    """An agent dies while it measures parts, and a launcher while a contender is measured in full."""
    words = ["sweep", "launch", *OPTIONS]
    launcher = bench.start(*words)
    bench.wait_for(lambda: is_underway(bench, {0}, num_ok=1), 120)
    os.killpg(launcher.pid, signal.SIGKILL)
    for agent in bench.agents():
        os.kill(agent, signal.SIGKILL)
    launcher.communicate()
    bench.wait_for(lambda: bench.leftovers() == [])
    ok_before = {key for key, attempt in bench.state().attempts.items() if attempt.ok}

    launcher = bench.start(*words)
    bench.wait_for(lambda: is_underway(bench, range(1, 9)), 120)
    launcher.kill()
    launcher.communicate()
    bench.run(*words)

    rows = bench.rows()
    ok_rows = [row for row in rows if row["status"] == "ok"]
    assert {row["status"] for row in rows} <= {"ok", "lost"}
    assert sum(row["status"] == "lost" for row in rows) == 1, "the run of the agent that was killed"
    starts = Counter((row["run_id"], row["repeat"]) for row in ok_rows)
    assert len({run_id for run_id, _ in starts}) == 3, "no run is lost"
    assert {*starts.values()} == {1}, "nothing is measured twice"
    assert ok_before <= {(row["run_id"], row["repeat"], row["attempt"]) for row in ok_rows}
    first_rows = [row for row in ok_rows if row["repeat"] == 0]
    assert {row["screened"] for row in first_rows} == {True}
    assert {row["measured_gas"] for row in first_rows} <= {"2,4", "2,6"}
    # Whole steps may contradict parts on a busy machine; then few whole steps screen the others.
    later_rows = [row for row in ok_rows if row["repeat"] and not row["screened"]]
    assert {row["measured_gas"] for row in later_rows} == {None}
    assert all(row["parts_step_time_s"] for row in later_rows if not any(r["suspect"] for r in first_rows))

    best, *_ = json.loads(bench.run("sweep", "top", "t", "--json"))
    assert (best["best"], best["screened"], best["measured_gas"]) == (True, None, None)
    assert best["run_id"] in {row["run_id"] for row in later_rows}
    status = bench.status()
    assert (status["by_status"], status["unconfirmed"]) == ({"ok": 3}, 0)
